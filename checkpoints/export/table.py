"""Forms of a bigram table for other programs: npz for scipy, llama.cpp's n-gram cache, a proposer for vLLM.

Letters: V vocabulary, X some entries (distinct pairs).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from ..table.table import BigramTable
from . import vllm_proposer
from .base import ExportOptions, Source, format_of

NPZ_FILE = "bigrams.npz"
LLAMA_FILE = "ngrams.bin"
LLAMA_MOST = (2**31 - 1) // 100
"""Most counts in a record: llama.cpp computes percentages of their sum in 32 bits."""

_PRIOR = 1.0  # of the method `bigram`, by default
_LLAMA_LEAST, _LLAMA_SHARE = 4, 75
"""Counts of a record, and percent of them that one token has, from which llama.cpp drafts."""
_GAMMA = 2
_MODULE = "vllm_proposer.py"


def _arrays(table: BigramTable) -> dict[str, NDArray[Any]]:
    """The counts of pairs as CSR, and by token how often it was seen: at all, and on either side of a pair."""
    tensors = {"indptr": table.row_ptr, "indices": table.col, "data": table.count, "unigram": table.unigram}
    tensors |= {"left": table.left_counts(), "right": table.right_counts()}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _write_npz(source: Source, folder: Path, options: ExportOptions) -> None:
    table = BigramTable.load(source.folder)
    arrays = _arrays(table)
    counts = sparse.csr_array(
        tuple(arrays.pop(name) for name in ("data", "indices", "indptr")), shape=(table.vocab_size,) * 2
    )
    sparse.save_npz(folder / NPZ_FILE, counts, compressed=False)
    for name, sums_V in arrays.items():
        np.save(folder / f"{name}.npy", sums_V, allow_pickle=False)


def _compare_npz(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    table = BigramTable.load(source.folder)
    counts = sparse.load_npz(folder / NPZ_FILE)
    sums = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("unigram", "left", "right")}
    found = {"indptr": counts.indptr, "indices": counts.indices, "data": counts.data} | sums
    for name, array in _arrays(table).items():
        if not np.array_equal(array, found[name]):
            raise ValueError(f"{name} read back from {folder} differs from that of {source.folder}")
    return [f"all {counts.nnz:,} counts of pairs, and unigram, left, right of {table.vocab_size:,} tokens"]


def _llama_record(table: BigramTable, x: int) -> NDArray[np.int32]:
    """What the file has of token x: x, -1, -1, -1, the number of followers, and token and count of each. Counts that
    add up to more than `LLAMA_MOST` are scaled to that; nothing for a token without followers."""
    entries = slice(int(table.row_ptr[x]), int(table.row_ptr[x + 1]))
    counts = table.count[entries].numpy().astype(np.int64)
    if not len(counts):
        return np.zeros(0, dtype="<i4")
    total = counts.sum()
    if total > LLAMA_MOST:
        counts = np.maximum(counts * (LLAMA_MOST - len(counts)) // total, 1)
    followers = np.stack((table.col[entries].numpy(), counts), axis=1).ravel()
    return np.concatenate(([x, -1, -1, -1, len(counts)], followers)).astype("<i4")


def _write_llama(source: Source, folder: Path, options: ExportOptions) -> None:
    table = BigramTable.load(source.folder)
    with (folder / LLAMA_FILE).open("wb") as out:
        for x in range(table.vocab_size):
            out.write(_llama_record(table, x).tobytes())


def _compare_llama(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    """Read as llama.cpp does, record after record."""
    table, path = BigramTable.load(source.folder), folder / LLAMA_FILE
    numbers, at = np.fromfile(path, dtype="<i4"), 0
    rows = drafting = scaled = 0
    for x in np.flatnonzero(table.row_ptr.diff().numpy()).tolist():
        record = _llama_record(table, x)
        if not np.array_equal(numbers[at : at + len(record)], record):
            raise ValueError(f"record {rows} read back from {path}, of token {x}, differs from {source.folder}")
        counts = record[6::2].astype(np.int64)
        drafting += counts.sum() >= _LLAMA_LEAST and 100 * counts.max() >= _LLAMA_SHARE * counts.sum()
        scaled += int(table.count[table.row_ptr[x] : table.row_ptr[x + 1]].sum()) > LLAMA_MOST
        rows, at = rows + 1, at + len(record)
    if at != len(numbers):
        raise ValueError(f"{path} goes on after the last record of {source.folder}")
    found = [f"{rows:,} records with {table.entries:,} counts"]
    if scaled:
        found.append(f"of {scaled:,} records, counts that were scaled down")
    found.append(
        f"{drafting:,} of the records make llama.cpp draft: they have {_LLAMA_LEAST} counts or more, and one token "
        f"{_LLAMA_SHARE} % of them"
    )
    return found


def successors(table: BigramTable) -> NDArray[np.int32]:
    """int32 [V]: what the method `bigram` drafts after each token at temperature 0; −1 where a row has no entries."""
    best_V = table.distributions("cpu", _PRIOR).most_likely(torch.arange(table.vocab_size))
    return torch.where(table.row_ptr.diff() > 0, best_V, -1).numpy().astype(np.int32)


def _write_vllm(source: Source, folder: Path, options: ExportOptions) -> None:
    np.save(folder / vllm_proposer.SUCCESSORS_FILE, successors(BigramTable.load(source.folder)), allow_pickle=False)
    shutil.copyfile(vllm_proposer.__file__, folder / _MODULE)


def _compare_vllm(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    following = successors(BigramTable.load(source.folder))
    if not np.array_equal(np.load(folder / vllm_proposer.SUCCESSORS_FILE, allow_pickle=False), following):
        raise ValueError(f"the likeliest next tokens read back from {folder} are not those of {source.folder}")
    return [f"the token that is drafted after each of {len(following):,} tokens, with this package's `bigram`"]


TABLE_FORMATS = (
    format_of("npz", write=_write_npz, compare=_compare_npz),
    format_of(
        "llama-ngrams",
        write=_write_llama,
        compare=_compare_llama,
        values=lambda *_: {"share": _LLAMA_SHARE, "least": _LLAMA_LEAST, "most": LLAMA_MOST},
    ),
    format_of(
        "vllm-bigrams",
        write=_write_vllm,
        compare=_compare_vllm,
        values=lambda source, folder, options: {"tokens": options.speculative_tokens or _GAMMA},
    ),
)
"""Formats of tables."""
