"""One teacher-forced pass over texts of the target: what replay needs to know of every position, and no more.

The texts are the target's own. At every token of theirs the distributions of the target and of each source of drafts
are reduced to some tens of numbers, from which `replay.py` predicts what decoding would do.

Shape letters: T positions (the new tokens of all texts, one after another), K candidates, H heads, C candidates of a
head, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...methods import Parts
from ...models.base import LanguageModel, check_same_vocabulary
from ...proposers.head_trees import HeadModule
from ...proposers.ngrams import TableDrafts, TableSource
from ...warpers import Sampling, warp
from .acceptance import Candidates


@dataclass(frozen=True)
class Drafts:
    """A source of drafts at every position of the texts; y is the token that stands there.

    At temperature 0 the numbers of candidates are those of one-hot distributions, so that only `rank_T` holds more.
    """

    target_T: NDArray[np.float32]
    """p(y), warped."""
    draft_T: NDArray[np.float32]
    """q(y), warped."""
    rank_T: NDArray[np.int32]
    """How many tokens the source holds more likely than y; 0: y is its best."""
    scale_TK: NDArray[np.float32]
    """cₖ of `acceptance.py`: with replacement, one of k candidates is accepted with min(1, cₖ q(y)/p(y)) given y."""
    without_TK: NDArray[np.float32]
    """P(one of k candidates accepted | y), without replacement."""
    drawn_TK: NDArray[np.float32]
    """P(y is among k candidates), without replacement."""


@dataclass(frozen=True)
class HeadDrafts:
    """Prediction heads in front of every position, as if a step began there."""

    root_T: NDArray[np.int32]
    """The token before the position."""
    token_THC: NDArray[np.int32]
    """Each head's most likely tokens, the best first; head h speaks of the token h places on."""
    log_prob_THC: NDArray[np.float32]
    """Their log-probabilities, unwarped."""


@dataclass(frozen=True)
class Recording:
    """Texts of the target and what was recorded of them."""

    sampling: Sampling
    prompts: list[list[int]]
    texts: list[list[int]]
    drafts: dict[str, Drafts] = field(default_factory=dict)
    """By source: `drafter`, or the name of a `TableSource`."""
    heads: HeadDrafts | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """New tokens of each text."""
        return np.array([len(text) for text in self.texts], dtype=np.int64)

    @property
    def positions(self) -> int:
        """T, the new tokens of all texts."""
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
    """Read the texts, drawn from the target with this `sampling`, once with it and with every source of drafts that
    `parts` holds.

    Args:
        candidates: K, the most candidates a position that replay shall know of.
        head_candidates: C, how many of each head's tokens to keep.
        draws: sequences of refused candidates per position, without replacement (`acceptance.Candidates`).
        tables: ways to draft from `parts.table`; of these the numbers of several candidates are not kept.
        chunk: positions of which whole distributions are held at a time.

    Raises ValueError: other numbers of prompts and texts, no text at all, a text whose token the target cannot have
    drawn, parts of another vocabulary.
    """
    if len(prompts) != len(texts) or not any(map(len, texts)):
        raise ValueError(f"{len(prompts)} prompts and {len(texts)} texts: expected as many, and one that is not empty")
    if parts.drafter is not None and parts.drafter.translation is not None:
        parts = replace(parts, drafter=None)  # whose distributions are over other tokens
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
    """Reads text by text, chunk by chunk, and keeps the numbers."""

    target: LanguageModel
    parts: Parts
    sampling: Sampling
    candidates: int
    draws: int
    width: int
    """Candidates of a head."""
    tables: dict[TableSource, TableDrafts]
    generator: torch.Generator
    found: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    head_rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def read(self, prompt: Sequence[int], text: Sequence[int], chunk: int) -> None:
        """Read one text."""
        ids = torch.tensor([*self.target.begin([prompt], 0)[0][0], *text], device=self.target.device)
        first = len(ids) - len(text)
        passes = [_states(self.target, prompt, ids, first, chunk)]
        # what a drafter makes of its own states, where the target has none yet, no pass over a text tells
        drafter = None if self.parts.drafter is None or self.parts.drafter.required_aux_layers else self.parts.drafter
        if drafter is not None:
            passes.append(_states(drafter, prompt, ids, first, chunk))
        before_BD = torch.zeros(1, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        for start, hiddens in zip(range(first, len(ids), chunk), zip(*passes, strict=True), strict=True):
            token_T = ids[start : start + chunk]
            roots_T = ids[start - 1 : start - 1 + len(token_T)]
            # One more state than positions: the first chunk brings the state before the first root, if there is one.
            read_TD = hiddens[0][:, -self.target.hidden_size :]
            hidden_TD = read_TD if len(read_TD) > len(token_T) else torch.cat((before_BD, read_TD))
            before_BD = hidden_TD[-1:]
            logits_TV = self.target.logits(hidden_TD[1:])
            target_TV = warp(logits_TV, self.sampling)
            if not bool((target_TV.gather(1, token_T[:, None]) > 0).all()) and not self.sampling.greedy:
                raise ValueError("a text holds a token of probability 0 under the target: it was not drawn from it")
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
        """`best_T`: what a table drafts at temperature 0, which need not be the first of the most likely tokens."""
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
            numbers |= dict.fromkeys(_BY_CANDIDATES, target_TV[:, :0])
        else:
            judged = Candidates(target_TV, draft_TV, token_T)
            drawn = (self.candidates, self.draws, self.generator)
            numbers["scale_TK"], _ = judged.scales(self.candidates)
            numbers["without_TK"] = judged.without_replacement(*drawn)
            numbers["drawn_TK"] = judged.drawn_without_replacement(*drawn)
        self.found.setdefault(name, []).append({key: value.cpu() for key, value in numbers.items()})

    def _keep_heads(self, heads: HeadModule, hidden_TD: Tensor, roots_T: Tensor) -> None:
        logits_THV = heads(hidden_TD)
        top = logits_THV.softmax(-1, dtype=torch.float32).topk(self.width, -1)
        self.head_rows.append((roots_T.int().cpu(), top.indices.int().cpu(), top.values.log().cpu()))

    def result(self) -> tuple[dict[str, Drafts], HeadDrafts | None]:
        """All that was kept."""
        drafts = {}
        for name, rows in self.found.items():
            columns = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
            narrow = {key: each.float() if each.is_floating_point() else each.int() for key, each in columns.items()}
            drafts[name] = Drafts(**{key: each.numpy() for key, each in narrow.items()})
        heads = None
        if self.head_rows:
            heads = HeadDrafts(*(torch.cat(column).numpy() for column in zip(*self.head_rows, strict=True)))
        return drafts, heads


_BY_CANDIDATES = ("scale_TK", "without_TK", "drawn_TK")


def _states(model: LanguageModel, prompt: Sequence[int], ids: Tensor, first: int, chunk: int) -> Iterator[Tensor]:
    """Hidden states [T, D] that predict the tokens from `first` on, `chunk` at a time; the first piece has one more
    before them."""
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
    """How many tokens stand before y; of equals the one of the lower number first, as argmax has it."""
    own_T1 = logits_TV.gather(1, token_T1)
    number_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    return ((logits_TV > own_T1) | ((logits_TV == own_T1) & (number_V < token_T1))).sum(1)
