"""Losses with a draft vocabulary."""

import pytest
import torch
from draftsmith.train.losses.chunks import IGNORED, DenseTeacher, SparseTeacher
from draftsmith.train.losses.drafter import agreement, mixture, narrow_vocabulary
from draftsmith.train.losses.objectives import OBJECTIVES


@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("whole_logits", [False, True])
def test_a_draft_vocabulary_equals_a_smaller_vocabulary(objective: str, whole_logits: bool) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 2, 3, 7, 8, 11])
    hidden_XD, weight_VD = torch.randn(9, 5), torch.randn(12, 5, requires_grad=True)
    teacher_XE, teacher_VE = torch.randn(9, 4), torch.randn(12, 4)
    labels_X = torch.tensor([2, 1, 11, IGNORED, 8, 5, 0, 3, 7])
    teacher = DenseTeacher(teacher_XE @ teacher_VE.T) if whole_logits else DenseTeacher(teacher_XE, teacher_VE)
    output = (hidden_XD @ weight_VD.T, None) if whole_logits else (hidden_XD, weight_VD)
    loss, count = mixture({objective: 1.0}, *(narrow_vocabulary(ids, *output, labels_X, teacher)))
    grad_VD = torch.autograd.grad(loss, weight_VD)[0]

    small_RD = weight_VD.detach()[ids].requires_grad_()
    own_X = torch.tensor([1, IGNORED, 5, IGNORED, 4, IGNORED, 0, 2, 3])
    expected, same = mixture({objective: 1.0}, hidden_XD, small_RD, own_X, DenseTeacher(teacher_XE, teacher_VE[ids]))
    assert count == same == 6
    torch.testing.assert_close(loss, expected)
    expected_VD = torch.zeros(12, 5).index_copy(0, ids, torch.autograd.grad(expected, small_RD)[0])
    torch.testing.assert_close(grad_VD, expected_VD)

    p_XV = (teacher_XE @ teacher_VE.T).softmax(1)
    q_XV = torch.zeros(9, 12).index_copy(1, ids, (hidden_XD @ weight_VD.detach()[ids].T).softmax(1))
    supervised = labels_X != IGNORED
    hits = agreement(output[0].detach(), None if whole_logits else weight_VD.detach(), teacher, labels_X, proposed=ids)
    torch.testing.assert_close(hits.overlap, torch.minimum(p_XV, q_XV)[supervised].sum())
    assert hits.top1 == (p_XV.argmax(1) == q_XV.argmax(1))[supervised].sum()


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_draft_vocabulary_learns_from_a_teachers_top_k(objective: str) -> None:
    """The remaining probability is spread evenly over the draft tokens outside the teacher's top k."""
    torch.manual_seed(0)
    ids = torch.tensor([0, 2, 3, 5, 7, 8, 11])
    hidden_XD, weight_VD = torch.randn(30, 5), torch.randn(12, 5, requires_grad=True)
    p_XV = torch.randn(30, 12).softmax(1)
    labels_X = ids[torch.randint(len(ids), (30,))]
    top_XK, ids_XK = p_XV.topk(7)
    teacher = SparseTeacher(ids_XK, top_XK.log())
    loss, count = mixture({objective: 1.0}, *narrow_vocabulary(ids, hidden_XD, weight_VD, labels_X, teacher))
    grad_VD = torch.autograd.grad(loss, weight_VD)[0]

    named_XR = torch.zeros(30, 12).scatter(1, ids_XK, 1.0)[:, ids].bool()
    assert set(named_XR.sum(1).tolist()) >= {3, 4, 5}  # 2 to 4 tokens of a position are replaced
    rest_X1 = 1 - top_XK.sum(1, keepdim=True)
    p_XR = torch.where(named_XR, p_XV[:, ids], rest_X1 / (~named_XR).sum(1, keepdim=True))
    small_RD = weight_VD.detach()[ids].requires_grad_()
    whole = DenseTeacher((p_XR / p_XR.sum(1, keepdim=True)).log())
    expected, _ = mixture({objective: 1.0}, hidden_XD, small_RD, torch.searchsorted(ids, labels_X), whole)
    assert count == 30
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected_VD = torch.zeros(12, 5).index_copy(0, ids, torch.autograd.grad(expected, small_RD)[0])
    torch.testing.assert_close(grad_VD, expected_VD, rtol=1e-4, atol=1e-5)
