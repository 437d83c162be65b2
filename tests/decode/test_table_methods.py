"""Methods that read a bigram table, with and without added counts: exact, and ranking as the formulas say.

Shape letters: B batch, K depth, C candidates, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.head_trees import PrunedHeadTree
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

VOCAB = 12
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [11, 0]]
ADD_K = [0.0, 0.01, 0.5]
MakeMarkov = Callable[[torch.Tensor], LanguageModel]
MakeStream = Callable[[int, int], Rng]
MakeHeads = Callable[..., torch.nn.Module]


@pytest.fixture
def table() -> BigramTable:
    """Half of the pairs are missing, and two tokens were never seen."""
    rng = np.random.default_rng(3)
    return BigramTable.from_documents([rng.integers(0, VOCAB - 2, 8) for _ in range(14)], VOCAB)


@pytest.fixture
def chain_VV() -> torch.Tensor:
    """A target that is a chain of pairs."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("name", ["unigram", "bigram", "slim-ss", "slim-s"])
def test_greedy_output_is_the_targets_own(
    make_llama: Callable[..., LlamaForCausalLM], make_heads: MakeHeads, table: BigramTable, name: str
) -> None:
    target, sampling = wrap_model(make_llama(VOCAB, seed=0)), Sampling()
    parts = Parts(heads=make_heads(3, 32, VOCAB), table=table)
    methods = [
        build_method(name, parts, sampling, **options)
        for options in ([{"add_k": add_k} for add_k in ADD_K] if name != "unigram" else [{}])
    ]
    plain, *outputs = (
        decode_texts(target, *one, PROMPTS, Limits(16), sampling, Rng.for_rows(0, len(PROMPTS)))
        for one in (build_method("autoregressive", Parts(), sampling), *methods)
    )
    assert outputs == [plain] * len(methods)


@pytest.mark.parametrize("add_k", ADD_K)
def test_sampled_output_follows_the_target(
    make_markov: MakeMarkov, make_stream: MakeStream, chain_VV: torch.Tensor, table: BigramTable, add_k: float
) -> None:
    """Two tokens of 8,000 rows, counted, also where the drafter gives tokens no probability at all."""
    rows, sampling = 8000, Sampling(1.0)
    built = build_method("bigram", Parts(table=table), sampling, gamma=1, add_k=add_k)
    target, stream = make_markov(chain_VV[None]), make_stream(7, rows)
    output = decode_texts(target, *built, [[1]] * rows, Limits(2), sampling, stream)
    counts_VV = np.zeros((VOCAB, VOCAB))
    np.add.at(counts_VV, tuple(np.array(output).T), 1)
    wanted_VV = (chain_VV[1][:, None] * chain_VV).numpy() * rows
    assert chisquare(counts_VV.ravel(), wanted_VV.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("sequences", [1, 5, 30])
@pytest.mark.parametrize("add_k", [0.0, 0.2])
def test_slim_ranks_by_the_smoothed_correlation(
    make_heads: MakeHeads, table: BigramTable, add_k: float, sequences: int
) -> None:
    """Every sequence enumerated, r by hand from the counts that the table holds."""
    unseen, depth, width = 0.02, 3, 4
    left, right = table.left_counts.tolist(), table.right_counts.tolist()
    rows = np.repeat(np.arange(VOCAB), np.diff(table.row_ptr))
    counts = {(int(x), int(y)): int(n) for x, y, n in zip(rows, table.col, table.count, strict=True)}

    def correlation(x: int, y: int) -> float:
        p_y = max(right[y], 1) / table.pairs
        if add_k:
            return (counts.get((x, y), 0) + add_k) / (left[x] + add_k * VOCAB) / p_y
        return counts[x, y] / left[x] / p_y if (x, y) in counts else unseen

    heads_BKV = torch.randn(3, depth, VOCAB, generator=torch.Generator().manual_seed(sequences)).softmax(-1)
    top = heads_BKV.topk(width, -1)
    roots = [2, 7, 11]
    sizes = {"num_sequences": sequences, "num_candidates": width, "unseen_correlation": unseen, "max_depth": depth}
    parts = Parts(heads=make_heads(depth, 1, VOCAB), table=table)
    slim = build_method("slim-s", parts, Sampling(), **sizes, add_k=add_k).proposer
    assert isinstance(slim, PrunedHeadTree)
    tree, tokens_BN = slim.prune(torch.tensor(roots)[:, None], top.indices, top.values.log())
    parents_BN = tree.parents_BN.expand(len(roots), -1)
    for row, root in enumerate(roots):
        posteriors = {}
        for length in range(1, depth + 1):
            for path in itertools.product(*top.indices[row, :length].tolist()):
                head = math.prod(float(heads_BKV[row, level, token]) for level, token in enumerate(path))
                posteriors[path] = head * math.prod(correlation(*pair) for pair in itertools.pairwise((root, *path)))
        best = sorted(posteriors, key=posteriors.__getitem__, reverse=True)[:sequences]
        wanted = {path[:length] for path in best for length in range(1, len(path) + 1)}
        found: list[tuple[int, ...]] = []
        for node, (parent, token) in enumerate(zip(parents_BN[row].tolist(), tokens_BN[row].tolist(), strict=True)):
            found.append((*found[parent], token) if node and parent >= 0 else ())
        assert set(found) - {()} == wanted
