"""Token blocks on disk: prepared once, memory-mapped ever after.

A folder holds `tokens.npy` int32 [blocks, T], `labels.npy` uint8 [blocks, T] (1 where a token is trained on, which the
first of a document never is), `documents.npy` int32 [blocks, T] (the document's number from 0, −1 where there is
padding) and `data.json`. Letters: B batch (blocks), T tokens of a block.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .conversations import Conversation
from .packing import IGNORED, PADDING, Batch, global_batch, pack_best_fit, positions_in_documents
from .templates import Template, render_all

__all__ = ["Batch", "PreparedData", "global_batch", "prepare"]

SCHEMA = 1
MANIFEST = "data.json"
_ARRAYS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "labels": np.dtype(np.uint8),
    "documents": np.dtype(np.int32),
}
_PROGRESS_ROWS = 256


def prepare(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    template: Template,
    block_tokens: int,
    out_dir: str | os.PathLike[str],
    *,
    source: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> PreparedData:
    """Render conversations, pack them into blocks of `block_tokens` tokens and write `out_dir`, whole or not at all.

    The conversations are consumed as a stream; only their tokens are kept. A folder that already holds prepared
    data is replaced. `source` goes into the manifest as it is (where the rows came from, the tokenizer's
    fingerprint, …); `progress(rows, tokens)` is called as rows are rendered.

    Raises:
        ValueError: a block too short to train on; no conversations; nothing trainable; `out_dir` holds other files.
    """
    if block_tokens < 2:
        raise ValueError(f"block_tokens is {block_tokens}, expected at least 2: the first token predicts the second")
    out = Path(out_dir)
    _check_replaceable(out)
    rendered = _Tokens()
    rows = _Counter(conversations, lambda n: progress(n, len(rendered.ids)) if progress else None)
    for document in render_all(rows, tokenizer, template, block_tokens):
        rendered.add(document.ids, document.trainable)
    trainable = sum(rendered.trainable)
    if not rendered.lengths or not trainable:
        raise ValueError(
            f"nothing to train on: {rows.count} conversations gave {len(rendered.lengths)} documents with "
            f"{trainable} trainable tokens of {len(rendered.ids)} in blocks of {block_tokens}"
        )
    if progress is not None:
        progress(rows.count, len(rendered.ids))
    blocks = pack_best_fit(rendered.lengths, block_tokens)
    manifest = {
        "schema": SCHEMA,
        "source": source,
        "options": {"template": template.name, "block_tokens": block_tokens},
        "rows": rows.count,
        "documents": len(rendered.lengths),
        "blocks": len(blocks),
        "tokens": len(rendered.ids),
        "trainable_tokens": trainable,
        "trainable_share": trainable / len(rendered.ids),
        "packing_density": len(rendered.ids) / (len(blocks) * block_tokens),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_arrays(temporary, rendered, blocks, block_tokens, _padding_id(tokenizer))
        manifest["sha256"] = {name: _sha256(temporary / f"{name}.npy") for name in _ARRAYS}
        _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        temporary.chmod(0o755)  # mkdtemp makes a private folder
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return PreparedData.load(out)


class PreparedData:
    """A prepared folder, opened for reading. Build it with `PreparedData.load`."""

    def __init__(self, directory: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.directory = directory
        self.manifest = manifest
        self._tokens = arrays["tokens"]
        self._labels = arrays["labels"]
        self._documents = arrays["documents"]
        self.blocks = int(self._tokens.shape[0])
        self.block_tokens = int(self._tokens.shape[1])

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> PreparedData:
        """Open a folder that `prepare` wrote; the arrays stay on disk.

        Raises:
            ValueError: a file is missing, or is not of the shape and type the manifest says.
        """
        directory = Path(directory)
        needed = [MANIFEST, *(f"{name}.npy" for name in _ARRAYS)]
        missing = [name for name in needed if not (directory / name).is_file()]
        if missing:
            raise ValueError(f"{directory} is no prepared data: {', '.join(missing)} missing")
        try:
            manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            schema, shape = manifest["schema"], (manifest["blocks"], manifest["options"]["block_tokens"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{directory / MANIFEST}: not a manifest of prepared data: {error!r}") from error
        if schema != SCHEMA:
            raise ValueError(f"{directory / MANIFEST}: schema {schema}, this version reads {SCHEMA}; prepare again")
        arrays = {}
        for name, dtype in _ARRAYS.items():
            path = directory / f"{name}.npy"
            try:
                found = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{path}: damaged: {error}") from error
            if found.shape != shape or found.dtype != dtype:
                raise ValueError(f"{path}: {found.dtype} {found.shape}, the manifest says {dtype} {shape}")
            arrays[name] = found
        return cls(directory, manifest, arrays)

    def verify(self) -> None:
        """Compare the arrays with the manifest's sha256.

        Raises:
            ValueError: an array is not the one that was written.
        """
        for name, expected in self.manifest["sha256"].items():
            found = _sha256(self.directory / f"{name}.npy")
            if found != expected:
                raise ValueError(f"{self.directory / name}.npy: sha256 {found}, the manifest says {expected}")

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The blocks of these indices as a batch [B, T].

        Raises:
            ValueError: an index outside 0 … blocks − 1.
        """
        index_B = self._checked(indices)
        tokens_BT = self._tokens[index_B].astype(np.int64)
        documents_BT = self._documents[index_B].astype(np.int64)
        positions_BT = positions_in_documents(documents_BT)
        labels_BT = np.where(self._labels[index_B] != 0, tokens_BT, IGNORED)
        return Batch(*map(torch.from_numpy, (tokens_BT, labels_BT, positions_BT, documents_BT)))

    def trainable_tokens(self, indices: Sequence[int] | np.ndarray) -> int:
        """How many labels of these blocks count after the shift: trainable, with a token of the same document before.

        Raises:
            ValueError: an index outside 0 … blocks − 1.
        """
        # the first token of a document is never marked in the file, so every mark has a token before it
        return int(np.count_nonzero(self._labels[self._checked(indices)]))

    def iter_documents(self) -> Iterator[np.ndarray]:
        """Token ids int32 [T] of every document, in the order in which they were rendered."""
        flat = np.asarray(self._documents).reshape(-1)
        border = np.ones(len(flat) + 1, dtype=bool)
        border[1:-1] = flat[1:] != flat[:-1]
        border[:: self.block_tokens] = True  # a document ends with its block
        edges = np.flatnonzero(border)
        starts, ends = edges[:-1], edges[1:]
        numbers = flat[starts]
        tokens = self._tokens.reshape(-1)
        for run in np.argsort(numbers, kind="stable"):
            if numbers[run] != PADDING:
                yield np.array(tokens[starts[run] : ends[run]])

    def _checked(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        index_B = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(index_B) and (index_B.min() < 0 or index_B.max() >= self.blocks):
            raise ValueError(f"block {index_B.min()} … {index_B.max()} asked for, there are {self.blocks}")
        return index_B


class _Tokens:
    """All documents end to end, in five bytes a token."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.trainable = bytearray()
        self.lengths: list[int] = []

    def add(self, ids: list[int], trainable: list[bool]) -> None:
        self.ids.extend(ids)
        self.trainable.extend(trainable)
        if trainable[0]:
            self.trainable[-len(ids)] = 0  # nothing comes before the first token, so nothing can predict it
        self.lengths.append(len(ids))


class _Counter:
    """Passes conversations on and counts them."""

    def __init__(self, conversations: Iterable[Conversation], report: Callable[[int], None]) -> None:
        self._conversations = conversations
        self._report = report
        self.count = 0

    def __iter__(self) -> Iterator[Conversation]:
        for conversation in self._conversations:
            yield conversation
            self.count += 1
            if self.count % _PROGRESS_ROWS == 0:
                self._report(self.count)


def _check_replaceable(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise ValueError(f"{out} holds files that are no prepared data; choose another folder or empty it")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder to write")


def _replace(new: Path, out: Path) -> None:
    """Put `new` where `out` is; what was there is moved aside first, deleted last."""
    if not out.exists():
        new.rename(out)
        return
    aside = new.with_name(new.name + ".old")
    out.rename(aside)
    new.rename(out)
    shutil.rmtree(aside)


def _write_arrays(folder: Path, rendered: _Tokens, blocks: list[list[int]], block_tokens: int, padding_id: int) -> None:
    shape = (len(blocks), block_tokens)
    written = {}
    for name, dtype in _ARRAYS.items():
        path = folder / f"{name}.npy"
        written[name] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):  # without it a full disk is found by a bus error, when a page is written
            with path.open("r+b") as reserved:
                os.posix_fallocate(reserved.fileno(), 0, path.stat().st_size)
    ids = np.frombuffer(rendered.ids, dtype=np.int32)
    trainable = np.frombuffer(rendered.trainable, dtype=np.uint8)
    starts = np.concatenate([[0], np.cumsum(rendered.lengths)])
    tokens, labels, documents = written["tokens"], written["labels"], written["documents"]
    for block, members in enumerate(blocks):
        at = 0
        for document in members:
            start, end = starts[document], starts[document + 1]
            place = slice(at, at + int(end - start))
            tokens[block, place] = ids[start:end]
            labels[block, place] = trainable[start:end]
            documents[block, place] = document
            at = place.stop
        tokens[block, at:] = padding_id
        documents[block, at:] = PADDING
    for name, values in written.items():
        values.flush()
        with (folder / f"{name}.npy").open("rb") as stored:
            os.fsync(stored.fileno())


def _padding_id(tokenizer: Any) -> int:
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(number for number in candidates if number is not None))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
