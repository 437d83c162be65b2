"""On-policy distillation: the drafter samples responses, and the target scores them.

Sources: DistillSpec (Zhou et al. 2023, arXiv 2310.08461, algorithm 1) and GKD (Agarwal et al. 2023, arXiv 2306.13649).
Letters: B batch (blocks), T tokens.
"""

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
    """Prompt of a document, for which the drafter samples a response."""

    row: int
    number: int
    prompt: np.ndarray
    room: int
    seed: int


def rewrite(
    model: Any, batch: Batch, rows: np.ndarray, global_batch: int, seed: Sequence[int], options: OnPolicy
) -> Batch:
    """Return a batch in which some responses are replaced by samples from `model`.

    A fraction of the rows is chosen at random. In each document of these rows, one random response is replaced, and the
    rest of the document is removed. Only the new response is supervised. Random choices depend on `seed` and the row
    numbers in the global batch, not on the number of processes or `micro_batch`. `model` is set to evaluation mode.
    """
    rng = np.random.default_rng([*seed, 0])
    # a fractional number of rows is rounded randomly, so that the share holds on average
    chosen = rng.permutation(global_batch)[: int(options.share * global_batch + rng.random())]
    blocks: list[list[Document]] = []
    drafts: list[_Draft] = []
    for at, row in enumerate(rows.tolist()):
        documents = _documents(batch, at)
        blocks.append([] if row in chosen else documents)
        if row in chosen:
            drafts += _drafts(documents, at, np.random.default_rng([*seed, 1, row]), options.new_tokens)
    drafts.sort(key=lambda draft: len(draft.prompt))  # prompts of similar length need little padding
    scorer = wrap_model(model, check=False, graphs=False)  # capturing CUDA graphs does not pay off for one step
    for group in _groups(drafts, scorer.max_positions):
        for draft, answer in zip(group, _sample(scorer, group, options), strict=True):
            ids = np.concatenate([draft.prompt, np.array(answer, dtype=draft.prompt.dtype)])
            trained = np.arange(len(ids)) >= len(draft.prompt)
            blocks[draft.row].append(Document(ids, trained, draft.number))
    padding = batch.tokens_BT[batch.documents_BT == PADDING]
    return make_batch(blocks, batch.tokens_BT.shape[1], int(padding[0]) if len(padding) else 0)


def _documents(batch: Batch, row: int) -> list[Document]:
    numbers = batch.documents_BT[row].numpy()
    ids, labels = batch.tokens_BT[row].numpy(), batch.labels_BT[row].numpy()
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [
        Document(ids[start:end], labels[start:end] >= 0, int(numbers[start]))
        for start, end in pairwise(borders)
        if numbers[start] != PADDING
    ]


def _drafts(documents: list[Document], at: int, rng: np.random.Generator, new_tokens: int) -> list[_Draft]:
    drafts = []
    for document in documents:
        trained = document.trained.astype(np.int8)
        starts = np.flatnonzero(np.diff(trained, prepend=0) == 1)
        starts = starts[starts > 0]  # a response needs a prompt
        if len(starts):
            start = int(rng.choice(starts))
            room = min(len(document.ids) - start, new_tokens)
            drafts.append(_Draft(at, document.number, document.ids[:start], room, int(rng.integers(1 << 62))))
    return drafts


def _groups(drafts: list[_Draft], positions: int) -> Iterator[list[_Draft]]:
    """Group prompts into batches whose longest prompt and longest response fit into `positions` tokens."""
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
    """Sample a response to each prompt, with at most `draft.room` tokens."""
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
