"""FLOPs by shapes against torch's counter, part by part and for whole steps of every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.profile import (
    FAMILIES,
    count_flops,
    forward_flops,
    heads_flops,
    measured_flops,
    part_flops,
    raw_forward,
    step_flops,
)
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.base import TransformersModel
from draftsmith.decode.models.draft_vocabulary import factorise, keep_tokens
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

VOCAB = 96
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
OPT = {"vocab_size": VOCAB, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 72, "num_layers": 1, "num_decoder_layers": 2}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, heads wider than hidden": ("llama", LLAMA | {"head_dim": 12}),
    "mistral": ("mistral", LLAMA),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
    "phi3": ("phi3", LLAMA),
    "gemma2": ("gemma2", LLAMA | {"head_dim": 16}),
    "gemma3": ("gemma3_text", LLAMA | {"head_dim": 16}),
    "smollm3": ("smollm3", LLAMA),
    "granite": ("granite", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "opt": ("opt", OPT | {"word_embed_proj_dim": 48}),
    "opt, narrow embeddings": ("opt", OPT | {"word_embed_proj_dim": 16}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt2": ("gpt2", GPT2),
    "gpt2, inner width": ("gpt2", GPT2 | {"n_inner": 56}),
    "t5": ("t5", T5),
    "t5, gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("umt5", T5 | {"feed_forward_proj": "gated-gelu"}),
}
SHAPES = [(1, 1), (1, 37), (5, 20), (17, 3)]


def build(kind: str, settings: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return loader.from_config(config, **more).eval()


@pytest.mark.parametrize("name", ["llama", "opt", "opt, narrow embeddings", "gpt_neox", "gpt2, inner width", "qwen3"])
@torch.inference_mode()
def test_a_plain_forward_costs_what_torchs_counter_says(name: str) -> None:
    """With attention that is written out, the counter misses nothing, and knows nothing of this project."""
    model = build(*SETTINGS[name], attn_implementation="eager")
    for batch, length in ((1, 40), (3, 7)):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(batch, length, dtype=torch.int64))
        found = forward_flops(model.config, length, 0, rows=batch)
        assert found.total == pytest.approx(counter.get_total_flops(), rel=0.005)
        assert min(found) > 0


@pytest.mark.parametrize("name", SETTINGS)
@torch.inference_mode()
def test_a_scorers_forward_on_a_cache_costs_what_the_counter_says(name: str) -> None:
    kind, settings = SETTINGS[name]
    model = build(kind, settings)
    scorer = wrap_model(model, check=False)
    assert kind in FAMILIES
    for nodes, context in SHAPES:
        found = part_flops(scorer, nodes, context)
        assert found is not None
        counted = count_flops(raw_forward(scorer, nodes, context))
        assert found.total == pytest.approx(counted, rel=0.005), (nodes, context)


@pytest.mark.parametrize(("tokens", "rank"), [(9, None), (None, 5), (9, 5)])
@pytest.mark.parametrize("fast", [True, False])
@torch.inference_mode()
def test_less_than_a_whole_output_layer_costs_less(tokens: int | None, rank: int | None, fast: bool) -> None:
    model = build("llama", LLAMA)
    if tokens is not None:
        keep_tokens(model, torch.arange(tokens))
    if rank is not None:
        factorise(model, rank)
    scorer = wrap_model(model, fast=fast, check=False)
    found, plain = part_flops(scorer, 4, 20), forward_flops(model.config, 4, 20)
    assert found is not None
    assert found.head == count_flops(lambda: scorer.logits(torch.ones(1, 4, scorer.hidden_size)))
    assert found.total == plain.total - plain.head + found.head < plain.total


@torch.inference_mode()
def test_other_models_are_left_to_the_counter(make_markov: Any, make_heads: Any) -> None:
    experts = build("mixtral", LLAMA | {"num_local_experts": 2})
    scorer = TransformersModel(experts)
    plain = build_method("autoregressive", Parts(), Sampling())
    found = measured_flops(scorer, plain, 1, 9)
    assert found == (count_flops(raw_forward(scorer, 1, 9)), 0, None)
    assert found.verification > 0
    assert "checked" not in found.per_token(1.0)
    assert measured_flops(make_markov(torch.full((1, 8, 8), 1 / 8)), plain, 1, 9) == (0, 0, None)
    assert part_flops(make_heads(2, 8, 16), 1, 9) is part_flops(lambda hidden: hidden, 1, 9) is None


@pytest.mark.parametrize("kind", ["own", "low-rank", "target"])
@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (2, 6)])
@torch.inference_mode()
def test_heads_cost_what_the_counter_says(kind: str, layers: int, rows: int) -> None:
    heads = PredictionHeads.from_lm_head(torch.randn(50, 24), 3, layers, kind, 4 if kind == "low-rank" else 0).eval()
    assert heads_flops(heads, rows) == count_flops(lambda: heads(torch.randn(rows, 24)))


@pytest.fixture
def parts(make_llama: Callable[..., LlamaForCausalLM]) -> tuple[Any, Parts]:
    """A target, and a part of every kind."""
    model = make_llama(VOCAB, num_hidden_layers=3)
    drafters = [wrap_model(make_llama(VOCAB, seed=seed, num_hidden_layers=1)) for seed in (1, 2)]
    heads = PredictionHeads.from_lm_head(torch.randn(VOCAB, 32), 3, 1).eval()
    table = BigramTable.from_documents([torch.arange(VOCAB).repeat(3).numpy()], VOCAB)
    return wrap_model(model), Parts(drafters[0], heads, table, (drafters[1],))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS if name != "beam"),  # beam search has one step, with the prompt's reading in it
    ("multi-candidate", {"k_config": "3x2x1", "attention": "batch"}),
    ("speculative", {"gamma": 7}),
    ("specinfer", {"gamma": 2, "num_drafts": 3}),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options or ''}" for name, options in CASES])
@torch.inference_mode()
def test_a_step_costs_what_the_counter_sees_in_decoding(
    parts: tuple[Any, Parts], name: str, options: dict[str, Any], temperature: float
) -> None:
    """Each method's whole step as it is decoded, its target forward, its drafter's at their widths, and its heads."""
    target, given = parts
    sampling = Sampling(temperature)
    method = build_method(name, given, sampling, **options)
    prompt = [int(token) for token in torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0))]
    steps = generate(target, *method, [prompt], Limits(40), sampling, Rng.for_rows(0, 1))
    first = next(steps)
    second: list[Any] = []
    counted = count_flops(lambda: second.append(next(steps)))
    found = step_flops(target, method, second[0].nodes, len(prompt) + len(first.new_ids[0]) - 1)
    assert found is not None
    assert (found.drafting == 0) == (not method.proposer.forwards(second[0].nodes))
    caught_up = 0.0
    if found.drafting and given.drafter is not None and first.accepted[0]:  # a drafter reads what it had not drafted
        models = {id(model): model for model, _ in method.proposer.forwards(5) if hasattr(model, "extend")}
        caught_up = sum(part_flops(model, 1, 60).total for model in models.values())
    wanted = found.verification + found.drafting
    assert 0.98 * wanted <= counted <= 1.02 * wanted + caught_up


@torch.inference_mode()
def test_rows_give_flops_by_the_token_and_what_they_were_checked_with(parts: tuple[Any, Parts]) -> None:
    target, given = parts
    method = build_method("multi-candidate", given, Sampling(), k_config="2x2x1")
    costs = measured_flops(target, method, 11, 30)
    config, drafter = target.config, given.drafter.config  # type: ignore[union-attr]
    assert costs.verification == forward_flops(config, 11, 30).total
    widths = [(1, 30), (2, 31), (4, 33)]
    assert costs.drafting == sum(forward_flops(drafter, *each).total for each in widths)
    assert costs.checked == pytest.approx(1, abs=0.005)
    found = costs.per_token(1.6)
    assert found["verification"] == costs.verification / 1.6
    assert found["drafting"] == costs.drafting / 1.6
    assert found["total"] == pytest.approx(found["verification"] + found["drafting"])
    assert found["checked"] == costs.checked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_weights_are_counted(dtype: torch.dtype) -> None:
    """Of a model large enough for them: 2 FLOPs for each weight and row."""
    sizes = LLAMA | {"hidden_size": 264, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = wrap_model(LlamaForCausalLM(AutoConfig.for_model("llama", **sizes)).to(dtype).eval())
    shaped = part_flops(model, 5, 40)
    assert shaped is not None
    assert count_flops(raw_forward(model, 5, 40)) == pytest.approx(shaped.total, rel=0.02)
