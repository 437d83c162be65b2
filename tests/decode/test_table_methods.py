"""Methods that read a table of counts, with its smoothings and pruned: exact, and worth what the formulas say.

Shape letters: B batch, K depth, C candidates, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode import method
from draftsmith.decode.engine import Limits, Proposal, generate
from draftsmith.decode.methods import METHODS, Parts, build_method, method_options
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.head_trees import PrunedHeadTree
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

VOCAB = 12
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [11, 0]]
SMOOTHINGS: list[dict[str, Any]] = [
    {},
    {"smoothing": "add-k"},
    {"smoothing": "add-k", "strength": 0.5},
    {"smoothing": "kneser-ney"},
    {"smoothing": "kneser-ney", "strength": 0.9},
]
MakeMarkov = Callable[[torch.Tensor], LanguageModel]
MakeStream = Callable[[int, int], Rng]


def sparse_table() -> BigramTable:
    """Half of the pairs are missing, and two tokens were never seen."""
    rng = np.random.default_rng(3)
    return BigramTable.from_documents([rng.integers(0, VOCAB - 2, 8) for _ in range(14)], VOCAB)


@pytest.fixture(params=[{}, {"min_count": 2}, {"top": 2}], ids=["whole", "twice", "top"])
def table(request: pytest.FixtureRequest) -> BigramTable:
    return sparse_table().pruned(**request.param) if request.param else sparse_table()


@pytest.mark.parametrize(
    ("name", "options"), [("unigram", {}), *itertools.product(("bigram", "slim-ss", "slim-s"), SMOOTHINGS)], ids=str
)
def test_greedy_output_is_the_targets_own(
    make_llama: Callable[..., LlamaForCausalLM],
    make_heads: Callable[..., torch.nn.Module],
    table: BigramTable,
    name: str,
    options: dict[str, Any],
) -> None:
    model = make_llama(VOCAB, seed=0)
    sampling = Sampling()
    built = build_method(name, Parts(heads=make_heads(3, 32, VOCAB), table=table), sampling, **options)
    output: list[list[int]] = [[] for _ in PROMPTS]
    for step in generate(wrap_model(model), *built, PROMPTS, Limits(16), sampling, Rng.for_rows(0, len(PROMPTS))):
        for row, new in zip(output, step.new_ids, strict=True):
            row += new
    for prompt, found in zip(PROMPTS, output, strict=True):
        ids = torch.tensor([prompt])
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert found == plain[0, len(prompt) :].tolist()


@pytest.mark.parametrize("options", SMOOTHINGS, ids=str)
def test_sampled_output_follows_the_target(
    make_markov: type[Any], make_stream: MakeStream, table: BigramTable, options: dict[str, Any]
) -> None:
    """Two tokens of 8,000 rows, counted, also where the drafter gives tokens no probability at all."""
    generator = torch.Generator().manual_seed(5)
    target_VV = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
    target, rows, sampling = make_markov(target_VV[None]), 8000, Sampling(1.0)
    built = build_method("bigram", Parts(table=table), sampling, gamma=1, **options)
    counts_VV = np.zeros((VOCAB, VOCAB))
    output: list[list[int]] = [[] for _ in range(rows)]
    for step in generate(target, *built, [[1]] * rows, Limits(2), sampling, make_stream(7, rows)):
        for row, new in zip(output, step.new_ids, strict=True):
            row += new
    np.add.at(counts_VV, tuple(np.array(output).T), 1)
    wanted_VV = (target_VV[1][:, None] * target_VV).numpy() * rows
    assert chisquare(counts_VV.ravel(), wanted_VV.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("options", SMOOTHINGS, ids=str)
def test_acceptance_of_a_bigram_is_the_overlap(
    make_markov: type[Any], make_stream: MakeStream, options: dict[str, Any]
) -> None:
    """α = Σ min(p, q) for the first token after a known one (Leviathan et al., theorem 3.5), within five errors."""
    table = sparse_table().pruned(min_count=2)
    generator = torch.Generator().manual_seed(5)
    target_VV = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
    rows, sampling = 4000, Sampling(1.0)
    after_V = table.distributions("cpu", 1.0, **options).after(torch.tensor(1)).double()
    wanted = float(torch.minimum(target_VV[1], after_V).sum())
    built = build_method("bigram", Parts(table=table), sampling, gamma=1, **options)
    first = next(
        iter(generate(make_markov(target_VV[None]), *built, [[1]] * rows, Limits(2), sampling, make_stream(3, rows)))
    )
    assert abs(float(first.accepted.mean()) - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / rows)


@pytest.mark.parametrize("options", SMOOTHINGS, ids=str)
def test_a_counted_chain_is_better_than_single_tokens(
    make_markov: type[Any], make_stream: MakeStream, options: dict[str, Any]
) -> None:
    """A target that is a chain of pairs: the bigram knows it after 20,000 tokens, the unigram cannot."""
    generator = torch.Generator().manual_seed(2)
    target_VV = (2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)
    rng, text = np.random.default_rng(0), [0]
    for _ in range(20_000):
        text.append(int(rng.choice(VOCAB, p=target_VV[text[-1]].numpy())))
    table, sampling = BigramTable.from_documents([np.array(text)], VOCAB), Sampling(1.0)
    rates = {}
    for name, settings in (("bigram", options), ("unigram", {})):
        built = build_method(name, Parts(table=table), sampling, gamma=2, **settings)
        steps = list(
            generate(make_markov(target_VV[None]), *built, PROMPTS * 50, Limits(20), sampling, make_stream(1, 200))
        )
        tokens = sum(len(new) for step in steps for new in step.new_ids)
        rates[name] = tokens / sum(int(step.active.sum()) for step in steps)
    assert rates["bigram"] > 2.6  # of at most 3, less what the limit cuts off
    assert rates["unigram"] < 2.0


def held(table: BigramTable) -> dict[tuple[int, int], int]:
    rows = np.repeat(np.arange(VOCAB), np.diff(table.row_ptr))
    return {(int(x), int(y)): int(n) for x, y, n in zip(rows, table.col, table.count, strict=True)}


@pytest.mark.parametrize("sequences", [1, 5, 30])
@pytest.mark.parametrize("options", [{}, {"smoothing": "add-k", "strength": 0.2}], ids=str)
def test_slim_ranks_by_the_smoothed_correlation(
    make_heads: Callable[..., torch.nn.Module], table: BigramTable, options: dict[str, Any], sequences: int
) -> None:
    """Every sequence enumerated, r by hand from the counts that the table holds."""
    whole, unseen, depth, width = sparse_table(), 0.02, 3, 4
    left, right, counts = whole.left_counts().tolist(), whole.right_counts().tolist(), held(table)
    kept = [sum(n for (x, _), n in counts.items() if x == token) for token in range(VOCAB)]

    def correlation(x: int, y: int) -> float:
        p_y = max(right[y], 1) / whole.pairs
        if options:
            lost = (left[x] - kept[x]) / VOCAB
            return (counts.get((x, y), 0) + 0.2 + lost) / (left[x] + 0.2 * VOCAB) / p_y
        return counts[x, y] / left[x] / p_y if (x, y) in counts else unseen

    heads_BKV = torch.randn(3, depth, VOCAB, generator=torch.Generator().manual_seed(sequences)).softmax(-1)
    top = heads_BKV.topk(width, -1)
    roots = [2, 7, 11]
    slim = PrunedHeadTree(make_heads(depth, 1, VOCAB), table, sequences, width, unseen, depth, **options)
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


def test_smoothing_changes_what_slim_proposes(make_heads: Callable[..., torch.nn.Module]) -> None:
    """Else the option would not reach the search."""
    heads_BKV = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    top = heads_BKV.topk(4, -1)
    found = []
    for options in SMOOTHINGS:
        built = build_method(
            "slim-s", Parts(heads=make_heads(3, 1, VOCAB), table=sparse_table()), Sampling(), **options
        )
        assert isinstance(built.proposer, PrunedHeadTree)
        _, tokens_BN = built.proposer.prune(torch.tensor([[2]]), top.indices, top.values.log())
        found.append(tuple(tokens_BN[0].tolist()))
    assert len(set(found)) > 2


def test_drafts_are_the_likeliest_or_follow_the_warped_distribution(make_markov: type[Any]) -> None:
    table = sparse_table()
    rows = table.distributions("cpu", 1.0, "kneser-ney")
    seen: list[Proposal] = []
    for sampling in (Sampling(), Sampling(0.7, top_k=5)):
        built = build_method("bigram", Parts(table=table), sampling, gamma=3, smoothing="kneser-ney")
        propose = built.proposer.propose
        built.proposer.propose = lambda context, propose=propose: seen.append(propose(context)) or seen[-1]  # type: ignore[method-assign, func-returns-value, return-value]
        target = make_markov(torch.full((1, VOCAB, VOCAB), 1 / VOCAB, dtype=torch.float64))
        for _ in generate(target, *built, PROMPTS, Limits(2), sampling, Rng.for_rows(0, len(PROMPTS))):
            break
    greedy, sampled = seen
    assert torch.equal(greedy.tokens_BN[:, 1:], rows.after(greedy.tokens_BN[:, :-1]).argmax(-1))
    assert sampled.draft_probs_BMV is not None
    after_BKV = rows.after(sampled.tokens_BN[:, :-1])
    kept = after_BKV.pow(1 / 0.7) * (after_BKV >= after_BKV.topk(5, -1).values[..., -1:])
    torch.testing.assert_close(sampled.draft_probs_BMV.float(), kept / kept.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("slim-s", {"smoothing": "kneser"}, "cannot be 'kneser'. Did you mean 'kneser-ney'"),
        ("bigram", {"smoothing": "add_k"}, "cannot be 'add_k'. Did you mean 'add-k'"),
        ("bigram", {"smooting": "add-k"}, "no option 'smooting'. Did you mean 'smoothing'"),
        ("bigram", {"strength": 0.3}, "smoothing 'none' has no strength, got 0.3"),
        ("slim-l", {"smoothing": "kneser-ney", "strength": 1.2}, "discount of up to 1 .* got 1.2"),
        ("slim-ss", {"smoothing": "add-k", "strength": -0.1}, "above 0 .* got -0.1"),
        ("bigram", {"prior": 0.0}, "prior must be above 0, got 0.0"),
    ],
)
def test_wrong_options_are_refused(
    make_heads: Callable[..., torch.nn.Module], name: str, options: dict[str, Any], message: str
) -> None:
    parts = Parts(heads=make_heads(3, 32, VOCAB), table=sparse_table())
    with pytest.raises(ValueError, match=message):
        build_method(name, parts, Sampling(), **options)


def test_the_options_are_those_of_every_method_that_reads_pairs() -> None:
    for name in METHODS:
        told = {"smoothing", "strength"} <= set(method_options(name, {}))
        assert told == (name == "bigram" or name.startswith("slim"))


def test_pruned_tables_and_smoothing_in_models_generate(
    make_llama: Callable[..., LlamaForCausalLM], make_heads: Callable[..., torch.nn.Module], tmp_path: Path
) -> None:
    model = make_llama(VOCAB, seed=0)
    model.generation_config.eos_token_id = None
    sparse_table().pruned(top=2).save(tmp_path / "table")
    ids = torch.tensor([[1, 2, 3]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    heads = make_heads(3, 32, VOCAB)
    for name, options in (("bigram", {"smoothing": "kneser-ney"}), ("slim-s", {"smoothing": "add-k", "strength": 0.1})):
        custom = method(name, heads=heads, table=tmp_path / "table", **options)
        assert model.generate(ids, custom_generate=custom, max_new_tokens=12).tolist() == plain.tolist()
