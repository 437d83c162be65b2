"""Answers in the drafter's own words, to be scored by the target (DistillSpec: Zhou et al. 2023, arXiv 2310.08461,
algorithm 1; on-policy distillation: Agarwal et al. 2023, arXiv 2306.13649). Letters: B batch (blocks), T tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...data.blocks.packing import PADDING, Batch, Document, make_batch
from ...decode.engine import Limits, generate
from ...decode.methods import Parts, build_method
from ...decode.models.loading import wrap_model
from ...decode.rng import Rng
from ...decode.warpers import Sampling
from ..config import OnPolicy

_ROWS_TOGETHER = 32  # prompts decoded in one batch


@dataclass(slots=True)
class _Draft:
    """A document that ends in an answer to be sampled."""

    row: int
    number: int
    prompt: np.ndarray
    room: int
    seed: int


def rewrite(
    model: Any, batch: Batch, rows: np.ndarray, global_batch: int, seed: Sequence[int], options: OnPolicy
) -> Batch:
    """`batch` with answers sampled from `model` in the chosen rows; of each of their documents one answer, chosen by
    chance, is replaced, what follows it is cut off, and nothing before it is trained on.

    Everything random follows from `seed` and the rows' numbers in the global batch, whatever the number of processes or
    the micro batch. `model` is put into evaluation mode.
    """
    rng = np.random.default_rng([*seed, 0])
    # a share that is no whole number of rows is kept on average
    chosen = rng.permutation(global_batch)[: int(options.share * global_batch + rng.random())]
    blocks: list[list[Document]] = []
    drafts: list[_Draft] = []
    for at, row in enumerate(rows.tolist()):
        documents = _documents(batch, at)
        blocks.append([] if row in chosen else documents)
        if row in chosen:
            drafts += _drafts(documents, at, np.random.default_rng([*seed, 1, row]), options.new_tokens)
    drafts.sort(key=lambda draft: len(draft.prompt))  # rows of one length waste nothing
    scorer = wrap_model(model, check=False, graphs=False)  # not worth capturing for one step
    for together in _groups(drafts, scorer.max_positions):
        for draft, answer in zip(together, _sample(scorer, together, options), strict=True):
            ids = np.concatenate([draft.prompt, np.array(answer, dtype=draft.prompt.dtype)])
            trained = np.arange(len(ids)) >= len(draft.prompt)
            blocks[draft.row].append(Document(ids, trained, draft.number))
    padding = batch.tokens_BT[batch.documents_BT == PADDING]
    return make_batch(blocks, batch.tokens_BT.shape[1], int(padding[0]) if len(padding) else 0)


def _documents(batch: Batch, row: int) -> list[Document]:
    """The documents of a row, taken out of the block."""
    numbers = batch.documents_BT[row].numpy()
    ids, labels = batch.tokens_BT[row].numpy(), batch.labels_BT[row].numpy()
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [
        Document(ids[start:end], labels[start:end] >= 0, int(numbers[start]))
        for start, end in pairwise(borders)
        if numbers[start] != PADDING
    ]


def _drafts(documents: list[Document], at: int, rng: np.random.Generator, new_tokens: int) -> list[_Draft]:
    found = []
    for document in documents:
        trained = document.trained.astype(np.int8)
        starts = np.flatnonzero(np.diff(trained, prepend=0) == 1)
        starts = starts[starts > 0]  # something must come before an answer
        if len(starts):
            start = int(rng.choice(starts))
            room = min(len(document.ids) - start, new_tokens)
            found.append(_Draft(at, document.number, document.ids[:start], room, int(rng.integers(1 << 62))))
    return found


def _groups(drafts: list[_Draft], positions: int) -> Iterator[list[_Draft]]:
    """Drafts to decode together, in order: not too many, and the longest prompt leaves the longest answer room."""
    group: list[_Draft] = []
    for draft in drafts:
        needed = len(draft.prompt) + max(other.room for other in [*group, draft])
        if group and (len(group) == _ROWS_TOGETHER or needed > positions):
            yield group
            group = []
        group.append(draft)
    if group:
        yield group


@torch.no_grad()
def _sample(scorer: Any, drafts: list[_Draft], options: OnPolicy) -> list[list[int]]:
    """An answer to each prompt, not longer than its room."""
    sampling = Sampling(temperature=options.temperature)
    method = build_method("autoregressive", Parts(), sampling)
    longest = max(draft.room for draft in drafts)
    answers: list[list[int]] = [[] for _ in drafts]
    prompts = [draft.prompt.tolist() for draft in drafts]
    rng = Rng([draft.seed for draft in drafts], scorer.device)
    for step in generate(scorer, *method, prompts, Limits(longest, options.stop_ids), sampling, rng):
        for answer, ids in zip(answers, step.new_ids, strict=True):
            answer += ids
    return [answer[: draft.room] for answer, draft in zip(answers, drafts, strict=True)]
