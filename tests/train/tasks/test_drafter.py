"""A drafter's loss sees each document by itself, whatever the architecture, and a teacher where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.forward.packed import PackedForward, has_plain_head
from draftsmith.train.loop.fit import fit
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.teachers.teacher import ModelTeacher

COMMON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = COMMON | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": LLAMA | {"max_position_embeddings": 64},
    "Mistral": LLAMA | {"sliding_window": 5},  # shorter than the blocks
    "Qwen2": LLAMA,
    "Gemma2": LLAMA | {"sliding_window": 5, "final_logit_softcapping": 3.0},
    "OPT": COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "GPTNeoX": COMMON | {"intermediate_size": 24, "max_position_embeddings": 64},
    "GPT2": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "Phi": LLAMA | {"num_key_value_heads": 2},  # its output projection has a bias
    "Cohere": LLAMA | {"logit_scale": 0.3},
}
PLAIN = {"Llama", "Mistral", "Qwen2", "OPT", "GPTNeoX", "GPT2"}


def build(family: str, attention: str = "sdpa", seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | FAMILIES[family] | overrides
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def documents_alone(model: Any, batch: Batch) -> list[tuple[int, torch.Tensor, list[int]]]:
    """Row, logits [T, V] and labels of every document, from a forward of that document by itself."""
    found = []
    for row in range(batch.tokens_BT.shape[0]):
        for number in batch.documents_BT[row].unique().tolist():
            inside = batch.documents_BT[row] == number
            if number >= 0:
                logits = model(batch.tokens_BT[row][inside][None]).logits[0]
                found.append((row, logits, batch.labels_BT[row][inside].tolist()))
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(worker: ModuleType, family: str, attention: str):
    if family == "Gemma2" and attention == "sdpa":
        pytest.skip("Gemma 2's capped attention has no sdpa kernel")
    model = build(family, attention)
    batch = worker.make_data(3, length=24).batch(range(3))
    assert has_plain_head(model) == (family in PLAIN)
    task = DrafterTask(model, None)
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = 0.0, 0
    with torch.no_grad():
        for _, logits_TV, labels in documents_alone(model, batch):
            for place, label in enumerate(labels[1:]):
                if label != -100:
                    expected -= float(logits_TV[place].log_softmax(-1)[label])
                    items += 1
    assert int(count) == items == int(task.count(batch))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", ["Llama", "Phi"])
def test_distillation_uses_the_teacher_without_training_it(worker: ModuleType, family: str):
    drafter, teacher = build("Llama"), build(family, seed=5, num_hidden_layers=3)
    objective = {"forward-kl": 0.7, "total-variation": 0.3}
    task = DrafterTask(drafter, worker.make_data(4), objective, ModelTeacher(teacher))
    batch = worker.make_data(3).batch(range(3))
    loss, _ = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected = 0.0
    with torch.no_grad():
        pairs = zip(documents_alone(drafter, batch), documents_alone(teacher, batch), strict=True)
        for (_, mine, labels), (_, theirs, _) in pairs:
            p, q = theirs.softmax(-1), mine.softmax(-1)
            for place, label in enumerate(labels[1:]):
                if label != -100:
                    kl = (p[place] * (p[place].log() - q[place].log())).sum()
                    expected += float(0.7 * kl + 0.3 * (1 - torch.minimum(p[place], q[place]).sum()))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any("teacher" in name for name, _ in task.module.named_parameters())
    assert len(task.module.state_dict()) == len(drafter.state_dict())


def test_evaluation_measures_loss_overlap_and_what_it_is_given(worker: ModuleType):
    drafter = build("Llama")
    seen: list[Any] = []

    def measure(model: Any) -> dict[str, float]:
        seen.append(model)
        return {"tokens_per_step": 2.1}

    data = worker.make_data(5)
    # one that equals it
    task = DrafterTask(drafter, data, eval_teacher=ModelTeacher(build("Llama")), evaluate_fn=measure)
    metrics = task.evaluate(task.module)
    assert seen == [drafter]
    assert metrics["overlap"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["top1_agreement"] == metrics["top5_agreement"] == 1.0
    assert 0 < metrics["top1_accuracy"] < metrics["top5_accuracy"] < 1
    assert metrics["tokens_per_step"] == 2.1
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["heldout_loss"]))
    batch = data.batch(range(5))
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    assert metrics["heldout_loss"] == pytest.approx(float(loss.detach()) / int(count), rel=1e-5)


def test_weights_follow_the_run(worker: ModuleType, tmp_path: Path, logged: Callable[..., list[Any]]):
    """Cross entropy fades out over the first half; the steps' losses are those of the weights at that moment."""
    teacher = ModelTeacher(worker.make_model(2))
    objective = {"cross-entropy": [1.0, 0.0, 0.5], "total-variation": [0.0, 1.0]}
    config = worker.make_config(steps=4, learning_rate=1e-12, warmup=0.0)
    model = worker.make_model(attention_dropout=0.0)
    fit(DrafterTask(model, None, objective, teacher), worker.make_data(), config, tmp_path / "both")
    parts = {}
    for name in ("cross-entropy", "total-variation"):
        fit(DrafterTask(model, None, {name: 1.0}, teacher), worker.make_data(), config, tmp_path / name)
        parts[name] = logged(tmp_path / name)
    for step, (weight_ce, weight_tv) in enumerate([(1.0, 0.0), (0.5, 0.25), (0.0, 0.5), (0.0, 0.75)]):
        expected = weight_ce * parts["cross-entropy"][step] + weight_tv * parts["total-variation"][step]
        assert logged(tmp_path / "both")[step] == pytest.approx(expected, rel=1e-5)


def test_flops_are_those_of_torchs_counter(worker: ModuleType):
    """Forward and backward of every weight matrix, the projection where there is something to predict."""
    from torch.utils.flop_counter import FlopCounterMode

    model = worker.make_model(attention_dropout=0.0)
    task = DrafterTask(model, None)
    tokens_BT = worker.make_data(4).batch(range(4)).tokens_BT
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT).logits.sum().backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(value for operation, value in found.items() if "attention" not in str(operation))
    assert task.flops(tokens_BT.numel(), tokens_BT.numel()) == products
    assert task.flops(tokens_BT.numel(), 0) == products - 6 * tokens_BT.numel() * model.lm_head.weight.numel()


def test_bf16_training_measures_the_weights_as_they_are(worker: ModuleType, tmp_path: Path):
    """Decoding for a measurement, and the teacher, run in their own types: autocast is for what is trained."""
    seen: list[bool] = []

    def measure(model: Any) -> dict[str, float]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return {"dtype_bits": float(torch.finfo(model(torch.tensor([[1, 2]])).logits.dtype).bits)}

    teacher = ModelTeacher(worker.make_model(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = teacher(worker.make_data(2).batch(range(2)))
    assert states.hidden_XE.dtype == torch.float32
    task = DrafterTask(worker.make_model(), None, {"forward-kl": 1.0}, teacher, evaluate_fn=measure)
    result = fit(task, worker.make_data(), worker.make_config(steps=2, precision="bf16"), tmp_path)
    assert seen == [False]
    assert result.metrics == {"dtype_bits": 32.0}


@pytest.mark.parametrize("family", ["OPT", "GPT2"])
def test_blocks_may_be_longer_than_learned_positions_but_documents_not(worker: ModuleType, family: str):
    """Blocks of 16, documents of at most 8, or of one and much padding; eight learned positions."""
    limit = {"max_position_embeddings": 8} if family == "OPT" else {"n_positions": 8}
    model = build(family, **limit)
    rows = torch.arange(32).reshape(2, 16) % 32
    documents = torch.tensor([[0] * 7 + [1] * 8 + [-1], [2] * 6 + [-1] * 10])
    positions = torch.tensor([[*range(7), *range(8), 0], [*range(6), *range(10)]])
    labels = torch.where(documents >= 0, rows, -100)
    for chosen in ([0, 1], [1]):  # with a mask, and with one document a row
        batch = Batch(rows, labels, positions, documents).rows(np.array(chosen))
        found = PackedForward(model)(batch)
        assert found.isfinite().all()
        for row, logits, _ in documents_alone(model, batch):
            head = model.get_output_embeddings()
            inside = batch.documents_BT[row]
            number = next(n for n in inside.unique().tolist() if n >= 0 and int((inside == n).sum()) == len(logits))
            torch.testing.assert_close(head(found[row][inside == number]), logits, atol=1e-4, rtol=1e-4)
    too_long = Batch(rows[:1], rows[:1], torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"a document has 16 tokens, and .* 8 positions"):
        PackedForward(model)(too_long)
