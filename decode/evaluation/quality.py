"""Quality of outputs: perplexity under the target, ROUGE-L, and near-ties with greedy outputs.

Shape letters: B batch (1 here), T positions, V vocabulary, D hidden.
"""

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..models.base import LanguageModel
from ..pool import common_prefix

_POSITIONS_AT_ONCE = 256  # limits the memory of logits
_WORD = re.compile(r"[a-z0-9]+")


@torch.inference_mode()
def surprisal(target: LanguageModel, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Return −log p(output | prompt) under the unwarped target, in nats. It is infinite if the probability is 0."""
    if not output:
        return 0.0
    hidden_BTD = _states(target, prompt, output)
    ids_BT1, nats = torch.tensor(output, device=target.device)[None, :, None], 0.0
    for start in range(0, len(output), _POSITIONS_AT_ONCE):
        part = slice(start, start + _POSITIONS_AT_ONCE)
        log_probs_BTV = target.logits(hidden_BTD[:, part]).float().log_softmax(-1)
        nats -= log_probs_BTV.gather(2, ids_BT1[:, part]).double().sum().item()
    return nats


def perplexity_of(nats: Iterable[float], tokens: Iterable[int]) -> float | None:
    """Return the perplexity: the exponential of the mean surprisal per token (arXiv 2407.09722, eq. 1).

    The result is None if there are no tokens or an output has probability 0, and NaN if the target returned NaN.
    """
    loss, count = sum(nats), sum(tokens)
    if math.isnan(loss):
        return loss
    return math.exp(loss / count) if count and loss / count < 700 else None


def rouge_l(text: str, references: Sequence[str]) -> float | None:
    """Return ROUGE-L, the F-measure of the longest common subsequence of words (Lin 2004).

    The result is the best score over all references, or None if there are none. Words are runs of a–z and 0–9 in the
    lower-cased text, without stemming, as in Google's `rouge_score`.
    """
    candidate = _WORD.findall(text.lower())
    return max((_f_measure(candidate, _WORD.findall(reference.lower())) for reference in references), default=None)


def _f_measure(candidate: Sequence[str], reference: Sequence[str]) -> float:
    common = common_subsequence(candidate, reference)
    if not common:
        return 0.0
    precision, recall = common / len(candidate), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by a bit-parallel algorithm (Hyyrö 2004)."""
    indices: dict[str, int] = {}
    for index, word in enumerate(first):
        indices[word] = indices.get(word, 0) | 1 << index
    ones = row = (1 << len(first)) - 1
    for word in second:
        matched = row & indices.get(word, 0)
        row = ((row + matched) | (row - matched)) & ones
    return len(first) - row.bit_count()


@torch.inference_mode()
def nearly_tied(target: LanguageModel, prompt: Sequence[int], text: Sequence[int], greedy: Sequence[int]) -> bool:
    """Return whether `text` first differs from `greedy` at a near-tie: logits whose order rounding can change.

    The limit is the largest logit times a third of the square root of the target's precision: 0.0001 for float32, 0.03
    for bfloat16, and 0.002 for int8 products that round their inputs. Certificates measure the limit instead.
    """
    index = common_prefix(text, greedy)
    if index == min(len(text), len(greedy)):
        return False
    logits_V = target.logits(_states(target, prompt, greedy[: index + 1])[:, -1:])[0, 0].float()
    lead = abs(float(logits_V[greedy[index]] - logits_V[text[index]]))
    largest = float(logits_V[logits_V.isfinite()].abs().max())  # masked tokens are minus infinity
    return lead <= math.sqrt(target.precision) / 3 * largest


def _states(target: LanguageModel, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Return the hidden states [1, T, D] from which the output tokens are predicted."""
    start, cache = target.begin([prompt], len(output))
    ids_BT, first = torch.tensor([[*start[0], *output]], device=target.device), len(start[0])
    return target.extend(cache, ids_BT[:, :-1])[:, first - 1 :]
