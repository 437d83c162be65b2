"""Statistics of a bigram table for reports.

Shape letters: V vocabulary, E entries (distinct pairs).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .table import TENSORS, BigramTable

EXTREMES = 10
AT_LEAST = 10
"""Number of times that a pair must have been seen, or be expected, to appear among the extremes."""
_BINS = {"1": 1, "2": 2, "3-9": 3, "10-99": 10, "100+": 100}


def table_facts(table: BigramTable, tokenizer: Any = None) -> dict[str, Any]:
    """Return the sizes, the density and the most extreme correlations of a table as plain JSON values.

    `bytes` is the size of the tensors and `density` entries / V². `highest_r` holds the ten highest r of pairs that
    were seen at least 10 times, `lowest_r` the ten lowest of pairs of which at least 10 are expected,
    n(x, ·) n(·, y) / n; of equals the lower tokens come first. With a tokenizer these pairs have `texts`.
    """
    by_count, _ = np.histogram(table.count.numpy(), [*_BINS.values(), 2**31])
    highest, lowest = _find_extremes(table)
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
        "highest_r": [_describe(table, pair, tokenizer) for pair in highest],
        "lowest_r": [_describe(table, pair, tokenizer) for pair in lowest],
    }


def _find_extremes(table: BigramTable) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the pairs (x, y, n) of the highest and of the lowest r."""
    left_V, right_V = (part_V.double().numpy() for part_V in (table.left_counts, table.right_counts))
    right_V /= max(table.pairs, 1)
    best: tuple[list[tuple[float, int, int, int]], ...] = ([], [])
    for first, end in table.chunks():
        part = slice(int(table.row_ptr[first]), int(table.row_ptr[end]))
        x_E, y_E, count_E = (
            tensor.numpy() for tensor in (table.rows_of(first, end), table.col[part], table.count[part])
        )
        expected_E = left_V[x_E] * right_V[y_E]
        score_E = count_E / expected_E
        for found, sign, among_E in ((best[0], -1, count_E >= AT_LEAST), (best[1], 1, expected_E >= AT_LEAST)):
            place_N = np.flatnonzero(among_E)
            # Stable sorting keeps the lower tokens first; the chunks come in their order, too.
            place_N = place_N[np.argsort(sign * score_E[place_N], kind="stable")[:EXTREMES]]
            found += [(sign * float(score_E[e]), int(x_E[e]), int(y_E[e]), int(count_E[e])) for e in place_N]
            found.sort()
            del found[EXTREMES:]
    highest, lowest = ([(x, y, count) for _, x, y, count in found] for found in best)
    return highest, lowest


def _describe(table: BigramTable, pair: tuple[int, int, int], tokenizer: Any) -> dict[str, Any]:
    x, y, count = pair
    expected = int(table.left_counts[x]) * int(table.right_counts[y]) / table.pairs
    described = {"left": x, "right": y, "count": count, "expected": round(expected, 3)}
    described["r"] = float(f"{count / expected:.5g}")
    if tokenizer is None:
        return described
    # Rows of padding in a target's embedding have no token.
    return described | {"texts": [text or "" for text in tokenizer.convert_ids_to_tokens([x, y])]}
