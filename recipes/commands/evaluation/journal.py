"""Finished work of a command on disk, so that a killed or interrupted command resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from ....checkpoints.storage.atomic import append_line
from ....checkpoints.storage.locks import sole_writer
from ....decode.evaluation.measure import Decoded, RunKey
from ...session.stopping import Stoppable
from ...session.terminal import log

Found = TypeVar("Found")

RUN = TypeAdapter(Decoded)
_LINE = TypeAdapter(tuple[str, Any])


class Journal:
    """File `<out>.state/<name>.jsonl` with the identity of the work in its first line; open for one writer.

    Each line is flushed when its work is done. A half last line, which a killed writer leaves, is cut off, and lines of
    another identity are dropped. `lines` are those of earlier processes. Raises ValueError: another process is writing,
    or a line that is not the last is damaged.
    """

    def __init__(self, out: Path, name: str, identity: dict[str, Any]) -> None:
        self.path = out.with_name(out.name + ".state") / f"{name}.jsonl"
        self.lines: list[Any] = []
        with ExitStack() as stack:
            stack.callback(_remove_if_empty, self.path.parent)
            stack.enter_context(sole_writer(self.path))
            self._file = stack.enter_context(self.path.open("a+b", buffering=0))
            self._read(json.loads(json.dumps({"identity": identity})))
            self._stack = stack.pop_all()
        if self.lines:
            log(f"resuming; {len(self.lines)} {name} of an earlier process are kept")

    def parsed(self, number: int, line: Any, form: TypeAdapter[Found]) -> Found:
        """Return the object that a line, or a part of it, was written from."""
        try:
            return form.validate_python(line)
        except ValidationError as error:
            raise self.damaged(number, "it has another form") from error

    def damaged(self, number: int, why: str) -> ValueError:
        """Return the error to raise for a line, counted from 1."""
        return ValueError(f"{self.path}:{number} is damaged: {why}; delete the file to restart")

    def add(self, line: Any) -> None:
        """Write and flush a line."""
        append_line(self._file, json.dumps(line, allow_nan=False).encode())

    def remove(self) -> None:
        """Delete the journal after the results are written."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _read(self, head: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        found: list[Any] = []
        for number, text in enumerate(lines, 1):
            try:
                found.append(json.loads(text))
            except ValueError as error:
                raise self.damaged(number, str(error)) from error
        if found and found[0] == head:
            self.lines = found[1:]
            return
        if found:
            mine, theirs = head["identity"], found[0].get("identity") if isinstance(found[0], dict) else None
            if not isinstance(theirs, dict):
                raise self.damaged(1, "it names no identity")
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            changed = ", ".join(_describe_change(name, theirs.get(name), mine.get(name)) for name in names)
            log(f"{self.path} belongs to other settings ({changed} differ): restarting")
        self._file.truncate(0)
        self.add(head)


class Kept:
    """Named results of work in a journal; stops before new work if a signal has arrived."""

    def __init__(self, journal: Journal, signals: Stoppable) -> None:
        self._journal, self._signals = journal, signals
        self._found: dict[str, tuple[int, Any]] = {}
        for number, line in enumerate(journal.lines, 2):
            name, value = journal.parsed(number, line, _LINE)
            self._found[name] = number, value

    def __call__(self, name: str, form: TypeAdapter[Found], work: Callable[[], Found]) -> Found:
        """Return the result of this name, from the journal or by doing the work."""
        if name in self:
            return self.known(name, form)
        self._signals.check()
        found = work()
        self.add(name, form, found)
        return found

    def each(self, name: str, form: TypeAdapter[Found]) -> Callable[[int, Callable[[], Found]], Found]:
        """Return the same for numbered work."""
        return lambda number, work: self(f"{name} {number}", form, work)

    def runs(self, name: str) -> dict[str, Any]:
        """Return the arguments of `measure` for the finished runs and for keeping others."""
        names = [each for each in self._found if each.startswith(f"{name} [")]
        finished = {RunKey(*json.loads(each.removeprefix(name))): self.known(each, RUN) for each in names}
        return {"finished": finished, "on_run": lambda key, run: self.add(f"{name} {json.dumps(key)}", RUN, run)}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def known(self, name: str, form: TypeAdapter[Found]) -> Found:
        """Return a result of an earlier process."""
        return self._journal.parsed(*self._found[name], form)

    def add(self, name: str, form: TypeAdapter[Found], found: Found) -> None:
        """Keep a result."""
        self._journal.add([name, form.dump_python(found, mode="json")])


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _describe_change(name: str, before: Any, now: Any) -> str:
    return f"{name} ({before}, now {now})" if name.startswith("hash of ") else name
