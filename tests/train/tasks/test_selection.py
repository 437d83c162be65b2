"""AdaSPEC: what is learned are the positions where the reference is most ahead, and no others."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.data.blocks.packing import IGNORED
from draftsmith.decode.models.draft_vocabulary import keep_tokens
from draftsmith.train.forward.packed import make_forward
from draftsmith.train.losses.chunks import SparseTeacher
from draftsmith.train.losses.drafter import divergences, shifted_labels
from draftsmith.train.losses.objectives import forward_kl_chunk
from draftsmith.train.tasks.drafter import DrafterTask, Selection
from draftsmith.train.teachers.teacher import ModelTeacher


def sharp(worker: ModuleType, seed: int = 0, **overrides: Any) -> Any:
    return worker.make_model(seed, attention_dropout=0.0, initializer_range=0.3, **overrides).eval()


def models(worker: ModuleType, kept: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """A drafter, one that was distilled before, and the target."""
    drafter, reference = sharp(worker), sharp(worker, seed=3)
    if kept is not None:
        for model in (drafter, reference):
            keep_tokens(model, kept)
    return drafter, reference, sharp(worker, seed=5, num_hidden_layers=3)


def loss_of(task: DrafterTask, batch: Any) -> tuple[torch.Tensor, int]:
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    return loss, int(count)


@pytest.mark.parametrize("kept", [None, torch.arange(0, 32, 2)])
@pytest.mark.parametrize("share", [0.3, 0.01])
def test_the_loss_is_the_mean_over_the_positions_where_the_reference_is_most_ahead(
    worker: ModuleType, kept: torch.Tensor | None, share: float
) -> None:
    """Written out position by position; its gradient is that of these positions alone. Times all trained positions."""
    drafter, reference, target = models(worker, kept)
    selection = Selection(ModelTeacher(reference), share)
    batch = worker.make_data(4, 24).batch(range(4))
    task = DrafterTask(drafter, None, {"forward-kl": 1.0}, ModelTeacher(target), selection=selection)
    loss, count = loss_of(task, batch)
    loss.backward()
    found = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()

    logits = [
        make_forward(each)(batch) @ each.get_output_embeddings().weight.T for each in (target, drafter, reference)
    ]
    ids = torch.arange(32) if kept is None else kept
    p_BTV, q_BTV, r_BTV = (each[..., ids].log_softmax(-1) for each in logits)
    labels_BT = shifted_labels(batch.labels_BT, batch.documents_BT, 1)
    trained = [(row, at) for row, at in (labels_BT != IGNORED).nonzero().tolist() if int(labels_BT[row, at]) in ids]
    mine, ahead = [], []
    for row, at in trained:
        p = p_BTV[row, at]
        mine.append((p.exp() * (p - q_BTV[row, at])).sum())
        ahead.append(float((mine[-1] - (p.exp() * (p - r_BTV[row, at])).sum()).detach()))
    chosen = sorted(range(len(mine)), key=lambda number: -ahead[number])[: math.ceil(share * len(mine))]
    expected = torch.stack([mine[number] for number in chosen]).mean() * len(mine)
    expected.backward()
    assert count == len(mine) > 20
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    for gradient, parameter in zip(found, drafter.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert not any("reference" in name for name, _ in task.module.named_parameters())


@pytest.mark.parametrize("objective", ["lk-lambda", "forward-kl"])
def test_all_positions_are_what_distillation_has_without_it(worker: ModuleType, objective: str) -> None:
    drafter, reference, target = models(worker, None)
    batch, plain = worker.make_data(4).batch(range(3)), {objective: 1.0}
    without = loss_of(DrafterTask(drafter, None, plain, ModelTeacher(target)), batch)
    selection = Selection(ModelTeacher(reference), 1.0)
    chosen = loss_of(DrafterTask(drafter, None, plain, ModelTeacher(target), selection=selection), batch)
    assert chosen[1] == without[1]
    assert float(chosen[0].detach()) == pytest.approx(float(without[0].detach()), rel=1e-5)


def test_a_batch_without_anything_to_learn_has_no_loss(worker: ModuleType) -> None:
    drafter, reference, target = models(worker, None)
    selection, batch = Selection(ModelTeacher(reference), 0.4), worker.make_data(4).batch([0])
    task = DrafterTask(drafter, None, {"forward-kl": 1.0}, ModelTeacher(target), selection=selection)
    loss, count = loss_of(task, batch._replace(labels_BT=torch.full_like(batch.labels_BT, IGNORED)))
    assert (float(loss.detach()), count) == (0.0, 0)


def test_the_teachers_most_likely_tokens_are_compared_as_they_are_learned(worker: ModuleType) -> None:
    """`divergences` of a teacher of few tokens: those and "any other"."""
    torch.manual_seed(0)
    p_XV, z_XV = torch.randn(9, 12).softmax(1), torch.randn(9, 12)
    top_XK, ids_XK = p_XV.topk(4, dim=1)
    labels_X = torch.tensor([1, IGNORED, 3, 4, IGNORED, 0, 2, 5, 7])
    found_X = divergences(z_XV, None, labels_X, SparseTeacher(ids_XK, top_XK.log()), chunk=4)
    q_XK = z_XV.softmax(1).gather(1, ids_XK)
    events = [torch.cat((each, 1 - each.sum(1, keepdim=True)), 1).log() for each in (q_XK, top_XK)]
    expected_X = forward_kl_chunk(*events)[0].masked_fill(labels_X == IGNORED, 0)
    assert torch.allclose(found_X, expected_X, atol=1e-5)
