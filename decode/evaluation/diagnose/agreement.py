"""Agreement between draft tokens and the target at every token of a text, measured by teacher forcing.

Shape letters: T predicted tokens of all passages (for EAGLE-3: input tokens of one text), C tokens of a chunk, X new
tokens, K depth, P passages, V vocabulary, R proposed tokens, D hidden, G auxiliary hidden states.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.storage.draft_vocabulary import widen
from ...models.base import LanguageModel
from ...proposers.head_trees import HeadModule
from ...proposers.ngrams import TableChain
from ...warpers import Sampling, warp
from ..bootstrap import Floats
from ..certify.rescoring import TextStates, chunks, teacher_force

_TOKENS_AT_ONCE = 16384
_PLAIN = Sampling(temperature=1.0)
MEASURES = ("hit", "overlap", "agree", "accepted")


class Passage(NamedTuple):
    """Prompt and text on which draft tokens and target are compared."""

    prompt: Sequence[int]
    """Token ids of the prompt, at least one. Encoder-decoders use them as encoder input."""
    text: Sequence[int]
    """Token ids of the text to predict."""
    judged: Sequence[bool] | None = None
    """Mask of the text's tokens that are scored. None scores all tokens."""

    def judge_only(self, ids: set[int]) -> "Passage":
        """Return a copy of the passage in which only tokens in `ids` are scored."""
        pairs = zip(self.judged or [True] * len(self.text), self.text, strict=True)
        return self._replace(judged=[bool(is_judged) and token in ids for is_judged, token in pairs])


Drafts = Callable[[slice], list[tuple[Tensor, Tensor]]]
"""Function that maps a slice of the predicted tokens to each head's unwarped logits [C, V] and greedy draft tokens,
int64 [C]. Head k predicts k positions ahead."""


@dataclass(frozen=True)
class Source:
    """Source of draft tokens: a draft model, heads, or a table."""

    make_drafts: Callable[[Sequence[Passage], TextStates], Drafts]
    """Function that returns the drafts for passages, given the target's hidden states."""
    depth: int = 1
    """Number of tokens predicted from one position (K), each by a separate head or step."""
    draws: bool = True
    """True if draft tokens are sampled. False if the most likely token is always proposed, as with heads."""
    proposed: Tensor | None = None
    """Ids of the tokens that can be proposed. None if all tokens can be proposed, or if this is unknown."""
    needs_previous_state: bool = False
    """True if drafting a token needs the target's hidden state from which the previous token is predicted."""


def drafter_source(model: LanguageModel) -> Source:
    """Return a `Source` that drafts with a draft model."""

    def make_drafts(passages: Sequence[Passage], states: TextStates) -> Drafts:
        prompts, texts = [passage.prompt for passage in passages], [passage.text for passage in passages]
        hidden_TD = teacher_force(model, prompts, texts).hidden_XD
        return lambda span: [_with_best(model.logits(hidden_TD[span]))]

    return Source(make_drafts)


def heads_source(heads: HeadModule, dtype: torch.dtype) -> Source:
    """Return a `Source` that drafts with prediction heads on the target's hidden states."""
    depth = heads.num_heads

    def make_drafts(passages: Sequence[Passage], states: TextStates) -> Drafts:
        def drafts(span: slice) -> list[tuple[Tensor, Tensor]]:
            count = span.stop - span.start
            rows = torch.arange(span.start - depth + 1, span.stop).clamp(min=0).to(states.before_XD.device)
            logits_CKV = heads(states.before_XD[rows].to(dtype))
            first = [depth - 1 - head for head in range(depth)]
            return [_with_best(logits_CKV[row : row + count, head]) for head, row in enumerate(first)]

        return drafts

    return Source(make_drafts, depth, draws=False, proposed=getattr(heads, "proposed", None), needs_previous_state=True)


def eagle_source(heads: EagleHeads, target: LanguageModel, previous_token: bool = False) -> Source:
    """Return a `Source` that drafts with EAGLE-3 heads. The target must return auxiliary states for them.

    With `previous_token`, the heads' input at each position is the preceding token.
    """

    def run_heads(passage: Passage) -> Tensor:
        aux_1TG, _, ids_1T = target_states(target, passage)
        return chains(heads, aux_1TG, ids_1T, len(passage.text), previous_token)

    def make_drafts(passages: Sequence[Passage], states: TextStates) -> Drafts:
        states_XKD = torch.cat([run_heads(passage) for passage in passages if passage.text])
        return lambda span: [_with_best(draft_logits(heads, states_CD)) for states_CD in states_XKD[span].unbind(1)]

    return Source(make_drafts, heads.num_heads, proposed=heads.proposed, needs_previous_state=True)


def target_states(target: LanguageModel, passage: Passage) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's auxiliary states [1, T, G], final states [1, T, D] and ids [1, T], without the last token."""
    (start,), cache = target.begin([passage.prompt], len(passage.text))
    ids_1T = torch.tensor([[*start, *passage.text[:-1]]], device=target.device)
    states_1TS = target.extend(cache, ids_1T)
    return states_1TS[..., : -target.hidden_size], states_1TS[..., -target.hidden_size :], ids_1T


def chains(heads: EagleHeads, aux_1TG: Tensor, ids_1T: Tensor, new: int, previous_token: bool = False) -> Tensor:
    """Return the states [X, K, D] from which step k of EAGLE-3 heads predicts each of the last `new` tokens.

    With `previous_token`, the heads' input at each position is the preceding token.
    """
    count = ids_1T.shape[1]
    mask_11TT = torch.ones(1, 1, count, count, dtype=torch.bool, device=ids_1T.device).tril()
    positions_1T = torch.arange(count, device=ids_1T.device)[None]
    input_1T = F.pad(ids_1T[:, :-1], (1, 0)) if previous_token else ids_1T
    (states_TKD,) = heads.features(aux_1TG.to(heads.fc.weight.dtype), input_1T, positions_1T, mask_11TT)
    steps_K = torch.arange(heads.num_heads, device=ids_1T.device)
    # step k at position t predicts token t + 2 + k
    position_XK = count - new - 1 + torch.arange(new, device=ids_1T.device)[:, None] - steps_K
    return states_TKD[position_XK.clamp(min=0), steps_K]


def draft_logits(heads: EagleHeads, states_XD: Tensor) -> Tensor:
    """Return logits [..., V] of EAGLE-3 heads, with minus infinity for tokens outside the draft vocabulary."""
    logits_XR = states_XD @ heads.projection().to(states_XD).T
    return logits_XR if heads.proposed is None else widen(logits_XR, heads.proposed, heads.vocab_size)


def table_source(proposer: TableChain, device: torch.device) -> Source:
    """Return a `Source` that drafts from a table of counts, as `ngrams.TableChain` does."""
    table = proposer.source.drafts(proposer.table, device)

    def make_drafts(passages: Sequence[Passage], states: TextStates) -> Drafts:
        return lambda span: [(table.logits(states.last_X[span]), table.best(states.last_X[span]))]

    return Source(make_drafts)


def _with_best(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_CV, logits_CV.argmax(-1)


@dataclass(frozen=True)
class Scores:
    """Agreement between target and drafts at each predicted token y. Row k contains drafts made k positions earlier."""

    measures: dict[str, NDArray[np.float32]]
    """Mapping from measure names to values [K, T]. hit: 1 if the source's most likely token is y. overlap: Σ min(p, q),
    unwarped, the acceptance probability at temperature 1 (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5). agree:
    1 if target and source have the same most likely token. accepted: acceptance probability with the sampling settings,
    Σ min(p, q), or p of the draft token if it is not sampled."""
    valid_KT: NDArray[np.bool_]
    """Mask of the scored tokens for which a draft was made k positions earlier."""
    passage_T: NDArray[np.int64]
    """Index of the passage of each token."""
    passages: int

    def sums(self, name: str) -> tuple[Floats, Floats]:
        """Return the sum of a measure and the number of scored tokens for each passage, [P] each."""
        value_KT = self.measures[name] * self.valid_KT
        sums = (value_KT.sum(0, dtype=np.float64), self.valid_KT.sum(0))
        over_P, under_P = (np.bincount(self.passage_T, values_T, self.passages) for values_T in sums)
        return over_P.astype(np.float64), under_P.astype(np.float64)

    def mean(self, name: str) -> float | None:
        """Return the mean of a measure over all scored tokens, or None if no token is scored."""
        over_P, under_P = self.sums(name)
        return float(over_P.sum() / under_P.sum()) if under_P.sum() else None

    def by_depth(self, name: str) -> list[float | None]:
        pairs = zip(self.measures[name], self.valid_KT, strict=True)
        return [float(row_T[valid_T].mean(dtype=np.float64)) if valid_T.any() else None for row_T, valid_T in pairs]


@torch.inference_mode()
def score(
    target: LanguageModel,
    source: Source,
    passages: Sequence[Passage],
    sampling: Sampling,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Compare a source of draft tokens with the target at each token of the passages, using teacher forcing.

    Raises:
        ValueError: There is no token to predict.
    """
    if not any(passage.text for passage in passages):
        raise ValueError(f"the {len(passages)} passages contain no token to predict")
    measures, valid = [], []
    done = 0
    for group in _groups(passages):
        if any(passage.text for passage in group):
            states = teacher_force(target, [passage.prompt for passage in group], [passage.text for passage in group])
            measures.append(_measure(target, source, group, states, sampling))
            valid.append(_valid(group, states.prefixes, source))
        done += len(group)
        if progress:
            progress(done, len(passages))
    passage_T = np.repeat(np.arange(len(passages)), [len(passage.text) for passage in passages])
    by_name = np.concatenate(measures, -1)
    return Scores(dict(zip(MEASURES, by_name, strict=True)), np.concatenate(valid, -1), passage_T, len(passages))


def _groups(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Yield groups of passages with about `_TOKENS_AT_ONCE` tokens, to limit the memory of hidden states."""
    sizes = np.cumsum([len(passage.prompt) + len(passage.text) for passage in passages])
    for _, group in groupby(zip(sizes // _TOKENS_AT_ONCE, passages, strict=True), lambda pair: pair[0]):
        yield [passage for _, passage in group]


def _measure(
    target: LanguageModel, source: Source, passages: Sequence[Passage], states: TextStates, sampling: Sampling
) -> NDArray[np.float32]:
    """Return the values [K, T] of all `MEASURES` (see `Scores`), stacked."""
    token_T = torch.tensor([token for passage in passages for token in passage.text])
    drafts, parts = source.make_drafts(passages, states), []
    for span in chunks(len(token_T), target.vocab_size):
        target_CV = target.logits(states.hidden_XD[span]).float()
        plain_CV, warped_CV = warp(target_CV, _PLAIN), warp(target_CV, sampling)
        token_C, rows = token_T[span].to(target.device), []
        for logits_CV, best_C in drafts(span):
            draft_CV = logits_CV.float()
            agree_C = (best_C == target_CV.argmax(-1)).float()
            if sampling.greedy:
                accepted_C = agree_C
            elif source.draws:
                accepted_C = torch.minimum(warped_CV, warp(draft_CV, sampling)).sum(-1)
            else:
                accepted_C = warped_CV.gather(-1, best_C[:, None])[:, 0]
            overlap_C = torch.minimum(plain_CV, warp(draft_CV, _PLAIN)).sum(-1)
            rows.append(torch.stack([(best_C == token_C).float(), overlap_C, agree_C, accepted_C]))
        parts.append(torch.stack(rows, 1).cpu())
    return torch.cat(parts, -1).numpy()


def _valid(passages: Sequence[Passage], starts: Sequence[Sequence[int]], source: Source) -> NDArray[np.bool_]:
    """Return the mask [K, T] of scored tokens for which a draft was made k positions earlier."""
    parts = []
    for passage, start in zip(passages, starts, strict=True):
        index_T = np.arange(len(passage.text))
        # A token is drafted from a state k + 1 positions before the state from which the target predicts the token.
        earliest = 1 if source.needs_previous_state and len(start) < 2 else 0
        judged_T = np.ones(len(index_T), dtype=bool) if passage.judged is None else np.asarray(passage.judged, bool)
        parts.append(judged_T & (index_T - np.arange(source.depth)[:, None] >= earliest))
    return np.concatenate(parts, -1)
