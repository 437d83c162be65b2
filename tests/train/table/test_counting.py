"""Counting in bounded memory equals a Counter, even if it is split, spilled, killed and resumed."""

import contextlib
import json
import random
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.checkpoints.storage.safe_read import load_json
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.runs import key_dtype
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.run_files import INDEX, merge_counts
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = [2e-4, 1e-3, 1e-2, 1.0]
"""Memory in MiB: from a buffer of a few keys to more than the whole corpus."""


def packed(documents: list[list[int]], dtype: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return np.array([token for document in documents for token in document], dtype=dtype), starts


def brute_table(documents: list[list[int]], vocab_size: int, path: Path) -> bytes:
    """Count a table pair by pair with a Counter and return the content of its file."""
    pairs = Counter(left * vocab_size + right for document in documents for left, right in pairwise(document))
    keys = sorted(pairs)
    run = (np.array(keys, dtype=key_dtype(vocab_size)), np.array([pairs[key] for key in keys], dtype=np.int64))
    unigram = np.zeros(vocab_size, dtype=np.int64)
    for token, count in Counter(token for document in documents for token in document).items():
        unigram[token] = count
    write_table(path, vocab_size, [run], unigram)
    return path.read_bytes()


def merged(folders: list[Path], vocab_size: int, out: Path) -> bytes:
    """Merge the counts in the folders and return the content of the table file."""
    merge_counts(folders, vocab_size, out / "table")
    return (out / "table").read_bytes()


def remove(folder: Path) -> None:
    """Delete a folder to which an abandoned counter may still be writing."""

    def passing(_: Any, __: str, raised: Any) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    shutil.rmtree(folder, onerror=passing)


def copied(folder: Path, copy: Path) -> None:
    """Copy a folder into which a counter may still be writing runs."""
    copy.mkdir()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path, copy)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    vocab_size = draw(st.one_of(st.integers(1, 70_000), st.sampled_from([1, 2, 65_536, 65_537])))
    some = draw(st.lists(st.integers(0, vocab_size - 1), max_size=6))
    token = st.sampled_from(sorted({0, vocab_size - 1, *some}))
    return vocab_size, draw(st.lists(st.lists(token, max_size=30), max_size=10))


ANY_WAY = given(corpus=corpora(), seed=st.integers(0, 2**32), ranks=st.integers(1, 3), memory=st.sampled_from(TINY))


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_all_ways_of_counting_give_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    def count(**drawn: Any) -> None:
        count_any_way(tmp_path_factory.mktemp("count"), **drawn)

    settings(deadline=None, max_examples=examples)(ANY_WAY(count))()


def count_any_way(tmp: Path, corpus: tuple[int, list[list[int]]], seed: int, ranks: int, memory: float) -> None:
    """Count documents by rank in batches of random sizes, with random interruptions.

    Hypothesis only draws `seed`, because the progress of an abandoned counter depends on its threads.
    """
    vocab_size, documents = corpus
    choices = random.Random(seed)
    for rank in range(ranks):
        folder, share = tmp / f"rank-{rank}", documents[rank::ranks]
        done, counter = 0, PairCounter(vocab_size, folder, memory, threads=choices.randint(1, 3))
        while done < len(share):
            size = choices.randint(1, len(share) - done)
            dtype = choices.choice(["int32", "int64", "uint32"])
            counter.add(*packed(share[done : done + size], dtype), {"next": done + size})
            done += size
            what = choices.choice(["go on", "spill", "drop", "copy"])
            if what == "spill":
                counter.spill()
            elif what != "go on":
                if what == "copy":  # files as left by a machine that crashed
                    (folder / "run-unfinished").write_bytes(b"half a run")
                    copied(folder, tmp / "copy")
                    counter.close()
                    remove(folder)
                    (tmp / "copy").rename(folder)
                del counter  # releases its lock
                counter = PairCounter(vocab_size, folder, memory)
                assert not (folder / "run-unfinished").exists()
                done = 0 if counter.position is None else counter.position["next"]
                assert counter.documents == done
                assert counter.tokens == sum(map(len, share[:done]))
        counter.spill()
        counter.close()
    folders = [tmp / f"rank-{rank}" for rank in range(ranks)]
    choices.shuffle(folders)
    numbers = merge_counts(folders, vocab_size, tmp / "table")
    assert (tmp / "table").read_bytes() == brute_table(documents, vocab_size, tmp / "brute")
    assert numbers == (sum(map(len, documents)), len(documents))
    remove(tmp)


def zipf_documents(number: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [(rng.zipf(1.4, size=size) % vocab_size).tolist() for size in rng.integers(0, 300, number)]


def test_a_call_with_an_invalid_token_is_not_counted(tmp_path: Path) -> None:
    with PairCounter(11, tmp_path / "count") as counter:
        counter.add(*packed([[1, 2], [3]]), 2)
        with pytest.raises(ValueError, match=r"\b4\b.* -7\b.*\b11\b"):
            counter.add(*packed([[1], [], [2, -7]])[:1], np.array([0, 1, 1]), 5)
        counter.add(*packed([[4, 5]]), 3)
        counter.spill()
        assert (counter.documents, counter.tokens, counter.position) == (3, 5, 3)
    assert merged([tmp_path / "count"], 11, tmp_path) == brute_table([[1, 2], [3], [4, 5]], 11, tmp_path / "brute")


def folder_of_runs(folder: Path) -> dict[str, Any]:
    with PairCounter(500, folder, 1e-2) as counter:
        for seed in range(3):
            counter.add(*packed(zipf_documents(5, 500, seed)), seed)
        counter.spill()
    return load_json(folder / INDEX)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_files_are_refused_and_named(tmp_path: Path, damage: str) -> None:
    index = folder_of_runs(tmp_path)
    path = tmp_path / index["runs"][1]["name"]
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-4])
    for attempt in (lambda: PairCounter(500, tmp_path), lambda: merge_counts([tmp_path], 500, tmp_path / "table")):
        with pytest.raises(ValueError, match=path.name) as caught:
            attempt()
    path.write_bytes(content)
    with PairCounter(500, tmp_path) as counter:  # the failed call must not keep the lock
        assert (counter.documents, path.name in str(caught.value)) == (15, True)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match=INDEX):
        PairCounter(500, tmp_path)


def test_other_vocabularies_and_second_counters_are_refused(tmp_path: Path) -> None:
    folder_of_runs(tmp_path)
    with pytest.raises(ValueError, match=r"500 .* 501"):
        PairCounter(501, tmp_path)
    with PairCounter(500, tmp_path), pytest.raises(ValueError, match=str(tmp_path)):
        PairCounter(500, tmp_path)


def test_runs_that_lack_counts_are_refused(tmp_path: Path) -> None:
    index = folder_of_runs(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index | {"tokens": index["tokens"] + 1}))
    with pytest.raises(ValueError, match=rf"{index['tokens']} .* {index['tokens'] + 1} "):
        merge_counts([tmp_path], 500, tmp_path / "table")
    assert not (tmp_path / "table").exists()
