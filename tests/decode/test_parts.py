"""Trees, warpers, the lattice search, metrics and profiles compared with plain implementations."""

import itertools

import numpy as np
import pytest
import torch
from draftsmith.decode.engine import Proposal, Step
from draftsmith.decode.evaluation.metrics import Tally, speedup_interval
from draftsmith.decode.proposers.lattice import Lattice
from draftsmith.decode.rng import Rng, categorical
from draftsmith.decode.tree import Tree, parse_branching, parse_tree
from draftsmith.decode.verifiers.lossy import TypicalAcceptance
from draftsmith.decode.warpers import Sampling, warp
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@pytest.mark.parametrize("branching", [(1,), (3,), (2, 3, 1), (4, 2, 2, 1), (1, 1, 1)])
def test_trees_follow_their_branching(branching: tuple[int, ...]) -> None:
    tree = Tree.k_ary(branching)
    rebuilt = Tree.from_parents(tree.parents_BN, len(branching))
    assert torch.equal(tree.depth_BN, rebuilt.depth_BN)
    assert torch.equal(tree.ancestors_BNN, rebuilt.ancestors_BNN)
    assert tree.nodes == 1 + sum(int(np.prod(branching[: level + 1])) for level in range(len(branching)))
    for node in range(tree.nodes):
        depth = int(tree.depth_BN[0, node])
        line, above = {node}, int(tree.parents_BN[0, node])
        while above >= 0:
            line.add(above)
            above = int(tree.parents_BN[0, above])
        assert set(torch.nonzero(tree.ancestors_BNN[0, node])[:, 0].tolist()) == line
        assert len(line) == depth + 1
        num_children = branching[depth] if depth < len(branching) else 0
        children = torch.nonzero(tree.parents_BN[0] == node)[:, 0].tolist()
        assert [int(tree.rank_BN[0, child]) for child in children] == list(range(num_children))
        if num_children:
            inner_MC, exists_MC = tree.inner_children
            assert inner_MC[node][exists_MC[node]].tolist() == children
    lines = [torch.nonzero(tree.ancestors_BNN[0, node])[:, 0].tolist() for node in range(tree.nodes)]
    path_LP, leaf_N = tree.leaf_paths
    assert path_LP.tolist() == [line for line in lines if len(line) == len(branching) + 1]
    assert all(node in path_LP[leaf] for node, leaf in enumerate(leaf_N.tolist()))


def test_a_tree_is_copied_to_a_device_once() -> None:
    """Repeated copies of the same tree would synchronise with the device."""
    meta = torch.device("meta")
    for make in (lambda: Tree.chain(5), lambda: Tree.k_ary((2, 2))):
        assert make().to(torch.device("cpu")) is make()
        assert make().to(meta) is make().to(meta)
        assert make().to(meta).line_BNP.device == meta


def test_branchings_are_parsed() -> None:
    assert parse_branching("4x2X1") == (4, 2, 1)
    for text in ("", "4x", "4x-1", "0", "axb"):
        with pytest.raises(ValueError, match=f"'{text}'"):
            parse_branching(text)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.5, top_k=4), Sampling(1.0, top_p=0.7), Sampling(2.0, 6, 0.6)]
)
def test_warping_equals_that_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * 3
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    torch.testing.assert_close(warp(logits, sampling), scores.softmax(-1))


def test_temperature_zero_is_one_hot_and_wrong_settings_are_refused() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert warp(logits, Sampling()).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    for settings in ({"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Sampling(**settings)  # type: ignore[arg-type]


def test_categorical_inverts_the_distribution() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)]:
        assert categorical(probs, torch.tensor(uniform, dtype=torch.float64)) == token


def test_random_numbers_do_not_depend_on_other_rows() -> None:
    batched, single, numbers = Rng.for_rows(5, 3), Rng.for_rows(6, 1), set[float]()
    for shape in [(4,), (), (2, 400), (30, 40), (5, 60), (1000,), (1025,), (3,)]:
        batched_numbers, single_numbers = batched.uniform(*shape), single.uniform(*shape)
        assert batched_numbers.shape == (3, *shape)
        assert torch.equal(batched_numbers[1], single_numbers[0])
        numbers |= set(batched_numbers.flatten().tolist())
    assert len(numbers) == 3 * (4 + 1 + 800 + 1200 + 300 + 1000 + 1025 + 3), "no number is repeated"
    assert torch.equal(batched.exponential(2, 3)[1], single.exponential(2, 3)[0])


@pytest.mark.parametrize(("depth", "candidates", "count"), [(1, 3, 2), (2, 4, 5), (3, 3, 7), (4, 3, 20), (3, 2, 50)])
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_best_paths_equal_enumeration(depth: int, candidates: int, count: int, linked: bool, full: bool) -> None:
    generator = torch.Generator().manual_seed(depth * 100 + count)
    log_probs = torch.randn(3, depth, candidates, generator=generator)
    first = torch.randn(3, candidates, generator=generator)
    first[0, 0] = -torch.inf  # a pair that was never counted
    links = 2 * torch.randn(3, depth - 1, candidates, candidates, generator=generator) if linked else None
    edges = log_probs[:, 1:, :, None].expand(-1, -1, -1, candidates)
    if links is not None:
        edges = edges + links.transpose(2, 3)
    lattice = Lattice(3, depth, candidates, count, "cpu", full)
    for _ in range(2):  # a second search must not depend on the state of the first
        parents_BN, depth_BN, place_BN = lattice.best_paths(first + log_probs[:, 0], edges)
    for row in range(3):
        scores: dict[tuple[int, ...], float] = {}
        for length in range(depth if full else 1, depth + 1):
            for path in itertools.product(range(candidates), repeat=length):
                score = float(first[row, path[0]]) + sum(float(log_probs[row, i, c]) for i, c in enumerate(path))
                if links is not None:
                    score += sum(float(links[row, i, a, b]) for i, (a, b) in enumerate(itertools.pairwise(path)))
                if score > -np.inf:
                    scores[path] = score
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:count]
        expected = {path[: length + 1] for path in best for length in range(len(path))}
        node_paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, parents_BN.shape[1]):
            parent = int(parents_BN[row, node])
            if parent >= 0:
                assert parent < node
                node_paths[node] = (*node_paths[parent], int(place_BN[row, node]) % candidates)
                assert int(depth_BN[row, node]) == len(node_paths[node])
        assert set(node_paths.values()) - {()} == expected
        assert len(set(node_paths.values())) == len(node_paths)  # no prefix is repeated


def test_the_tally_follows_the_definitions() -> None:
    tally = Tally()
    for active, accepted, rejected, new in [(True, 3, False, [1, 2, 3, 4]), (True, 1, True, [5]), (False, 2, True, [])]:
        counts = [np.array([value]) for value in (accepted, accepted + rejected, rejected)]
        tally.add_step(Step([new], 1, 4, np.array([active]), *counts), 0)
    metrics = (tally + Tally()).metrics()
    assert metrics["tokens_per_step"] == 5 / 2
    assert metrics["acceptance_rate"] == 4 / 5
    assert metrics["acceptance_by_depth"] == [1.0, 0.5, 1.0]
    assert metrics["nodes_per_step"] == 4


def test_speedup_is_a_ratio_of_throughputs_with_an_interval() -> None:
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.9, 1.1, 40)
    value, interval = speedup_interval([100] * 40, seconds / 2, [100] * 40, seconds)
    assert value == pytest.approx(2.0)
    assert interval == (pytest.approx(2.0), pytest.approx(2.0))  # both times of a prompt have the same noise
    value, interval = speedup_interval([100] * 40, rng.uniform(0.4, 0.6, 40), [100] * 40, seconds)
    assert interval is not None
    assert interval[0] < value < interval[1]


@pytest.mark.parametrize("shape", ["3x2x2", "0, 1, 0.0, 1.2, 0.0.1"])
def test_typical_acceptance_by_hand(shape: str) -> None:
    """The deepest path of tokens with p > min(ε, δ exp(-entropy)) is accepted, or the most likely of several."""
    tree, _ = parse_tree(shape)
    rows, vocab, epsilon, delta = 300, 12, 0.09, 0.3
    generator = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(vocab, (rows, tree.nodes), generator=generator)
    probs_BNV = (2 * torch.randn(rows, tree.nodes, vocab, generator=generator)).softmax(-1)
    verdict = TypicalAcceptance(epsilon, delta).verify(Proposal(tree, tokens_BN), probs_BNV, Rng.for_rows(0, rows))
    floor_BN = (delta * (probs_BNV * probs_BNV.log()).sum(-1).exp()).clamp(max=epsilon)
    depths = set()
    for row in range(rows):
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        paths: dict[int, tuple[float, list[int]] | None] = {0: (0.0, [])}
        for node in range(1, tree.nodes):
            parent = int(tree.parents_BN[0, node])
            above, prob = paths[parent], float(probs_BNV[row, parent, tokens_BN[row, node]])
            passes = above is not None and prob > float(floor_BN[row, parent])
            paths[node] = (above[0] + np.log(prob), [*above[1], node]) if above and passes else None
            current = paths[node]
            if current and (len(current[1]), current[0]) > best[:2]:
                best = (len(current[1]), current[0], current[1])
        depths.add(best[0])
        assert verdict.path_BK[row, : int(verdict.accepted_B[row])].tolist() == best[2]
        end = best[2][-1] if best[2] else 0
        assert probs_BNV[row, end, verdict.next_B[row]] > floor_BN[row, end]
    assert depths == set(range(tree.max_depth + 1))
