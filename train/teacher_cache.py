"""A target's most likely tokens at every trained position on disk: written once, memory-mapped ever after.

A folder holds `rows-00000.safetensors`, …, each with `ids` (uint16 where the vocabulary allows, else int32) and
`log_probs` (float16), both [rows, K], the most likely first, and `log_rest` float16 [rows], the logarithm of what all
other tokens have together; beside each a `.sha256` as `sha256sum -c` reads it; then `documents.safetensors` with
`first_row` int64 and `check` uint64, both [documents]; and `teacher.json`. There is a row for every position whose next
token is trained on. Rows lie in the order of the blocks, so that a block's are side by side, and a document's begin at
its `first_row`.

Float16 changes log p by at most 2⁻¹¹ · |log p|, hence p by at most 2⁻¹¹ · p · |log p| ≤ 2⁻¹¹ / e = 1.8e-4 (at
p = 1/e), and the sum of a row by at most 2⁻¹¹ times its entropy in nats. That would drown a small rest; so a row that
is read is scaled to sum to 1 − rest, with the rest as precise as any log p.

Letters: X flattened positions of a batch, R rows, C rows of a chunk, K tokens kept, E hidden of the target,
V vocabulary, N documents of a batch, D documents of the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.packing import Batch
from ..data.prepared import PreparedData, token_dtype
from .losses import IGNORED, shifted_labels

SCHEMA = 1
MANIFEST = "teacher.json"
DOCUMENTS = "documents.safetensors"
SHARD_BYTES = 64 << 20  # what a killed writer may lose
_SCANNED_BLOCKS = 128
_DTYPES = {"U16": np.uint16, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "F16": np.float16}


@dataclass(frozen=True)
class CacheSource:
    """What a cache is made from and holds; two caches with the same `key` hold the same.

    `target` is where the target lies (only told, not compared), `fingerprint` and `data` say which model and which
    prepared data it is (`train.state.data_fingerprint`).
    """

    target: str
    fingerprint: str
    data: str
    top_k: int
    dtype: str = "auto"
    load_in_8bit: bool = False

    @property
    def key(self) -> str:
        """Name of the cache's folder."""
        text = json.dumps(self._identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, wanted: CacheSource) -> list[str]:
        """In what a cache of this differs from the one that is wanted, with both sides."""
        mine, theirs = self._identity(), wanted._identity()
        shown = {"fingerprint": "target", "data": "data"}
        named = {"fingerprint": (f" ({self.target})", f" ({wanted.target})")}
        found = []
        for name in (name for name in mine if mine[name] != theirs[name]):
            here, there = named.get(name, ("", ""))
            found.append(
                f"{shown.get(name, name)} is {str(mine[name])[:16]}{here} there, {str(theirs[name])[:16]}{there} here"
            )
        return found

    def _identity(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "target"}


@dataclass(frozen=True)
class Shard:
    """A file of rows: those of the blocks `first_block` … `end_block` - 1."""

    number: int
    first_block: int
    end_block: int
    first_row: int
    rows: int

    @property
    def name(self) -> str:
        return f"rows-{self.number:05d}.safetensors"


@dataclass(frozen=True)
class CachePlan:
    """Where every row of a cache will lie, known before the target has run."""

    top_k: int
    vocab_size: int
    rows: int
    first_row_D: np.ndarray
    check_D: np.ndarray
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, data: PreparedData, top_k: int, vocab_size: int, shard_bytes: int | None = None) -> CachePlan:
        """Look through the data once; `shard_bytes` is the size of a file (None: `SHARD_BYTES`).

        Raises:
            ValueError: a `top_k` that is no number of tokens of this vocabulary.
        """
        if not 1 <= top_k <= vocab_size:
            raise ValueError(f"top_k is {top_k}, expected 1 … {vocab_size}, the size of the target's vocabulary")
        documents, rows, checks, by_block = [], [], [], []
        for start in range(0, data.blocks, _SCANNED_BLOCKS):
            spans = _spans(data.batch(range(start, min(start + _SCANNED_BLOCKS, data.blocks))))
            documents.append(spans.number_N)
            rows.append(spans.rows_N)
            checks.append(spans.check_N)
            by_block.append(spans.kept_X.reshape(spans.blocks, -1).sum(1))
        number_N, rows_N = np.concatenate(documents), np.concatenate(rows)
        first_row_D = np.zeros(number_N.max() + 1, dtype=np.int64)
        check_D = np.zeros(number_N.max() + 1, dtype=np.uint64)
        first_row_D[number_N] = np.cumsum(rows_N) - rows_N
        check_D[number_N] = np.concatenate(checks)
        most = max(1, (shard_bytes or SHARD_BYTES) // _row_bytes(top_k, vocab_size))
        shards = tuple(_shards(np.concatenate(by_block), most))
        return cls(top_k, vocab_size, int(rows_N.sum()), first_row_D, check_D, shards)

    @property
    def row_bytes(self) -> int:
        return _row_bytes(self.top_k, self.vocab_size)

    def bytes_of(self, shards: int, rows: int) -> int:
        """Bytes on disk of so many files with so many rows, and of what is written at the end (headers rounded up)."""
        return rows * self.row_bytes + 1024 * (shards + 2) + 16 * len(self.first_row_D)


def _row_bytes(top_k: int, vocab_size: int) -> int:
    return top_k * (token_dtype(vocab_size).itemsize + 2) + 2


def _shards(rows_of_block: np.ndarray, most: int) -> Iterator[Shard]:
    """Consecutive blocks with at most `most` rows together, or one block with more."""
    total = np.concatenate([[0], np.cumsum(rows_of_block)])
    first = number = 0
    while first < len(rows_of_block):
        end = max(first + 1, int(np.searchsorted(total, total[first] + most, "right")) - 1)
        rows = int(total[end] - total[first])
        if rows:
            yield Shard(number, first, end, int(total[first]), rows)
            number += 1
        first = end


@dataclass(frozen=True)
class _Spans:
    """The documents of a batch in the order in which they stand: number, rows, and a hash of what decides its rows."""

    blocks: int
    kept_X: np.ndarray
    number_N: np.ndarray
    rows_N: np.ndarray
    check_N: np.ndarray


def _spans(batch: Batch) -> _Spans:
    labels_BT = shifted_labels(batch.labels_BT, batch.documents_BT, 1)
    kept_X = (labels_BT != IGNORED).cpu().numpy().reshape(-1)
    tokens_X, positions_X, documents_X = (
        tensor.cpu().numpy().reshape(-1) for tensor in (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    )
    starts = np.flatnonzero(positions_X == 0)  # of documents, and of padding
    mixed_X = (tokens_X * 2 + kept_X + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed_X ^= (positions_X + 1).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed_X ^= mixed_X >> np.uint64(29)
    mixed_X *= np.uint64(0xBF58476D1CE4E5B9)
    mixed_X ^= mixed_X >> np.uint64(32)
    real = documents_X[starts] >= 0
    rows_N = np.add.reduceat(kept_X.astype(np.int64), starts)[real]
    return _Spans(
        len(batch.tokens_BT), kept_X, documents_X[starts][real], rows_N, np.add.reduceat(mixed_X, starts)[real]
    )


class TeacherCache:
    """A cache, opened for reading. Build it with `TeacherCache.load`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], arrays: dict[str, dict[str, np.ndarray]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.source = CacheSource(**manifest["source"])
        self.vocab_size = int(manifest["vocab_size"])
        self.rows = int(manifest["rows"])
        self._first_row_D, self._check_D = (arrays[DOCUMENTS][name] for name in ("first_row", "check"))
        shards = [Shard(**shard) for shard in manifest["shards"]]
        self._first_rows = np.array([shard.first_row for shard in shards])
        self._shards = [arrays[shard.name] for shard in shards]

    @classmethod
    def load(cls, folder: str | os.PathLike[str], wanted: CacheSource | None = None) -> TeacherCache:
        """Open a finished cache; rows stay on disk. `wanted` is what it must have been made from.

        Raises:
            ValueError: no cache; one of another target, data or `top_k` (both sides are named); a file that is
                missing, or not of the size and form that the manifest says.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        differences = CacheSource(**manifest["source"]).differences(wanted) if wanted is not None else []
        if differences:
            raise ValueError(f"the teacher's cache {folder} is another one: {'; '.join(differences)}")
        arrays = {}
        for name, written in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing: delete {folder}, and write the cache again")
            if path.stat().st_size != written["bytes"]:
                raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, expected {written['bytes']}")
            arrays[name] = map_safetensors(path)
        for shard in manifest["shards"]:
            name = Shard(**shard).name
            found = {key: array.shape for key, array in arrays[name].items()}
            if found != shapes_of(shard["rows"], manifest["source"]["top_k"]):
                raise ValueError(f"{folder / name} is damaged: it does not hold {shard['rows']:,} rows, but {found}")
        return cls(folder, manifest, arrays)

    def verify(self) -> None:
        """Read every file and compare it with the manifest's SHA-256.

        Raises:
            ValueError: a file is not the one that was written.
        """
        for name, written in self.manifest["files"].items():
            if stamp(self.folder / name) != written:
                raise ValueError(
                    f"{self.folder / name} is damaged: its SHA-256 is not the manifest's; delete {self.folder}, and "
                    "write the cache again"
                )

    def mean_mass(self) -> float:
        """How much of the target's probability the tokens that were kept hold, on average over the positions."""
        rest = sum(float(np.exp(arrays["log_rest"], dtype=np.float64).sum()) for arrays in self._shards)
        return 1.0 - rest / max(1, self.rows)

    def find(self, batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Flattened positions int64 [R] of a batch whose next token is trained on, and their rows int64 [R].

        None where the cache was made from other documents: tokens, positions and what is trained are compared.
        """
        spans = _spans(batch)
        if len(spans.number_N) and spans.number_N.max() >= len(self._check_D):
            return None
        if (self._check_D[spans.number_N] != spans.check_N).any():
            return None
        ends_N = np.cumsum(spans.rows_N)
        offset_N = self._first_row_D[spans.number_N] - (ends_N - spans.rows_N)
        positions_R = np.flatnonzero(spans.kept_X)
        return positions_R, np.repeat(offset_N, spans.rows_N) + np.arange(len(positions_R))

    def read(self, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids (as stored) and float32 log-probabilities of these rows, both [R, K]."""
        ids_RK = np.empty((len(rows_R), self.source.top_k), dtype=token_dtype(self.vocab_size))
        log_probs_RK = np.empty(ids_RK.shape, dtype=np.float32)
        log_rest_R = np.empty(len(rows_R), dtype=np.float32)
        shard_R = np.searchsorted(self._first_rows, rows_R, "right") - 1
        for number in np.unique(shard_R):
            mine, arrays = shard_R == number, self._shards[number]
            rows = rows_R[mine] - self._first_rows[number]
            ids_RK[mine] = arrays["ids"][rows]
            log_probs_RK[mine] = arrays["log_probs"][rows]
            log_rest_R[mine] = arrays["log_rest"][rows]
        sum_R = np.exp(log_probs_RK).sum(1, dtype=np.float64)
        log_probs_RK += np.log((1 - np.exp(log_rest_R, dtype=np.float64)) / sum_R)[:, None].astype(np.float32)
        return ids_RK, log_probs_RK


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `teacher.json` says.

    Raises:
        ValueError: there is none, or one of another form.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest["schema"]
        if schema == SCHEMA:
            CacheSource(**manifest["source"])
            [Shard(**shard) for shard in manifest["shards"]]
            [manifest[key] for key in ("vocab_size", "rows", "files")]
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no cache of a teacher: it has no {MANIFEST}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the manifest of a teacher's cache: {error!r}") from error
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema}, this version reads {SCHEMA}; write the cache again")
    return manifest


def shapes_of(rows: int, top_k: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a file of rows."""
    return {"ids": (rows, top_k), "log_probs": (rows, top_k), "log_rest": (rows,)}


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as memory-mapped arrays, so that some rows cost no more than they are.

    Raises:
        ValueError: not such a file.
    """
    size = path.stat().st_size
    arrays: dict[str, np.ndarray] = {}
    with path.open("rb") as file:
        start = int.from_bytes(file.read(8), "little")
        try:
            header: Any = json.loads(file.read(start)) if start < size else None
            for name, item in header.items():
                begin, end = (8 + start + offset for offset in item["data_offsets"])
                dtype = np.dtype(_DTYPES[item["dtype"]])
                if end > size or end - begin != dtype.itemsize * int(np.prod(item["shape"])):
                    raise ValueError(f"{path} is damaged: {name} does not fit into the file")
                arrays[name] = np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=tuple(item["shape"]))
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: not a safetensors file of ours ({error!r})") from error
    return arrays


def stamp(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
