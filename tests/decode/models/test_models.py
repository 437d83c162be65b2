"""Model families: tree forwards equal plain forwards of each path, for unmodified models and ragged rows."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.verify.windows import position_limit, windows
from draftsmith.decode.models.base import TransformersModel
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.models.products.native import compiled, library_products
from draftsmith.decode.models.products.weights import FAMILIES as LEAN
from draftsmith.decode.tree import Tree
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

COMMON = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = COMMON | {"intermediate_size": 48, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_key_value_heads": 2},
    "mistral": WIDE | {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 16},
    "qwen2": WIDE | {"num_key_value_heads": 2},
    "qwen3": WIDE | {"num_key_value_heads": 4, "head_dim": 8},
    "opt": COMMON | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "gpt_neox": WIDE,
    "gpt2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi3": WIDE | {"num_key_value_heads": 4, "pad_token_id": 0},
    "olmo2": WIDE | {"num_key_value_heads": 2},
    "gemma2": WIDE | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8},
    "gemma3_text": WIDE
    | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 5}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": WIDE | {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
}


ROUNDING = 5e-6


def build(family: str, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(FAMILIES.get(family, {}) | overrides))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
            else:  # norms and biases, which would be ones and zeros
                parameter.uniform_(0.5, 1.5)
    return model


@torch.inference_mode()
def tree_against_paths(model: PreTrainedModel, fast: bool, lengths: tuple[int, int] = (4, 2)) -> float:
    """Return the largest relative difference of logits between a ragged batch of trees and one forward per path."""
    scorer = wrap_model(model, fast=fast)
    draws = torch.Generator().manual_seed(1)
    prompts_BT = torch.randint(1, 50, (2, max(lengths)), generator=draws)
    tree = Tree.k_ary((2, 2, 1))
    tokens_BN = torch.randint(1, 50, (2, tree.nodes), generator=draws)
    for row, length in enumerate(lengths):
        tokens_BN[row, 0] = prompts_BT[row, length - 1]
    cache = scorer.new_cache(2, max(lengths) + 32)
    scorer.extend(cache, prompts_BT[:, :-1])
    cache.set_lengths([length - 1 for length in lengths])
    logits_BNV = scorer.logits(scorer.extend(cache, tokens_BN, tree))
    worst, largest = 0.0, 0.0
    for row, length in enumerate(lengths):
        for node in range(tree.nodes):
            path = torch.nonzero(tree.ancestors_BNN[0, node])[:, 0]
            ids = torch.cat((prompts_BT[row, : length - 1], tokens_BN[row, path]))
            plain_V = model(ids[None]).logits[0, -1]
            worst = max(worst, (plain_V - logits_BNV[row, node]).abs().max().item())
            largest = max(largest, plain_V.abs().max().item())
    return worst / largest


AS_WIDE = {"gpt2": {"n_embd": 64}, "opt": {"hidden_size": 64, "word_embed_proj_dim": 64}}
AS_WIDE["gemma2"] = {"hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16}
"""Sizes that the C kernels support, for families without `head_dim` in their configuration."""
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MORE: dict[str, list[dict[str, Any]]] = {
    "phi3": [{"hidden_size": 64, "head_dim": 16, "rope_parameters": PARTLY}, {"rope_parameters": PARTLY}],
    "gpt_neox": [{"hidden_size": 64, "use_parallel_residual": False}, {"hidden_act": "gelu_new"}],
    "gemma2": [AS_WIDE["gemma2"] | {"attn_logit_softcapping": 2.0}],
    "llama": [{"hidden_size": 64, "attention_bias": True, "mlp_bias": True}],
    "opt": [AS_WIDE["opt"] | {"enable_bias": False}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_forward_equals_plain_forwards(family: str) -> None:
    assert tree_against_paths(build(family), fast=False) < ROUNDING


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (family, overrides)
        for family in sorted(LEAN)
        for overrides in (
            {},
            AS_WIDE.get(family, {"hidden_size": 64, "head_dim": 16}),
            {"num_key_value_heads": 4, "tie_word_embeddings": True},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
            *MORE.get(family, ()),
        )
        if family not in ("phi3", "gemma3_text", "gpt2", "opt") or "rope_parameters" not in overrides
    ],
    ids=str,
)
def test_the_lean_forward_equals_plain_forwards(family: str, overrides: dict[str, Any]) -> None:
    model = build(family, **overrides)
    thin = wrap_model(model)
    assert isinstance(thin, LeanDecoder)
    assert (thin._few is not None) == (thin.key_width == 16 and compiled() is not None)
    assert tree_against_paths(model, fast=True) < ROUNDING
    with library_products():
        assert tree_against_paths(model, fast=True) < ROUNDING


@pytest.mark.parametrize("family", sorted(LEAN))
@torch.inference_mode()
def test_in_16_bits_the_lean_forward_rounds_no_more_than_transformers(family: str) -> None:
    """Both implementations are compared with float64 computations on the same weights."""
    half = build(family, **AS_WIDE.get(family, {"hidden_size": 64, "head_dim": 16})).to(torch.bfloat16)
    exact, thin = copy.deepcopy(half).double(), LeanDecoder(half)
    ids_BM = torch.randint(1, 50, (8, 12), generator=torch.Generator().manual_seed(1))
    exact_BMV, logits_BMV = exact(ids_BM).logits, half(ids_BM).logits
    for in_c in (True, False):
        with nullcontext() if in_c else library_products():
            found_BMV = thin.logits(thin.extend(thin.new_cache(8, 12), ids_BM))
        assert (found_BMV - exact_BMV).abs().mean() < 1.2 * (logits_BMV - exact_BMV).abs().mean()


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[4000, 5, 9], [2, 5000], [700, 690, 680, 5]], ids=str)
def test_ragged_batches_equal_single_rows(lengths: list[int]) -> None:
    scorer = wrap_model(build("llama", hidden_size=64, head_dim=16, max_position_embeddings=8192))
    assert isinstance(scorer, LeanDecoder)
    cache, draws = scorer.new_cache(len(lengths), 5008), torch.Generator().manual_seed(2)
    for part in (*cache.keys, *cache.values):
        part.normal_(generator=draws)
    roots_B1 = torch.randint(50, (len(lengths), 1), generator=draws)
    single = [
        scorer.extend(cache.rows(row, row + 1, [length]), roots_B1[row, None]) for row, length in enumerate(lengths)
    ]
    if scorer._few is not None:
        for part in (*cache.keys, *cache.values):
            for row, length in enumerate(lengths):
                part[row, :, length + 1 :] = torch.nan
    batched_B1D = scorer.extend(cache.rows(0, len(lengths), lengths), roots_B1)
    assert (batched_B1D - torch.cat(single)).abs().max() < 2e-5


ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0}}),
    ("llama", {"hidden_act": "relu"}),
    ("gemma2", {"query_pre_attn_scalar": 5}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 16}),
]
"""Models that the optimised forward does not support."""


def test_the_lean_forward_is_used_for_supported_models(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    half = make_llama(50).to(torch.bfloat16)
    assert isinstance(wrap_model(half), LeanDecoder)  # checked against the model's own forward
    for family, overrides in ELSEWHERE:
        assert isinstance(wrap_model(build(family, **overrides)), TransformersModel)
    alibi = wrap_model(build("bloom", vocab_size=50, hidden_size=32, n_layer=2, n_head=4))
    assert "'bloom' use ALiBi" in str(alibi.tree_fault)  # chains only


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": WIDE | {"num_key_value_heads": 2, "head_dim": 16},
    "phi3": WIDE | {"num_key_value_heads": 4, "pad_token_id": 0},
    "qwen2": WIDE | MIXED | {"num_key_value_heads": 2, "use_sliding_window": True},
    "qwen3": WIDE | MIXED | {"num_key_value_heads": 4, "head_dim": 16, "use_sliding_window": True},
    "ministral": WIDE | MIXED | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": WIDE | MIXED | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": WIDE | MIXED | {"num_key_value_heads": 2, "head_dim": 16},
    "olmo3": WIDE | MIXED | {"num_key_value_heads": 2},
    "cohere2": WIDE | MIXED | {"num_key_value_heads": 2},
    "smollm3": WIDE
    | MIXED
    | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    | {"use_sliding_window": True},
}


@pytest.mark.parametrize(
    ("family", "fast"), [(name, fast) for name in WINDOWED for fast in sorted({False, name in LEAN})]
)
@torch.inference_mode()
def test_texts_longer_than_a_sliding_window(family: str, fast: bool) -> None:
    """The window has 128 tokens, the prompts 300 and 40. A window that is off by one token would be detected."""
    overrides = WINDOWED[family] | {"sliding_window": 128, "max_position_embeddings": 512}
    model = build(family, **overrides)
    scorer = wrap_model(model, fast=fast)
    assert isinstance(scorer, LeanDecoder) == fast
    assert scorer.max_positions == 512
    bound = 4e-5 if family == "gemma3_text" and fast else 2e-5  # its norms scale by up to 2.5
    assert tree_against_paths(model, fast, (300, 40)) < bound
    endless = wrap_model(build(family, **overrides | {"sliding_window": 512}), fast=fast)
    cache, ids_1T = endless.new_cache(1, 300), torch.arange(300)[None] % 50
    unlike_V = endless.logits(endless.extend(cache, ids_1T))[0, -1] - model(ids_1T).logits[0, -1]
    assert unlike_V.abs().max() > 100 * bound
    if fast:  # attention to rows of very different lengths is computed row by row
        wide, lengths = wrap_model(build(family, **overrides | {"max_position_embeddings": 8192})), [6000, 3, 190]
        cache = wide.new_cache(3, 6001)
        for part in (*cache.keys, *cache.values):
            part.normal_(generator=torch.Generator().manual_seed(3))
        roots_B1 = torch.tensor([[7], [9], [11]])
        single = [wide.extend(cache.rows(i, i + 1, [length]), roots_B1[i, None]) for i, length in enumerate(lengths)]
        batched_B1D = wide.extend(cache.rows(0, 3, lengths), roots_B1)
        assert (batched_B1D - torch.cat(single)).abs().max() < 2e-5


@pytest.mark.parametrize(("family", "window"), [("mistral", 16), ("gpt_oss", 128)])
def test_positions_are_limited_by_unsupported_windows(family: str, window: int) -> None:
    config = AutoConfig.for_model(family, **(WIDE | {"sliding_window": window, "max_position_embeddings": 512}))
    assert position_limit(config) == window
    assert set(windows(config)) == {None}


def test_the_cache_refuses_too_many_tokens(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    scorer = wrap_model(make_llama(50))
    cache = scorer.new_cache(1, 4)
    cache.set_lengths([2])
    with pytest.raises(ValueError, match=r"4 slots.*5"):
        scorer.extend(cache, torch.zeros(1, 3, dtype=torch.int64))
