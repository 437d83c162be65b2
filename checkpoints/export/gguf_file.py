"""GGUF files as llama.cpp has them, read: settings, and tensors that are stored as plain numbers.

Source: the specification in ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Of tensors, by ggml's number; all others are quantised."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies."""

    shape: tuple[int, ...]
    """As torch has it: ggml counts from the last dimension."""
    kind: int
    """ggml's number of its type."""
    offset: int
    """From the beginning of the file."""


@dataclass(frozen=True)
class GgufFile:
    """What a file says of itself."""

    path: Path
    version: int
    values: dict[str, Any]
    """Settings that are one value."""
    lengths: dict[str, int]
    """Of settings that are arrays, how many values they have."""
    tensors: dict[str, GgufTensor]

    def load(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ValueError: none of that name, or a quantised one.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        found = self.tensors[name]
        if found.kind not in DTYPES:
            raise ValueError(f"{self.path}: {name} is of ggml's type {found.kind}, expected one of {sorted(DTYPES)}")
        with self.path.open("rb") as opened:
            opened.seek(found.offset)
            data = bytearray(opened.read(prod(found.shape) * DTYPES[found.kind].itemsize))
        return torch.frombuffer(data, dtype=DTYPES[found.kind]).reshape(found.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header: no count in it is believed beyond the file's own size.

    Raises:
        ValueError: not such a file, another version, or one that ends too early.
    """
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).file()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a GGUF file that can be read: {error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def file(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._data[:4]!r}")
        self._at = 4
        version = self._one("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3")
        counts = self._one("Q"), self._one("Q")
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(self._count(counts[1], 13)):
            key, kind = self._string(), self._one("I")
            if kind == _ARRAY:
                lengths[key] = self._skip_array()
            else:
                values[key] = self._value(kind)()
        found = [(self._string(), *self._tensor()) for _ in range(self._count(counts[0], 24))]
        step = values.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"its alignment is {step!r}")
        start = -(-self._at // step) * step
        tensors = {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in found}
        if len(tensors) != len(found):
            raise ValueError("it has two tensors of one name")
        for name, one in tensors.items():
            size = prod(one.shape) * DTYPES[one.kind].itemsize if one.kind in DTYPES else 1
            if one.offset + size > len(self._data):
                raise ValueError(f"it ends at {len(self._data)} bytes, before the end of {name}")
        return GgufFile(self._path, version, values, lengths, tensors)

    def _one(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _count(self, count: int, least: int) -> int:
        """A number of things of at least so many bytes each, which must fit into what is left."""
        if count * least > len(self._data) - self._at:
            raise ValueError(f"{count} entries at byte {self._at} do not fit into {len(self._data)} bytes")
        return count

    def _string(self) -> str:
        length = self._count(self._one("Q"), 1)
        self._at += length
        return bytes(self._data[self._at - length : self._at]).decode()

    def _value(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self._string
        if kind not in _SCALARS:
            raise ValueError(f"a value at byte {self._at} is of type {kind}")
        return lambda: self._one(_SCALARS[kind])

    def _skip_array(self) -> int:
        kind, count = self._one("I"), self._one("Q")
        if kind in _SCALARS:
            self._at += self._count(count, struct.calcsize(_SCALARS[kind])) * struct.calcsize(_SCALARS[kind])
        else:
            read = self._value(kind)
            for _ in range(self._count(count, 8)):
                read()
        return int(count)

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        dimensions = self._one("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        shape = tuple(reversed([self._one("Q") for _ in range(dimensions)]))
        return shape, self._one("I"), self._one("Q")
