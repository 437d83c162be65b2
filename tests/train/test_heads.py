"""Heads learn the tokens after the next one, on a target that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads import PredictionHeads
from draftsmith.train.heads import HeadsTask
from draftsmith.train.loop import fit
from draftsmith.train.table import count_table
from safetensors import safe_open

HEADS = 3


@pytest.fixture
def task(worker: ModuleType) -> HeadsTask:
    target = worker.make_model()
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), HEADS, 1)
    return HeadsTask(target, heads, worker.make_data(4, seed=1), [1.0, 0.8, 0.64], lambda _: {"tokens_per_step": 1.5})


def test_the_loss_is_that_of_the_token_t_plus_2_plus_k(worker: ModuleType, task: HeadsTask):
    batch = worker.make_data(3).batch(range(3))
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.normal_(0.0, 0.3)
    sums, counts = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = [0.0] * HEADS, [0] * HEADS
    with torch.no_grad():
        for row in range(3):
            for number in set(batch.documents_BT[row].tolist()) - {-1}:
                inside = batch.documents_BT[row] == number
                tokens, labels = batch.tokens_BT[row][inside], batch.labels_BT[row][inside].tolist()
                hidden = task.target.model(tokens[None]).last_hidden_state[0]
                logits = task.module.heads(hidden)  # [T, K, V]
                for place in range(len(labels)):
                    for k in range(HEADS):
                        ahead = place + 2 + k
                        if ahead < len(labels) and labels[ahead] != -100:
                            expected[k] -= float(logits[place, k].log_softmax(-1)[labels[ahead]])
                            items[k] += 1
    assert counts.tolist() == items == task.count(batch).tolist()
    weighted = [value * weight for value, weight in zip(expected, (1.0, 0.8, 0.64), strict=True)]
    assert sums.tolist() == pytest.approx(weighted, rel=1e-4)


def test_only_the_heads_are_trained_and_stored(worker: ModuleType, task: HeadsTask, tmp_path: Path):
    before = {name: tensor.clone() for name, tensor in task.target.state_dict().items()}
    result = fit(task, worker.make_data(), worker.make_config(steps=30, save_every=0), tmp_path)
    assert result.last_loss < result.first_loss
    for name, tensor in task.target.state_dict().items():
        assert torch.equal(tensor, before[name])
    with safe_open(tmp_path / "checkpoints" / "step-000030" / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(task.module.state_dict())
    names = {f"head{k}_{what}" for k in range(HEADS) for what in ("loss", "top1")}
    assert result.metrics.keys() == names | {"heldout_loss", "tokens_per_step"}
    expected = sum(w * result.metrics[f"head{k}_loss"] for k, w in enumerate((1.0, 0.8, 0.64)))
    assert result.metrics["heldout_loss"] == pytest.approx(expected)


def test_heads_learn_a_sequence_that_can_be_known(
    worker: ModuleType, task: HeadsTask, tmp_path: Path, logged: Callable[..., list[Any]]
):
    data = worker.make_data()
    batch = data.batch(range(data.blocks))
    tokens = (batch.tokens_BT[:, :1] + torch.arange(16)) % worker.VOCAB  # every token is one more than the last
    counting = worker.data_of(tokens, batch.labels_BT != -100, batch.documents_BT, "counting")
    task._heldout = counting
    result = fit(task, counting, worker.make_config(steps=60, learning_rate=0.05, save_every=0), tmp_path)
    assert all(result.metrics[f"head{k}_top1"] > 0.9 for k in range(HEADS))


def test_wrong_shapes_are_refused(worker: ModuleType):
    target = worker.make_model()
    heads = PredictionHeads(2, 1, 16, worker.VOCAB)
    with pytest.raises(ValueError, match="expected 2 weights"):
        HeadsTask(target, heads, None, [1.0])
    with pytest.raises(ValueError, match="size 8, the target makes 16"):
        HeadsTask(target, PredictionHeads(2, 1, 8, worker.VOCAB), None)


def test_a_table_counts_the_documents(worker: ModuleType):
    data = worker.make_data(5)
    table = count_table(data, worker.VOCAB)
    batch = data.batch(range(5))
    tokens, documents = batch.tokens_BT, batch.documents_BT
    pairs: dict[tuple[int, int], int] = {}
    for row in range(5):
        for place in range(15):
            if documents[row, place] == documents[row, place + 1] >= 0:
                pair = (int(tokens[row, place]), int(tokens[row, place + 1]))
                pairs[pair] = pairs.get(pair, 0) + 1
    found = {
        (left, int(table.col[entry])): int(table.count[entry])
        for left in range(worker.VOCAB)
        for entry in range(int(table.row_ptr[left]), int(table.row_ptr[left + 1]))
    }
    assert found == pairs
