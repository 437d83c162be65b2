"""Where acceptance is lost: agreement of drafts and target on given texts, and every draft token that decoding tried.

The same measures are taken of different texts (a corpus's, the target's own), of the same texts under different
conditions (read within a training block, rounded to another type), and of real decoding. What differs between two of
them is lost, or gained, by what differs between their conditions.

Shape letters: T predicted tokens of all passages, C tokens of a chunk, K depth, P passages, G cells, R resamples,
V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..certify.rescoring import Reading, chunks, read_back
from ..replay.recording import Recording
from ..replay.steps import replay_chances
from ..trace import TracedStep

_TOKENS_AT_ONCE = 16384
_PLAIN = Sampling(temperature=1.0)
RESAMPLES = 2000
FEWEST = 3
"""Passages that an interval needs."""

Floats = NDArray[np.float64]


class Passage(NamedTuple):
    """A text, and what it follows."""

    prompt: Sequence[int]
    """Token ids, at least one; what the encoder reads, where there is one."""
    text: Sequence[int]
    """The tokens that are predicted."""
    kept: Sequence[bool] | None = None
    """Which of them are judged. None: all."""


View = Callable[[slice], list[Tensor]]


class Source(ABC):
    """Something that drafts. `view` gives what it holds likely at every token of some passages."""

    depth: int = 1
    """K: how many tokens it speaks of at once, each place ahead by a head of its own."""
    draws: bool = True
    """Whether drafts are drawn from its distributions. Heads propose their most likely token, whatever the chance."""

    @abstractmethod
    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        """A function from a slice of the predicted tokens to K unwarped logits [C, V] of each of them; the k-th as said
        k places before. `reading` is the target's."""

    def best(self, place: slice, logits_CV: Tensor) -> Tensor:
        """int64 [C]: what is drafted at temperature 0."""
        return logits_CV.argmax(-1)


class DrafterSource(Source):
    """A draft model.

    Args:
        window: read no token further from the beginning of what is read than this: tokens beyond it are predicted from
            the last `window` tokens alone, as if the text began there. None: all that comes before is read.
    """

    def __init__(self, model: LanguageModel, window: int | None = None) -> None:
        self.model, self.window = model, window

    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        pieces = [Passage(*passage[:2]) for passage in passages]
        if self.window is not None:
            pieces = [piece for passage in passages for piece in within(passage, self.window)]
        prompts, texts = [piece.prompt for piece in pieces], [piece.text for piece in pieces]
        hidden_TD = read_back(self.model, prompts, texts).hidden_XD
        return lambda place: [self.model.logits(hidden_TD[place])]


class HeadsSource(Source):
    """Prediction heads on the target's states."""

    draws = False

    def __init__(self, heads: HeadModule, dtype: torch.dtype) -> None:
        self.heads, self.depth, self._dtype = heads, heads.num_heads, dtype

    def view(self, passages: Sequence[Passage], reading: Reading) -> View:
        def logits(place: slice) -> list[Tensor]:
            count = place.stop - place.start
            rows = torch.arange(place.start - self.depth + 1, place.stop).clamp(min=0).to(reading.before_XD.device)
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
            return lambda place: [log_V.expand(place.stop - place.start, -1)]
        return lambda place: [self._rows.after(reading.last_X[place]).log()]

    def best(self, place: slice, logits_CV: Tensor) -> Tensor:
        return logits_CV.argmax(-1) if self._order == 1 else self._rows.most_likely(self._last_T[place])


def within(passage: Passage, window: int) -> Iterator[Passage]:
    """A passage in pieces of which none is longer than `window` tokens: its beginning as it is, and of the rest half a
    window at a time behind as many tokens as fit before it.

    Raises:
        ValueError: a window below 2.
    """
    if window < 2:
        raise ValueError(f"window must be at least 2 tokens, got {window}")
    ids, first = [*passage.prompt, *passage.text], len(passage.prompt)
    if first < window:
        yield Passage(ids[:first], ids[first:window])
    for start in range(max(first, window), len(ids), window // 2):
        end = min(start + window // 2, len(ids))
        yield Passage(ids[end - window : start], ids[start:end])


@dataclass(frozen=True)
class Scores:
    """What was found at every predicted token. Row k is of what was drafted k places before; y is the text's token."""

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
    """Whether the token is judged, and something was drafted there k places before."""
    entropy_T: NDArray[np.float32]
    """Of the unwarped target, nats."""
    passage_T: NDArray[np.int64]
    """Number of the passage."""
    place_T: NDArray[np.int64]
    """Place in the text, from 0."""
    position_T: NDArray[np.int64]
    """Position in the whole sequence, from 0."""
    passages: int
    """P."""

    def sums(self, name: str, chosen_T: NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
        """A measure by passage, [P] each: its sum, and how many tokens it is over.

        Args:
            name: hit, overlap, agree or accepted.
            chosen_T: only these tokens.
        """
        valid_KT = self.valid_KT if chosen_T is None else self.valid_KT & chosen_T
        value_KT = getattr(self, f"{name}_KT") * valid_KT
        sums = (value_KT.sum(0, dtype=np.float64), valid_KT.sum(0))
        over_P, under_P = (np.bincount(self.passage_T, each_T, self.passages) for each_T in sums)
        return over_P.astype(np.float64), under_P.astype(np.float64)

    def mean(self, name: str, chosen_T: NDArray[np.bool_] | None = None) -> float | None:
        """Over all tokens; None where there are none."""
        over_P, under_P = self.sums(name, chosen_T)
        return float(over_P.sum() / under_P.sum()) if under_P.sum() else None

    def by_depth(self, name: str) -> list[float | None]:
        """The mean of each row."""
        value_KT = getattr(self, f"{name}_KT")
        pairs = zip(value_KT, self.valid_KT, strict=True)
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

    Raises:
        ValueError: no token at all.
    """
    if not any(passage.text for passage in passages):
        raise ValueError(f"{len(passages)} passages without any token to predict")
    found: list[dict[str, Any]] = []
    done = 0
    for group in _groups(passages):
        found.append(_score_group(target, source, group, sampling, done))
        done += len(group)
        if progress:
            progress(done, len(passages))
    names = [part.name for part in fields(Scores) if part.name != "passages"]
    joined = {name: np.concatenate([part[name] for part in found], -1) for name in names}
    return Scores(**joined, passages=len(passages))


def _groups(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Passages together of about `_TOKENS_AT_ONCE` tokens: their states are held at a time."""
    sizes = np.cumsum([len(passage.prompt) + len(passage.text) for passage in passages])
    for _, group in groupby(zip(sizes // _TOKENS_AT_ONCE, passages, strict=True), lambda pair: pair[0]):
        yield [passage for _, passage in group]


def _score_group(
    target: LanguageModel, source: Source, passages: Sequence[Passage], sampling: Sampling, first: int
) -> dict[str, Any]:
    prompts, texts = [passage.prompt for passage in passages], [passage.text for passage in passages]
    if not any(texts):
        return _places(passages, prompts, first, source.depth) | _nothing(source.depth)
    reading = read_back(target, prompts, texts)
    told: dict[str, Any] = _places(passages, reading.prefixes, first, source.depth)
    view, token_T = source.view(passages, reading), torch.tensor([t for text in texts for t in text])
    parts: list[dict[str, Tensor]] = []
    for place in chunks(len(token_T), target.vocab_size):
        logits_CV = target.logits(reading.hidden_XD[place]).float()
        rows = [
            _compare(source, place, logits_CV, each_CV.float(), token_T[place].to(target.device), sampling)
            for each_CV in view(place)
        ]
        part = {name: torch.stack([row[name] for row in rows]).cpu() for name in _MEASURES}
        parts.append(part | {"entropy_T": torch.special.entr(logits_CV.softmax(-1)).sum(-1).cpu()})
    return told | {name: torch.cat([part[name] for part in parts], -1).numpy() for name in parts[0]}


_MEASURES = ("hit_KT", "overlap_KT", "agree_KT", "accepted_KT")


def _compare(
    source: Source, place: slice, target_CV: Tensor, draft_CV: Tensor, token_C: Tensor, sampling: Sampling
) -> dict[str, Tensor]:
    """The measures of `Scores` for logits of target and source."""
    best_C = source.best(place, draft_CV)
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


def _nothing(depth: int) -> dict[str, NDArray[Any]]:
    """Measures of no token at all."""
    empty_KT = np.zeros((depth, 0), dtype=np.float32)
    return dict.fromkeys(_MEASURES, empty_KT) | {"entropy_T": empty_KT[0]}


def _places(
    passages: Sequence[Passage], starts: Sequence[Sequence[int]], first: int, depth: int
) -> dict[str, NDArray[Any]]:
    """Where every predicted token stands, and at which of them something was drafted k places before."""
    number, place, position, valid_KT = [], [], [], []
    for count, (passage, start) in enumerate(zip(passages, starts, strict=True)):
        own_T = np.arange(len(passage.text))
        number.append(np.full(len(own_T), first + count))
        place.append(own_T)
        position.append(len(start) + own_T)
        # What is drafted for a token comes from a state k + 1 places before the one that the target reads it from.
        earliest = 1 if depth > 1 and len(start) < 2 else 0
        kept_T = np.ones(len(own_T), dtype=bool) if passage.kept is None else np.asarray(passage.kept, dtype=bool)
        valid_KT.append(kept_T & (own_T - np.arange(depth)[:, None] >= earliest))
    names = ("passage_T", "place_T", "position_T")
    told = {name: np.concatenate(each) for name, each in zip(names, (number, place, position), strict=True)}
    return told | {"valid_KT": np.concatenate(valid_KT, -1)}


def expected_steps(scores: Scores, passages: Sequence[Passage], depth: int) -> float | None:
    """Tokens per step, if every draft were accepted by the chance of its own that was found at its place, whatever
    became of the others. Exact for the target's own greedy text; None for passages of which only a part is judged.

    Args:
        depth: how many tokens a step drafts, at most K if there are heads.
    """
    if any(passage.kept is not None for passage in passages):
        return None
    accepted_KT = np.where(scores.valid_KT, scores.accepted_KT, 0.0)
    if len(accepted_KT) == 1:
        accepted_KT = np.tile(accepted_KT, (depth, 1))
    prompts, texts = ([list(side) for side in sides] for sides in zip(*(each[:2] for each in passages), strict=True))
    return replay_chances(Recording(_PLAIN, prompts, texts), accepted_KT[:depth], depth + 1).tokens_per_step


class Tried(NamedTuple):
    """A draft token that decoding looked at."""

    place: int
    """Of the text's tokens, from 0."""
    depth: int
    """From 0."""
    drafted: int
    said: int
    """The token that the text has there."""
    accepted: bool


def tried(steps: Iterable[TracedStep]) -> list[Tried]:
    """The draft tokens that steps tried, in order; of the last step those that the text still holds. Of several
    candidates in one place of a tree the accepted one, or the first if all were refused."""
    found, place = [], 0
    for step in steps:
        count = len(step.accepted)
        for depth, token in enumerate(step.accepted):
            found.append(Tried(place + depth, depth, token, token, True))
        if step.rejected and step.next_id is not None:
            found.append(Tried(place + count, count, step.rejected[0], step.next_id, False))
        place += count + (step.next_id is not None)
    return found


@torch.inference_mode()
def probabilities(
    target: LanguageModel,
    source: Source,
    passages: Sequence[Passage],
    found: Sequence[Sequence[Tried]],
) -> list[list[tuple[float, float, float]]]:
    """Of each token tried in each passage, unwarped: what the target and the source gave it, and what the target gave
    the token that stands there."""
    told: list[list[tuple[float, float, float]]] = []
    for passage, tokens in zip(passages, found, strict=True):
        told.append([])
        if not tokens:
            continue
        reading = read_back(target, [passage.prompt], [passage.text])
        view = source.view([passage], reading)
        for place in chunks(len(passage.text), target.vocab_size):
            target_CV = target.logits(reading.hidden_XD[place]).float().softmax(-1)
            rows = [logits_CV.float().softmax(-1) for logits_CV in view(place)]
            for each in tokens:
                if place.start <= each.place < place.stop:
                    at, row_CV = each.place - place.start, rows[min(each.depth, len(rows) - 1)]
                    picks = target_CV[at, each.drafted], row_CV[at, each.drafted], target_CV[at, each.said]
                    told[-1].append((float(picks[0]), float(picks[1]), float(picks[2])))
    return told


class Resamples:
    """Prompts drawn anew, with replacement, always the same ones: 95 % and other percentile intervals of ratios.

    Tokens of one text depend on one another; texts do not. So whole passages are drawn.
    """

    def __init__(self, passages: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.passages = passages
        self._weight_RP: Floats | None = None
        if passages >= FEWEST:
            self._weight_RP = rng.multinomial(passages, np.full(passages, 1 / passages), RESAMPLES).astype(np.float64)

    def ratios(self, over_PG: Floats, under_PG: Floats) -> Floats | None:
        """[R, G] Σ over / Σ under of each resample, nan where nothing was drawn; None for too few passages."""
        if self._weight_RP is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((self._weight_RP @ over_PG) / (self._weight_RP @ under_PG))


def interval(ratios_R: Floats | None, level: float = 0.95) -> tuple[float, float] | None:
    """The middle share of resampled numbers; None where there are too few that are numbers."""
    if ratios_R is None:
        return None
    known_R = ratios_R[np.isfinite(ratios_R)]
    if len(known_R) < 0.9 * len(ratios_R):
        return None
    low, high = np.quantile(known_R, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class Cell:
    """Draft tokens that have something in common."""

    split: str
    name: str
    examined: int
    accepted: int
    rejections_share: float
    """Of all rejections."""
    excess: float
    """Of all rejections, how many there would not be if the cell were like the average; below 0: it is better."""
    interval: tuple[float, float] | None
    """95 %, of the accepted share."""
    members: NDArray[np.int64]
    """Places of its tokens among those tried."""

    @property
    def share(self) -> float:
        """Accepted of examined."""
        return self.accepted / self.examined


def cells(
    split: str,
    name_X: Sequence[str],
    accepted_X: NDArray[np.bool_],
    passage_X: NDArray[np.int64],
    resamples: Resamples,
) -> list[Cell]:
    """Tried tokens by name, those first that cost most.

    Args:
        split: what the names are of.
        name_X, accepted_X, passage_X: of every token tried.
    """
    names = np.asarray(name_X, dtype=object)
    rate, rejections = (1 - accepted_X.mean(), int((~accepted_X).sum())) if len(accepted_X) else (0.0, 0)
    found = []
    for name in dict.fromkeys(name_X):
        member_X = names == name
        good, count = int(accepted_X[member_X].sum()), int(member_X.sum())
        columns = (accepted_X & member_X, member_X)
        over_PG, under_PG = (
            np.bincount(passage_X, each_X, resamples.passages)[:, None].astype(np.float64) for each_X in columns
        )
        ratios_RG = resamples.ratios(over_PG, under_PG)
        span = interval(None if ratios_RG is None else ratios_RG[:, 0])
        lost, expected = count - good, rate * count
        of = max(rejections, 1)
        members = np.flatnonzero(member_X)
        found.append(Cell(split, str(name), count, good, lost / of, float(lost - expected) / of, span, members))
    return sorted(found, key=lambda cell: -cell.excess)


def bands(value_X: NDArray[Any], edges: Sequence[float], unit: str = "", digits: int = 0) -> list[str]:
    """The name of the band that each number lies in: from one edge up to, not including, the next.

    Args:
        edges: rising; the first is at most the least number.
        unit: behind the numbers.
        digits: after the point; whole numbers end a band at the last number inside.
    """
    place_X = np.searchsorted(np.asarray(edges), value_X, side="right") - 1
    names = []
    for number, low in enumerate(edges):
        high = edges[number + 1] if number + 1 < len(edges) else None
        if high is None:
            names.append(f"{low:.{digits}f} and more{unit}")
        elif digits:
            names.append(f"{low:.{digits}f} to {high:.{digits}f}{unit}")
        else:
            names.append(f"{low:.0f}{unit}" if high - low == 1 else f"{low:.0f} to {high - 1:.0f}{unit}")
    return [names[place] for place in place_X]


def quantile_edges(value_X: NDArray[Any], parts: int) -> list[float]:
    """Edges of `parts` bands that hold as many numbers each, as far as equal ones allow."""
    edges = np.unique(np.quantile(value_X, np.arange(parts) / parts))
    return [float(edge) for edge in edges]
