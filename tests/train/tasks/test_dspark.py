"""Training of DSpark drafters: the loss, its gradients, and the start of the Markov head from a table."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.checkpoints.heads.dspark import DSparkHeads, factorize
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.train.loop.fit import fit
from draftsmith.train.losses.drafter import IGNORED
from draftsmith.train.tasks.dflash import DSparkModule, DSparkTask

KINDS, RANK = 3, 8
OBJECTIVE = {"cross-entropy": 0.1, "total-variation": 1.8}


def task_of(
    worker: ModuleType, objective: dict[str, float], heldout: Any = None, proposed: int | None = None, **options: Any
) -> DSparkTask:
    target = worker.make_model(num_hidden_layers=3, attention_dropout=0.0).eval()
    draft_ids = None if proposed is None else torch.arange(0, worker.VOCAB, proposed)
    torch.manual_seed(0)
    heads = DSparkHeads.for_target(target.config, 0, KINDS, 1, [1], draft_ids, rank=RANK)
    heads.attach(target.get_input_embeddings().weight, target.get_output_embeddings().weight).begin_as(target)
    return DSparkTask(target, heads, heldout, [1.0, 0.5, 0.25], objective, anchors=4, **options)


@pytest.mark.parametrize("proposed", [None, 2])
@pytest.mark.parametrize("objective", [OBJECTIVE, {"cross-entropy": 1.0}], ids=["overlap", "text"])
def test_the_loss_and_its_gradients_are_those_of_the_formula(
    worker: ModuleType, objective: dict[str, float], proposed: int | None
) -> None:
    """The confidence learns the overlap with the target or, from text only, hits of the most likely token."""
    module, batch = task_of(worker, objective, proposed=proposed, confidence_weight=0.7).module, worker.make_data(3)
    assert isinstance(module, DSparkModule)
    batch, heads = batch.batch(range(3)), module.heads
    torch.nn.init.normal_(heads.markov_head.markov_w1.weight)
    sums_K, _ = module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    (sums_K / torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    gradients = {name: weight.grad for name, weight in heads.named_parameters()}
    heads.zero_grad()

    states_YS = module.frozen_states(batch)
    rows_X, labels_XK = module.trained_rows(batch)
    features_XKD = module.features(batch, states_YS, rows_X)
    before_XK = torch.stack([batch.tokens_BT.flatten()[rows_X + k + 1] for k in range(KINDS)], 1)
    assert torch.equal(features_XKD[..., -RANK:], heads.markov_head.markov_w1(before_XK))
    matrix_RD = torch.cat((heads.projection(), heads.markov_head.markov_w2.weight), 1)
    logits_XKR = features_XKD @ matrix_RD.T
    kept_R = torch.arange(worker.VOCAB) if heads.proposed is None else heads.proposed
    # the target predicts token t + 2 + k at position t + 1 + k
    rows_XK = (rows_X[:, None] + 1 + torch.arange(KINDS)).clamp(max=len(states_YS) - 1)
    p_XKR = (states_YS[rows_XK, -heads.hidden_size :] @ heads.projection().T).softmax(-1)
    assert p_XKR.shape[-1] == len(kept_R)
    q_XKR = logits_XKR.softmax(-1)
    overlap_XK = torch.minimum(p_XKR, q_XKR).sum(-1)
    if "total-variation" not in objective:
        overlap_XK = (logits_XKR.argmax(-1) == labels_XK).float()
    scores_XK = heads.confidence_head.proj(features_XKD)[..., 0]
    losses_XK = 0.7 * F.binary_cross_entropy_with_logits(scores_XK, overlap_XK.detach(), reduction="none")
    losses_XK += objective.get("total-variation", 0.0) * 0.5 * (p_XKR - q_XKR).abs().sum(-1)
    entropy_XK = -q_XKR.log().gather(-1, labels_XK.clamp(min=0)[..., None])[..., 0]
    losses_XK += objective["cross-entropy"] * entropy_XK
    expected_K = losses_XK.masked_fill(labels_XK == IGNORED, 0.0).sum(0) * torch.tensor([1.0, 0.5, 0.25])
    assert torch.allclose(sums_K, expected_K, atol=1e-4)
    (expected_K / torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    for name, weight in heads.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, atol=1e-5), name


def bigram_data(worker: ModuleType, blocks: int, seed: int) -> Any:
    """Return supervised text in which each token has a likely successor, and its documents."""
    stream = torch.Generator().manual_seed(seed)
    successor_V = torch.randperm(worker.VOCAB, generator=torch.Generator().manual_seed(7))
    tokens_BT = torch.randint(worker.VOCAB, (blocks, 16), generator=stream)
    for position in range(1, 16):
        follows_B = torch.rand(blocks, generator=stream) < 0.7
        tokens_BT[:, position][follows_B] = successor_V[tokens_BT[:, position - 1]][follows_B]
    documents_BT = torch.zeros_like(tokens_BT)
    return worker.data_of(tokens_BT.numpy(), documents_BT.numpy() == 0, documents_BT, f"bigrams {seed}"), tokens_BT


def test_a_start_from_a_table_is_better_than_a_random_start(worker: ModuleType, tmp_path: Path) -> None:
    train, tokens_BT = bigram_data(worker, 64, 0)
    heldout, _ = bigram_data(worker, 8, 1)
    table = BigramTable.from_documents(list(tokens_BT.numpy()), worker.VOCAB)
    random = task_of(worker, OBJECTIVE, heldout)
    started = task_of(worker, OBJECTIVE, heldout, table=table, fit_batch=train.batch(range(8)))
    assert 0 < started.markov_scale < 2
    before, after = (task.evaluate(task.module) for task in (random, started))
    assert after["head0_loss"] < before["head0_loss"] - 0.05
    result = fit(random, train, worker.make_config(steps=20, save_every=0), tmp_path)
    assert result.last_loss < result.first_loss
    assert random.evaluate(random.module)["head0_loss"] < before["head0_loss"]


def test_the_factors_approximate_the_log_correlations(worker: ModuleType) -> None:
    _, tokens_BT = bigram_data(worker, 64, 0)
    table = BigramTable.from_documents(list(tokens_BT.numpy()), worker.VOCAB)
    ids_V = torch.arange(worker.VOCAB)
    exact_VV = table.look_up(ids_V[:, None], ids_V, torch.zeros(()))
    weight_VV = (table.left_counts + 1.0)[:, None] * (table.right_counts + 1.0)
    errors = []
    for rank in (4, 16, worker.VOCAB - 1):
        w1_VF, w2_VF = factorize(table, rank)
        errors.append(float((weight_VV * (w1_VF @ w2_VF.T - exact_VV) ** 2).sum()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01 * errors[0]
    with pytest.raises(ValueError, match=r"markov_rank must be from 1 to 31.*got 32"):
        factorize(table, 32)
