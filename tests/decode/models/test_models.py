"""Families: a tree forward equals plain forwards of each path, unmodified models, ragged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decode.models.base import TransformersModel
from draftsmith.decode.models.lean import LeanLlama
from draftsmith.decode.models.loading import wrap_model
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
    "gemma2": WIDE | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64},
}


def build(family: str, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(FAMILIES.get(family, {}) | overrides))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
    return model


@torch.inference_mode()
def tree_against_paths(model: PreTrainedModel, fast: bool) -> float:
    """The largest difference between a ragged batch of trees and plain forwards of each path."""
    scorer = wrap_model(model, fast=fast)
    prompts = [[5, 9, 3, 7], [8, 2]]
    tree = Tree.k_ary((2, 2, 1))
    tokens_BN = torch.randint(1, 50, (2, tree.nodes), generator=torch.Generator().manual_seed(1))
    for row, prompt in enumerate(prompts):
        tokens_BN[row, 0] = prompt[-1]
    cache = scorer.new_cache(2, 32)
    scorer.extend(cache, torch.tensor([[5, 9, 3], [8, 0, 0]]))
    cache.set_lengths([3, 1])
    logits_BNV = scorer.logits(scorer.extend(cache, tokens_BN, tree))
    worst = 0.0
    for row, prompt in enumerate(prompts):
        for node in range(tree.nodes):
            path = torch.nonzero(tree.ancestors_BNN[0, node])[:, 0]
            ids = torch.cat((torch.tensor(prompt[:-1], dtype=torch.int64), tokens_BN[row, path]))
            plain_V = model(ids[None]).logits[0, -1]
            worst = max(worst, (plain_V - logits_BNV[row, node]).abs().max().item())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_forward_equals_plain_forwards(family: str) -> None:
    assert tree_against_paths(build(family), fast=False) < 2e-5


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 4, "head_dim": 6},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
    ids=str,
)
def test_the_lean_forward_equals_plain_forwards(family: str, overrides: dict[str, Any]) -> None:
    model = build(family, **overrides)
    assert isinstance(wrap_model(model), LeanLlama)
    assert tree_against_paths(model, fast=True) < 2e-5


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[4000, 5, 9], [2, 5000], [700, 690, 680, 5]], ids=str)
def test_rows_of_unlike_lengths_give_what_each_gives_alone(lengths: list[int]) -> None:
    """Where much of the longest row's length would be masked in the others, those slots are not even read."""
    scorer = wrap_model(build("llama", max_position_embeddings=8192))
    assert isinstance(scorer, LeanLlama)
    cache, draws = scorer.new_cache(len(lengths), 5008), torch.Generator().manual_seed(2)
    for part in (*cache.keys, *cache.values):
        part.normal_(generator=draws)
    roots_B1 = torch.randint(50, (len(lengths), 1), generator=draws)
    alone = [
        scorer.extend(cache.rows(row, row + 1, [length]), roots_B1[row, None]) for row, length in enumerate(lengths)
    ]
    if max(lengths) > 700:
        for part in (*cache.keys, *cache.values):
            for row, length in enumerate(lengths):
                part[row, :, length + 1 :] = torch.nan
    together_B1D = scorer.extend(cache.rows(0, len(lengths), lengths), roots_B1)
    assert (together_B1D - torch.cat(alone)).abs().max() < 2e-5


def test_which_forward_serves(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    half = make_llama(50).to(torch.bfloat16)
    assert isinstance(wrap_model(half), LeanLlama)  # compared with the model's own forwards on the way
    assert isinstance(wrap_model(make_llama(50, attention_bias=True)), TransformersModel)
    with pytest.raises(ValueError, match="'bloom'"):  # ALiBi
        wrap_model(build("bloom", vocab_size=50, hidden_size=32, n_layer=2, n_head=4))


def test_positions_end_at_the_sliding_window() -> None:
    assert wrap_model(build("mistral", sliding_window=16)).max_positions == 16


def test_the_cache_refuses_what_does_not_fit(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    scorer = wrap_model(make_llama(50))
    cache = scorer.new_cache(1, 4)
    cache.set_lengths([2])
    with pytest.raises(ValueError, match=r"4 .*2 .*3 "):
        scorer.extend(cache, torch.zeros(1, 3, dtype=torch.int64))
