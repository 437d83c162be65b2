"""Bigram tables against a plain Counter and the dense formula."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

VOCAB = 11
NAMES = ("row_ptr", "col", "count", "unigram")
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=12)


def arrays(documents: list[list[int]]) -> list[np.ndarray]:
    return [np.array(document, dtype=np.int32) for document in documents]


def reference(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Dense pair counts [V, V] and token counts [V], one by one."""
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    tokens = Counter(token for document in documents for token in document)
    dense = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for (left, right), count in pairs.items():
        dense[left, right] = count
    return dense, np.array([tokens[token] for token in range(VOCAB)])


def dense(table: BigramTable) -> np.ndarray:
    matrix = csr_matrix((table.count.long(), table.col, table.row_ptr), shape=(table.vocab_size,) * 2)
    return matrix.toarray()


def random_table(seed: int = 0, length: int = 400) -> BigramTable:
    return BigramTable.from_documents([np.random.default_rng(seed).integers(0, VOCAB, length)], VOCAB)


@settings(deadline=None)
@given(documents=DOCUMENTS)
def test_counts_are_those_of_a_counter(documents: list[list[int]]) -> None:
    table = BigramTable.from_documents(arrays(documents), VOCAB)
    pairs, tokens = reference(documents)
    np.testing.assert_array_equal(dense(table), pairs)
    np.testing.assert_array_equal(table.unigram, tokens)
    np.testing.assert_array_equal(table.left_counts(), pairs.sum(1))
    np.testing.assert_array_equal(table.right_counts(), pairs.sum(0))
    assert table.pairs == pairs.sum()


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    random_table().save(tmp_path)
    whole = (tmp_path / TABLE_FILE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = {*range(24), *range(0, len(whole), 37), header - 1, header, header + 1, len(whole) - 1}
    for size in sorted(places):
        (tmp_path / TABLE_FILE).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"{TABLE_FILE} \({size} bytes\)"):
            BigramTable.load(tmp_path)
    (tmp_path / TABLE_FILE).write_bytes(whole + bytes(8))
    with pytest.raises(ValueError, match=TABLE_FILE):
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
def test_a_loaded_table_stays_in_its_file(tmp_path: Path) -> None:
    """What the process itself holds grows by far less than the file: the system may drop the rest at any time."""
    vocab, entries = 2000, 3_000_000
    keys = np.sort(np.random.default_rng(0).choice(vocab**2, entries, replace=False)).astype(np.uint32)
    run = (keys, np.ones(entries, dtype=np.int64))
    write_table(tmp_path / TABLE_FILE, vocab, [run], np.full(vocab, entries))
    output = subprocess.run(
        [sys.executable, "-c", LOAD_MAPPED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown, found = output.stdout.split()
    assert int(found) == entries
    assert (tmp_path / TABLE_FILE).stat().st_size > 24e6
    assert float(grown) < 12


def test_saving_over_the_file_that_a_table_was_loaded_from(tmp_path: Path) -> None:
    table = random_table()
    table.save(tmp_path)
    loaded = BigramTable.load(tmp_path)
    loaded.save(tmp_path)
    loaded.pruned(min_count=3).save(tmp_path)
    assert all(torch.equal(getattr(loaded, name), getattr(table, name)) for name in NAMES)
    assert BigramTable.load(tmp_path).pruning is not None
