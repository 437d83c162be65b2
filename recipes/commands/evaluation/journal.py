"""Journal of intermediate results on disk, which allows an interrupted command to resume."""

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from ....checkpoints.storage.atomic import append_line
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.messages import first_line
from ....decode.evaluation.measure import Decoded, RunKey
from ...session.stopping import Stoppable
from ...session.terminal import log

Found = TypeVar("Found")

RUN = TypeAdapter(Decoded)
_LINE = TypeAdapter(tuple[str, Any])


class Journal:
    """Journal of named results in the file `<out>.state/<name>.jsonl`, whose first line stores `identity`.

    Results are flushed to disk when they are added. An incomplete last line is removed, and results with another
    `identity` are deleted. Raises ValueError if another process has opened the journal or if the file is damaged.
    """

    def __init__(self, out: Path, name: str, identity: dict[str, Any], signals: Stoppable | None = None) -> None:
        self.path = out.with_name(out.name + ".state") / f"{name}.jsonl"
        self._signals = signals
        self._found: dict[str, Any] = {}
        with ExitStack() as stack:
            stack.callback(_remove_if_empty, self.path.parent)
            stack.enter_context(sole_writer(self.path))
            self._file = stack.enter_context(self.path.open("a+b", buffering=0))
            self._read(json.loads(json.dumps({"identity": identity})))
            self._stack = stack.pop_all()
        if self._found:
            log(f"resuming with {len(self._found)} finished {name}")

    def __call__(self, name: str, form: TypeAdapter[Found], work: Callable[[], Found]) -> Found:
        """Return the stored result `name`, or store that of `work`. Raise Interrupted if a signal has arrived."""
        if name in self:
            return self.known(name, form)
        if self._signals is not None:
            self._signals.check()
        result = work()
        self.add(name, form, result)
        return result

    def numbered(self, name: str, form: TypeAdapter[Found]) -> Callable[[int, Callable[[], Found]], Found]:
        """Return a function that loads or computes the result with a given number, stored as `<name> <number>`."""
        return lambda number, work: self(f"{name} {number}", form, work)

    def runs(self, name: str) -> dict[str, Any]:
        """Return keyword arguments for `measure` to reuse the finished runs and to store new ones."""
        names = [each for each in self._found if each.startswith(f"{name} [")]
        finished = {RunKey(*json.loads(each.removeprefix(name))): self.known(each, RUN) for each in names}
        return {"finished": finished, "on_run": lambda key, run: self.add(f"{name} {json.dumps(key)}", RUN, run)}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def known(self, name: str, form: TypeAdapter[Found]) -> Found:
        """Return the stored result `name`; raise ValueError if its type is not `form`."""
        try:
            return form.validate_python(self._found[name])
        except ValidationError as error:
            raise self._damage_error(f"{name!r} has an unexpected format") from error

    def add(self, name: str, form: TypeAdapter[Found], result: Found) -> None:
        """Store a result, and flush it to disk."""
        self._append([name, form.dump_python(result, mode="json")])

    def remove(self) -> None:
        """Delete the journal after the results are written."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _append(self, line: Any) -> None:
        append_line(self._file, json.dumps(line, allow_nan=False).encode())

    def _damage_error(self, reason: object) -> ValueError:
        return ValueError(f"{self.path} is damaged: {reason}; delete the file to restart")

    def _read(self, head: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        try:
            first, *others = map(json.loads, lines) if lines else [head]
            if first == head:
                self._found = dict(map(_LINE.validate_python, others))
                if lines:
                    return
            else:
                log(f"{self.path} was written with other settings ({_differences(first, head)} differ): restarting")
        except ValueError as error:
            raise self._damage_error(first_line(error)) from error
        self._file.truncate(0)
        self._append(head)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _differences(before: Any, now: dict[str, Any]) -> str:
    """Return the names of settings that differ between two journals' first lines; raise ValueError for bad lines."""
    old = before.get("identity") if isinstance(before, dict) else None
    if not isinstance(old, dict):
        raise ValueError("the first line has no `identity` mapping")
    new = now["identity"]
    return ", ".join(name for name in {**new, **old} if new.get(name) != old.get(name))
