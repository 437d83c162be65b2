"""Joint training of a target and its heads (Medusa-2): stages, losses and checkpoints."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.config import Medusa2
from draftsmith.train.loop.fit import fit
from draftsmith.train.tasks.heads import HeadsModule
from draftsmith.train.tasks.medusa2 import Medusa2Module, Medusa2Task
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

HEADS = 2
SETTINGS = Medusa2(heads_only=0.5, warmup=0.25, heads_weight=0.2, rate=0.5)


def make_task(worker: ModuleType, medusa2: Medusa2 = SETTINGS, trained: bool = False) -> Medusa2Task:
    torch.manual_seed(3)
    target = worker.make_model()
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), HEADS, 1)
    get_peft_model(target, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    if trained:
        with torch.no_grad():
            for parameter in [*heads.parameters(), *(p for p in target.parameters() if p.requires_grad)]:
                parameter.normal_(0.0, 0.2)
    return Medusa2Task(target, heads, worker.make_data(4, seed=1), medusa2)


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT


def adapters(task: Medusa2Task) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in task.target.named_parameters() if "lora_" in name}


def test_the_weight_of_the_heads_loss_follows_its_schedule():
    parts = [SETTINGS.heads_loss_weight(progress) for progress in (0.0, 0.49, 0.5, 0.625, 0.75, 1.0)]
    assert parts == pytest.approx([1, 1, 0, 0.2 * math.sin(math.pi / 4), 0.2, 0.2])
    assert Medusa2(heads_only=0, warmup=0).heads_loss_weight(0) == 0.2


def test_the_loss_is_the_sum_of_heads_labels_and_divergence(worker: ModuleType):
    """The target's loss is the cross-entropy with adapters plus the divergence from the original model."""
    task = make_task(worker, trained=True)
    module = task.module.eval()
    assert isinstance(module, Medusa2Module)
    batch = worker.make_data(3).batch(range(3))
    task.begin(9, 10)
    sums, counts = module(*tensors(batch))
    assert counts.tolist() == task.count(batch).tolist()
    assert len(sums) == HEADS + 1

    original = worker.make_model().eval()
    now = HeadsModule(task.target, module.heads, module.head_weights, {"cross-entropy": 1.0})
    heads_sums, _ = now(*tensors(batch))
    torch.testing.assert_close(sums[:HEADS], 0.2 * heads_sums)
    expected = 0.0
    for row in range(3):
        for number in set(batch.documents_BT[row].tolist()) - {-1}:
            inside = batch.documents_BT[row] == number
            tokens, labels = batch.tokens_BT[row][inside][None], batch.labels_BT[row][inside]
            log_q = task.target(tokens).logits[0, :-1].log_softmax(-1)
            log_p = original(tokens).logits[0, :-1].log_softmax(-1)
            for position in (labels[1:] != -100).nonzero()[:, 0].tolist():
                expected -= float(log_q[position, labels[position + 1]])
                expected += float((log_p[position].exp() * (log_p[position] - log_q[position])).sum())
    assert float(sums[HEADS]) == pytest.approx(expected, rel=1e-4)
    sums.sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for name, p in task.target.named_parameters() if "lora_" in name)  # type: ignore[union-attr]


def test_the_target_is_unchanged_in_the_first_stage(worker: ModuleType, tmp_path: Path):
    task = make_task(worker)
    before = adapters(task)
    batch = worker.make_data(3).batch(range(3))
    task.begin(0, 10)
    task.module.train()
    sums, _ = task.module(*tensors(batch))
    frozen = HeadsModule(worker.make_model().eval(), task.module.heads, [1.0] * HEADS, {"cross-entropy": 1.0})  # type: ignore[arg-type]
    torch.testing.assert_close(sums[:HEADS], frozen(*tensors(batch))[0])
    assert float(sums[HEADS]) == 0
    sums.sum().backward()
    assert all(float(p.grad.abs().sum()) == 0 for name, p in task.target.named_parameters() if "lora_" in name)  # type: ignore[union-attr]
    task.module.zero_grad()
    fit(task, worker.make_data(), worker.make_config(steps=5, save_every=5), tmp_path / "a")
    assert any(not torch.equal(before[name], value) for name, value in adapters(task).items())
    alone = make_task(worker, Medusa2(heads_only=0.99, warmup=0))
    fit(alone, worker.make_data(), worker.make_config(steps=5, save_every=5), tmp_path / "b")
    assert all(torch.equal(before[name], value) for name, value in adapters(alone).items())


def test_checkpoints_contain_heads_and_adapters(worker: ModuleType, tmp_path: Path):
    task = make_task(worker)
    fit(task, worker.make_data(), worker.make_config(steps=2, save_every=2), tmp_path)
    with safe_open(tmp_path / "checkpoints" / "step-000002" / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    assert all(name.startswith("heads.") or "lora_" in name for name in names)
    assert sum("lora_" in name for name in names) == len(adapters(task))
    again = make_task(worker)
    result = fit(again, worker.make_data(), worker.make_config(steps=2, save_every=2), tmp_path)
    assert result.resumed_from == 2
    assert all(torch.equal(adapters(task)[name], value) for name, value in adapters(again).items())


def test_the_target_has_its_own_learning_rate(worker: ModuleType):
    from draftsmith.train.loop.optimizer import make_optimizer

    task = make_task(worker)
    optimizer = make_optimizer(task.module, worker.make_config())
    names = {id(p): group["rate_group"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in task.module.named_parameters():
        if parameter.requires_grad:
            assert names[id(parameter)] == ("base" if "lora_" in name else ""), name
    assert len(names) == sum(p.requires_grad for p in task.module.parameters())
    rates = []
    for step in (0, 49, 50, 60, 75, 99):
        task.begin(step, 100)
        rates.append(task.module.rate("base"))  # type: ignore[operator]
    assert rates == pytest.approx([0, 0, 0, 0.5 * 10 / 25, 0.5, 0.5])


def test_recomputed_activations_give_the_same_gradients(worker: ModuleType):
    batch = worker.make_data(3).batch(range(3))
    gradients = []
    for recomputed in (False, True):
        task = make_task(worker, trained=True)
        if recomputed:
            task.module.gradient_checkpointing_enable()  # type: ignore[operator]
        task.begin(9, 10)
        task.module.train()
        torch.manual_seed(0)
        task.module(*tensors(batch))[0].sum().backward()
        gradients.append([p.grad for p in task.module.parameters() if p.requires_grad])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
