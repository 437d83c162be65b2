"""What a command has done, kept on disk as it is finished, so that a killed one can resume."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Self, get_type_hints

from pydantic import BaseModel, Field, TypeAdapter, create_model

from ....decode.evaluation.certify.certify import DecodedBatch
from ....decode.evaluation.energy import Energy
from ....decode.evaluation.measure import Decoded, RunKey
from ....decode.evaluation.metrics import Tally

SCHEMA = 1


class _Head(BaseModel):
    version: Literal[1] = Field(alias="schema")
    identity: dict[str, Any]


class _Joules(BaseModel):
    label: str
    energy: Energy


_COUNTS: dict[str, Any] = {name: (kind, ...) for name, kind in get_type_hints(Tally).items()}
_Counts: Any = create_model("_Counts", **_COUNTS)
"""A `Tally` of which nothing is missing."""
_RUN: TypeAdapter[Any] = TypeAdapter(tuple[str, int, int, list[int], _Counts, float, float] | _Joules)
_TEXTS: TypeAdapter[Any] = TypeAdapter(tuple[str, int, float, list[list[int]]])


class Journal(ABC):
    """`<out>.state/<name>`: in its first line what its lines belong to; open for one writer.

    A line is written and flushed when its work is done; a half last line, which a killed writer leaves, is cut off.
    Lines that belong to something else are dropped.

    Attributes:
        changed: the parts of the identity that differ from those of the journal that was found.

    Raises:
        ValueError: another process is writing; a damaged line that is not the last, with its number.
    """

    name: ClassVar[str]
    _cure: ClassVar[str] = "delete that line or the file to go on"

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.path = out.with_name(out.name + ".state") / self.name
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
    def _take(self, line: bytes) -> None:
        """Keep what an earlier process wrote in a line; ValueError for a damaged one."""

    def remove(self) -> None:
        """Delete the journal: the results stand."""
        self.path.unlink()
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if lines:
            theirs = self._checked(1, _Head.model_validate_json, lines[0]).identity
            self.changed = [name for name in {**identity, **theirs} if identity.get(name) != theirs.get(name)]
        if lines and not self.changed:
            for number, line in enumerate(lines[1:], start=2):
                self._checked(number, self._take, line)
            return
        self._file.truncate(0)
        self._write({"schema": SCHEMA, "identity": identity})

    def _checked(self, number: int, read: Any, line: bytes) -> Any:
        try:
            return read(line)
        except ValueError as error:
            raise ValueError(f"{self.path}:{number} is damaged: {error}; {self._cure}") from error

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

    def _take(self, line: bytes) -> None:
        found = _RUN.validate_json(line, strict=True)
        if isinstance(found, _Joules):
            self.energies[found.label] = found.energy
        else:
            label, prompt, repeat, ids, counts, seconds, reading = found
            tally = Tally(**counts.model_dump())
            self.finished[RunKey(label, prompt, repeat)] = Decoded(ids, tally, seconds, reading)


class TextJournal(Journal):
    """Of a certificate: a line for what a method wrote after the next of its prompts, numbered from 0; it is judged
    again.

    Attributes:
        finished: what earlier processes wrote, by label.
    """

    name = "texts.jsonl"
    _cure = "delete it with all lines after it, or the file, to go on"

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.finished: dict[str, list[DecodedBatch]] = {}
        self._counts: Counter[str] = Counter()
        super().__init__(out, identity)

    def add(self, label: str, written: DecodedBatch) -> None:
        """Write down texts that are finished."""
        self._write([label, self._counts[label], written.seconds, written.outputs])
        self._counts[label] += 1

    def _take(self, line: bytes) -> None:
        label, number, seconds, outputs = _TEXTS.validate_json(line, strict=True)
        if number != self._counts[label]:
            raise ValueError("texts before these are missing: they would be taken for those of other prompts")
        self.finished.setdefault(label, []).append(DecodedBatch(outputs, seconds))
        self._counts[label] += 1
