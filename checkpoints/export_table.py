"""Forms of a bigram table for other programs: npz for scipy.

Letters: V vocabulary, E entries (distinct pairs).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy import sparse

from .export import ExportOptions, Format, Source
from .table import BigramTable

NPZ_FILE = "bigrams.npz"


def _write_npz(source: Source, folder: Path, options: ExportOptions) -> None:
    del options
    table = BigramTable.load(source.folder)
    shape = (table.vocab_size, table.vocab_size)
    counts = sparse.csr_array((table.count.numpy(), table.col.numpy(), table.row_ptr.numpy()), shape=shape)
    sparse.save_npz(folder / NPZ_FILE, counts, compressed=False)
    np.save(folder / "unigram.npy", table.unigram.numpy(), allow_pickle=False)


def _compare_npz(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    del options
    table = BigramTable.load(source.folder)
    counts = sparse.load_npz(folder / NPZ_FILE)
    unigram = np.load(folder / "unigram.npy", allow_pickle=False)
    same = all(
        np.array_equal(mine.numpy(), theirs)
        for mine, theirs in (
            (table.row_ptr, counts.indptr),
            (table.col, counts.indices),
            (table.count, counts.data),
            (table.unigram, unigram),
        )
    )
    if not same:
        raise ValueError(f"the counts read back from {folder / NPZ_FILE} differ from those of {source.folder}")
    return [f"all {counts.nnz:,} counts of pairs and {len(unigram):,} of tokens"]


def _serve_npz(source: Source, options: ExportOptions) -> str:
    del source, options
    return f"""
```python
import numpy as np
from scipy import sparse

counts = sparse.load_npz("{{folder}}/{NPZ_FILE}")  # counts[x, y]: how often token y came after token x
unigram = np.load("{{folder}}/unigram.npy")  # how often each token was seen
```
"""


TABLE_FORMATS = (
    Format(
        name="npz",
        kind="table",
        summary="Counts of pairs as a sparse matrix, and of tokens as an array",
        readers="scipy ≥ 1.8 and numpy",
        write=_write_npz,
        compare=_compare_npz,
        serving=_serve_npz,
    ),
)
"""Formats of tables."""
