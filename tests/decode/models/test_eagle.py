"""EAGLE-3 heads: training and decoding equal a plain implementation."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.checkpoints.heads.eagle import EagleHeads, load_eagle, save_eagle
from draftsmith.checkpoints.heads.layouts import is_eagle, read_heads
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from helpers.recordings import graphed
from torch import Tensor
from transformers import PreTrainedModel

VOCAB, LENGTH, STEPS = 40, 9, 3
KEPT = torch.arange(1, VOCAB, 2)
NORM_SETS = [("fc_norm",), ("norm_before_fc",), ("norm_output",), ("norm_before_fc", "norm_output")]


def given_of(model: PreTrainedModel, heads: EagleHeads, ids_BT: Tensor) -> Tensor:
    states = model(ids_BT, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in heads.layers], -1)


def norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_D / (x_D.pow(2).mean() + eps).sqrt() * weight_D


def turn(x_E: Tensor, position: int, base: float) -> Tensor:
    half = len(x_E) // 2
    angles = position * base ** -(torch.arange(half) / half)
    first, second = x_E[:half], x_E[half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))


def slow_features(heads: EagleHeads, given_TG: Tensor, ids: list[int], start: int) -> list[Tensor]:
    """Compute the features of all steps of a chain from a position by loops over tokens and attention heads."""
    config, layer = heads.config, heads.midlayer
    attention, width = layer.self_attn, config.head_dim
    base, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    queries_a_key = config.num_attention_heads // config.num_key_value_heads

    def fused(given_G: Tensor) -> Tensor:
        if "norm_before_fc" in heads.norms:
            given_G = norm(given_G, heads.input_norm.weight, eps)
        if "fc_norm" in heads.norms:
            chunks = given_G.chunk(len(heads.layers))
            given_G = torch.cat([norm(x_D, each.weight, eps) for x_D, each in zip(chunks, heads.fc_norm, strict=True)])
        return heads.fc.weight @ given_G

    def step(state_D: Tensor, token: int, position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        embedded_D = norm(heads.embedding[token], layer.input_layernorm.weight, eps)
        normed_D = norm(state_D, layer.hidden_norm.weight, eps)
        read_C = torch.cat((embedded_D, normed_D))
        state_D = normed_D if heads.normed else state_D
        key = (attention.k_proj.weight @ read_C).view(-1, width)
        past.append(
            (torch.stack([turn(k, position, base) for k in key]), (attention.v_proj.weight @ read_C).view(-1, width))
        )
        attended = []
        for head, query in enumerate((attention.q_proj.weight @ read_C).view(-1, width)):
            turned, group = turn(query, position, base), head // queries_a_key
            shares = torch.stack([turned @ key[group] for key, _ in past]).div(width**0.5).softmax(0)
            attended.append(sum(share * value[group] for share, (_, value) in zip(shares, past, strict=True)))
        state_D = state_D + attention.o_proj.weight @ torch.cat(attended)
        x_D, mlp = norm(state_D, layer.post_attention_layernorm.weight, eps), layer.mlp
        return state_D + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x_D) * (mlp.up_proj.weight @ x_D))

    past: list[tuple[Tensor, Tensor]] = []
    for place in range(start + 1):
        state_D = step(fused(given_TG[place]), ids[place + 1], place, past)
    states = [state_D]
    for ahead in range(1, STEPS):
        above_D = norm(states[-1], heads.norm.weight, eps) if "norm_output" in heads.norms else states[-1]
        states.append(step(above_D, ids[start + 1 + ahead], start + ahead, past))
    return [norm(state_D, heads.norm.weight, eps) for state_D in states]


@pytest.mark.parametrize(("normed", "norms"), [(False, ()), (True, ()), *((False, norms) for norms in NORM_SETS)])
@torch.no_grad()
def test_training_equals_the_plain_implementation(
    make_llama: Any, make_eagle: Any, normed: bool, norms: tuple[str, ...]
) -> None:
    """The block has two documents, and the second must not attend to the first."""
    model = make_llama(VOCAB).double()
    heads = make_eagle(model, norms=norms)
    heads.normed = normed
    ids_T, split = torch.randint(VOCAB, (LENGTH + 7,), generator=torch.Generator().manual_seed(1)), 7
    documents_T = (torch.arange(len(ids_T)) >= split).long()
    states = [given_of(model, heads, part[None])[0] for part in (ids_T[:split], ids_T[split:])]
    positions_T = torch.cat((torch.arange(split), torch.arange(LENGTH)))
    mask_TT = (documents_T[:, None] == documents_T) & torch.ones(len(ids_T), len(ids_T), dtype=torch.bool).tril()
    made_TKD = heads.features(torch.cat(states)[None], ids_T[None], positions_T[None], mask_TT[None, None])[0]
    second = ids_T[split:].tolist()
    for start in range(LENGTH - STEPS):
        expected = slow_features(heads, states[1], second, start)
        assert (made_TKD[split + start] - torch.stack(expected)).abs().max() < 1e-10
    expected = slow_features(heads, states[0], ids_T[:split].tolist(), 2)
    assert (made_TKD[2] - torch.stack(expected)).abs().max() < 1e-10


@torch.no_grad()
def test_rotary_positions_are_float32_for_all_dtypes(make_llama: Any, make_eagle: Any) -> None:
    heads = make_eagle(make_llama(VOCAB))
    exact = heads.rotary_emb.inv_freq.clone()
    heads = heads.to(torch.bfloat16)
    assert not torch.equal(heads.rotary_emb.inv_freq.float(), exact)
    EagleDrafter(heads)
    assert torch.equal(heads.rotary_emb.inv_freq, exact)


@pytest.mark.parametrize("hidden", [32, 64])  # the C kernels support the layer of size 64, whose heads are wide enough
@pytest.mark.parametrize(
    ("proposed", "normed", "norms"),
    [(None, False, ()), (KEPT, False, ()), (None, True, ()), *((None, False, norms) for norms in NORM_SETS)],
    ids=str,
)
@torch.no_grad()
def test_drafting_equals_training(
    make_llama: Any, make_eagle: Any, proposed: Tensor | None, normed: bool, norms: tuple[str, ...], hidden: int
) -> None:
    """Two rows of different lengths are decoded, and the drafts of the first step are compared."""
    model = make_llama(VOCAB, hidden_size=hidden, seed=1)
    heads = make_eagle(model, proposed, norms)
    heads.normed = normed
    target, drafter = wrap_model(model, aux_layers=heads.layers), EagleDrafter(heads)
    recorded: list[Tensor] = []

    class Spied(EagleDrafter):
        def logits(self, hidden_XD: Tensor) -> Tensor:
            recorded.append(super().logits(hidden_XD))
            return recorded[-1]

    prompts = [[5, 7, 2, 9, 1, 4], [3, 1, 8]]
    method = build_method("speculative", Parts(drafter=Spied(heads)), Sampling(0.0), gamma=STEPS)
    texts = decode_texts(target, *method, prompts, Limits(6), Sampling(0.0), Rng([0, 1], target.device))
    assert drafter.vocab_size == VOCAB
    expected = decode_texts(
        target,
        *build_method("autoregressive", Parts(), Sampling(0.0)),
        prompts,
        Limits(6),
        Sampling(0.0),
        Rng([0, 1], target.device),
    )
    assert texts == expected
    for row, prompt in enumerate(prompts):
        # the first step: the prompt and a chain of the drafter's own tokens
        chain = [int(step_BMV[row, -1].argmax()) for step_BMV in recorded[:STEPS]]
        ids_1T = torch.tensor([[*prompt, *chain]])
        length = ids_1T.shape[1]
        mask_TT = torch.ones(length, length, dtype=torch.bool).tril()
        given_1TG, places_1T = given_of(model, heads, ids_1T), torch.arange(length)[None]
        made_KD = heads.features(given_1TG, ids_1T, places_1T, mask_TT[None, None])[0, len(prompt) - 2]
        logits_KR = made_KD @ heads.projection().T
        for step, step_BMV in enumerate(recorded[:STEPS]):
            found_R = step_BMV[row, -1] if proposed is None else step_BMV[row, -1, proposed]
            assert (found_R - logits_KR[step]).abs().max() < 1e-4, (row, step)


@pytest.mark.parametrize(("name", "options"), [("speculative", {"gamma": 3}), ("multi-candidate", {"k_config": "3x2"}),
                                               ("dynamic-tree", {})], ids=str)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("normed", "norms"), [(False, ()), (True, ()), (False, ("fc_norm", "norm_output"))])
def test_replays_draft_the_same_tokens(
    make_llama: Any,
    make_eagle: Any,
    name: str,
    options: dict[str, Any],
    temperature: float,
    normed: bool,
    norms: tuple[str, ...],
) -> None:
    model, sampling = make_llama(VOCAB, seed=1), Sampling(temperature)
    heads = make_eagle(model, norms=norms)
    heads.normed = normed
    target, drafter = wrap_model(model, aux_layers=heads.layers), EagleDrafter(heads)
    fast, recordings = graphed(drafter)

    def texts(drafter: Any, prompts: list[list[int]]) -> list[list[int]]:
        method = build_method(name, Parts(drafter=drafter), sampling, **options)
        return decode_texts(target, *method, prompts, Limits(20), sampling, Rng.for_rows(0, len(prompts)))

    for prompts in ([[5, 7, 2, 9, 1, 4]], [[3, 1, 8]], [[5, 7, 2, 9, 1, 4], [3, 1, 8]]):
        assert texts(fast, prompts) == texts(drafter, prompts)
    assert recordings.replayed > 10


@pytest.mark.parametrize("norms", [(), *NORM_SETS], ids=str)
def test_heads_survive_a_round_trip(make_llama: Any, make_eagle: Any, norms: tuple[str, ...], tmp_path: Path) -> None:
    model = make_llama(VOCAB)
    heads = make_eagle(model, KEPT, norms)
    save_eagle(heads, tmp_path)
    loaded = load_eagle(tmp_path)
    with pytest.raises(ValueError, match=r"EAGLE-3.*drafter"):
        read_heads(tmp_path)
    assert is_eagle(tmp_path)
    assert not is_eagle(tmp_path.parent)
    assert (loaded.layers, loaded.norms) == (heads.layers, norms)
    assert loaded.proposed is not None
    assert loaded.proposed.tolist() == KEPT.tolist()
    saved_state, loaded_state = heads.state_dict(), loaded.state_dict()
    assert saved_state.keys() == loaded_state.keys()
    assert all(torch.equal(weight, loaded_state[name]) for name, weight in saved_state.items())
