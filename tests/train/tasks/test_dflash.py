"""Training of DFlash drafters."""

from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.dflash import DFlashHeads
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.tasks.dflash import DFlashModule, DFlashTask, dynamic_weights

SLOTS, EVERY = 3, 1_000


def task_of(worker: ModuleType, anchors: int, objective: str = "cross-entropy", dynamic: bool = False) -> DFlashTask:
    target: Any = worker.make_model()
    torch.manual_seed(0)
    heads = DFlashHeads.for_target(target.config, worker.VOCAB - 1, SLOTS + 1, num_layers=2, layers=[1])
    heads.attach(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    weights = [1.0] * SLOTS if dynamic else [1.0, 0.5, 0.25]
    return DFlashTask(target, heads, None, weights, {objective: 1.0}, anchors=anchors, dynamic=dynamic)


def module_of(task: DFlashTask) -> DFlashModule:
    assert isinstance(task.module, DFlashModule)
    return task.module


def plain_losses(task: DFlashTask, batch: Batch, objective: str) -> list[tuple[int, int, dict[int, torch.Tensor]]]:
    """Return the row, the anchor's position and the losses by slot of all blocks, each from its document alone."""
    heads, blocks = module_of(task).heads, []
    for row, documents_T in enumerate(batch.documents_BT):
        for number in set(documents_T.tolist()) - {-1}:
            places = (documents_T == number).nonzero()[:, 0]
            tokens_1T, labels = batch.tokens_BT[row, places][None], batch.labels_BT[row, places].tolist()
            with torch.no_grad():
                output = task.target(tokens_1T, output_hidden_states=True)
            log_p_TV, length = output.logits[0].log_softmax(-1), len(places)
            aux_1TG = torch.cat([output.hidden_states[layer] for layer in heads.layers], -1)
            for anchor in range(1, length):
                block_1S = torch.tensor([[int(tokens_1T[0, anchor]), *[heads.mask] * SLOTS]])
                embedded_1SD = torch.nn.functional.embedding(block_1S, heads.embedding)
                spans = (torch.arange(anchor, anchor + SLOTS + 1)[None], torch.arange(anchor)[None])
                hidden_1SD = heads.through_layers(embedded_1SD, heads.context(aux_1TG[:, :anchor]), *spans, None)
                log_q_SV = (hidden_1SD[0] @ heads.projection().T).log_softmax(-1)
                losses = {}
                for slot in range(1, SLOTS + 1):
                    if anchor + slot < length and labels[anchor + slot] >= 0:
                        log_q_V, log_p_V = log_q_SV[slot], log_p_TV[anchor + slot - 1]
                        divergence = (log_p_V.exp() * (log_p_V - log_q_V)).sum()
                        is_text = objective == "cross-entropy"
                        losses[slot] = -log_q_V[labels[anchor + slot]] if is_text else divergence
                blocks.append((row, int(places[anchor]), losses))
    return blocks


@pytest.mark.parametrize("objective", ["cross-entropy", "forward-kl"])
def test_blocks_are_trained_independently(worker: ModuleType, objective: str) -> None:
    """Slot j of a block learns token j after its anchor, or the target's distribution of this token."""
    task, batch = task_of(worker, EVERY, objective), worker.make_data(9).batch(range(9))
    sums_K, counts_K = task.module(*batch)
    blocks = plain_losses(task, batch, objective)
    for slot in range(1, SLOTS + 1):
        losses = [losses[slot] for _, _, losses in blocks if slot in losses]
        assert int(counts_K[slot - 1]) == len(losses) > 10
        assert torch.allclose(sums_K[slot - 1], 0.5 ** (slot - 1) * sum(losses), rtol=1e-4)


def test_anchors_of_a_row_do_not_depend_on_other_rows(worker: ModuleType) -> None:
    task, batch = task_of(worker, 4), worker.make_data(3).batch(range(3))
    sums_K, counts_K = task.module(*batch)
    assert torch.equal(task.count(batch), counts_K)
    rows = [task.module(*(each[row, None] for each in batch)) for row in range(3)]
    assert torch.equal(sum(counts for _, counts in rows), counts_K)
    assert torch.allclose(sum(sums for sums, _ in rows), sums_K, rtol=1e-5)
    module = module_of(task)
    chosen_BT = (module.labels(batch) >= 0).any(-1)
    assert chosen_BT.sum(1).tolist() == [4, 4, 4]
    module.progress = 0.5
    assert not torch.equal((module.labels(batch) >= 0).any(-1), chosen_BT), "each step draws other anchors"
    module.eval()
    held_out_BT = (module.labels(batch) >= 0).any(-1)
    module.progress = 0.75
    assert torch.equal((module.labels(batch) >= 0).any(-1), held_out_BT), "evaluations draw the same anchors"


def test_slots_with_a_loss_of_zero_are_weighted() -> None:
    """A loss of 0 is a certain prediction, not a slot without a label."""
    losses_1K = torch.tensor([[0.5, 0.0, 0.0]])
    all_1K, last_1K = torch.tensor([[True, True, True]]), torch.tensor([[True, True, False]])
    reached = 0.5 + 0.5 * float(torch.tensor(-0.5).exp())
    assert dynamic_weights(losses_1K, all_1K)[0].tolist() == pytest.approx([3 * reached, 2 * reached, reached])
    assert dynamic_weights(losses_1K, last_1K)[0].tolist() == pytest.approx([2 * reached, reached, 0.0])


def test_dynamic_weights_equal_their_formula(worker: ModuleType) -> None:
    """Losses and gradients are those of Σ_j w_j · CE_j with constant weights w_j = Σ_{m≥j} Π_{i≤m} (1 + q_i) / 2."""
    task, batch = task_of(worker, EVERY, dynamic=True), worker.make_data(3).batch(range(3))
    sums_K, _ = task.module(*batch)
    sums_K.sum().backward()
    gradient = module_of(task).heads.fc.weight.grad
    assert gradient is not None
    total = torch.zeros(())
    for _, _, losses in plain_losses(task, batch, "cross-entropy"):
        confidence = {slot: (1 + float((-loss.detach()).exp())) / 2 for slot, loss in losses.items()}
        for slot, loss in losses.items():
            weight = 0.0
            for last in range(slot, SLOTS + 1):
                product = 1.0
                for each in range(1, last + 1):
                    product *= confidence.get(each, 1.0)
                weight += product * (last in losses)
            total = total + weight * loss
    module_of(task).heads.fc.weight.grad = None
    total.backward()
    expected = module_of(task).heads.fc.weight.grad
    assert expected is not None
    assert torch.allclose(sums_K.sum(), total, rtol=1e-4)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-5)
