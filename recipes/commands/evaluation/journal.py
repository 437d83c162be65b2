"""What a command has done, kept on disk as it is finished, so that a killed one can go on: the runs of an evaluation
and joules that are counted, and the texts that a certificate judges."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self

from ....decode.evaluation.certify.certify import Written
from ....decode.evaluation.energy import Energy
from ....decode.evaluation.measure import Decoded, RunKey
from ....decode.evaluation.metrics import Tally

SCHEMA = 1


class Journal(ABC):
    """`<out>.state/<name>`: in its first line what its lines belong to; open for one writer.

    A line is written and flushed when its work is done. An unfinished last line, which a killed writer leaves, is cut
    off. Lines that belong to something else are dropped: `changed` then names what differs.

    Attributes:
        changed: the parts of the identity that differ from those of the journal that was found; empty if none do.

    Raises:
        ValueError: another process is writing; a damaged line that is not the last, with its number.
    """

    name: ClassVar[str]
    _cure: ClassVar[str] = "delete that line or the file to go on"

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.path = _place(out, self.name)
        self.changed: list[str] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(json.loads(json.dumps(identity)))
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process writes {out}; wait for it, or choose another `out`") from error
        except ValueError:
            self._file.close()
            raise

    @abstractmethod
    def _take(self, value: Any) -> None:
        """Keep what an earlier process wrote in a line; ValueError for a damaged one."""

    def remove(self) -> None:
        """Delete the journal: the results stand."""
        self.path.unlink()
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def __enter__(self) -> Self:
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
            begun = self._parsed(1, lines[0])
            theirs = begun.get("identity") if isinstance(begun, dict) and begun.get("schema") == SCHEMA else None
            if not isinstance(theirs, dict):
                raise ValueError(f"{self.path}:1 does not say what its lines belong to: delete the file to start anew")
            self.changed = [name for name in {**identity, **theirs} if identity.get(name) != theirs.get(name)]
        if lines and not self.changed:
            for number, line in enumerate(lines[1:], start=2):
                value = self._parsed(number, line)
                try:
                    self._take(value)
                except ValueError as error:
                    raise self._damaged(number, str(error)) from error
            return
        self._file.truncate(0)
        self._write({"schema": SCHEMA, "identity": identity})

    def _parsed(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise self._damaged(number, "it is no JSON") from error

    def _damaged(self, number: int, why: str) -> ValueError:
        return ValueError(f"{self.path}:{number} is damaged: {why}; {self._cure}")

    def _write(self, value: Any) -> None:
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(start)  # half a line, of a disk that is full, must not stand before the next one
            raise


class RunJournal(Journal):
    """Of an evaluation: a line a run, and a line a row whose joules are counted.

    Attributes:
        finished: the runs of earlier processes.
        energies: what earlier processes counted, by label.
    """

    name = "runs.jsonl"

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.finished: dict[RunKey, Decoded] = {}
        self.energies: dict[str, Energy] = {}
        super().__init__(out, identity)

    def add(self, key: RunKey, run: Decoded) -> None:
        """Write down a run that has finished."""
        self._write([*key, run.ids, dataclasses.asdict(run.tally), run.seconds, run.reading])

    def add_energy(self, label: str, energy: Energy) -> None:
        """Write down what a token of a row takes."""
        self._write({"label": label, "energy": energy.as_dict()})

    def _take(self, value: Any) -> None:
        if isinstance(value, dict):
            self.energies |= _energy(value)
        else:
            self.finished |= _run(value)


class TextJournal(Journal):
    """Of a certificate: a line for what a method wrote after the next of its prompts, numbered from 0. Texts are judged
    again by whoever goes on, which takes little beside writing them.

    Attributes:
        finished: what earlier processes wrote, by label.
    """

    name = "texts.jsonl"
    _cure = "delete it with all lines after it, or the file, to go on"

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.finished: dict[str, list[Written]] = {}
        self._counts: Counter[str] = Counter()
        super().__init__(out, identity)

    def add(self, label: str, written: Written) -> None:
        """Write down texts that are finished."""
        self._write([label, self._counts[label], written.seconds, written.outputs])
        self._counts[label] += 1

    def _take(self, value: Any) -> None:
        if not isinstance(value, list) or [type(part) for part in value] != [str, int, float, list]:
            raise ValueError("it holds no texts")
        label, number, seconds, outputs = value
        if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in outputs):
            raise ValueError("it holds no tokens")
        if number != self._counts[label]:
            raise ValueError("texts before these are missing: they would be taken for those of other prompts")
        self.finished.setdefault(label, []).append(Written(outputs, seconds))
        self._counts[label] += 1


def journal_path(out: Path) -> Path:
    """Where the runs of the evaluation that writes `out` are kept."""
    return _place(out, RunJournal.name)


def _place(out: Path, name: str) -> Path:
    return out.with_name(out.name + ".state") / name


def _run(value: Any) -> dict[RunKey, Decoded]:
    wanted = (str, int, int, list, dict, float, float)
    if not isinstance(value, list) or [type(part) for part in value] != list(wanted):
        raise ValueError("it holds no run")
    label, place, repeat, ids, counts, seconds, reading = value
    fields = {each.name for each in dataclasses.fields(Tally)}
    if set(counts) != fields or not all(type(token) is int for token in ids):
        raise ValueError("it holds no counts or tokens")
    return {RunKey(label, place, repeat): Decoded(ids, Tally(**counts), seconds, reading)}


def _energy(value: dict[str, Any]) -> dict[str, Energy]:
    label, found = value.get("label"), value.get("energy")
    names = {each.name for each in dataclasses.fields(Energy)}
    if not isinstance(label, str) or not isinstance(found, dict) or set(found) != names:
        raise ValueError("it holds no joules")
    trials, above = found["trials"], found["above_idle"]
    if not isinstance(trials, list) or not isinstance(found["source"], str):
        raise ValueError("it holds no trials or source")
    numbers = [*trials, *(found[name] for name in names - {"source", "trials", "above_idle"})]
    if not all(type(each) is float for each in (*numbers, *([] if above is None else [above]))):
        raise ValueError("it holds no numbers")
    return {label: Energy(**found | {"trials": tuple(trials)})}
