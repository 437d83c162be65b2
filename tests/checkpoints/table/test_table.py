"""Bigram tables: counts equal a Counter, files survive a round trip, and damaged files are refused."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.facts import table_facts
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.runs import check_documents, key_dtype
from draftsmith.checkpoints.table.table import TABLE_FILE, TENSORS, BigramTable
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

VOCAB = 11
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=12)


def random_table(seed: int = 0, length: int = 400) -> BigramTable:
    return BigramTable.from_documents([np.random.default_rng(seed).integers(0, VOCAB, length)], VOCAB)


def pairs_in(table: BigramTable) -> dict[tuple[int, int], int]:
    rows = np.repeat(np.arange(table.vocab_size), np.diff(table.row_ptr))
    return {(int(x), int(y)): int(n) for x, y, n in zip(rows, table.col, table.count, strict=True)}


@settings(deadline=None)
@given(documents=DOCUMENTS)
def test_counts_equal_a_counter(documents: list[list[int]]) -> None:
    table = BigramTable.from_documents([np.array(document, dtype=np.int32) for document in documents], VOCAB)
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    tokens, left, right = (
        Counter(ids)
        for ids in (
            (t for d in documents for t in d),
            (x for x, _ in pairs.elements()),
            (y for _, y in pairs.elements()),
        )
    )
    assert pairs_in(table) == pairs
    for counts, expected in ((table.unigram, tokens), (table.left_counts, left), (table.right_counts, right)):
        assert counts.tolist() == [expected[token] for token in range(VOCAB)]
    assert table.pairs == pairs.total()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    random_table().save(tmp_path)
    whole = (tmp_path / TABLE_FILE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in sorted({*range(24), *range(0, len(whole), 37), header - 1, header, header + 1, len(whole) - 1}):
        (tmp_path / TABLE_FILE).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"{TABLE_FILE} \({size} bytes\)"):
            BigramTable.load(tmp_path)
    (tmp_path / TABLE_FILE).write_bytes(whole + bytes(8))
    with pytest.raises(ValueError, match=TABLE_FILE):
        BigramTable.load(tmp_path)
    (tmp_path / TABLE_FILE).unlink()
    with pytest.raises(ValueError, match=str(tmp_path / TABLE_FILE)):
        BigramTable.load(tmp_path)


LOAD_MAPPED = """
import re, sys
from pathlib import Path
import torch
from draftsmith.checkpoints.table.table import BigramTable

def megabytes(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

BigramTable.from_documents([], 1000)
before = megabytes("RssAnon")
table = BigramTable.load(Path(sys.argv[1]))
print(megabytes("RssAnon") - before, table.entries)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_table_is_memory_mapped(tmp_path: Path) -> None:
    vocab, entries = 2000, 3_000_000
    keys = np.sort(np.random.default_rng(0).choice(vocab**2, entries, replace=False)).astype(np.uint32)
    run = (keys, np.ones(entries, dtype=np.int64))
    write_table(tmp_path / TABLE_FILE, vocab, [run], np.full(vocab, entries))
    output = subprocess.run(
        [sys.executable, "-c", LOAD_MAPPED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown, count = output.stdout.split()
    assert int(count) == entries
    assert (tmp_path / TABLE_FILE).stat().st_size > 24e6
    assert float(grown) < 12


def test_saving_over_the_file_that_a_table_was_loaded_from(tmp_path: Path) -> None:
    table = random_table()
    table.save(tmp_path)
    written = (tmp_path / TABLE_FILE).read_bytes()
    loaded = BigramTable.load(tmp_path)
    loaded.save(tmp_path)
    assert all(torch.equal(getattr(loaded, name), getattr(table, name)) for name in TENSORS)
    assert (tmp_path / TABLE_FILE).read_bytes() == written


def zipf() -> BigramTable:
    document = np.random.default_rng(0).zipf(1.3, 30_000).clip(max=150) - 1
    return BigramTable.from_documents([document], 150)


def test_statistics_of_a_table(tmp_path: Path) -> None:
    table = zipf()
    table.save(tmp_path)
    facts, counts = table_facts(table), np.array(list(pairs_in(table).values()))
    assert json.loads(json.dumps(facts)) == facts
    numbers = {"entries": len(counts), "pairs": 29_999, "tokens": 30_000, "density": len(counts) / 150**2}
    assert facts.items() >= numbers.items()
    assert 0 < (tmp_path / TABLE_FILE).stat().st_size - facts["bytes"] < 2048
    ranges = {"1": (1, 1), "2": (2, 2), "3-9": (3, 9), "10-99": (10, 99), "100+": (100, 10**9)}
    expected = {name: int(((counts >= low) & (counts <= high)).sum()) for name, (low, high) in ranges.items()}
    assert facts["entries_by_count"] == expected
    assert facts["tokens_never_seen"] == int((table.unigram == 0).sum())


def check(tokens: list[int], starts: list[int]) -> Callable[[], None]:
    return lambda: check_documents(np.array(tokens, dtype=np.int64), np.array(starts, dtype=np.int64), VOCAB)


ONE = np.zeros(1, dtype=np.int64)
MISTAKES: dict[str, tuple[Callable[[], Any], list[object]]] = {
    "vocabulary of none": (lambda: key_dtype(0), [0, 2**31 - 1]),
    "token above": (check([1, 2, 3, 11, 4], [0, 2, 2]), ["document 2", "token 11", VOCAB]),
    "token below": (check([1, -(2**63)], [0]), [-(2**63)]),
    "documents of fractions": (lambda: BigramTable.from_documents([np.array([0.5])], VOCAB), ["float64"]),
    "starts after the first token": (check([1, 2], [1]), ["begin with 0 and end by 2, got [1] to [1]"]),
    "too large a count": (
        lambda: write_table(Path("x"), VOCAB, [(np.array([13], np.uint32), ONE + 2**31)], np.zeros(VOCAB, int)),
        ["(1, 2)", 2**31, 2**31 - 1],
    ),
    "sums of another vocabulary": (lambda: write_table(Path("x"), 10, [], ONE), ["unigram is [1]", 10]),
    "k below 0": (lambda: random_table().correlation(-1.0), [-1.0]),
    "k not a number": (lambda: random_table().distributions("cpu", 1.0, float("nan")), ["nan"]),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_are_refused(
    mistake: tuple[Callable[[], Any], list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, expected = mistake
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\S") as caught:
        attempt()
    assert all(str(part) in str(caught.value) for part in expected), caught.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("row_ptr", lambda t: t.flip(0), "row_ptr"),
        ("row_ptr", lambda t: t[:-1], "row_ptr has 11 entries for 11 tokens, expected 12"),
        ("col", lambda t: t + VOCAB, "col must be between 0 and 10"),
        ("col", lambda t: torch.cat((t[:1], t[:1], t[2:])), "row 0"),
        ("col", lambda t: t[None], "col is torch.int32 [1, "),
        ("col", lambda t: t.long(), "col is torch.int64"),
        ("count", lambda t: t[:-1], "counts for"),
        ("count", lambda t: t * 0, "count must be at least 1, got 0"),
        ("unigram", lambda t: t - 10**6, "unigram must be at least 0, got -9"),
        ("unigram", None, "unigram"),
        ("vocab_size", lambda text: "12", "12 tokens"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path: Path, name: str, change: Any, expected: str) -> None:
    random_table().save(tmp_path)
    file, metadata = tmp_path / TABLE_FILE, {"vocab_size": str(VOCAB)}
    tensors: dict[str, Any] = load_file(file)
    if change is None:
        del tensors[name]
    elif name in metadata:
        metadata[name] = change(metadata[name])
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match=str(file)) as caught:
        BigramTable.load(tmp_path)
    assert expected in str(caught.value)
