"""How well drafts agree with the target at every token of given texts.

Shape letters: T predicted tokens of all passages, C tokens of a chunk, K depth, P passages, V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.base import LanguageModel
from ...proposers.head_trees import HeadModule
from ...proposers.ngrams import TableChain
from ...warpers import Sampling, warp
from ..bootstrap import Floats
from ..certify.rescoring import Reading, chunks, read_back
from ..replay.recording import Recording
from ..replay.steps import replay_chances

_TOKENS_AT_ONCE = 16384
_PLAIN = Sampling(temperature=1.0)


class Passage(NamedTuple):
    """A text, and what it follows."""

    prompt: Sequence[int]
    """Token ids, at least one; what the encoder reads, where there is one."""
    text: Sequence[int]
    """The tokens that are predicted."""
    judged: Sequence[bool] | None = None
    """Which of them are judged. None: all."""


View = Callable[[slice], list[Tensor]]


class Source(ABC):
    """Something that drafts. `view` gives what it holds likely at every token of some passages."""

    depth: int = 1
    """K: how many tokens it speaks of at once, each position ahead by a head of its own."""
    draws: bool = True
    """Whether drafts are drawn from its distributions. Heads propose their most likely token, whatever the chance."""

    @abstractmethod
    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        """A function from a slice of the predicted tokens to K unwarped logits [C, V] of each; the k-th as said k
        positions before. `reading` is the target's."""

    def best(self, span: slice, logits_CV: Tensor) -> Tensor:
        """int64 [C]: what is drafted at temperature 0."""
        return logits_CV.argmax(-1)


class DrafterSource(Source):
    """A draft model."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        prompts, texts = [passage.prompt for passage in passages], [passage.text for passage in passages]
        hidden_TD = read_back(self.model, prompts, texts).hidden_XD
        return lambda span: [self.model.logits(hidden_TD[span])]


class HeadsSource(Source):
    """Prediction heads on the target's states."""

    draws = False

    def __init__(self, heads: HeadModule, dtype: torch.dtype) -> None:
        self.heads, self.depth, self._dtype = heads, heads.num_heads, dtype

    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        def logits(span: slice) -> list[Tensor]:
            count = span.stop - span.start
            rows = torch.arange(span.start - self.depth + 1, span.stop).clamp(min=0).to(reading.before_XD.device)
            logits_CKV = self.heads(reading.before_XD[rows].to(self._dtype))
            first = [self.depth - 1 - head for head in range(self.depth)]
            return [logits_CKV[row : row + count, head] for head, row in enumerate(first)]

        return logits


class TableSource(Source):
    """A table of counts, as `ngrams.TableChain` drafts from it."""

    def __init__(self, proposer: TableChain, device: torch.device) -> None:
        self._order = proposer.order
        settings = (proposer.prior, proposer.smoothing, proposer.strength)
        self._rows = proposer.table.distributions(device, *settings)
        self._last_T = torch.zeros(0, dtype=torch.int64)

    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        self._last_T = reading.last_X
        if self._order == 1:
            log_V = self._rows.unigram_V.log()
            return lambda span: [log_V.expand(span.stop - span.start, -1)]
        return lambda span: [self._rows.after(reading.last_X[span]).log()]

    def best(self, span: slice, logits_CV: Tensor) -> Tensor:
        return logits_CV.argmax(-1) if self._order == 1 else self._rows.most_likely(self._last_T[span])


@dataclass(frozen=True)
class Scores:
    """What was found at every predicted token y. Row k is of what was drafted k positions before."""

    hit_KT: NDArray[np.float32]
    """1 where the source's most likely token is y."""
    overlap_KT: NDArray[np.float32]
    """Σ min(p, q), unwarped: the chance that a draft is accepted at temperature 1 (Leviathan et al. 2023, arXiv
    2211.17192, theorem 3.5)."""
    agree_KT: NDArray[np.float32]
    """1 where target and source have the same most likely token."""
    accepted_KT: NDArray[np.float32]
    """The chance that a draft is accepted as decoding warps: Σ min(p, q), warped; of a token that is not drawn, p of
    it."""
    valid_KT: NDArray[np.bool_]
    """Whether the token is judged, and something was drafted there k positions before."""
    passage_T: NDArray[np.int64]
    """Number of the passage."""
    passages: int
    """P."""

    def sums(self, name: str) -> tuple[Floats, Floats]:
        """A measure (hit, overlap, agree or accepted) by passage, [P] each: its sum, and how many tokens it is over."""
        value_KT = getattr(self, f"{name}_KT") * self.valid_KT
        sums = (value_KT.sum(0, dtype=np.float64), self.valid_KT.sum(0))
        over_P, under_P = (np.bincount(self.passage_T, each_T, self.passages) for each_T in sums)
        return over_P.astype(np.float64), under_P.astype(np.float64)

    def mean(self, name: str) -> float | None:
        """Over all tokens; None where there are none."""
        over_P, under_P = self.sums(name)
        return float(over_P.sum() / under_P.sum()) if under_P.sum() else None

    def by_depth(self, name: str) -> list[float | None]:
        """The mean of each row."""
        pairs = zip(getattr(self, f"{name}_KT"), self.valid_KT, strict=True)
        return [float(row_T[valid_T].mean(dtype=np.float64)) if valid_T.any() else None for row_T, valid_T in pairs]


@torch.inference_mode()
def score(
    target: LanguageModel,
    source: Source,
    passages: Sequence[Passage],
    sampling: Sampling,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Read passages with the target and with a source of drafts, the text given, and compare them at every token.
    Raises ValueError for no token at all."""
    if not any(passage.text for passage in passages):
        raise ValueError(f"{len(passages)} passages without any token to predict")
    parts: list[dict[str, Any]] = []
    done = 0
    for group in _groups(passages):
        parts.append(_score_group(target, source, group, sampling, done))
        done += len(group)
        if progress:
            progress(done, len(passages))
    names = [part.name for part in fields(Scores) if part.name != "passages"]
    return Scores(**{name: np.concatenate([part[name] for part in parts], -1) for name in names}, passages=done)


def _groups(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Passages together of about `_TOKENS_AT_ONCE` tokens: their states are held at a time."""
    sizes = np.cumsum([len(passage.prompt) + len(passage.text) for passage in passages])
    for _, group in groupby(zip(sizes // _TOKENS_AT_ONCE, passages, strict=True), lambda pair: pair[0]):
        yield [passage for _, passage in group]


def _score_group(
    target: LanguageModel, source: Source, passages: Sequence[Passage], sampling: Sampling, first: int
) -> dict[str, Any]:
    prompts, texts = [passage.prompt for passage in passages], [passage.text for passage in passages]
    passage_T = np.repeat(first + np.arange(len(passages)), [len(text) for text in texts])
    if not len(passage_T):
        empty_KT = np.zeros((source.depth, 0), dtype=np.float32)
        return dict.fromkeys(_MEASURES, empty_KT) | {"valid_KT": empty_KT.astype(bool), "passage_T": passage_T}
    reading = read_back(target, prompts, texts)
    valid_KT = _valid(passages, reading.prefixes, source.depth)
    view, token_T = source.view(passages, reading), torch.tensor([t for text in texts for t in text])
    parts: list[dict[str, Tensor]] = []
    for span in chunks(len(token_T), target.vocab_size):
        logits_CV = target.logits(reading.hidden_XD[span]).float()
        token_C = token_T[span].to(target.device)
        rows = [_compare(source, span, logits_CV, each_CV.float(), token_C, sampling) for each_CV in view(span)]
        parts.append({name: torch.stack([row[name] for row in rows]).cpu() for name in _MEASURES})
    measures = {name: torch.cat([part[name] for part in parts], -1).numpy() for name in _MEASURES}
    return measures | {"valid_KT": valid_KT, "passage_T": passage_T}


_MEASURES = ("hit_KT", "overlap_KT", "agree_KT", "accepted_KT")


def _compare(
    source: Source, span: slice, target_CV: Tensor, draft_CV: Tensor, token_C: Tensor, sampling: Sampling
) -> dict[str, Tensor]:
    """The measures of `Scores` for logits of target and source."""
    best_C = source.best(span, draft_CV)
    hit_C, agree_C = best_C == token_C, best_C == target_CV.argmax(-1)
    overlap_C = torch.minimum(warp(target_CV, _PLAIN), warp(draft_CV, _PLAIN)).sum(-1)
    if sampling.greedy:
        accepted_C = agree_C
    elif source.draws:
        accepted_C = torch.minimum(warp(target_CV, sampling), warp(draft_CV, sampling)).sum(-1)
    else:
        accepted_C = warp(target_CV, sampling).gather(-1, best_C[:, None])[:, 0]
    values = (hit_C.float(), overlap_C, agree_C.float(), accepted_C.float())
    return dict(zip(_MEASURES, values, strict=True))


def _valid(passages: Sequence[Passage], starts: Sequence[Sequence[int]], depth: int) -> NDArray[np.bool_]:
    """[K, T] which tokens are judged, of those for which something was drafted k positions before."""
    parts = []
    for passage, start in zip(passages, starts, strict=True):
        index_T = np.arange(len(passage.text))
        # What is drafted for a token comes from a state k + 1 positions before the one that the target reads it from.
        earliest = 1 if depth > 1 and len(start) < 2 else 0
        judged_T = np.ones(len(index_T), dtype=bool) if passage.judged is None else np.asarray(passage.judged, bool)
        parts.append(judged_T & (index_T - np.arange(depth)[:, None] >= earliest))
    return np.concatenate(parts, -1)


def expected_tokens_per_step(scores: Scores, passages: Sequence[Passage], depth: int) -> float | None:
    """Tokens per step, if every draft were accepted by the chance found at its position. Exact for the target's own
    greedy text; None for passages of which only a part is judged.

    Args:
        depth: how many tokens a step drafts, at most K if there are heads.
    """
    if any(passage.judged is not None for passage in passages):
        return None
    accepted_KT = np.where(scores.valid_KT, scores.accepted_KT, 0.0)
    if len(accepted_KT) == 1:
        accepted_KT = np.tile(accepted_KT, (depth, 1))
    prompts, texts = ([list(side) for side in sides] for sides in zip(*(each[:2] for each in passages), strict=True))
    return replay_chances(Recording(_PLAIN, prompts, texts), accepted_KT[:depth], depth + 1).tokens_per_step
