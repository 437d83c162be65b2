"""Memory-mapped token data on disk. Blocks are assembled from documents when a batch is loaded.

A directory contains `data.json` and these arrays: `tokens.npy` (uint16 or int32, all documents concatenated),
`trained.npy` (uint8 loss mask), `documents.npy` (int64 [documents + 1], the start of each document), `order.npy` (int64
[documents]) and `blocks.npy` (int64 [blocks + 1]). Block b consists of the documents order[blocks[b] : blocks[b + 1]].
Shape suffixes: B batch size (blocks), T tokens.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints.storage.atomic import atomic_dir
from ...checkpoints.storage.safe_read import file_hash, load_json
from ..conversations import Conversation, collect_rarely
from ..rendering.layout import Rendered
from ..rendering.render import Renderer, RenderReport
from ..rendering.templates import Template
from .packing import Batch, Document, global_batch, make_batch, pack

SCHEMA = 2
MANIFEST = "data.json"
_ARRAYS = ("tokens", "trained", "documents", "order", "blocks")
_PROGRESS_ROWS = 256
_BUFFER = 1 << 20
_WINDOW_DOCUMENTS = 1 << 18  # documents packed jointly: enough for dense blocks, few enough to save memory


def prepare(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    template: Template,
    block_tokens: int,
    out_dir: str | os.PathLike[str],
    *,
    source: dict[str, Any],
    packing: str = "best-fit",
    last_turn_only: bool = False,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
) -> "PreparedData":
    """Render conversations, pack them into blocks of `block_tokens` and write the blocks to `out_dir` atomically.

    Existing prepared data in `out_dir` is replaced. `packing` is "best-fit", or "pad" for one document per block,
    padded to the longest document of a batch. With `last_turn_only`, only the last answer of a conversation is
    supervised. The manifest records `source`. `progress` receives the row and token counts.

    Raises ValueError if no token is supervised, or `out_dir` contains other files.
    """
    out, rows = Path(out_dir), 0
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} contains files that are not prepared data: choose another folder")

    def count_rows() -> Iterator[Conversation]:
        nonlocal rows
        for conversation in conversations:
            yield conversation
            rows += 1
            if rows % _PROGRESS_ROWS == 0:
                progress(rows, writer.tokens)

    with atomic_dir(out) as folder:
        report = RenderReport()
        writer = _Writer(folder, 1 + max(tokenizer.get_vocab().values()))
        render = Renderer(template, tokenizer, block_tokens, last_turn_only=last_turn_only)
        with collect_rarely():
            for document in render(count_rows(), report):
                writer.add(document)
        if not writer.trained:
            raise ValueError(f"no token is supervised: {rows} conversations, blocks of {block_tokens} tokens")
        progress(rows, writer.tokens)
        counts = writer.finish(block_tokens, packing)
        options = {"block_tokens": block_tokens, "packing": packing, "last_turn_only": last_turn_only}
        manifest = {"schema": SCHEMA, "source": source, "options": {"template": template.name} | options}
        manifest |= {"rows": rows, "rendering": asdict(report), "padding_id": padding_id(tokenizer)} | counts
        manifest |= {"sha256": {name: file_hash(folder / f"{name}.npy") for name in _ARRAYS}}
        record = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(record, encoding="utf-8")
    return PreparedData.load(out)


class PreparedData:
    """Tokenized and packed training data on disk, opened with `PreparedData.load`."""

    def __init__(self, directory: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.directory = directory
        self.manifest = manifest
        self._tokens, self._trained, self._documents, self._order, self._blocks = (arrays[name] for name in _ARRAYS)
        self.blocks = len(self._blocks) - 1
        self.block_tokens = int(manifest["options"]["block_tokens"])
        self._pads = manifest["options"]["packing"] == "pad"
        self._padding_id = int(manifest["padding_id"])

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "PreparedData":
        """Open a directory written by `prepare`. Raises ValueError if a file is missing or damaged."""
        directory = Path(directory)
        manifest_file = directory / MANIFEST
        if not manifest_file.is_file():
            raise ValueError(f"{directory} is not prepared data: {MANIFEST} is missing")
        manifest = load_json(manifest_file, "schema", "tokens", "documents", "blocks", "options", "padding_id")
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"{manifest_file}: schema {manifest['schema']}, expected {SCHEMA}: prepare the data again")
        arrays: dict[str, np.ndarray] = {}
        for name in _ARRAYS:
            path = directory / f"{name}.npy"
            try:
                arrays[name] = np.lib.format.open_memmap(path, mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise ValueError(f"{path}: missing or damaged: {error}") from error
        return cls(directory, manifest, arrays)

    def verify(self, vocab_size: int) -> None:
        """Raise ValueError if the hash of an array has changed or a token id is not less than `vocab_size`."""
        for name, written in self.manifest["sha256"].items():
            if (digest := file_hash(path := self.directory / f"{name}.npy")) != written:
                again = f"delete {self.directory} to prepare it again"
                raise ValueError(f"{path} has SHA-256 {digest}, but {MANIFEST} lists {written}: {again}")
        least, most = int(self._tokens.min()), int(self._tokens.max())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"{self.directory / 'tokens.npy'} has the token {least if least < 0 else most}, expected 0 to "
                f"{vocab_size - 1}: prepare the data with the model's tokenizer"
            )

    def step_batch(self, step: int, batch_blocks: int, seed: int) -> tuple[np.ndarray, Batch]:
        """Return the block indices and the batch of a global step, which depend only on the arguments."""
        indices = global_batch(self.blocks, batch_blocks, step, seed)
        return indices, self.batch(indices)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Load blocks as a batch [B, T]. With packing "pad", T is the length of the longest document in the batch."""
        blocks = [
            [self._document(document) for document in self._order[self._blocks[b] : self._blocks[b + 1]].tolist()]
            for b in indices
        ]
        length = self.block_tokens
        if self._pads and blocks:
            length = max(len(document.ids) for block in blocks for document in block)
        return make_batch(blocks, length, self._padding_id)

    def token_counts(self, *, trained: bool) -> np.ndarray:
        """Count the occurrences of each token id, int64 [1 + largest id]; only supervised ones if `trained`."""
        counts = np.zeros(0, dtype=np.int64)
        for start in range(0, len(self._tokens), _BUFFER):
            part = slice(start, start + _BUFFER)
            count_rows = self._tokens[part][self._trained[part] > 0] if trained else self._tokens[part]
            more = np.bincount(count_rows, minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        return counts

    def _document(self, number: int) -> Document:
        start, end = int(self._documents[number]), int(self._documents[number + 1])
        return Document(self._tokens[start:end], self._trained[start:end], number)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the storage dtype of token ids: uint16 if the vocabulary fits, otherwise int32."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32)


class _Writer:
    """Writer of the array files of prepared data."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._tokens = _Column(folder / "tokens.npy", token_dtype(vocab_size))
        self._trained = _Column(folder / "trained.npy", np.dtype(np.uint8))
        self.lengths: list[int] = []
        self.tokens = self.trained = 0

    def add(self, document: Rendered) -> None:
        if document.spans and document.spans[0][0] == 0:
            document.spans[0] = (1, document.spans[0][1])  # no token precedes the first one, so it cannot be predicted
        self.lengths.append(len(document.ids))
        self._tokens.append(document.ids)
        self._trained.append(document.trainable())
        self.tokens += len(document.ids)
        self.trained += sum(end - start for start, end in document.spans)

    def finish(self, block_tokens: int, packing: str) -> dict[str, int | float]:
        """Pack the documents, write the remaining arrays, and return the counts for the manifest."""
        self._tokens.close()
        self._trained.close()
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = range(0, len(lengths), _WINDOW_DOCUMENTS)
        packed = [pack(lengths[start : start + _WINDOW_DOCUMENTS], block_tokens, packing) for start in starts]
        sizes = np.concatenate([size for _, size in packed])
        order = np.concatenate([order + start for start, (order, _) in zip(starts, packed, strict=True)])
        np.save(self._folder / "documents.npy", np.concatenate([[0], np.cumsum(lengths)]))
        np.save(self._folder / "order.npy", order)
        np.save(self._folder / "blocks.npy", np.concatenate([[0], np.cumsum(sizes)]))
        return {
            "documents": len(lengths),
            "blocks": len(sizes),
            "tokens": self.tokens,
            "trainable_tokens": self.trained,
            "trainable_share": self.trained / self.tokens,
            "packing_density": self.tokens / (len(sizes) * block_tokens),
        }


class _Column:
    """Writer that appends to a one-dimensional .npy file. The file is valid after `close`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype, self._length = path.open("wb", _BUFFER), dtype, 0
        self._write_header()
        self._data = self._file.tell()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._data, "numpy leaves room in the header for the length to grow"
        self._file.close()

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def padding_id(tokenizer: Any) -> int:
    """Return the token id for padding: the tokenizer's padding token, else its EOS token, else 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(number for number in candidates if number is not None))
