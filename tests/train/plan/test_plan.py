"""Memory estimated from shapes, against what autograd keeps, what files hold, and what ZeRO's paper says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.data.blocks.packing import Batch
from draftsmith.decode.models.draft_vocabulary import factorise, keep_tokens
from draftsmith.train.forward.packed import PackedForward
from draftsmith.train.plan import probe
from draftsmith.train.plan.memory import Demand, Launch, Part, heads_size, model_size, peak, plan_memory
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1, "intermediate_size": 160},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0},
    "gpt_neox": {"intermediate_size": 256},
    "gpt2": {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make(family: str, hidden: int = 64, layers: int = 3, **overrides: Any) -> Any:
    names = {"gpt2": ("n_embd", "n_layer", "n_head", "n_positions")}
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    sizes = dict(zip(names.get(family, usual), (hidden, layers, 2, 128), strict=True))
    config = AutoConfig.for_model(family, vocab_size=96, **(sizes | FAMILIES[family] | overrides))
    return AutoModelForCausalLM.from_config(config)


def demand_of(model: Any, **options: Any) -> Demand:
    return Demand(
        model_size(model), None, False, 0, **({"block_tokens": 64, "micro_batch": 3, "global_batch": 6} | options)
    )


def part(demand: Demand, name: str) -> int:
    return sum(found.size for found in plan_memory(demand) if found.name == name)


def kept_by_autograd(model: Any, rows: int, length: int) -> int:
    """Bytes of the storages that a forward pass over packed blocks keeps for the backward pass, weights not counted."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    forward = PackedForward(model.train())
    tokens_BT = torch.randint(0, 96, (rows, length))
    documents_BT = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
    positions_BT = (torch.arange(length) % (length // 2)).expand(rows, length).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = forward.hidden(Batch(tokens_BT, tokens_BT, positions_BT, documents_BT))
    states.sum().backward()
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("hidden", "layers"), [(64, 3), (128, 6)])
def test_activations_are_estimated_within_a_factor_of_what_autograd_keeps(family: str, hidden: int, layers: int):
    model = make(family, hidden, layers)
    found = kept_by_autograd(model, 3, 64)
    estimated = part(demand_of(model), "activations of a micro batch")
    assert 0.8 * found <= estimated <= 1.8 * found


def test_checkpointing_keeps_a_layers_input_and_one_layer():
    model = make("llama", 64, 8)
    plain, recomputing = (demand_of(model, checkpointing=how) for how in (False, True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = kept_by_autograd(model, 3, 64)
    estimated = part(recomputing, "activations of a micro batch")
    assert 0.8 * found <= estimated <= 2 * found
    assert estimated < part(plain, "activations of a micro batch") / 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_meta_model_has_the_sizes_of_the_model(family: str, tied: bool):
    with torch.device("meta"):
        meta = model_size(make(family, tie_word_embeddings=tied))
    model = make(family, tie_word_embeddings=tied)
    assert meta == model_size(model)
    count = sum(p.numel() for p in model.parameters())
    assert (meta.parameters, meta.trained, meta.weights) == (count, count, 4 * count)


@pytest.mark.parametrize("rank", [None, 5])
def test_less_than_a_whole_output_layer_makes_fewer_logits(rank: int | None):
    whole, model = make("llama"), make("llama")
    keep_tokens(model, torch.arange(24))
    if rank is not None:
        factorise(model, rank)
    before, after = model_size(whole), model_size(model)
    assert (before.vocab_size, after.vocab_size) == (96, 24)
    assert after.layer_elements == before.layer_elements
    assert after.parameters - before.parameters == (0 if rank is None else 5 * (96 + 64) - whole.lm_head.weight.numel())
    assert after.projection == (96 + 2 * 24) * (rank or 64)


def test_in_8_bits_matrices_but_the_projection_take_a_byte():
    model = make("llama", tie_word_embeddings=False).to(torch.float16)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    whole, eight = model_size(model), model_size(model, eight_bit=True)
    assert whole.weights - eight.weights == matrices
    assert eight.parameters == whole.parameters


def test_states_are_16_bytes_a_parameter_and_shared_out_as_in_the_papers_figure_1():
    size = model_size(make("llama"))
    count = size.parameters
    run = demand_of(make("llama"))
    names = ("weights", "gradients", "AdamW's two moments", "weights in float32")
    assert [part(run, name) for name in names] == [4 * count, 4 * count, 8 * count, 0]
    shares = {1: (2, 2, 2, 1), 2: (2, 0.5, 2, 1), 3: (0.5, 0.5, 2, 1)}  # bytes a parameter of 4 processes, in 16 bits
    for stage, expected in shares.items():
        sharded = replace(run, precision="bf16", micro_batch=1, global_batch=4, launch=Launch("cuda", 4, stage))
        assert [part(sharded, name) / count for name in names] == pytest.approx(expected, abs=1 / count)
    offloaded = replace(sharded, launch=Launch("cuda", 4, 3, offload_optimizer=True, offload_weights=True))
    host = {found.name for found in plan_memory(offloaded) if found.place == "host"}
    assert set(names) <= host
    assert peak(plan_memory(offloaded), "cuda") < peak(plan_memory(sharded), "cuda")


def test_the_peak_is_what_always_lies_there_and_the_greediest_phase():
    parts = (Part("a", 100), Part("b", 7, "training"), Part("c", 4, "training"), Part("d", 9, "saving", "host"))
    assert peak(parts, "cuda") == 111
    assert peak(parts, "cpu") == 111
    assert peak((*parts, Part("e", 3, "saving", "host")), "cpu") == 112


def test_heads_are_trained_and_their_target_is_not():
    target = make("llama", tie_word_embeddings=False)
    heads = PredictionHeads.from_lm_head(target.lm_head.weight, 3, 1)
    size = heads_size(heads, model_size(target), 64)
    count = sum(p.numel() for p in heads.parameters())
    assert (size.trained, size.weights) == (count, 4 * count)
    demand = Demand(size, model_size(target), True, 3, block_tokens=64, micro_batch=2, global_batch=4)
    assert part(demand, "gradients") == 4 * count
    assert part(demand, "target") == sum(p.numel() * 4 for p in target.parameters())
    assert part(demand, "target while it runs")


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/job", ("job/memory.max", "job/memory.current")),
        ("0::/elsewhere", ("memory.max", "memory.current")),  # inside a container
        ("7:memory:/job", ("memory/job/memory.limit_in_bytes", "memory/job/memory.usage_in_bytes")),
    ],
)
def test_limits_of_control_groups_of_both_versions_count(
    line: str, files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own"
    own.write_text(f"9:cpuset:/job\n{line}\n")
    monkeypatch.setattr(probe, "_OWN_CGROUPS", own)
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path)
    assert probe.free_bytes(torch.device("cpu"))[1] == "available on this machine"
    for name, size in zip(files, (5000, 2000), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{size}\n")
    assert probe.free_bytes(torch.device("cpu")) == (3000, "left by the control group")
