"""PARD: mask tokens of packed blocks have the context of parallel drafting and learn the target's distributions."""

from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.data.blocks.packing import IGNORED, PADDING
from draftsmith.train.config import Parallel
from draftsmith.train.forward.packed import make_forward
from draftsmith.train.losses.drafter import shifted_labels
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.parallel import ExtendedBatch, append_mask_tokens
from draftsmith.train.teachers.teacher import ModelTeacher

LENGTH = 40
PARALLEL = Parallel(token=3, tokens=4, keep_share=0.6, min_share=0.1)


def sharp(worker: ModuleType, seed: int = 0, **overrides: Any) -> Any:
    return worker.make_model(seed, attention_dropout=0.0, initializer_range=0.3, **overrides).eval()


def chains(longer: ExtendedBatch, length: int, row: int) -> list[tuple[int, int, int]]:
    """Return, for each mask token in a row, its position, the end of its prefix and its distance from that end."""
    results = []
    visible_LL = longer.batch.visible_BTT[row]
    for position in range(length, visible_LL.shape[1]):
        if longer.batch.documents_BT[row, position] != PADDING:
            end = int(visible_LL[position, :length].nonzero().max())
            results.append((position, end, int(visible_LL[position, length:].sum())))
    return results


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mask_tokens_have_the_states_of_separate_texts(worker: ModuleType, attention: str) -> None:
    model = sharp(worker, attn_implementation=attention)
    forward, batch = make_forward(model), worker.make_data(4, LENGTH).batch(range(3))
    longer, length = append_mask_tokens(batch, PARALLEL, 0.25), batch.tokens_BT.shape[1]
    actual_BLD, text_BTD = forward(longer.batch), forward(batch)
    inside_BT = batch.documents_BT != PADDING
    assert (actual_BLD[:, :length] - text_BTD)[inside_BT].abs().max() < 1e-4
    count = 0
    for row in range(3):
        for position, end, number in chains(longer, length, row):
            document = batch.documents_BT[row] == batch.documents_BT[row, end]
            text = batch.tokens_BT[row][document & (torch.arange(length) <= end)]
            alone = torch.cat((text, torch.full((number,), PARALLEL.token)))
            expected_D = model.base_model(alone[None], use_cache=False).last_hidden_state[0, -1]
            assert (actual_BLD[row, position] - expected_D).abs().max() < 1e-4
            count += 1
    assert count > 30


def test_mask_tokens_learn_the_targets_distributions(worker: ModuleType) -> None:
    """The loss is the mean over all positions, including mask tokens, times the number of supervised tokens."""
    drafter, target = sharp(worker), sharp(worker, seed=5, num_hidden_layers=3)
    task = DrafterTask(
        drafter, worker.make_data(4, LENGTH), {"forward-kl": 1.0}, ModelTeacher(target), parallel=PARALLEL
    )
    batch = worker.make_data(4, LENGTH).batch(range(3))
    length = batch.tokens_BT.shape[1]
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    labels_BT = shifted_labels(batch.labels_BT, batch.documents_BT, 1)
    longer = append_mask_tokens(batch, PARALLEL, 0.0)
    spoken_BL = longer.labels_X.view(3, -1)
    with torch.no_grad():
        p_BTV = (make_forward(target)(batch) @ target.get_output_embeddings().weight.T).softmax(-1)
        q_BLV = (make_forward(drafter)(longer.batch) @ drafter.get_output_embeddings().weight.T).softmax(-1)
    sums, labels = 0.0, 0
    for row in range(3):
        places = [(position, position) for position in range(length)]
        places += [(position, end + number) for position, end, number in chains(longer, length, row)]
        for position, teaches in places:
            label = int(spoken_BL[row, position])
            assert position >= length or label == int(labels_BT[row, teaches])
            if label != IGNORED:
                assert label == int(batch.tokens_BT[row, teaches + 1])
                p, q = p_BTV[row, teaches], q_BLV[row, position]
                sums, labels = sums + float((p * (p.log() - q.log())).sum()), labels + 1
    assert int(count) == int((labels_BT != IGNORED).sum()) < labels
    assert float(loss.detach()) == pytest.approx(sums / labels * int(count), rel=1e-4)
    loss.backward()


def test_shares_of_mask_tokens_decrease_and_do_not_depend_on_the_batch(worker: ModuleType) -> None:
    data = worker.make_data(40, LENGTH)
    joint = data.batch(range(data.blocks))
    length = joint.tokens_BT.shape[1]
    longer, later = (append_mask_tokens(joint, PARALLEL, progress) for progress in (0.5, 0.75))
    labels_BT = shifted_labels(joint.labels_BT, joint.documents_BT, 1)
    spoken_BL, counts = longer.labels_X.view(data.blocks, -1), [0] * PARALLEL.tokens
    for row in range(data.blocks):
        joint_chains = chains(longer, length, row)
        one = data.batch([row])
        separate_chains = chains(append_mask_tokens(one, PARALLEL, 0.5), one.tokens_BT.shape[1], 0)
        assert {each[1:] for each in joint_chains} == {each[1:] for each in separate_chains}
        assert {each[1:] for each in joint_chains} != {each[1:] for each in chains(later, length, row)}
        for position, _, number in joint_chains:
            counts[number] += int(spoken_BL[row, position]) != IGNORED
    for number, share in enumerate(PARALLEL.shares(), 1):
        same_BP = joint.documents_BT[:, number:] == joint.documents_BT[:, :-number]
        could = int((same_BP & (labels_BT[:, number:] != IGNORED)).sum())
        assert could > 400
        assert abs(counts[number] / could - share) < 0.1
