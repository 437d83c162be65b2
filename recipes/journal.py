"""The runs of an evaluation that are done, and joules that are counted, kept on disk as they finish, so that a killed
one can go on."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..decode.energy import Energy
from ..decode.measure import Decoded, RunKey
from ..decode.metrics import Tally

SCHEMA = 1


class RunJournal:
    """`<out>.state/runs.jsonl`: in its first line what the runs belong to, then a line a run, and a line a row whose
    joules are counted; open for one writer.

    A line is written and flushed when its run has finished. An unfinished last line, which a killed writer leaves, is
    cut off. Runs that belong to something else are dropped: `changed` then names what differs.

    Attributes:
        finished: the runs of earlier processes.
        energies: what earlier processes counted, by label.
        changed: the parts of the identity that differ from those of the journal that was found; empty if none do.

    Raises:
        ValueError: another process is writing; a damaged line that is not the last, with its number.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.path = journal_path(out)
        self.finished: dict[RunKey, Decoded] = {}
        self.energies: dict[str, Energy] = {}
        self.changed: list[str] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(json.loads(json.dumps(identity)))
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process evaluates into {out}; wait for it, or choose another `out`") from error
        except ValueError:
            self._file.close()
            raise

    def add(self, key: RunKey, run: Decoded) -> None:
        """Write down a run that has finished."""
        self._write([*key, run.ids, dataclasses.asdict(run.tally), run.seconds, run.reading])

    def add_energy(self, label: str, energy: Energy) -> None:
        """Write down what a token of a row takes."""
        self._write({"label": label, "energy": energy.as_dict()})

    def remove(self) -> None:
        """Delete the journal: the results stand."""
        self.path.unlink()
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if lines:
            begun = _parsed(self.path, 1, lines[0])
            theirs = begun.get("identity") if isinstance(begun, dict) and begun.get("schema") == SCHEMA else None
            if not isinstance(theirs, dict):
                raise ValueError(f"{self.path}:1 does not say what its runs belong to: delete the file to start anew")
            self.changed = [name for name in {**identity, **theirs} if identity.get(name) != theirs.get(name)]
        if lines and not self.changed:
            for number, line in enumerate(lines[1:], start=2):
                value = _parsed(self.path, number, line)
                if isinstance(value, dict):
                    self.energies |= _energy(self.path, number, value)
                else:
                    self.finished |= _run(self.path, number, value)
            return
        self._file.truncate(0)
        self._write({"schema": SCHEMA, "identity": identity})

    def _write(self, value: Any) -> None:
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(start)  # half a line, of a disk that is full, must not stand before the next one
            raise


def journal_path(out: Path) -> Path:
    """Where the runs of the evaluation that writes `out` are kept."""
    return out.with_name(out.name + ".state") / "runs.jsonl"


def _parsed(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _damaged(path, number) from error


def _run(path: Path, number: int, value: Any) -> dict[RunKey, Decoded]:
    wanted = (str, int, int, list, dict, float, float)
    if not isinstance(value, list) or [type(part) for part in value] != list(wanted):
        raise _damaged(path, number)
    label, place, repeat, ids, counts, seconds, reading = value
    fields = {each.name for each in dataclasses.fields(Tally)}
    if set(counts) != fields or not all(type(token) is int for token in ids):
        raise _damaged(path, number)
    return {RunKey(label, place, repeat): Decoded(ids, Tally(**counts), seconds, reading)}


def _energy(path: Path, number: int, value: dict[str, Any]) -> dict[str, Energy]:
    label, found = value.get("label"), value.get("energy")
    names = {each.name for each in dataclasses.fields(Energy)}
    if not isinstance(label, str) or not isinstance(found, dict) or set(found) != names:
        raise _damaged(path, number)
    trials, above = found["trials"], found["above_idle"]
    if not isinstance(trials, list) or not isinstance(found["source"], str):
        raise _damaged(path, number)
    numbers = [*trials, *(found[name] for name in names - {"source", "trials", "above_idle"})]
    if not all(type(each) is float for each in (*numbers, *([] if above is None else [above]))):
        raise _damaged(path, number)
    return {label: Energy(**found | {"trials": tuple(trials)})}


def _damaged(path: Path, number: int) -> ValueError:
    return ValueError(f"{path}:{number} is damaged: it holds no run, nor joules; delete that line or the file to go on")
