"""On-policy responses: rows, positions, probabilities, and independence of the number of processes."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from draftsmith.data.blocks.packing import IGNORED, PADDING, Batch
from draftsmith.train.config import OnPolicy
from draftsmith.train.loop.fit import fit
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.on_policy import rewrite
from draftsmith.train.teachers.teacher import ModelTeacher
from scipy.stats import chisquare


def documents(batch: Batch, row: int) -> dict[int, tuple[list[int], list[int]]]:
    """Return the tokens and labels of each document of a row, by document number."""
    by_number = {}
    for number in batch.documents_BT[row].unique().tolist():
        if number != PADDING:
            inside = batch.documents_BT[row] == number
            by_number[number] = batch.tokens_BT[row, inside].tolist(), batch.labels_BT[row, inside].tolist()
    return by_number


def test_chosen_rows_end_in_sampled_responses(worker: ModuleType):
    model = worker.make_model(initializer_range=0.3)
    whole = worker.make_data(8).batch(range(8))
    options = OnPolicy(share=0.5, new_tokens=5, temperature=1e-3)  # practically greedy
    changed = rewrite(model, whole, np.arange(8), 8, (0, 3), options)
    rows_changed = 0
    for row in range(8):
        before, after = documents(whole, row), documents(changed, row)
        if before == after:
            continue
        rows_changed += 1
        assert after, "a chosen row must contain documents"
        for number, (ids, labels) in after.items():
            start = next(position for position, label in enumerate(labels) if label != IGNORED)
            old_ids, old_labels = before[number]
            assert ids[:start] == old_ids[:start], "text before the answer must not change"
            assert old_labels[start] != IGNORED, "the original answer starts there"
            assert old_labels[start - 1] == IGNORED
            assert labels[start:] == ids[start:], "the whole answer must be supervised"
            assert len(ids) <= min(len(old_ids), start + 5)
            with torch.no_grad():
                greedy = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert ids[start:] == greedy[start - 1 : -1]
    assert rows_changed == 4


def test_samples_do_not_depend_on_the_split_of_rows(worker: ModuleType):
    model = worker.make_model(initializer_range=0.1)
    whole, options = worker.make_data(8).batch(range(8)), OnPolicy(share=0.75, new_tokens=8)
    joint = rewrite(model, whole, np.arange(8), 8, (1, 2), options)
    other_step = rewrite(model, whole, np.arange(8), 8, (1, 3), options)
    for rank in range(2):
        own_rows = np.arange(rank, 8, 2)
        split = rewrite(model, whole.rows(own_rows), own_rows, 8, (1, 2), options)
        for at, row in enumerate(own_rows.tolist()):
            assert documents(split, at) == documents(joint, row)
    assert any(documents(other_step, row) != documents(joint, row) for row in range(8))


def test_answers_follow_the_drafters_distribution(worker: ModuleType):
    """The chi-square test of the first tokens of 2,000 answers has a false-positive rate of 1e-6."""
    model = worker.make_model(initializer_range=0.2).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    labels = torch.tensor([[IGNORED] * 4 + [5, 9, 2, 6]])
    one = Batch(tokens, labels, torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.int64))
    batch = one.rows(np.zeros(200, dtype=np.int64))
    options, counts = OnPolicy(share=1.0, new_tokens=1, temperature=1.5), np.zeros(worker.VOCAB)
    for step in range(10):
        changed = rewrite(model, batch, np.arange(200), 200, (0, step), options)
        counts += np.bincount(changed.tokens_BT[:, 4], minlength=worker.VOCAB)
    with torch.no_grad():
        expected = (model(tokens[:, :4]).logits[0, -1].double() / 1.5).softmax(-1).numpy()
    assert counts.sum() == 2000
    assert chisquare(counts, expected * 2000).pvalue > 1e-6


def test_stop_tokens_end_answers(worker: ModuleType):
    model = worker.make_model(initializer_range=0.01)  # almost uniform
    whole = worker.make_data(8).batch(range(8))
    stops = tuple(range(16))
    changed = rewrite(model, whole, np.arange(8), 8, (0, 0), OnPolicy(1.0, 12, stop_ids=stops))
    answers = [
        [label for label in labels if label != IGNORED]
        for row in range(8)
        for _, labels in documents(changed, row).values()
    ]
    assert all(token not in stops for answer in answers for token in answer[:-1])
    assert any(answer[-1] in stops for answer in answers)


def test_training_on_policy_helps(worker: ModuleType, tmp_path: Path, logged: Callable[..., list[Any]]):
    target, heldout = worker.make_model(2, hidden_size=32), worker.make_data(8, seed=3)
    with torch.no_grad():
        target.lm_head.weight.mul_(20)
    teacher, own = ModelTeacher(target), OnPolicy(share=0.5, new_tokens=6)
    objective = {"forward-kl": 1.0}
    task = DrafterTask(worker.make_model(1), heldout, objective, teacher, on_policy=own, eval_teacher=teacher)
    result = fit(task, worker.make_data(), worker.make_config(steps=20, save_every=0, evaluate_every=20), tmp_path)
    assert result.metrics["overlap"] > logged(tmp_path, "evaluation")[0]["overlap"] + 0.02
