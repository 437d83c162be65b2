"""Pruned tables: what is kept and what is known of the rest; reports; both through files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable, merged_runs
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=8)
NAMES = ("row_ptr", "col", "count", "unigram")


def counted(documents: list[list[int]], vocab_size: int = VOCAB) -> BigramTable:
    return BigramTable.from_documents([np.array(document, dtype=np.int64) for document in documents], vocab_size)


def zipf(tokens: int, vocab_size: int, seed: int = 0) -> BigramTable:
    document = np.random.default_rng(seed).zipf(1.3, tokens).clip(max=vocab_size) - 1
    return BigramTable.from_documents([document], vocab_size)


def entries(table: BigramTable) -> dict[tuple[int, int], int]:
    rows = np.repeat(np.arange(table.vocab_size), np.diff(table.row_ptr))
    return {(int(x), int(y)): int(n) for x, y, n in zip(rows, table.col, table.count, strict=True)}


def same(first: BigramTable, second: BigramTable) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in NAMES)


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 4), st.integers(0, 3))
def test_pruning_keeps_what_it_says(documents: list[list[int]], min_count: int, top: int) -> None:
    whole = counted(documents)
    before = entries(whole)
    if before and max(before.values()) < min_count:
        with pytest.raises(ValueError, match=rf"{max(before.values())}, .* {min_count} "):
            whole.pruned(min_count=min_count, top=top)
        return
    small = whole.pruned(min_count=min_count, top=top)
    wanted = {}
    for x in range(VOCAB):
        row = sorted((-n, y) for (left, y), n in before.items() if left == x and n >= min_count)
        wanted |= {(x, y): -n for n, y in (row[:top] if top else row)}
    assert entries(small) == wanted
    assert entries(whole) == before
    assert whole.pruning is None
    assert small.pairs == whole.pairs == sum(before.values())
    assert small.mass == (sum(wanted.values()) / whole.pairs if whole.pairs else 1.0)
    assert torch.equal(small.left_counts(), whole.left_counts())
    assert torch.equal(small.right_counts(), whole.right_counts())
    assert small.pruning is not None
    assert small.pruning["entries"] == len(before)
    x, y = torch.tensor([list(pair) for pair in wanted] or [[0, 0]]).unbind(1)
    log_unseen = torch.tensor(-torch.inf)
    if wanted:  # r of what is kept is what it was
        assert torch.equal(small.look_up(x, y, log_unseen), whole.look_up(x, y, log_unseen))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 2.0])
def test_a_size_in_megabytes_is_never_exceeded(tmp_path: Path, share: float) -> None:
    """And the threshold is the least that fits: with those of one count less the file would be too large."""
    table = zipf(60_000, 300)
    table.save(tmp_path / "whole")
    megabytes = (8 * 4 * 300 + 2048 + share * 8 * table.entries) / 1e6
    small = table.pruned(megabytes=megabytes)
    small.save(tmp_path / "small")
    size = (tmp_path / "small" / TABLE_FILE).stat().st_size
    assert size <= megabytes * 1e6
    assert small.pruning is not None
    threshold = small.pruning["threshold"]
    assert entries(small) == {pair: n for pair, n in entries(table).items() if n >= threshold}
    more = int((table.count >= threshold - 1).sum()) - small.entries
    assert threshold == 1 or size + 8 * more > megabytes * 1e6 - 2048
    assert (small.entries == table.entries) == (share == 2.0)


def test_pruned_tables_come_back_from_their_file(tmp_path: Path) -> None:
    small = zipf(5000, 120).pruned(min_count=2, top=9)
    small.save(tmp_path)
    loaded = BigramTable.load(tmp_path)
    assert same(loaded, small)
    assert loaded.pruning == small.pruning
    assert loaded.mass == small.mass < 1
    for kind in ("left_counts", "right_counts"):
        assert torch.equal(getattr(loaded, kind)(), getattr(small, kind)())
    assert loaded.report() == small.report()
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / TABLE_FILE).read_bytes() == (tmp_path / TABLE_FILE).read_bytes()


@settings(deadline=None, max_examples=25)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.sampled_from([1, 3, 1000]))
def test_streamed_merging_gives_the_file_of_the_whole(parts: list[list[list[int]]], chunk: int) -> None:
    tables = [counted(part) for part in parts]
    whole = counted([document for part in parts for document in part])
    runs = list(merged_runs(tables, chunk))
    keys = np.concatenate([keys for keys, _ in runs]) if runs else np.zeros(0)
    assert {
        divmod(int(key), VOCAB): int(n) for key, n in zip(keys, (n for _, ns in runs for n in ns), strict=True)
    } == (entries(whole))


def test_a_report_counts_what_there_is(tmp_path: Path) -> None:
    table = zipf(30_000, 150)
    table.save(tmp_path)
    report, counts = table.report(), np.array(list(entries(table).values()))
    assert json.loads(json.dumps(report)) == report
    numbers = {"entries": len(counts), "pairs": 29_999, "tokens": 30_000, "density": len(counts) / 150**2, "mass": 1.0}
    assert report.items() >= (numbers | {"pruning": None}).items()
    assert 0 < (tmp_path / TABLE_FILE).stat().st_size - report["bytes"] < 2048
    wanted = {"1": (1, 1), "2": (2, 2), "3-9": (3, 9), "10-99": (10, 99), "100+": (100, 10**9)}
    found = {name: int(((counts >= low) & (counts <= high)).sum()) for name, (low, high) in wanted.items()}
    assert report["entries_by_count"] == found
    assert sum(found.values()) == len(counts)
    assert report["tokens_never_seen"] == int((table.unigram == 0).sum())


def test_a_report_names_the_most_extreme_correlations() -> None:
    """Against all pairs, sorted: seen ten times for the highest, ten expected for the lowest."""
    table = zipf(30_000, 150)
    left, right = table.left_counts().tolist(), table.right_counts().tolist()
    counts = entries(table)
    expected = {(x, y): left[x] * right[y] / table.pairs for x, y in counts}
    by_r = sorted((n / expected[pair], *pair) for pair, n in counts.items())
    lowest = [(x, y) for _, x, y in by_r if expected[x, y] >= 10][:10]
    highest = sorted((-r, x, y) for r, x, y in by_r if counts[x, y] >= 10)[:10]
    report = table.report()
    assert [(e["left"], e["right"]) for e in report["lowest_r"]] == lowest
    assert [(e["left"], e["right"]) for e in report["highest_r"]] == [(x, y) for _, x, y in highest]
    for entry in report["lowest_r"] + report["highest_r"]:
        pair = entry["left"], entry["right"]
        assert entry["count"] == counts[pair]
        assert entry["r"] == pytest.approx(entry["count"] / expected[pair], rel=1e-4)
