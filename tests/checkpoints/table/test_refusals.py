"""What tables refuse, each row with the numbers, names and paths that its message holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.runs import check_documents, key_dtype
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable, merged_runs
from safetensors.torch import load_file, save_file

VOCAB = 11
ONE = np.zeros(1, dtype=np.int64)
SMALL = BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB, 400)], VOCAB)
TABLE = BigramTable.from_documents([np.random.default_rng(0).zipf(1.3, 5000).clip(max=120) - 1], 120)
PRUNED = TABLE.pruned(min_count=2)
Case = tuple[Callable[[], Any], list[object]]


def counted_twice() -> None:
    most = BigramTable.from_documents([np.array([1, 2])], VOCAB)
    most.count[0] = 2**31 - 1
    write_table(Path("x"), VOCAB, merged_runs([most, most]), most.unigram.numpy())


def checked(tokens: list[int], starts: list[int]) -> Callable[[], None]:
    return lambda: check_documents(np.array(tokens, dtype=np.int64), np.array(starts, dtype=np.int64), VOCAB)


CASES: dict[str, Case] = {
    "vocabulary of none": (lambda: key_dtype(0), [0, 2**31 - 1]),
    "vocabulary too large": (lambda: BigramTable.from_documents([], 2**31), [2**31]),
    "token above": (checked([1, 2, 3, 11, 4], [0, 2, 2]), ["document 2", "token 11", VOCAB]),
    "token below": (checked([1, -(2**63)], [0]), [-(2**63)]),
    "documents of two dimensions": (lambda: check_documents(np.zeros((2, 2), int), ONE, VOCAB), ["int64 [2, 2]"]),
    "documents of fractions": (lambda: BigramTable.from_documents([np.array([0.5])], VOCAB), ["float64"]),
    "starts after the first token": (checked([1, 2], [1]), ["[1] to [1] in 2"]),
    "no starts": (checked([1, 2], []), ["0 documents"]),
    "too large a sum": (counted_twice, ["(1, 2)", 4294967294, 2**31 - 1]),
    "merging nothing": (lambda: merged_runs([]), []),
    "merging a pruned table": (lambda: merged_runs([TABLE, PRUNED]), [f"{PRUNED.entries} of {TABLE.entries}"]),
    "sums of other vocabularies": (lambda: write_table(Path("x"), 10, [], ONE), ["unigram is [1]", 10]),
    "left of others": (lambda: write_table(Path("x"), 1, [], ONE, left_V=np.zeros(2, int)), ["left is [2]"]),
    "pruning to less than one": (lambda: TABLE.pruned(min_count=0), ["min_count", "0 and 0"]),
    "pruning to fewer than none": (lambda: TABLE.pruned(top=-1), ["top", "1 and -1"]),
    "too small a size": (lambda: TABLE.pruned(megabytes=0.001), [120, 0.005896, 0.001]),
    "an infinite size": (lambda: TABLE.pruned(megabytes=math.inf), ["inf"]),
    "pruning twice": (lambda: PRUNED.pruned(top=1), [f"{PRUNED.entries} of {TABLE.entries}"]),
    "smoothing misspelled": (lambda: SMALL.correlation("kneser"), ["'kneser'", "'kneser-ney'"]),
    "strength of none": (lambda: SMALL.correlation("none", 0.5), [0.5]),
    "k below 0": (lambda: SMALL.correlation("add-k", -1.0), [-1.0]),
    "k not a number": (lambda: SMALL.distributions("cpu", 1.0, "add-k", math.nan), ["nan"]),
    "discount above 1": (lambda: SMALL.correlation("kneser-ney", 1.5), [1.5]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mistakes_are_refused(case: Case) -> None:
    attempt, wanted = case
    with pytest.raises(ValueError, match=r"\S") as caught:
        attempt()
    assert all(str(part) in str(caught.value) for part in wanted), caught.value


@pytest.mark.parametrize(
    ("table", "name", "change", "wanted"),
    [
        (SMALL, "row_ptr", lambda t: t.flip(0), "row_ptr"),
        (SMALL, "row_ptr", lambda t: t[:-1], "row_ptr has 11 entries for 11 tokens, expected 12"),
        (SMALL, "col", lambda t: t + VOCAB, "11 tokens"),
        (SMALL, "col", lambda t: t.flip(0), "ascend"),
        (SMALL, "col", lambda t: torch.cat((t[:1], t[:1], t[2:])), "row 0: 0 and 0"),
        (SMALL, "col", lambda t: t[None], "col is I32 [1, "),
        (SMALL, "count", lambda t: t[:-1], "counts for"),
        (SMALL, "count", lambda t: t * 0, "count holds 0"),
        (SMALL, "unigram", lambda t: t - 10**6, "unigram holds -9"),
        (SMALL, "unigram", None, "unigram"),
        (SMALL, "vocab_size", lambda text: "12", "12 tokens"),
        (PRUNED, "left", lambda t: t + 1, "4999 pairs"),
        (PRUNED, "right", lambda t: t[:-1], "right has 119 counts for 120 tokens"),
        (PRUNED, "left", lambda t: t.flip(0), "row 0 holds 1271 pairs, of 1042"),
        (PRUNED, "left", None, "left"),
        (PRUNED, "pruning", lambda text: "[1, 2", "column"),
        (PRUNED, "pruning", lambda text: text.replace('"pairs": 4999', '"pairs": null'), "'pairs': None"),
        (PRUNED, "pruning", lambda text: "[]", "[]"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, table: BigramTable, name: str, change: Any, wanted: str
) -> None:
    table.save(tmp_path)
    file, metadata = tmp_path / TABLE_FILE, {"vocab_size": str(table.vocab_size)}
    if table.pruning is not None:
        metadata["pruning"] = json.dumps(table.pruning)
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
    assert wanted in str(caught.value)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / TABLE_FILE)):
        BigramTable.load(tmp_path)
