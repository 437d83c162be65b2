"""FLOPs of forwards, and of whole steps of every method."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.profile import count_flops, measured_flops, raw_forward
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

VOCAB = 96
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
OPT = {"vocab_size": VOCAB, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
    "opt": ("opt", OPT | {"word_embed_proj_dim": 48}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt2": ("gpt2", GPT2 | {"n_inner": 56}),
}


def build(kind: str, settings: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), **options).eval()


@pytest.mark.parametrize("name", SETTINGS)
@torch.inference_mode()
def test_flops_equal_those_of_eager_attention(name: str) -> None:
    kind, settings = SETTINGS[name]
    model = build(kind, settings, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 40, dtype=torch.int64))
    scorer, total = wrap_model(build(kind, settings), check=False), counter.get_total_flops()
    assert count_flops(raw_forward(scorer, 40, 0)) == pytest.approx(total, rel=0.005)
    assert 0 < count_flops(raw_forward(scorer, 4, 40)) < 0.2 * total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_weights_are_counted(dtype: torch.dtype) -> None:
    """Each weight takes 2 FLOPs per row."""
    sizes = LLAMA | {"hidden_size": 264, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(AutoConfig.for_model("llama", **sizes)).to(dtype).eval()
    weights = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name)
    assert count_flops(raw_forward(wrap_model(model), 5, 0)) == pytest.approx(2 * 5 * weights, rel=0.02)


@pytest.fixture
def parts(make_llama: Callable[..., LlamaForCausalLM]) -> tuple[Any, Parts]:
    model = make_llama(VOCAB, num_hidden_layers=3)
    drafters = [wrap_model(make_llama(VOCAB, seed=seed, num_hidden_layers=1)) for seed in (1, 2)]
    heads = PredictionHeads.from_lm_head(torch.randn(VOCAB, 32), 3, 1).eval()
    table = BigramTable.from_documents([torch.arange(VOCAB).repeat(3).numpy()], VOCAB)
    return wrap_model(model), Parts(drafters[0], heads, table, (drafters[1],))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS if name != "beam"),  # beam search has a single step, which includes the prefill
    ("multi-candidate", {"k_config": "3x2x1", "attention": "batch"}),
    ("speculative", {"gamma": 7}),
    ("specinfer", {"gamma": 2, "num_drafts": 3}),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options or ''}" for name, options in CASES])
@torch.inference_mode()
def test_flops_of_a_step_equal_those_counted_in_decoding(
    parts: tuple[Any, Parts], name: str, options: dict[str, Any], temperature: float
) -> None:
    target, artifacts = parts
    sampling = Sampling(temperature)
    method = build_method(name, artifacts, sampling, **options)
    prompt = [int(token) for token in torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0))]
    steps = generate(target, *method, [prompt], Limits(40), sampling, Rng.for_rows(0, 1))
    first = next(steps)
    second: list[Any] = []
    counted = count_flops(lambda: second.append(next(steps)))
    context = len(prompt) + len(first.new_ids[0]) - 1
    flops = measured_flops(target, method, second[0].nodes, context)
    assert (flops.drafting == 0) == (not method.proposer.forwards(second[0].nodes))
    caught_up = 0.0
    if flops.drafting and artifacts.drafter is not None and first.accepted[0]:  # it reads tokens that it did not draft
        models = {id(model): model for model, _ in method.proposer.forwards(5) if hasattr(model, "extend")}
        caught_up = sum(count_flops(raw_forward(model, 1, 60)) for model in models.values())
    expected = flops.verification + flops.drafting
    assert 0.98 * expected <= counted <= 1.02 * expected + caught_up


@torch.inference_mode()
def test_flops_are_interpolated_by_nodes_and_given_per_token(parts: tuple[Any, Parts]) -> None:
    target, artifacts = parts
    method = build_method("multi-candidate", artifacts, Sampling(), k_config="2x2x1")
    low, half, high = (measured_flops(target, method, nodes, 30) for nodes in (10, 10.5, 11))
    assert half.verification == pytest.approx((low.verification + high.verification) / 2)
    per_token = half.per_token(1.6)
    assert per_token["drafting"] == half.drafting / 1.6
    assert per_token["total"] == pytest.approx(per_token["verification"] + per_token["drafting"])
