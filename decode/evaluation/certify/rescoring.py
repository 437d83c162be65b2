"""Finished texts read again by a model in one wide forward each, from nothing: no step, tree or cache has a part in it.
Who judges has no part of ours at all: forward and warping are transformers' own.

Shape letters: B rows, T positions of a row, X new tokens of all rows one after another, C tokens of a chunk,
V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ...engine import Limits, Proposer
from ...models.base import LanguageModel, TransformersModel, bare_model
from ...models.final_norm import norm_input
from ...models.kv_cache import KVCache
from ...models.loading import wrap_model
from ...proposers.adaptive import AdaptiveChain
from ...proposers.beams import DraftBeam
from ...proposers.chains import DraftChains
from ...proposers.draft_tree import DraftTree, ParallelChain
from ...proposers.dynamic_tree import DynamicTree
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...proposers.ngrams import PromptLookup, TableChain, lookup
from ...proposers.suffix import SuffixTree, longest_match
from ...warpers import Sampling, warp
from ..measure import sample_texts

_TOKENS_A_FORWARD = 8192
_NUMBERS_A_CHUNK = 1 << 22
WIDTHS = (1, 4, 16, 64)
_SAFETY = 4.0
_TEXTS, _TOKENS = 4, 64  # that rounding is measured on


class Reading(NamedTuple):
    """What a model makes of the new tokens of some rows."""

    hidden_XD: Tensor
    """The state that each new token is predicted from."""
    before_XD: Tensor
    """The state that the token before it was predicted from; zeros where there is none."""
    last_X: Tensor
    """int64; the token before it."""
    prefixes: list[list[int]]
    """For each row, all committed tokens but the new ones."""


@torch.inference_mode()
def read_back(model: LanguageModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Reading:
    """Run prompts and outputs (of each row; at least one new token in all) through a model, rows side by side."""
    longest = max(map(len, prompts)) + max(map(len, outputs))
    rows = max(1, _TOKENS_A_FORWARD // longest)
    parts = [
        _read_some(model, prompts[start : start + rows], outputs[start : start + rows])
        for start in range(0, len(prompts), rows)
    ]
    hidden, before, last, prefixes = zip(*parts, strict=True)
    return Reading(torch.cat(hidden), torch.cat(before), torch.cat(last), [row for some in prefixes for row in some])


def _read_some(model: LanguageModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Reading:
    starts, cache = model.begin(prompts, max(map(len, outputs)))
    texts = [[*start, *output] for start, output in zip(starts, outputs, strict=True)]
    ids_BT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids_BT[row, : len(text)] = torch.tensor(text)
    ids_BT = ids_BT.to(model.device)
    # without the layers that it gives; what stands behind a shorter row's end is not looked at
    hidden_BTD = model.extend(cache, ids_BT[:, :-1])[..., -model.hidden_size :]
    row_X = torch.tensor([row for row, output in enumerate(outputs) for _ in output], device=model.device)
    place_X = torch.tensor(
        [len(start) - 1 + index for start, output in zip(starts, outputs, strict=True) for index in range(len(output))],
        device=model.device,
    )
    before_XD = hidden_BTD[row_X, (place_X - 1).clamp(min=0)].masked_fill((place_X < 1)[:, None], 0.0)
    prefixes = [list(start) for start in starts]
    return Reading(hidden_BTD[row_X, place_X], before_XD, ids_BT[row_X, place_X], prefixes)


def chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Slices of so many tokens that their distributions take little memory."""
    size = max(1, _NUMBERS_A_CHUNK // vocab)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class Judge(TransformersModel):
    """Runs whole texts as transformers does by itself: causal, without a cache, mask or position of ours."""

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        assert not any(cache.lengths)
        if self._norm is None:
            return self._decoder(input_ids=tokens_BM, use_cache=False).last_hidden_state.to(self.device)
        with norm_input(self._norm) as seen:
            self._decoder(input_ids=tokens_BM, use_cache=False)
        return seen[0].reshape(*tokens_BM.shape, -1).to(self.device)


def judge_of(model: PreTrainedModel, states: str = "after-norm") -> LanguageModel:
    """The judge of a transformers model's texts; of an encoder-decoder its scorer."""
    model = bare_model(model)
    return wrap_model(model, check=False) if model.config.is_encoder_decoder else Judge(model, states)


def judged(logits_XV: Tensor, sampling: Sampling) -> Tensor:
    """[X, V] float64: what `warpers.warp` should give above temperature 0, by transformers' own processors."""
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    logits_XV = logits_XV.float()
    for process in processors:
        logits_XV = process(None, logits_XV)
    return logits_XV.double().softmax(-1)


View = Callable[[slice], Tensor]


def proposers_view(
    proposer: Proposer,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    reading: Reading,
    vocab: int,
) -> View | None:
    """A function from a slice of the tokens to [C, V], what a proposer's drafter, heads or table hold likely as each
    next token, given the text before it; None for proposers without any such part, and for drafters that read more
    than the text.

    The mean of several drafters; of heads the first; of prompt look-up all on the token that it finds. It only orders
    the vocabulary: a deeper head proposes other tokens too.
    """
    if isinstance(proposer, (AdaptiveChain, DraftBeam, DraftChains, DraftTree, DynamicTree, ParallelChain)):
        models = proposer.models if isinstance(proposer, DraftChains) else (proposer.model,)
        if any(model.required_aux_layers is not None for model in models):
            return None
        states = [(model, read_back(model, prompts, outputs).hidden_XD) for model in models]
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
        found = [_looked_up(prefix, output, proposer, vocab) for prefix, output in rows]
        found_X = torch.from_numpy(np.concatenate(found)).to(reading.last_X.device)
        # One class more for places where nothing is found, which is cut off.
        return lambda index: F.one_hot(found_X[index], vocab + 1)[:, :-1].float()
    return None


def _looked_up(
    prefix: Sequence[int], output: Sequence[int], proposer: PromptLookup | SuffixTree, nothing: int
) -> np.ndarray:
    """int64 [T]: the token that look-up in the text proposes in the place of each of the output's; `nothing`: none."""
    text_S = np.array([*prefix, *output])
    lengths_T = len(prefix) + np.arange(len(output))
    if isinstance(proposer, SuffixTree):
        found = (longest_match(text_S[:length]) for length in lengths_T)
        return np.array([text_S[start] if match else nothing for start, match in found])
    places_T = lookup(
        np.broadcast_to(text_S, (len(output), len(text_S))), lengths_T, proposer.longest, proposer.shortest
    )
    return np.where(places_T >= 0, text_S[places_T], nothing)


class Rounding(NamedTuple):
    """How far the target's forwards of different shapes are from each other on the same text."""

    dtype: str
    spread: float
    """The largest difference between two logits of one token at one place that was seen."""
    near_tie: float
    """Logits that differ by no more are taken for equal."""
    total_variation: float
    """Mean total variation between the warped distributions; at temperature 0 the share of places where the most
    likely token changes. A bias as small as this is rounding's, whatever the method."""
    places: int
    """Places of texts that were looked at."""


@torch.inference_mode()
def measure_rounding(
    target: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, reference: LanguageModel | None = None
) -> Rounding:
    """Compare the target's forwards of 1, 4, 16 and 64 tokens with one wide forward of a few texts of its own, by
    `reference` or the target itself.

    A near-tie is a difference of up to four times the largest that was seen, at least one unit in the last place of the
    largest logit, and no more than the root of the dtype's precision times that logit.
    """
    reference = reference or target
    prompts = list(prompts[:_TEXTS])
    outputs = sample_texts(target, prompts, Limits(_TOKENS), sampling, batch=_TEXTS)
    wide_XV = reference.logits(read_back(reference, prompts, outputs).hidden_XD).float()
    finite_XV = wide_XV.isfinite()  # a model may rule tokens out by minus infinity
    spread, distance = 0.0, 0.0
    for width in WIDTHS:
        narrow = [_rerun(target, prompt, output, width) for prompt, output in zip(prompts, outputs, strict=True)]
        narrow_XV = torch.cat(narrow).float()
        spread = max(spread, float((narrow_XV - wide_XV)[finite_XV].abs().max()))
        apart_X = (warp(narrow_XV, sampling) - warp(wide_XV, sampling)).abs().sum(-1) / 2
        distance = max(distance, float(apart_X.mean()))
    precision, largest = torch.finfo(target.weights_dtype).eps, float(wide_XV[finite_XV].abs().max())
    near_tie = min(max(_SAFETY * spread, precision * largest), math.sqrt(precision) * largest)
    return Rounding(str(target.weights_dtype).removeprefix("torch."), spread, near_tie, distance, len(wide_XV))


def _rerun(model: LanguageModel, prompt: Sequence[int], output: Sequence[int], width: int) -> Tensor:
    """[X, V] logits of a row's new tokens from forwards of `width` tokens on top of the cache."""
    (start,), cache = model.begin([prompt], len(output) + width)
    ids_1T = torch.tensor([[*start, *output]], device=model.device)
    first = len(start) - 1
    if first:
        model.extend(cache, ids_1T[:, :first])
    parts = []
    for index in range(first, ids_1T.shape[1] - 1, width):
        cache.set_lengths([index])
        parts.append(model.extend(cache, ids_1T[:, index : min(index + width, ids_1T.shape[1] - 1)])[0])
    return model.logits(torch.cat(parts))
