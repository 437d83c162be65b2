"""One teacher-forced pass over texts of the target, which records what replay needs of every position.

At every token the distributions of the target and of each source of drafts are reduced to some tens of numbers, from
which `replay.py` predicts the steps of decoding.

Shape letters: T positions (new tokens of all texts in a row), K candidates, H heads, C candidates per head,
V vocabulary, D hidden, S draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ...methods import Parts
from ...models.base import LanguageModel, check_same_vocabulary
from ...proposers.head_trees import HeadModule
from ...proposers.ngrams import TableDrafts, TableSource
from ...warpers import Sampling, warp

_TINY = 1e-30


class Candidates:
    """Acceptance probabilities of candidates at many positions whose emitted token is known.

    Lossless decoding emits the token y at a position with probability p(y). With replacement, after j refusals, the
    remainder of p is [p - cⱼq]+ for a scale c₀ = 0, cⱼ₊₁ = cⱼ + Fⱼ, Fⱼ = Σ [p - cⱼq]+. So all k candidates are refused
    and y is drawn with probability [p(y) - cₖq(y)]+, and

        P(one of k accepted | y) = min(1, cₖ q(y) / p(y)).

    Without replacement (Algorithm 2 of the multi-candidate paper) a refused x leaves q, and
    cⱼ₊₁ = cⱼ + Fⱼ / (1 - Σ q(refused)). If refused tokens are drawn in the proportions in which they are refused, the
    weights cancel, and the probability is the mean of min(1, cₖ q(y) / p(y)) over such draws. After one sort by p/q,
    every such sum is a lookup.

    Args:
        target_TV: p, the warped distributions of the target.
        draft_TV: q, those of the drafter.
        token_T: y.
    """

    def __init__(self, target_TV: Tensor, draft_TV: Tensor, token_T: Tensor) -> None:
        target_TV, draft_TV = target_TV.double(), draft_TV.double()
        ratio_TV = torch.where(draft_TV > 0, target_TV / draft_TV.clamp(min=_TINY), torch.inf)
        self._ratio_TV, order_TV = ratio_TV.sort(1)
        self._draft_TV = draft_TV.gather(1, order_TV)
        sorted_TV = target_TV.gather(1, order_TV)
        # Sums over the tokens before a place and from it on: [T, V + 1].
        self._before = _before(sorted_TV), _before(self._draft_TV)
        self._from = _before(sorted_TV.flip(1)).flip(1), _before(self._draft_TV.flip(1)).flip(1)
        self._support_T1 = (draft_TV > 0).sum(1, keepdim=True)
        self.target_T = target_TV.gather(1, token_T[:, None])[:, 0]
        self.draft_T = draft_TV.gather(1, token_T[:, None])[:, 0]
        self._odds_T1 = (self.draft_T / self.target_T.clamp(min=_TINY))[:, None]

    def left(self, scale_TX: Tensor) -> Tensor:
        """Return F(c) = Σ [p - cq]+, [T, X]."""
        place_TX = self._place(scale_TX)
        target_TX, draft_TX = (sums.gather(1, place_TX) for sums in self._from)
        # c may be infinite, where nothing is left; 0 · ∞ is none.
        taken_TX = torch.where(draft_TX > 0, scale_TX * draft_TX, 0.0)
        return (target_TX - taken_TX).clamp(min=0)

    def _place(self, scale_TX: Tensor) -> Tensor:
        return torch.searchsorted(self._ratio_TV, scale_TX.contiguous(), right=True)

    def scales(self, count: int) -> Tensor:
        """Return c₁ … cₖ with replacement, [T, K]."""
        scales = [torch.ones_like(self.target_T)[:, None]]
        for _ in range(count - 1):
            scales.append(scales[-1] + self.left(scales[-1]))
        return torch.cat(scales, 1)

    def accepted(self, scale_TX: Tensor) -> Tensor:
        """Return min(1, c q(y) / p(y)), [T, X]."""
        return (scale_TX * self._odds_T1).nan_to_num(0.0).clamp(max=1)

    def without_replacement(self, count: int, draws: int, generator: torch.Generator) -> Tensor:
        """Return P(one of k candidates accepted | y) for k = 1 … `count`, drawn without replacement, [T, K].

        It is exact for k ≤ 2. Beyond, it is a mean over `draws` sequences of refused tokens, the first of which are
        spread evenly.
        """
        rows = len(self.target_T)
        before_TS = torch.zeros(rows, draws, dtype=torch.float64, device=self.target_T.device)
        scale_TS, rest_TS = torch.ones_like(before_TS), torch.ones_like(before_TS)
        drawn_TSK = torch.empty(rows, draws, 0, dtype=torch.int64, device=before_TS.device)
        accepted = [self.accepted(scale_TS[:, :1])]
        for index in range(1, count):
            uniform_TS = self._uniform(before_TS, generator, even=index == 1)
            refused_TS1 = self._refused(before_TS, scale_TS, drawn_TSK, uniform_TS)[..., None]
            drawn_TSK = torch.cat((drawn_TSK, refused_TS1), 2).sort(2).values
            rest_TS = rest_TS - self._draft_at(refused_TS1)[..., 0]
            mass_TS = self.left(scale_TS)
            step_TS = torch.where(mass_TS > 0, mass_TS / rest_TS.clamp(min=_TINY), torch.inf)
            # If the support of q is exhausted, there are no more candidates.
            step_TS = torch.where(self._support_T1 > index, step_TS, 0.0)
            before_TS, scale_TS = scale_TS, scale_TS + step_TS
            each_T1 = self._second() if index == 1 else self.accepted(scale_TS).mean(1, keepdim=True)
            accepted.append(each_T1)
        return torch.cat(accepted, 1)

    def _second(self) -> Tensor:
        """Return the exact probability for k = 2: the sum over the refused token, in proportion to [q - p]+, [T, 1]."""
        ratio_TV, draft_TV = self._ratio_TV, self._draft_TV
        weight_TV = draft_TV * (1 - ratio_TV).clamp(min=0).masked_fill(draft_TV == 0, 0.0)
        total_T1 = weight_TV.sum(1, keepdim=True)
        rest_TV = (1 - draft_TV).clamp(min=_TINY)
        scale_TV = 1 + torch.where(self._support_T1 > 1, self.left(torch.ones_like(total_T1)) / rest_TV, 0.0)
        mean_T1 = (weight_TV * self.accepted(scale_TV)).sum(1, keepdim=True) / total_T1.clamp(min=_TINY)
        return torch.where(total_T1 > _TINY, mean_T1, 1.0)

    def _uniform(self, like_TS: Tensor, generator: torch.Generator, even: bool) -> Tensor:
        """Draw numbers in [0, 1); with `even`, one in each of S equal parts."""
        uniform_TS = torch.rand(like_TS.shape, generator=generator, dtype=torch.float64).to(like_TS.device)
        parts_S = torch.arange(like_TS.shape[1], device=like_TS.device)
        return (uniform_TS + parts_S) / like_TS.shape[1] if even else uniform_TS

    def _draft_at(self, place_TSX: Tensor) -> Tensor:
        return self._draft_TV.gather(1, place_TSX.flatten(1)).view_as(place_TSX)

    def _refused(self, before_TS: Tensor, scale_TS: Tensor, drawn_TSK: Tensor, uniform_TS: Tensor) -> Tensor:
        """Draw places of refused tokens in proportion to min([cq - p]+, (c - c')q), c' the scale before; [T, S].

        In the order of p/q the weights are (c - c')q until the ratio reaches c', and cq - p from there until c. Earlier
        draws, which all lie in the first part, are excluded.
        """
        gap_TS = torch.where(scale_TS.isfinite(), scale_TS - before_TS, 1.0)
        scale_TS = before_TS + gap_TS
        first_TS, end_TS = self._place(before_TS), self._place(scale_TS)
        sums_P, sums_Q = self._before
        taken_TS = self._draft_at(drawn_TSK).sum(2)
        low_TS = gap_TS * (sums_Q.gather(1, first_TS) - taken_TS).clamp(min=0)
        base_TS = scale_TS * sums_Q.gather(1, first_TS) - sums_P.gather(1, first_TS)
        top_TS = scale_TS * sums_Q.gather(1, end_TS) - sums_P.gather(1, end_TS)
        wanted_TS = uniform_TS * (low_TS + (top_TS - base_TS).clamp(min=0))
        early_TS = self._skip(wanted_TS / gap_TS.clamp(min=_TINY), drawn_TSK)
        # Bisection for the first place whose cumulative weight suffices.
        low, high = first_TS, end_TS
        for _ in range(self._ratio_TV.shape[1].bit_length()):
            middle = (low + high) // 2
            enough = scale_TS * sums_Q.gather(1, middle) - sums_P.gather(1, middle) - base_TS > wanted_TS - low_TS
            low, high = torch.where(enough, low, (middle + 1).clamp(max=end_TS)), torch.where(enough, middle, high)
        late_TS = (high - 1).clamp(min=0)
        return torch.where(wanted_TS < low_TS, early_TS, late_TS)

    def _skip(self, mass_TS: Tensor, drawn_TSK: Tensor) -> Tensor:
        """Return the place where the cumulative sum of q passes `mass_TS` if earlier draws (ascending) have no mass."""
        for taken_TS in drawn_TSK.unbind(2):
            start_TS = self._before[1].gather(1, taken_TS)
            mass_TS = torch.where(mass_TS >= start_TS, mass_TS + self._draft_TV.gather(1, taken_TS), mass_TS)
        place_TS = torch.searchsorted(self._before[1][:, 1:].contiguous(), mass_TS.contiguous(), right=True)
        return place_TS.clamp(max=self._draft_TV.shape[1] - 1)


def _before(values_TV: Tensor) -> Tensor:
    return pad(values_TV.cumsum(1), (1, 0))


@dataclass(frozen=True)
class Drafts:
    """Source of drafts at every position of the texts, whose token is y.

    At temperature 0 only `rank_T` is of use, and the arrays by number of candidates are empty.
    """

    target_T: NDArray[np.float32]
    """p(y), warped."""
    draft_T: NDArray[np.float32]
    """q(y), warped."""
    rank_T: NDArray[np.int32]
    """Number of tokens that are more likely than y in the source."""
    scale_TK: NDArray[np.float32]
    """cₖ of `Candidates`."""
    without_TK: NDArray[np.float32]
    """P(one of k candidates accepted | y), without replacement."""


@dataclass(frozen=True)
class HeadDrafts:
    """Outputs of prediction heads before every position, as if a step began there."""

    root_T: NDArray[np.int32]
    """Token before the position."""
    token_THC: NDArray[np.int32]
    """Most likely tokens of each head, in order; head h predicts the token at offset h."""
    log_prob_THC: NDArray[np.float32]
    """Their unwarped log-probabilities."""


@dataclass(frozen=True)
class Recording:
    """Texts of the target with the recorded numbers."""

    sampling: Sampling
    prompts: list[list[int]]
    texts: list[list[int]]
    drafts: dict[str, Drafts] = field(default_factory=dict)
    """Drafts by source: `drafter`, or the name of a `TableSource`."""
    heads: HeadDrafts | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of new tokens of each text."""
        return np.array([len(text) for text in self.texts], dtype=np.int64)

    @property
    def positions(self) -> int:
        """T, the number of new tokens of all texts."""
        return int(self.lengths.sum())


TABLE_SOURCES = (TableSource(1), TableSource(2))


@torch.inference_mode()
def record(
    target: LanguageModel,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    candidates: int = 8,
    head_candidates: int = 20,
    draws: int = 16,
    tables: Sequence[TableSource] = TABLE_SOURCES,
    chunk: int = 128,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Record texts that the target sampled, with every source of drafts in `parts`.

    Args:
        candidates: K, maximum number of candidates per position.
        head_candidates: C, number of recorded tokens of each head.
        draws: number of sequences of refused candidates (`Candidates.without_replacement`).
        tables: ways to draft from `parts.table`.
        chunk: number of positions whose whole distributions are in memory.

    Raises:
        ValueError: No text, or a text that the target cannot have sampled; parts with another vocabulary.
    """
    if len(prompts) != len(texts) or not any(map(len, texts)):
        raise ValueError(f"{len(prompts)} prompts and {len(texts)} texts: expected equal numbers, and some new tokens")
    if parts.drafter is not None and parts.drafter.translation is not None:
        parts = replace(parts, drafter=None)  # its distributions are over other tokens
    for other, what in ((parts.drafter, "drafter"), (parts.table, "table")):
        if other is not None:
            check_same_vocabulary(target, other, what)
    drafts = {} if parts.table is None else {each: each.drafts(parts.table, target.device) for each in tables}
    width, generator = min(head_candidates, target.vocab_size), torch.Generator().manual_seed(seed)
    reader = _Reader(target, parts, sampling, candidates, draws, width, drafts, generator)
    for done, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        if text:
            reader.read(prompt, text, chunk)
        if progress:
            progress(done, len(prompts))
    given, written = ([list(map(int, row)) for row in rows] for rows in (prompts, texts))
    return Recording(sampling, given, written, *reader.result())


@dataclass
class _Reader:
    """Reader of texts in chunks."""

    target: LanguageModel
    parts: Parts
    sampling: Sampling
    candidates: int
    draws: int
    width: int
    """Number of recorded tokens of each head."""
    tables: dict[TableSource, TableDrafts]
    generator: torch.Generator
    found: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    head_rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def read(self, prompt: Sequence[int], text: Sequence[int], chunk: int) -> None:
        """Read one text."""
        ids = torch.tensor([*self.target.begin([prompt], 0)[0][0], *text], device=self.target.device)
        first = len(ids) - len(text)
        passes = [_states(self.target, prompt, ids, first, chunk)]
        # A drafter that continues from its own hidden states cannot be replayed from one pass.
        drafter = None if self.parts.drafter is None or self.parts.drafter.required_aux_layers else self.parts.drafter
        if drafter is not None:
            passes.append(_states(drafter, prompt, ids, first, chunk))
        before_BD = torch.zeros(1, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        for start, hiddens in zip(range(first, len(ids), chunk), zip(*passes, strict=True), strict=True):
            token_T = ids[start : start + chunk]
            roots_T = ids[start - 1 : start - 1 + len(token_T)]
            # The first chunk includes the state before the first root, if there is one.
            read_TD = hiddens[0][:, -self.target.hidden_size :]
            hidden_TD = read_TD if len(read_TD) > len(token_T) else torch.cat((before_BD, read_TD))
            before_BD = hidden_TD[-1:]
            logits_TV = self.target.logits(hidden_TD[1:])
            target_TV = warp(logits_TV, self.sampling)
            if not bool((target_TV.gather(1, token_T[:, None]) > 0).all()) and not self.sampling.greedy:
                raise ValueError("a text has a token of probability 0 under the target, which cannot have sampled it")
            if drafter is not None:
                draft_TV = drafter.logits(hiddens[1][-len(token_T) :])
                self._keep("drafter", target_TV, draft_TV, token_T)
            for source, table in self.tables.items():
                self._keep(source.name, target_TV, table.logits(roots_T), token_T, table.best(roots_T))
            if self.parts.heads is not None:
                self._keep_heads(self.parts.heads, hidden_TD[:-1], roots_T)

    def _keep(
        self, name: str, target_TV: Tensor, draft_logits_TV: Tensor, token_T: Tensor, best_T: Tensor | None = None
    ) -> None:
        """Record a chunk; `best_T` is the draft of a table at temperature 0, which need not rank first."""
        draft_TV = warp(draft_logits_TV, self.sampling)
        token_T1 = token_T[:, None]
        rank_T = _rank(draft_logits_TV, token_T1)
        if best_T is not None:
            rank_T = torch.where(token_T == best_T, 0, rank_T.clamp(min=1))
        numbers = {
            "target_T": target_TV.gather(1, token_T1)[:, 0],
            "draft_T": draft_TV.gather(1, token_T1)[:, 0],
            "rank_T": rank_T,
        }
        if self.sampling.greedy or best_T is not None:
            numbers |= dict.fromkeys(("scale_TK", "without_TK"), target_TV[:, :0])
        else:
            judged = Candidates(target_TV, draft_TV, token_T)
            numbers["scale_TK"] = judged.scales(self.candidates)
            numbers["without_TK"] = judged.without_replacement(self.candidates, self.draws, self.generator)
        self.found.setdefault(name, []).append({key: value.cpu() for key, value in numbers.items()})

    def _keep_heads(self, heads: HeadModule, hidden_TD: Tensor, roots_T: Tensor) -> None:
        logits_THV = heads(hidden_TD)
        top = logits_THV.softmax(-1, dtype=torch.float32).topk(self.width, -1)
        self.head_rows.append((roots_T.int().cpu(), top.indices.int().cpu(), top.values.log().cpu()))

    def result(self) -> tuple[dict[str, Drafts], HeadDrafts | None]:
        """Concatenate the chunks."""
        drafts = {}
        for name, rows in self.found.items():
            columns = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
            narrow = {key: each.float() if each.is_floating_point() else each.int() for key, each in columns.items()}
            drafts[name] = Drafts(**{key: each.numpy() for key, each in narrow.items()})
        heads = None
        if self.head_rows:
            heads = HeadDrafts(*(torch.cat(column).numpy() for column in zip(*self.head_rows, strict=True)))
        return drafts, heads


def _states(model: LanguageModel, prompt: Sequence[int], ids: Tensor, first: int, chunk: int) -> Iterator[Tensor]:
    """Yield the hidden states [T, D] that predict the tokens from `first` on, by chunks; the first has one more."""
    _, cache = model.begin([prompt], len(ids) - first)
    earlier = 2 if first >= 2 else 1
    if first > earlier:
        model.extend(cache, ids[None, : first - earlier])
    cache.set_lengths([first - earlier])
    start = first - earlier
    for end in range(first, len(ids), chunk):
        stop = min(end + chunk, len(ids)) - 1
        yield model.extend(cache, ids[None, start:stop])[0]
        cache.set_lengths([stop])
        start = stop


def _rank(logits_TV: Tensor, token_T1: Tensor) -> Tensor:
    """Return the number of tokens before y; of equals the lower id comes first, as in argmax."""
    own_T1 = logits_TV.gather(1, token_T1)
    number_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    return ((logits_TV > own_T1) | ((logits_TV == own_T1) & (number_V < token_T1))).sum(1)
