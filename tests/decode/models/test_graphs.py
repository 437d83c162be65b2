"""Replayed forwards equal eager ones for all shapes, orders of calls and cache contents.

Without a GPU the graphs are recordings of operations, which are replayed on the same tensors. Like CUDA graphs, they
repeat every number that came from the host. Tests that need a device are marked `gpu`.

Shape letters: B batch, M new tokens, D hidden, S cache slots.
"""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Limits, decode_texts, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel, TransformersModel
from draftsmith.decode.models.graphs import GraphedModel
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from helpers.recordings import graphed
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

VOCAB = 64
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [63, 0]]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.12}  # hidden states reach 4
Build = Callable[..., LlamaForCausalLM]
Heads = Callable[..., torch.nn.Module]


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()


# The returned states must stay valid after later replays.
@torch.inference_mode()
def walk(model: LanguageModel, lengths: Sequence[int], rounds: int, seed: int) -> list[torch.Tensor]:
    """Return the hidden states of a prompt and of `rounds` chains, fixed trees and growing trees after the prompt."""
    generator = torch.Generator().manual_seed(seed)
    batch, device = len(lengths), model.device

    def tokens(count: int, least: int = 1, end: int = VOCAB) -> torch.Tensor:
        return torch.randint(least, end, (batch, count), generator=generator).to(device)

    cache = model.new_cache(batch, max(lengths) + 2 * rounds + 20)
    states = [model.extend(cache, tokens(max(lengths)))[:, : min(lengths)]]
    cache.set_lengths(list(lengths))
    fixed = Tree.k_ary((2, 2, 1)).to(device)
    for step in range(rounds):
        if step % 3 == 0:  # a chain that starts with two tokens
            states.append(model.extend(cache, tokens(2)))
            states += [model.extend(cache, tokens(1), Tree.chain(4).to(device), start) for start in (2, 3, 4)]
            gained = [1 + (row + step) % 2 for row in range(batch)]
        elif step % 3 == 1:  # a fixed tree; the root's second child and one of its children are accepted
            levels = ((0, 1), (1, 3), (3, 7), (7, 11))
            states += [model.extend(cache, tokens(stop - start), fixed, start) for start, stop in levels]
            cache.move_to_front(torch.tensor([[2, 5 + row % 2, 3] for row in range(batch)], device=device))
            gained = [3 - (row + step) % 2 for row in range(batch)]
        else:  # beams, with different parents in each row
            tree, first = Tree.chain(0).to(device), 0
            states.append(model.extend(cache, tokens(1), tree))
            for _ in range(3):
                tree = tree.grow(tokens(3, first, tree.nodes))
                first = tree.nodes - 3
                states.append(model.extend(cache, tokens(3), tree, first))
            gained = [1] * batch
        cache.set_lengths([length + gain for length, gain in zip(cache.lengths, gained, strict=True)])
    return states


def difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def run(
    target: LanguageModel, name: str, parts: Parts, prompts: list[list[int]], sampling: Sampling, **options: object
) -> list[list[int]]:
    method = build_method(name, parts, sampling, **options)
    rng = Rng.for_rows(3, len(prompts), target.device)
    return decode_texts(target, *method, prompts, Limits(30), sampling, rng)


@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
@pytest.mark.parametrize(
    ("kind", "lengths", "dtype"),
    [
        ("lean", [5], torch.float32),
        ("lean", [7, 7], torch.float32),
        *(("lean", [3, 9, 1], dtype) for dtype in TOLERANCES),
        ("llama", [3, 9, 1], torch.float32),
        ("gpt2", [3, 9, 1], torch.float32),
    ],
    ids=str,
)
def test_a_replay_equals_the_eager_forward(
    make_llama: Build, kind: str, lengths: list[int], dtype: torch.dtype, states: str
) -> None:
    model = (gpt2() if kind == "gpt2" else make_llama(VOCAB)).to(dtype)
    eager = wrap_model(model, fast=kind == "lean", states=states)
    fast, recordings = graphed(eager)
    assert fast.states == states
    for seed in (0, 1):  # the second run reuses the cache and the graphs of the first
        assert difference(walk(fast, lengths, 18, seed), walk(eager, lengths, 18, seed)) < TOLERANCES[dtype]
        gc.collect()
        assert len(fast._free) == 1
    assert recordings.replayed > 60
    assert recordings.captured < 30


@pytest.mark.parametrize("supports_any_length", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("autoregressive", {}),
        ("speculative", {}),
        ("multi-candidate", {"k_config": "3x2x1"}),
        ("multi-candidate", {"k_config": "3x1x2", "replacement": False}),
        ("multi-candidate", {"k_config": "2x2", "attention": "batch"}),
        ("specinfer", {"num_drafts": 2}),
        ("adaptive", {"policy": "oracle"}),
        ("medusa", {}),
        ("mjsd", {"likelihood_threshold": 0.1}),
        ("mjgd", {"num_beams": 3}),
    ],
    ids=str,
)
def test_replayed_runs_equal_eager_runs(
    make_llama: Build,
    make_heads: Heads,
    name: str,
    options: dict[str, object],
    temperature: float,
    supports_any_length: bool,
) -> None:
    """Masks replace the GPU kernels that handle any length if `supports_any_length` is set."""
    target, drafter = (wrap_model(make_llama(VOCAB, seed, num_hidden_layers=1)) for seed in (0, 1))
    target.supports_any_length = drafter.supports_any_length = supports_any_length
    heads, sampling = make_heads(4, 32, VOCAB), Sampling(temperature)
    (fast, recordings), (fast_drafter, _) = graphed(target), graphed(drafter)
    for prompts in (PROMPTS[:1], PROMPTS):
        expected = run(target, name, Parts(drafter, heads), prompts, sampling, **options)
        assert run(fast, name, Parts(fast_drafter, heads), prompts, sampling, **options) == expected
    assert recordings.replayed > 10


def accepted_drafts(
    target: LanguageModel, name: str, drafter: LanguageModel, temperature: float, **options: object
) -> object:
    """Decode two prompts; return the new tokens and the numbers of accepted draft tokens of each step."""
    sampling, steps = Sampling(temperature), []
    method = build_method(name, Parts(drafter), sampling, **options)
    for step in generate(target, *method, PROMPTS[:3:2], Limits(30), sampling, Rng.for_rows(3, 2)):
        steps.append((step.new_ids, step.accepted[step.active].tolist()))
    return steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "of_two"),
    [
        ("adaptive", ({"gamma": 6, "confidence_threshold": 0.2}, {"gamma": 3, "confidence_threshold": 0.2})),
        ("bild", ({"gamma": 5, "fallback_threshold": 0.3}, {"gamma": 5, "fallback_threshold": 0.1})),
        ("dynamic-tree", ({"min_prob": 0.01}, {"min_prob": 0.01, "max_nodes": 3, "max_depth": 5})),
        (
            "suffix",
            (
                {"fallback": "drafter", "min_prob": 0.01},
                {"fallback": "drafter", "min_prob": 0.01, "max_nodes": 12, "confidence_threshold": 0.2},
            ),
        ),
    ],
)
def test_unused_draft_levels_do_not_change_texts(
    make_llama: Build, name: str, of_two: tuple[dict[str, object], ...], temperature: float
) -> None:
    target = wrap_model(make_llama(VOCAB, sharpness=1.5))
    fast, recordings = graphed(target)
    for options in (*of_two, *reversed(of_two)):  # target and drafter exchange their cache memory
        expected = accepted_drafts(target, name, target, temperature, **options)
        assert accepted_drafts(fast, name, fast, temperature, **options) == expected
    assert recordings.replayed > 10


@torch.inference_mode()
def test_cache_memory_is_reused_but_never_shared(make_llama: Build) -> None:
    fast, _ = graphed(wrap_model(make_llama(VOCAB)))
    first, second = fast.new_cache(2, 20), fast.new_cache(2, 20)
    assert first.keys[0].data_ptr() != second.keys[0].data_ptr()
    fast.extend(first, torch.ones(2, 3, dtype=torch.int64))
    first.set_lengths([3, 1])
    address = first.keys[0].data_ptr()
    assert first.keys[0].any()
    del first
    third = fast.new_cache(2, 9)  # the memory of a larger cache is reused
    assert third.keys[0].data_ptr() == address
    assert third.lengths == [0, 0]
    assert not any(memory.any() for memory in (*third.keys, *third.values))
    assert fast.new_cache(1, 9).keys[0].data_ptr() != address  # but not that of another batch size
    for batch in range(3, 12):
        fast.new_cache(batch, 9)
    assert len(fast._free) == 4


@torch.inference_mode()
def test_unsupported_calls_run_eagerly(make_llama: Build) -> None:
    eager = wrap_model(make_llama(VOCAB))
    fast, recordings = graphed(eager, max_tokens=4)
    cache, counts = fast.new_cache(1, 40), []
    fast.extend(cache, torch.ones(1, 3, dtype=torch.int64))  # a prompt
    cache.set_lengths([3])
    fast.extend(cache, torch.ones(1, 5, dtype=torch.int64))  # too many tokens
    fast.extend(eager.new_cache(1, 8), torch.ones(1, 3, dtype=torch.int64))  # a cache without persistent memory
    assert recordings.warmed == 0
    for model in (eager, fast, fast, fast):
        model_cache = model.new_cache(1, 40)
        model_cache.set_lengths([3])
        model.extend(model_cache, torch.ones(1, 4, dtype=torch.int64))
        with FlopCounterMode(display=False) as counter:
            model.extend(model_cache, torch.ones(1, 4, dtype=torch.int64))
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    assert set(counts) == {counts[0]}
    with pytest.raises(ValueError, match=r"48 .*49"):
        fast.extend(cache, torch.ones(1, 1, dtype=torch.int64), Tree.chain(45), 45)


def test_replays_inside_and_outside_inference_mode(make_llama: Build) -> None:
    eager = wrap_model(make_llama(VOCAB))
    fast, recordings = graphed(eager)
    for inside in (True, False, True, False):
        with torch.inference_mode(inside):
            cache = fast.new_cache(2, 16)
        with torch.inference_mode(not inside):
            fast.extend(cache, torch.ones(2, 3, dtype=torch.int64))
            cache.set_lengths([3, 2])
            first = fast.extend(cache, torch.ones(2, 2, dtype=torch.int64))
        with torch.inference_mode(inside):
            assert torch.equal(fast.extend(cache, torch.ones(2, 2, dtype=torch.int64)), first)
        del cache
    assert recordings.replayed == 7


@torch.inference_mode()
def test_rotary_tables_of_graphs_stay_in_memory(make_llama: Build) -> None:
    model = LeanDecoder(make_llama(VOCAB))
    model.extend(model.new_cache(1, 8), torch.ones(1, 4, dtype=torch.int64))
    table = model._rotation.tables[""][0]
    cache = model.new_cache(1, 400)
    cache.set_lengths([390])
    model.extend(cache, torch.ones(1, 1, dtype=torch.int64))
    assert len(model._rotation.tables[""][0]) > len(table)
    assert any(entry[""][0] is table for entry in model._rotation.outgrown if entry)


# Models on several devices or with offloaded weights: no graphs, and a cache with each layer on its device.


def test_an_offloaded_model_decodes_the_same_text(make_llama: Build, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    expected = run(wrap_model(make_llama(VOCAB)), "autoregressive", Parts(), PROMPTS, Sampling())
    device_map = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = dispatch_model(make_llama(VOCAB), device_map, offload_dir=str(tmp_path))
    assert not LeanDecoder.covers(model)
    target = wrap_model(model)
    assert isinstance(target, TransformersModel)
    assert target.layer_devices == [torch.device("cpu")] * 2
    assert run(target, "autoregressive", Parts(), PROMPTS, Sampling()) == expected


@pytest.mark.parametrize("lengths", [[4], [4, 2]], ids=str)
def test_a_cache_has_each_layer_on_its_device(lengths: list[int]) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    spread = KVCache(3, len(lengths), 2, 16, 4, 6, torch.float32, cpu, [cpu, meta, cpu])
    single = KVCache(3, len(lengths), 2, 16, 4, 6, torch.float32, cpu)
    assert [key.device for key in spread.keys] == [value.device for value in spread.values] == [cpu, meta, cpu]
    key_BHME, value_BHME = (torch.randn(len(lengths), 2, 5, width) for width in (4, 6))
    for cache in (spread, single):
        cache.set_lengths(lengths)
        for layer, keys in enumerate(cache.keys):
            cache.write(layer, key_BHME.to(keys.device), value_BHME.to(keys.device), 0)
        cache.move_to_front(torch.tensor([[2, 4]] * len(lengths)))
    for layer in (0, 2):
        assert torch.equal(spread.keys[layer], single.keys[layer])
        assert torch.equal(spread.values[layer], single.values[layer])


# Tests that need a device.


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
@pytest.mark.parametrize(("kind", "lengths"), [("lean", [5]), ("lean", [3, 9, 1]), ("llama", [3, 9, 1])], ids=str)
def test_a_cuda_graph_equals_the_eager_forward(
    make_llama: Build, kind: str, lengths: list[int], dtype: torch.dtype, states: str
) -> None:
    eager = wrap_model(make_llama(VOCAB).to("cuda", dtype), fast=kind == "lean", graphs=False, states=states)
    roomy, tight = GraphedModel(eager, stride=16), GraphedModel(eager, stride=16, max_graphs=3)
    for seed in (0, 1, 2):
        expected = walk(eager, lengths, 18, seed)
        for fast in (roomy, tight):
            assert difference(walk(fast, lengths, 18, seed), expected) < TOLERANCES[dtype]


@gpu
@torch.inference_mode()
def test_a_replay_does_not_synchronise(make_llama: Build) -> None:
    fast = wrap_model(make_llama(VOCAB).to("cuda"))
    assert isinstance(fast, GraphedModel)
    tree = Tree.k_ary((2, 2)).to(fast.device)
    cache = fast.new_cache(2, 40)
    tokens_BN = torch.ones(2, tree.nodes, dtype=torch.int64, device="cuda")
    try:
        for lengths in ([5, 3], [6, 4], [7, 7], [9, 8]):
            if lengths == [7, 7]:  # all shapes are captured
                torch.cuda.set_sync_debug_mode("error")
            cache.set_lengths(lengths)
            fast.logits(fast.extend(cache, tokens_BN[:, :2]))
            fast.logits(fast.extend(cache, tokens_BN, tree))
    finally:
        torch.cuda.set_sync_debug_mode("default")
