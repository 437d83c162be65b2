"""Rescoring of complete outputs by teacher forcing, with one forward each and without steps or trees.

The model that scores outputs (`Judge`) uses the forward and the logits processors of transformers.

Shape letters: B rows, T positions of a row, X new tokens of all rows one after another, C tokens of a chunk, L
continuations, V vocabulary, D hidden.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ...engine import Limits, Proposer
from ...models.base import LanguageModel, TransformersModel, bare_model
from ...models.final_norm import module_inputs
from ...models.kv_cache import KVCache
from ...models.loading import wrap_model
from ...models.products.native import library_products
from ...proposers.beams import DraftBeam
from ...proposers.chains import DraftChains
from ...proposers.draft_state import DrafterProposer
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...proposers.ngrams import PromptLookup, TableChain, lookup
from ...proposers.suffix import SuffixTree, longest_match
from ...warpers import Sampling, warp
from ..measure import sample_texts

_TOKENS_A_FORWARD = 8192
_NUMBERS_A_CHUNK = 1 << 22
_WIDTHS = (1, 4, 16, 64)
_TEXTS, _TOKENS = 4, 64
"""Number and length of the texts on which rounding is measured."""


class TextStates(NamedTuple):
    """Hidden states of the output tokens of several rows."""

    hidden_XD: Tensor
    """Hidden state from which each output token is predicted."""
    before_XD: Tensor
    """Hidden state from which the preceding token is predicted, or zeros if there is none."""
    last_X: Tensor
    """Token that precedes each output token, int64."""
    prefixes: list[list[int]]
    """Decoder tokens of each row before the output."""


@torch.inference_mode()
def teacher_force(
    model: LanguageModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> TextStates:
    """Run prompts and outputs through a model, and return its hidden states. At least one output must have tokens."""
    rows = max(1, _TOKENS_A_FORWARD // (max(map(len, prompts)) + max(map(len, outputs))))
    parts = [
        _read_some(model, prompts[start : start + rows], outputs[start : start + rows])
        for start in range(0, len(prompts), rows)
    ]
    hidden, before, last, prefixes = zip(*parts, strict=True)
    return TextStates(torch.cat(hidden), torch.cat(before), torch.cat(last), list(itertools.chain(*prefixes)))


def _read_some(model: LanguageModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> TextStates:
    starts, cache = model.begin(prompts, max(map(len, outputs)))
    texts = [torch.tensor([*start, *output]) for start, output in zip(starts, outputs, strict=True)]
    ids_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(model.device)
    # The last columns are the final states. Positions after the end of a shorter row are not read.
    hidden_BTD = model.extend(cache, ids_BT[:, :-1])[..., -model.hidden_size :]
    positions = [
        (row, len(start) - 1 + index)
        for row, (start, output) in enumerate(zip(starts, outputs, strict=True))
        for index in range(len(output))
    ]
    row_X, position_X = torch.tensor(positions, dtype=torch.int64, device=model.device).reshape(-1, 2).T
    before_XD = hidden_BTD[row_X, (position_X - 1).clamp(min=0)].masked_fill((position_X < 1)[:, None], 0.0)
    prefixes = [list(start) for start in starts]
    return TextStates(hidden_BTD[row_X, position_X], before_XD, ids_BT[row_X, position_X], prefixes)


def chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Divide the indices of `tokens` tokens into slices, each short enough for its distributions to fit in memory."""
    size = max(1, _NUMBERS_A_CHUNK // vocab)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class Judge(TransformersModel):
    """Model that scores whole sequences with the forward of transformers instead of this package's forward."""

    @library_products()
    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        assert not any(cache.lengths)
        if self._norm is None:
            return self._decoder(input_ids=tokens_BM, use_cache=False).last_hidden_state.to(self.device)
        with module_inputs([self._norm]) as captured:
            self._decoder(input_ids=tokens_BM, use_cache=False)
        return captured[0].reshape(*tokens_BM.shape, -1).to(self.device)

    @library_products()
    def logits(self, hidden_XD: Tensor) -> Tensor:
        return super().logits(hidden_XD)


def make_judge(model: PreTrainedModel, states: str = "after-norm") -> LanguageModel:
    """Return a `Judge` for a decoder, or the result of `wrap_model` for an encoder-decoder."""
    model = bare_model(model)
    return wrap_model(model, check=False) if model.config.is_encoder_decoder else Judge(model, states)


def judge_probs(logits_XV: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities [X, V], float64, warped by transformers' processors. Temperature must be above 0."""
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    logits_XV = logits_XV.float()
    for process in processors:
        logits_XV = process(None, logits_XV)
    return logits_XV.double().softmax(-1)


def joint_distribution(
    model: LanguageModel, prompt: Sequence[int], sampling: Sampling, stops: Sequence[int], length: int
) -> np.ndarray:
    """Return the probability of each of the L sequences of `length` tokens. Only token 0 can follow a stop token."""
    paths = list(itertools.product(range(model.vocab_size), repeat=length))
    hidden_XD = teacher_force(model, [prompt] * len(paths), paths).hidden_XD
    path_LX = torch.tensor(paths, device=hidden_XD.device)
    probs_LXV = judge_probs(model.logits(hidden_XD), sampling).unflatten(0, path_LX.shape)
    token_LX = probs_LXV.gather(2, path_LX[..., None])[..., 0]
    stopped_LX = torch.isin(path_LX, torch.tensor(stops, device=path_LX.device)).cummax(1).values
    token_LX[:, 1:] = torch.where(stopped_LX[:, :-1], (path_LX[:, 1:] == 0).double(), token_LX[:, 1:])
    return token_LX.prod(1).cpu().numpy()


def make_draft_scorer(
    proposer: Proposer,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    reading: TextStates,
    vocab: int,
) -> Callable[[slice], Tensor] | None:
    """Return a function that maps a slice of C tokens to the proposer's scores of the vocabulary, [C, V].

    Scores are the probabilities of the drafters (mean), first head or table, or one-hot vectors of tokens that lookup
    finds. `reading` contains the target's hidden states. Returns None for drafters that need auxiliary hidden states.
    """
    if isinstance(proposer, (DrafterProposer, DraftBeam, DraftChains)):
        models = proposer.models if isinstance(proposer, DraftChains) else (proposer.model,)
        if any(model.required_aux_layers is not None for model in models):
            return None
        states = [(model, teacher_force(model, prompts, outputs).hidden_XD) for model in models]
        return lambda index: torch.stack(
            [warp(model.logits(hidden_XD[index]), sampling) for model, hidden_XD in states]
        ).mean(0)
    if isinstance(proposer, (HeadTree, PrunedHeadTree)):
        heads = proposer.heads
        return lambda index: heads(reading.before_XD[index])[:, 0].softmax(-1, dtype=torch.float32)
    if isinstance(proposer, TableChain):
        drafts = proposer.source.drafts(proposer.table, reading.last_X.device)
        return lambda index: warp(drafts.logits(reading.last_X[index]), sampling)
    if isinstance(proposer, (PromptLookup, SuffixTree)):
        rows = zip(reading.prefixes, outputs, strict=True)
        matches = [_look_up(prefix, output, proposer, vocab) for prefix, output in rows]
        match_X = torch.from_numpy(np.concatenate(matches)).to(reading.last_X.device)
        # The last class stands for positions without a match, and is dropped.
        return lambda index: F.one_hot(match_X[index], vocab + 1)[:, :-1].float()
    return None


def _look_up(
    prefix: Sequence[int], output: Sequence[int], proposer: PromptLookup | SuffixTree, missing: int
) -> np.ndarray:
    """Return the token that lookup proposes at each output position, int64 [T], or `missing` if nothing matches."""
    text_S = np.array([*prefix, *output])
    lengths_T = len(prefix) + np.arange(len(output))
    if isinstance(proposer, SuffixTree):
        matches = (longest_match(text_S[:length]) for length in lengths_T)
        return np.array([text_S[start] if match else missing for start, match in matches])
    position_T = lookup(
        np.broadcast_to(text_S, (len(output), len(text_S))), lengths_T, proposer.max_ngram, proposer.min_ngram
    )
    return np.where(position_T >= 0, text_S[position_T], missing)


@dataclass(frozen=True)
class Rounding:
    """Rounding differences between forwards of the target that process the same text in different shapes."""

    dtype: str
    spread: float
    """Largest observed difference between two forwards in the logit of a token."""
    near_tie: float
    """Maximum difference at which two logits count as a near-tie."""
    total_variation: float
    """Mean total variation distance between the warped distributions (at temperature 0: share of positions where the
    most likely token changes). Rounding explains a bias of this size."""
    tokens: int
    """Number of tokens compared."""


@torch.inference_mode()
def measure_rounding(
    target: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, reference: LanguageModel | None = None
) -> Rounding:
    """Compare forwards of the target over a few tokens with a forward of `reference` over the whole text.

    `near_tie` is four times the largest observed difference, at least one unit in the last place of the largest logit,
    and at most the square root of the target's precision times that logit.
    """
    reference = reference or target
    prompts = list(prompts[:_TEXTS])
    outputs = sample_texts(target, prompts, Limits(_TOKENS), sampling, batch=_TEXTS)
    wide_XV = reference.logits(teacher_force(reference, prompts, outputs).hidden_XD).float()
    finite_XV = wide_XV.isfinite()  # A model may exclude tokens with logits of minus infinity.
    spread, distance = 0.0, 0.0
    for width in _WIDTHS:
        narrow = [_rerun(target, prompt, output, width) for prompt, output in zip(prompts, outputs, strict=True)]
        narrow_XV = torch.cat(narrow).float()
        spread = max(spread, float((narrow_XV - wide_XV)[finite_XV].abs().max()))
        distance_X = (warp(narrow_XV, sampling) - warp(wide_XV, sampling)).abs().sum(-1) / 2
        distance = max(distance, float(distance_X.mean()))
    precision, largest = target.precision, float(wide_XV[finite_XV].abs().max())
    near_tie = min(max(4.0 * spread, precision * largest), math.sqrt(precision) * largest)
    return Rounding(str(target.weights_dtype).removeprefix("torch."), spread, near_tie, distance, len(wide_XV))


def _rerun(model: LanguageModel, prompt: Sequence[int], output: Sequence[int], width: int) -> Tensor:
    """Return the logits [X, V] of a row's output tokens, computed with a cache in forwards of `width` tokens."""
    (start,), cache = model.begin([prompt], len(output) + width)
    ids_1T = torch.tensor([[*start, *output[:-1]]], device=model.device)
    first = len(start) - 1
    if first:
        model.extend(cache, ids_1T[:, :first])
    parts = []
    for index in range(first, ids_1T.shape[1], width):
        cache.set_lengths([index])
        parts.append(model.extend(cache, ids_1T[:, index : index + width])[0])
    return model.logits(torch.cat(parts))
