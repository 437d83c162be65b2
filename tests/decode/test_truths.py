"""Properties of the methods besides their output distributions: what they propose and accept.

Each property is compared with a plain computation: forwards of whole texts, enumerations of all sequences, or another
method. No test is statistical. Tests that could pass vacuously also assert that the property is exercised.

Shape letters: B batch, S slots, T positions, N nodes, K heads, V vocabulary, E sequences enumerated.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Context, Limits, Proposal, Proposer, Step, Verdict, Verifier, generate
from draftsmith.decode.methods import Method, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.head_trees import PrunedHeadTree
from draftsmith.decode.proposers.ngrams import PromptLookup, lookup
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import parse_branching
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

GREEDY, PLAIN = Sampling(), Sampling(1.0)
# No prompt has a single token, since heads would find all tokens equally likely and their candidates arbitrary.
PROMPTS = [[1, 2, 3], [5, 2], [9, 8, 7, 6, 5, 4, 3], [11, 0]]
MakeLlama = Callable[..., LlamaForCausalLM]
MakeMarkov = Callable[[torch.Tensor], LanguageModel]
MakeHeads = Callable[..., torch.nn.Module]


class RecordingVerifier(Verifier):
    """Verifier that records each proposal and passes it to another verifier."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.lossless, self.score_type = verifier, verifier.lossless, verifier.score_type
        self.proposals: list[Proposal] = []

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        self.proposals.append(proposal)
        return self.verifier.verify(proposal, target_BNV, rng)


def trace(
    target: LanguageModel,
    method: Method,
    sampling: Sampling,
    limits: Limits,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> Iterator[tuple[list[int], list[int], int, list[int]]]:
    """Yield the text before the step, draft chain, number of accepted tokens and new tokens, by step and row."""
    watching = RecordingVerifier(method.verifier)
    texts = [list(prompt) for prompt in prompts]
    rng = Rng.for_rows(0, len(prompts))
    for step in generate(target, method.proposer, watching, prompts, limits, sampling, rng):
        proposal = watching.proposals.pop()
        assert proposal.tree.is_chain
        for row, text in enumerate(texts):
            if step.active[row]:
                drafted_N = proposal.tokens_BN[row, 1:]
                if proposal.valid_BN is not None:
                    drafted_N = drafted_N[proposal.valid_BN[row, 1:]]
                yield list(text), drafted_N.tolist(), int(step.accepted[row]), step.new_ids[row]
            text += step.new_ids[row]


def run(
    target: LanguageModel, method: Method, sampling: Sampling, limits: Limits
) -> tuple[list[list[int]], list[Step]]:
    steps = list(generate(target, *method, PROMPTS, limits, sampling, Rng.for_rows(0, len(PROMPTS))))
    return [[token for step in steps for token in step.new_ids[row]] for row in range(len(PROMPTS))], steps


@torch.no_grad()
def log_probs(model: LlamaForCausalLM, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log-probabilities float64 [B, T, V] of texts of equal length from a plain forward pass."""
    return model(torch.tensor(ids)).logits.double().log_softmax(-1)


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(log_probs(model, [ids])[0, -1].argmax()))
    return ids[len(prompt) :]


def make_pair(make_llama: MakeLlama, vocab: int, noise: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a target and a drafter with the same weights plus noise, which often agrees with it."""
    target, drafter = (make_llama(vocab, seed=0, sharpness=2.0) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return target, drafter


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_without_thresholds_all_tokens_are_accepted(make_llama: MakeLlama, sampling: Sampling) -> None:
    target, drafter = (wrap_model(make_llama(16, seed=seed)) for seed in (0, 1))
    settings = {
        "mjsd": {"num_beams": 4, "likelihood_threshold": 0.0},
        "bild": {"fallback_threshold": 0.0, "rollback_threshold": 1e9},
    }
    for name, options in settings.items():
        method = build_method(name, Parts(drafter), sampling, gamma=3, **options)
        for _, drafted, accepted, gained in trace(target, method, sampling, Limits(24)):
            assert accepted == len(drafted) == 3
            assert len(gained) == 4


def test_mjsd_with_a_wide_beam_drafts_the_most_likely_sequence(make_llama: MakeLlama) -> None:
    target, drafter = make_pair(make_llama, 6, noise=0.1)
    method = build_method("mjsd", Parts(wrap_model(drafter)), GREEDY, gamma=3, num_beams=36, likelihood_threshold=0.6)
    prompts = [[token % 6 for token in prompt] for prompt in PROMPTS]
    for text, drafted, _, _ in trace(wrap_model(target), method, GREEDY, Limits(20), prompts):
        assert drafted == likeliest(drafter, text, 3, None)


def test_mjsd_at_threshold_1_is_greedy_decoding(make_llama: MakeLlama) -> None:
    target = make_llama(16, seed=0)
    drafter = wrap_model(target)  # rejects even the target's own drafts
    method = build_method("mjsd", Parts(drafter), GREEDY, gamma=3, num_beams=4, likelihood_threshold=1.0)
    output, steps = run(wrap_model(target), method, GREEDY, Limits(15))
    assert output == [greedy(target, prompt, 15) for prompt in PROMPTS]
    assert not any(step.accepted.any() for step in steps)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_mjsd_keeps_the_longest_passing_prefix(make_llama: MakeLlama, sampling: Sampling) -> None:
    """Expected prefixes come from plain forwards of both models. Some pass although a shorter prefix fails."""
    target, drafter = make_pair(make_llama, 16, noise=0.1)
    threshold, late, lengths = 0.6, 0, set()
    method = build_method(
        "mjsd", Parts(wrap_model(drafter)), sampling, gamma=4, num_beams=3, likelihood_threshold=threshold
    )
    for text, drafted, accepted, gained in trace(wrap_model(target), method, sampling, Limits(60)):
        positions, tokens = torch.arange(len(text) - 1, len(text) + 3), torch.tensor(drafted)
        p, q = (log_probs(model, [text + drafted])[0, positions, tokens].cumsum(0).exp() for model in (target, drafter))
        passes = [min(1.0, ratio) > threshold for ratio in (p / q).tolist()]
        assert accepted == max((length for length in range(1, 5) if passes[length - 1]), default=0)
        late += not all(passes[:accepted])
        lengths.add(accepted)
        if sampling.greedy and len(gained) > accepted:
            assert gained[accepted] == greedy(target, text + drafted[:accepted], 1)[0]
    assert late > 0
    assert lengths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", ["bild", "adaptive"])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_chains_end_and_roll_back_by_their_thresholds(make_llama: MakeLlama, sampling: Sampling, name: str) -> None:
    target, drafter = make_pair(make_llama, 16, noise=0.1)
    fallback, rollback, cut, rolled_back = 0.3, 1.5, 0, 0
    options = {"fallback_threshold": fallback, "rollback_threshold": rollback}
    options = {"gamma": 6} | (options if name == "bild" else {"confidence_threshold": fallback})
    method = build_method(name, Parts(wrap_model(drafter)), sampling, **options)
    for text, drafted, accepted, gained in trace(wrap_model(target), method, sampling, Limits(60)):
        positions = slice(len(text) - 1, None)
        p, q = (log_probs(model, [text + drafted])[0, positions] for model in (target, drafter))
        sure = (q.exp().amax(-1) >= fallback).tolist()
        end = len(drafted) - (name == "adaptive")  # which also drafts the token that ends the chain
        assert all(sure[:end])
        assert len(drafted) == 6 or not sure[end]
        unlikely = [index for index, token in enumerate(drafted) if -float(p[index, token]) > rollback]
        assert accepted == min([*unlikely, len(drafted)]) or name == "adaptive"
        cut, rolled_back = cut + (0 < len(drafted) < 6), rolled_back + (accepted < len(drafted))
        if sampling.greedy and len(gained) > accepted:
            assert gained[accepted] == int(p[accepted].argmax())
    assert cut > 5
    assert rolled_back > 5


def test_the_oracle_drafts_only_accepted_tokens(make_llama: MakeLlama) -> None:
    target_model, drafter = make_pair(make_llama, 32, noise=0.05)
    target, parts, limits = wrap_model(target_model), Parts(wrap_model(drafter)), Limits(60)
    counts = {}
    for policy in ("oracle", "confidence"):
        method = build_method("adaptive", parts, GREEDY, gamma=5, policy=policy)
        steps = list(trace(target, method, GREEDY, limits))
        drafted, accepted = sum(len(step[1]) for step in steps), sum(step[2] for step in steps)
        counts[policy] = (drafted, accepted, len(steps))
    drafted, accepted, oracle_steps = counts.pop("oracle")
    assert 0 < drafted == accepted
    assert all(drafted > accepted for drafted, accepted, _ in counts.values())
    assert all(steps >= oracle_steps for _, _, steps in counts.values())
    full = list(trace(target, build_method("speculative", parts, GREEDY, gamma=5), GREEDY, limits))
    assert len(full) == oracle_steps
    assert sum(step[2] for step in full) == accepted < sum(len(step[1]) for step in full)


@pytest.mark.parametrize(("draft_cost", "token_cost"), [(0.1, 0.0), (0.6, 0.03)])
def test_the_oracle_is_faster_than_any_fixed_length(
    make_markov: MakeMarkov, draft_cost: float, token_cost: float
) -> None:
    """After six of the eight tokens, the drafter nearly equals the target; after the other two, it is wrong."""
    target_VV = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(8, 1.0), 8))
    wrong_VV = torch.nn.functional.one_hot(target_VV.argmin(1), 8)
    draft_VV = torch.where(
        torch.arange(8)[:, None] < 6, 0.97 * target_VV + 0.03 / 8, 0.02 * target_VV + 0.98 * wrong_VV
    )
    target, parts = make_markov(target_VV[None]), Parts(make_markov(draft_VV[None]))

    def rate(name: str, **options: Any) -> float:
        method, tokens, time = build_method(name, parts, PLAIN, **options), 0, 0.0
        for step in generate(target, *method, [[0]], Limits(3000), PLAIN, Rng.for_rows(1, 1)):
            tokens += len(step.new_ids[0])
            time += 1 + (draft_cost + token_cost) * (step.nodes - 1)
        return tokens / time

    fixed = [1.0, *(rate("speculative", gamma=gamma) for gamma in (1, 2, 4, 6, 8))]
    oracle = rate("adaptive", policy="oracle", gamma=8, draft_cost=draft_cost, token_cost=token_cost)
    assert oracle > 1.1 * max(fixed)


def test_batch_speculative_is_a_k_configuration(make_llama: MakeLlama) -> None:
    target, parts = wrap_model(make_llama(16, seed=0)), Parts(wrap_model(make_llama(16, seed=1)))
    batch = build_method("batch-speculative", parts, PLAIN, num_drafts=3, gamma=4)
    tree = build_method("multi-candidate", parts, PLAIN, k_config="3x1x1x1", replacement=True)
    other = build_method("multi-candidate", parts, PLAIN, k_config="3x1x1x1", replacement=False)
    outputs = [run(target, method, PLAIN, Limits(40))[0] for method in (batch, tree, other)]
    assert outputs[0] == outputs[1] != outputs[2]


class Recording(Proposer):
    """Proposer that returns the tree of the first proposer and records the trees of both."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self.both = (first, second)
        self.pairs: list[tuple[Proposal, Proposal]] = []

    def capacity(self, limits: Limits) -> tuple[int, int]:
        first, second = (proposer.capacity(limits) for proposer in self.both)
        return max(first[0], second[0]), max(first[1], second[1])

    def start(self, context: Context) -> None:
        for proposer in self.both:
            proposer.start(context)

    def propose(self, context: Context) -> Proposal:
        first, second = (proposer.propose(context) for proposer in self.both)
        self.pairs.append((first, second))
        return first


def paths(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    """Return the token sequences from the root to each node of a tree."""
    parents = proposal.tree.parents_BN.expand(len(proposal.tokens_BN), -1)[row].tolist()
    node_paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, (parent, token) in enumerate(zip(parents, proposal.tokens_BN[row].tolist(), strict=True)):
        if node and parent >= 0:
            node_paths[node] = (*node_paths[parent], token)
    return set(node_paths.values()) - {()}


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_bpd_is_slim_with_one_full_sequence(make_llama: MakeLlama, make_heads: MakeHeads, sampling: Sampling) -> None:
    target, heads = wrap_model(make_llama(12, seed=0)), make_heads(3, 32, 12)
    blockwise = build_method("bpd", Parts(heads=heads), sampling)
    recording = Recording(blockwise.proposer, PrunedHeadTree(heads, None, 1, (4,) * 3, 0.01, 3, "full"))
    output, steps = run(target, Method(recording, blockwise.verifier), sampling, Limits(40))
    for chain, pruned in recording.pairs:
        assert torch.equal(chain.tokens_BN, pruned.tokens_BN)
        assert torch.equal(chain.tree.parents_BN.expand(len(PROMPTS), -1), pruned.tree.parents_BN)
    slim_output, same_steps = run(target, Method(recording.both[1], blockwise.verifier), sampling, Limits(40))
    assert slim_output == output
    assert [step.accepted.tolist() for step in same_steps] == [step.accepted.tolist() for step in steps]
    assert sum(int(step.accepted.sum()) for step in steps) > 0


@pytest.mark.parametrize("lengths", ["all", "full"])
@pytest.mark.parametrize(("unseen", "add_k"), [(0.0, 0.0), (0.01, 0.0), (0.01, 0.2)])
@pytest.mark.parametrize(("sequences", "widths"), [(1, "4x4x4x4"), (3, "4x4x4x4"), (30, "4x4x4x4"), (30, "3x4x1x2")])
def test_slim_keeps_the_highest_posteriors(
    make_heads: MakeHeads, unseen: float, add_k: float, lengths: str, sequences: int, widths: str
) -> None:
    """All sequences are ranked by the product of head probabilities and correlations; half of the pairs are unseen."""
    vocab, depth, counts = 12, 4, parse_branching(widths)
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(sequences)
    documents = [rng.integers(0, vocab, 8) for _ in range(12)]
    table = BigramTable.from_documents(documents, vocab)
    pairs = [pair for document in documents for pair in itertools.pairwise(document.tolist())]
    left, right = (np.bincount(ids, minlength=vocab) for ids in zip(*pairs, strict=True))

    def correlation(x: int, y: int) -> float:
        count = pairs.count((x, y))
        if add_k:
            return (count + add_k) / (left[x] + add_k * vocab) / (max(right[y], 1) / len(pairs))
        return count * len(pairs) / (left[x] * right[y]) if count else unseen

    heads_BKV = torch.randn(3, depth, vocab, generator=generator).softmax(-1)
    top = heads_BKV.topk(4, -1)
    roots = [2, 7, 11]
    tree = PrunedHeadTree(make_heads(depth, 1, vocab), table, sequences, counts, unseen, depth, lengths, add_k)
    pruned, tokens_BN = tree.prune(torch.tensor(roots)[:, None], top.indices, top.values.log())
    for row, root in enumerate(roots):
        posteriors = {}
        for length in range(1, depth + 1) if lengths == "all" else [depth]:
            levels = [top.indices[row, level, : counts[level]].tolist() for level in range(length)]
            for path in itertools.product(*levels):
                head = np.prod([float(heads_BKV[row, level, token]) for level, token in enumerate(path)])
                posterior = head * np.prod([correlation(*pair) for pair in itertools.pairwise((root, *path))])
                if posterior > 0:
                    posteriors[path] = posterior
        best = sorted(posteriors, key=posteriors.__getitem__, reverse=True)[:sequences]
        expected = {path[:length] for path in best for length in range(1, len(path) + 1)}
        assert paths(Proposal(pruned, tokens_BN), row) == expected


def test_slim_decodes_without_any_sequence(make_llama: MakeLlama, make_heads: MakeHeads) -> None:
    """If unseen pairs have correlation 0, the tree may consist of the root only."""
    model = make_llama(12, seed=0)
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    for documents in ([np.arange(1)], [np.arange(12), np.arange(4)]):
        parts = Parts(heads=make_heads(3, 32, 12), table=BigramTable.from_documents(documents, 12))
        method = build_method("slim-s", parts, GREEDY, unseen_correlation=0.0, num_candidates=4)
        output, steps = run(wrap_model(model), method, GREEDY, Limits(20))
        assert output == expected
        assert {step.nodes for step in steps} == ({1} if len(documents) == 1 else {1, 2, 3, 4})


def likeliest(model: LlamaForCausalLM, text: Sequence[int], count: int, stop: int | None) -> list[int]:
    """Return the most likely continuation of `count` tokens, or fewer tokens if it ends with the stop token."""
    every_ET = torch.tensor(list(itertools.product(range(model.config.vocab_size), repeat=count)))
    scores_ETV = log_probs(model, [[*text, *tokens] for tokens in every_ET.tolist()])[:, len(text) - 1 : -1]
    scores_ET = scores_ETV.gather(2, every_ET[..., None])[..., 0]
    if stop is not None:  # tokens after a stop token score 0 and are removed below
        scores_ET[:, 1:].masked_fill_((every_ET[:, :-1] == stop).long().cumsum(1) > 0, 0.0)
    best = every_ET[scores_ET.sum(1).argmax()].tolist()
    return best[: best.index(stop) + 1] if stop in best else best


@pytest.mark.parametrize("stop", [None, 4])
def test_a_wide_beam_finds_the_most_likely_sequence(make_llama: MakeLlama, stop: int | None) -> None:
    """All 6^3 sequences are searched with 6^2 beams. Greedy decoding misses the best sequence."""
    model = make_llama(6, seed=4)
    prompts = [[first, second, 1] for first in range(6) for second in range(6)]
    limits = Limits(3, () if stop is None else (stop,))
    method = build_method("beam", Parts(), GREEDY, num_beams=36)
    steps = list(generate(wrap_model(model), *method, prompts, limits, GREEDY, Rng.for_rows(0, len(prompts))))
    assert len(steps) == 1
    expected = [likeliest(model, prompt, 3, stop) for prompt in prompts]
    assert steps[0].new_ids == expected
    assert any(text != greedy(model, prompt, 3)[: len(text)] for prompt, text in zip(prompts, expected, strict=True))
    assert any(len(text) < 3 for text in expected) == (stop is not None)


@pytest.mark.parametrize("stop", [None, 4])
def test_joint_greedy_decoding_takes_the_most_likely_tokens(make_llama: MakeLlama, stop: int | None) -> None:
    model = make_llama(6, seed=4)
    prompts = [[token % 6 for token in prompt] for prompt in PROMPTS]
    limits, unlike_greedy, ended = Limits(12, () if stop is None else (stop,)), 0, 0
    for gamma in (2, 3):
        method = build_method("mjgd", Parts(), GREEDY, gamma=gamma, num_beams=36)
        for text, drafted, accepted, gained in trace(wrap_model(model), method, GREEDY, limits, prompts):
            assert accepted == len(drafted) - 1 == gamma - 1  # the last one is the token after the path
            assert gained == likeliest(model, text, gamma, stop)
            unlike_greedy += gained != greedy(model, text, gamma)[: len(gained)]
            ended += len(gained) < gamma
    assert unlike_greedy > 0
    assert (ended > 0) == (stop is not None)


def test_prompt_lookup_continues_periodic_texts(make_markov: MakeMarkov) -> None:
    cycle = torch.full((1, 5, 5), 1e-6).scatter_(2, (torch.arange(5)[None, :, None] + 1) % 5, 1.0)
    prompts = [[3, 4, 0, 1, 2, 3, 4, 0, 1], [2, 3, 4, 0, 1, 2], [1, 2]]
    method = Method(PromptLookup(7, 3), build_method("prompt-lookup", Parts(), GREEDY).verifier)
    steps = list(trace(make_markov(cycle), method, GREEDY, Limits(32), prompts))
    for text, drafted, accepted, gained in steps:
        repeats = len(set(text)) < len(text)
        assert drafted == ([(text[-1] + offset) % 5 for offset in range(1, 8)] if repeats else [])
        assert accepted == len(drafted)
        assert gained == [(text[-1] + offset) % 5 for offset in range(1, 9)][: len(gained)]
    assert [len(step[1]) for step in steps[:3]] == [7, 7, 0]


def latest_match(text: list[int], longest: int) -> int:
    """Search a text for its longest suffix (up to `longest`) that occurs earlier; return the latest end, or -1."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return end
    return -1


@pytest.mark.parametrize("longest", [1, 2, 5, 20])
def test_lookup_equals_a_full_search(longest: int) -> None:
    rng = np.random.default_rng(longest)
    ids_BS, lengths_B = rng.integers(0, 4, (500, 12)), rng.integers(1, 13, 500)  # texts may be shorter than the rows
    expected = [latest_match(ids_S[:length].tolist(), longest) for ids_S, length in zip(ids_BS, lengths_B, strict=True)]
    assert lookup(ids_BS, lengths_B, longest).tolist() == expected
    assert 0 < expected.count(-1) < 250
