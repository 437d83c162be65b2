"""A training step on a simulated CUDA device uses no tensors on the CPU and rarely synchronises.

The host waits only for the indices of rows with labels, since losses of other rows are not computed.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.teachers.teacher import ModelTeacher
from helpers.pretend_device import PretendCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
BLOCKS = 4
ABOUT_ROWS = {"train/forward/packed.py", "train/losses/chunks.py", "train/tasks/heads.py"}


def drafter(worker: ModuleType, objective: str) -> Any:
    teacher = None if objective == "cross-entropy" else ModelTeacher(worker.make_model(5, attention_dropout=0.0).eval())
    model = worker.make_model(attention_dropout=0.0)
    return DrafterTask(model, worker.make_data(BLOCKS), {objective: 1.0}, teacher)


def heads(worker: ModuleType, objective: str, projection: str) -> Any:
    target = worker.make_model(attention_dropout=0.0)
    weight = target.requires_grad_(False).lm_head.weight
    trained_heads = PredictionHeads.from_lm_head(weight, 2, 1, projection=projection)
    return HeadsTask(target, trained_heads, worker.make_data(BLOCKS), (1.0, 0.8), objective={objective: 1.0})


TASKS: dict[str, Callable[[ModuleType], Any]] = {
    "drafter, labels": lambda worker: drafter(worker, "cross-entropy"),
    "drafter, teacher": lambda worker: drafter(worker, "lk-lambda"),
    "heads, labels": lambda worker: heads(worker, "cross-entropy", "own"),
    "heads, target": lambda worker: heads(worker, "forward-kl", "target"),
}


def step(task: Any, batch: Any, device: str) -> tuple[float, list[torch.Tensor]]:
    """Take a training step; return the loss and the trained weights."""
    task.move_to(device)
    task.module.to(device)
    weights = [weight for weight in task.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    losses, _ = task.module(*batch.to(device))
    losses.sum().backward()
    optimizer.step()
    return losses.detach().sum(), weights


@pytest.mark.parametrize("kind", TASKS)
def test_a_step_on_a_device(worker: ModuleType, kind: str) -> None:
    batch = worker.make_data().batch(range(BLOCKS))
    expected, after = step(TASKS[kind](worker), batch, "cpu")
    with PretendCuda() as cuda:
        loss, weights = step(TASKS[kind](worker), batch, "cuda")
        assert all(weight.is_cuda and weight.grad is not None for weight in weights)
        waits = [event.place.partition(":")[0] for event in cuda.syncs if event.kind != "send"]
        assert set(waits) <= ABOUT_ROWS
        assert len(waits) <= 9
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        pairs = [(old, new.cpu()) for old, new in zip(after, weights, strict=True)]
    assert all(torch.allclose(old, new, rtol=1e-3, atol=1e-4) for old, new in pairs)
