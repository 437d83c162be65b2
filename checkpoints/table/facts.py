"""Statistics of a bigram table for its manifest."""

from typing import Any

import numpy as np

from .table import TENSORS, BigramTable

_BINS = {"1": 1, "2": 2, "3-9": 3, "10-99": 10, "100+": 100}


def table_facts(table: BigramTable) -> dict[str, Any]:
    """Compute sizes and density (entries / V²) of a table as JSON-serialisable values."""
    by_count, _ = np.histogram(table.count.numpy(), [*_BINS.values(), 2**31])
    return {
        "vocab_size": table.vocab_size,
        "entries": table.entries,
        "density": table.entries / table.vocab_size**2,
        "bytes": sum(getattr(table, name).nbytes for name in TENSORS),
        "pairs": table.pairs,
        "tokens": int(table.unigram.sum()),
        "tokens_never_seen": int((table.unigram == 0).sum()),
        "rows_seen": int(table.left_counts.count_nonzero()),
        "widest_row": table.widest_row(),
        "entries_by_count": dict(zip(_BINS, by_count.tolist(), strict=True)),
    }
