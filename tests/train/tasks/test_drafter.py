"""Training of drafters on labels and teachers."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import fit
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.teachers.teacher import ModelTeacher


def sharp(worker: ModuleType, seed: int = 0, **overrides: Any) -> Any:
    return worker.make_model(seed, attention_dropout=0.0, initializer_range=0.3, **overrides).eval()


def test_distillation_uses_the_teacher_without_training_it(worker: ModuleType):
    drafter, teacher = sharp(worker), sharp(worker, seed=5, num_hidden_layers=3)
    objective = {"forward-kl": 0.7, "total-variation": 0.3}
    task = DrafterTask(drafter, worker.make_data(4), objective, ModelTeacher(teacher))
    batch = worker.make_data(3).batch(range(3))
    loss, _ = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected = 0.0
    with torch.no_grad():
        for row in range(3):
            for number in set(batch.documents_BT[row].tolist()) - {-1}:
                inside = batch.documents_BT[row] == number
                tokens, labels = batch.tokens_BT[row][inside][None], batch.labels_BT[row][inside][1:]
                p, q = (model(tokens).logits[0, :-1][labels != -100].softmax(-1) for model in (teacher, drafter))
                expected += float(0.7 * (p * (p.log() - q.log())).sum() + 0.3 * (1 - torch.minimum(p, q).sum(-1)).sum())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any("teacher" in name for name, _ in task.module.named_parameters())
    assert len(task.module.state_dict()) == len(drafter.state_dict())


def test_evaluation_measures_loss_overlap_and_given_metrics(worker: ModuleType):
    drafter = sharp(worker)
    models: list[Any] = []

    def measure(model: Any) -> dict[str, float]:
        models.append(model)
        return {"tokens_per_step": 2.1}

    data = worker.make_data(5)
    # the teacher equals the drafter
    task = DrafterTask(drafter, data, eval_teacher=ModelTeacher(sharp(worker)), evaluate_fn=measure)
    metrics = task.evaluate(task.module)
    assert models == [drafter]
    assert metrics["overlap"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["top1_agreement"] == metrics["top5_agreement"] == 1.0
    assert 0 < metrics["top1_accuracy"] < metrics["top5_accuracy"] < 1
    assert metrics["tokens_per_step"] == 2.1
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["heldout_loss"]))
    batch = data.batch(range(5))
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    assert metrics["heldout_loss"] == pytest.approx(float(loss.detach()) / int(count), rel=1e-5)


def test_objective_weights_follow_their_schedule(worker: ModuleType, tmp_path: Path, logged: Callable[..., list[Any]]):
    """The weight of cross-entropy decreases to 0 over the first half of the run."""
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


def test_evaluations_of_bf16_training_run_without_autocast(worker: ModuleType, tmp_path: Path):
    autocast_states: list[bool] = []

    def measure(model: Any) -> dict[str, float]:
        autocast_states.append(torch.is_autocast_enabled("cpu"))
        return {"dtype_bits": float(torch.finfo(model(torch.tensor([[1, 2]])).logits.dtype).bits)}

    teacher = ModelTeacher(worker.make_model(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = teacher(worker.make_data(2).batch(range(2)))
    assert states.hidden_XE.dtype == torch.float32
    task = DrafterTask(worker.make_model(), None, {"forward-kl": 1.0}, teacher, evaluate_fn=measure)
    result = fit(task, worker.make_data(), worker.make_config(steps=2, precision="bf16"), tmp_path)
    assert autocast_states == [False]
    assert result.metrics == {"dtype_bits": 32.0}
