"""What a table of counts holds, in numbers that fit a report.

Letters: V vocabulary, E entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .counts import BigramCounts, default_discount

EXTREMES = 10
AT_LEAST = 10
_BINS = {"1": 1, "2": 2, "3-9": 3, "10-99": 10, "100+": 100}


def report(table: BigramCounts, tokenizer: Any = None) -> dict[str, Any]:
    """Sizes, density, mass, and the most extreme correlations of a table.

    The ten highest r are those among pairs that were seen at least 10 times, the lowest those among held pairs of which
    10 are expected, n(x, ·) n(·, y) / n; the lower tokens first of equals. Plain JSON values: `bytes` are those of the
    tensors, `density` is entries / V², `mass` the share of all pairs that the entries hold, `discount` the default one
    of "kneser-ney"; with a tokenizer the extremes have `texts`.
    """
    unigram_V = np.asarray(table.unigram)
    tensors = (table.row_ptr, table.col, table.count, table.unigram)
    size = sum(tensor.nbytes for tensor in tensors) + (16 * table.vocab_size if table.pruning is not None else 0)
    by_count, _ = np.histogram(np.asarray(table.count), [*_BINS.values(), 2**31])
    highest, lowest = _extremes(table)
    return {
        "vocab_size": table.vocab_size,
        "entries": table.entries,
        "density": table.entries / table.vocab_size**2,
        "bytes": size,
        "pairs": table.pairs,
        "mass": table.mass,
        "pruning": table.pruning,
        "tokens": int(unigram_V.sum()),
        "tokens_never_seen": int(np.count_nonzero(unigram_V == 0)),
        "rows_seen": int(np.count_nonzero(np.asarray(table.left_counts()))),
        "widest_row": table.widest_row(),
        "entries_by_count": dict(zip(_BINS, by_count.tolist(), strict=True)),
        "discount": default_discount(table),
        "highest_r": [_described(table, pair, tokenizer) for pair in highest],
        "lowest_r": [_described(table, pair, tokenizer) for pair in lowest],
    }


def _extremes(table: BigramCounts) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Pairs (x, y, n) of the highest and of the lowest r."""
    left_V, right_V = (np.asarray(part, dtype=np.float64) for part in (table.left_counts(), table.right_counts()))
    right_V /= max(table.pairs, 1)
    best: tuple[list[tuple[float, int, int, int]], ...] = ([], [])
    for first, end in table.chunks():
        start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
        x_E, y_E = np.asarray(table.rows_of(first, end)), np.asarray(table.col[start:stop])
        count_E = np.asarray(table.count[start:stop])
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


def _described(table: BigramCounts, pair: tuple[int, int, int], tokenizer: Any) -> dict[str, Any]:
    x, y, count = pair
    expected = int(table.left_counts()[x]) * int(table.right_counts()[y]) / table.pairs
    found = {"left": x, "right": y, "count": count, "expected": round(expected, 3)}
    found["r"] = float(f"{count / expected:.5g}")
    if tokenizer is None:
        return found
    # Rows of padding in a target's embedding have no token.
    return found | {"texts": [text or "" for text in tokenizer.convert_ids_to_tokens([x, y])]}
