"""Suffix decoding: trees equal plain implementations of their definitions."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import CONTEXT, TextStore
from draftsmith.decode.engine import Context, Limits, Proposal, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.dynamic_tree import DynamicTree
from draftsmith.decode.proposers.suffix import SuffixTree, longest_match
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

VOCAB = 6
GREEDY, RNG = Sampling(), Rng.for_rows(0, 1)
Path = tuple[int, ...]


class Row:
    """Minimal context of one row for `start`, which only reads the lengths."""

    lengths = (1,)


def started(nodes: int, depth: int, least: float, texts: TextStore | None = None) -> SuffixTree:
    proposer = SuffixTree(nodes, depth, least, texts)
    proposer.start(Row())  # type: ignore[arg-type]
    return proposer


def paths_of(parents: Sequence[int], tokens: Sequence[int]) -> list[Path]:
    """Return the path of tokens to each node, in the order of the nodes."""
    paths: list[Path] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def likely(text: list[int], texts: list[list[int]], guesses: list[dict[int, float]], depth: int) -> dict[Path, float]:
    """Compute the joint probabilities of paths by exhaustive search; `guesses` has token probabilities by depth."""
    length = next((n for n in range(min(16, len(text) - 1), 0, -1) if text[-n:] in ends(text[:-1], n)), 0)
    start = max((end for end in range(length, len(text)) if text[end - length : end] == text[-length:]), default=0)
    suffix_match = tuple(text[start + step % (len(text) - start)] for step in range(depth)) if length else ()
    context = next(
        (n for n in range(min(CONTEXT, len(text)), 0, -1) if any(text[-n:] in ends(t[:-1], n) for t in texts)), 0
    )
    follow = [t[i:] for t in texts for i in range(context, len(t)) if context and t[i - context : i] == text[-context:]]
    probabilities: dict[Path, float] = {}
    open_paths: list[tuple[Path, float]] = [((), 1.0)]
    while open_paths:
        path, joint = open_paths.pop()
        step = len(path)
        if step == depth:
            continue
        shares: dict[int, float] = dict(guesses[step]) if step < len(guesses) else {}
        if suffix_match and path == suffix_match[:step]:
            shares[suffix_match[step]] = max(shares.get(suffix_match[step], 0), 1 - 0.8 / (length + step) ** 0.7)
        matches = [continuation[: step + 1] for continuation in follow if tuple(continuation[:step]) == path]
        counts = Counter(continuation[step] for continuation in matches if len(continuation) > step)
        commonest = sorted(
            Counter({-1: len(matches) - counts.total()} | counts).items(), key=lambda item: (-item[1], item[0])
        )
        for token, count in [pair for pair in commonest if pair[1]][:4]:
            if token >= 0:
                shares[token] = max(shares.get(token, 0), count / (len(matches) + 1))
        for token, share in shares.items():
            probabilities[*path, token] = joint * share
            open_paths.append(((*path, token), joint * share))
    return probabilities


def ends(text: list[int], length: int) -> list[list[int]]:
    return [text[start : start + length] for start in range(len(text) - length + 1)]


@pytest.mark.parametrize("seed", range(40))
def test_trees_contain_the_most_likely_paths(seed: int) -> None:
    """The probabilities are compared with a plain implementation."""
    draw = np.random.default_rng(seed)
    text = draw.integers(0, VOCAB, 2 + seed).tolist()
    texts = [draw.integers(0, VOCAB, draw.integers(0, 20)).tolist() for _ in range(seed % 5 * 4)]
    guesses = [{int(token): float(draw.random()) for token in draw.permutation(VOCAB)[:2]} for _ in range(seed % 3)]
    nodes, depth, least = int(draw.integers(1, 12)), int(draw.integers(1, 5)), float(draw.choice([0.02, 0.1, 0.3]))
    store = TextStore.from_documents([np.array(ids, dtype=np.int32) for ids in texts]) if texts else None
    grown = started(nodes, depth, least, store).grow(0, np.array(text), guesses)
    paths = paths_of([node.parent for node in grown], [node.token for node in grown])
    joints = likely(text, texts, guesses, depth)
    enough = sorted((joint for joint in joints.values() if joint >= least), reverse=True)[:nodes]
    assert len(set(paths)) == len(paths)
    assert [joints[path] for path in paths] == pytest.approx(enough)
    assert [node.joint for node in grown] == pytest.approx(enough)


def test_the_latest_of_the_longest_matches_is_used() -> None:
    draw = np.random.default_rng(5)
    for _ in range(300):
        text = draw.integers(0, 3, draw.integers(1, 40))
        latest: dict[int, int] = {}
        for end in range(1, len(text)):
            length = next((n for n in range(16) if n >= end or text[end - 1 - n] != text[-1 - n]), 16)
            if length:
                latest[length] = end
        expected = (latest[max(latest)], max(latest)) if latest else (0, 0)
        assert longest_match(text) == expected


@pytest.fixture
def target_model(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(64, seed=0)


def test_a_datastore_with_the_answer_is_always_accepted(target_model: LlamaForCausalLM) -> None:
    target, prompt = wrap_model(target_model), [3, 1, 4]
    greedy = generate(target, *build_method("autoregressive", Parts(), GREEDY), [prompt], Limits(40), GREEDY, RNG)
    answer = [token for step in greedy for token in step.new_ids[0]]
    table = BigramTable.from_documents([np.array(answer)], 64)
    with pytest.raises(ValueError, match=r"`count\.texts`"):
        build_method("suffix", Parts(table=table), GREEDY, datastore="table")
    table.texts = TextStore.from_documents([np.array([*prompt, *answer], dtype=np.int32)])
    method = build_method(
        "suffix", Parts(table=table), GREEDY, max_nodes=4, max_depth=4, datastore="table", min_prob=0.01
    )
    steps = list(generate(target, *method, [prompt], Limits(40), GREEDY, RNG))
    assert [token for step in steps for token in step.new_ids[0]] == answer
    assert sum(int(step.accepted[0]) for step in steps) >= 0.7 * sum(step.nodes - 1 for step in steps) > 0


def test_rejections_lower_the_probability_of_matches() -> None:
    """The tree becomes empty in a row whose matches were never accepted."""
    proposer, text = started(4, 2, 0.15), np.array([1, 2, 1])
    assert [node.token for node in proposer.grow(0, text)] == [2]

    sizes = []
    for _ in range(6):
        nodes = proposer.grow(0, text)
        sizes.append(len(nodes))
        proposed = ([1, *(node.token for node in nodes)], [-1, *(node.parent for node in nodes)])
        proposer.commit(SimpleNamespace(paths=[[]], proposed=[proposed]), None, None)  # type: ignore[arg-type]
    assert sizes[0] == 1
    assert sizes[-1] == 0


def likeliest(
    after: Callable[[Path], list[float]], known: dict[Path, float], proposer: DynamicTree
) -> tuple[set[Path], int]:
    """Return the paths that `DynamicTree` should propose, and the number of nodes that its drafter should run.

    `after` returns the drafter's distribution after a path; `known` has joint probabilities of suffix matches."""
    joint, ran = {(): 1.0} | known, 0

    def best() -> list[Path]:
        return sorted((path for path in joint if path), key=lambda path: -joint[path])[: proposer.max_nodes]

    def is_open(path: Path) -> bool:
        follows = [known_joint for other, known_joint in joint.items() if other[:-1] == path and other in known]
        return not follows or max(follows) < proposer.confidence_threshold * joint[path]

    grown = [path for path in [()] if is_open(path)]
    for _ in range(proposer.max_depth):
        for path in grown:
            probs, ran = after(path), ran + 1
            for token in sorted(range(len(probs)), key=lambda token: -probs[token])[: proposer.width]:
                if joint[path] * probs[token] >= proposer.min_prob:
                    joint[(*path, token)] = max(joint.get((*path, token), 0.0), joint[path] * probs[token])
        level = [path for path in best() if path[:-1] in grown][: proposer.width]
        grown = [path for path in level if is_open(path) and joint[path] >= proposer.expand_prob]
    return set(best()), ran


@pytest.mark.parametrize("case", [(1, 0.0), (2, 0.0), (1, 0.15), (2, 0.15)])
@pytest.mark.parametrize("name", ["dynamic-tree", "suffix"])
def test_dynamic_trees_with_suffixes_equal_a_plain_implementation(
    make_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch, name: str, case: tuple[int, float]
) -> None:
    rows, expand_prob = case
    target, small = wrap_model(make_llama(7)), make_llama(7, seed=1, sharpness=1.5, num_hidden_layers=1)
    options: dict[str, Any] = {"max_nodes": 9, "width": 2, "min_prob": 0.04, "expand_prob": expand_prob}
    options |= {"max_depth": 4} if name == "dynamic-tree" else {"draft_depth": 4, "fallback": "drafter"}
    method = build_method(name, Parts(wrap_model(small)), GREEDY, **options)
    proposer, sizes = method[0], list[int]()
    propose = proposer.propose

    def after(text: list[int], path: Path) -> list[float]:
        result: list[float] = small(torch.tensor([[*text, *path]])).logits[0, -1].softmax(-1).tolist()
        return result

    def propose_and_check(context: Context) -> Proposal:
        expected, rans = [], []
        for row, length in enumerate(context.lengths):
            text = context.host_ids_BS[row, :length]
            nodes = proposer.suffix.grow(row, text) if proposer.suffix and not context.ended[row] else []
            paths = paths_of([node.parent for node in nodes], [node.token for node in nodes])
            known = {path: node.joint for path, node in zip(paths, nodes, strict=True)}

            paths, ran = likeliest(partial(after, text.tolist()), known, proposer)
            expected.append(set() if context.ended[row] else paths)
            rans.append(0 if context.ended[row] else ran)
        proposal = propose(context)
        parents = proposal.tree.parents_BN.expand(rows, -1).tolist()
        for row, tokens in enumerate(proposal.tokens_BN.tolist()):
            paths = paths_of(parents[row][1:], tokens[1:])
            result = [path for path, parent in zip(paths, parents[row][1:], strict=True) if parent >= 0]
            assert set(result) == expected[row]
            assert len(result) == len(expected[row])
        assert max(rans) <= sum(proposer._ran) <= sum(rans)  # equal if there is one row
        sizes.append(len(result))
        return proposal

    monkeypatch.setattr(proposer, "propose", propose_and_check)
    list(generate(target, *method, [[1, 2, 3, 1, 2], [3, 4]][:rows], Limits(64), GREEDY, Rng.for_rows(0, rows)))
    assert len(sizes) >= 8
    assert len(set(sizes)) > 1
