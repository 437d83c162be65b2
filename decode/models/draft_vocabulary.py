"""Drafters with less than a whole output layer, most of a small drafter's work: some of its rows, or two thin factors.

What is never proposed has probability 0 in q, which no exact verifier minds (FR-Spec: Zhao et al. 2025, arXiv
2502.14856; EAGLE-3: Li et al. 2025, arXiv 2503.01840, whose map is called d2t). Nor does one mind which matrix the
logits come from: factors are one of low rank.

Letters: R rows that are computed, K rank, V vocabulary, D hidden, X any leading shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.storage.draft_vocabulary import (
    INNER,
    OUTER,
    TOKENS,
    check_tokens,
    read_vocabulary,
    write_vocabulary,
)

_BUFFER = "draft_tokens_R"


class LowRankHead(nn.Linear):
    """An output layer whose matrix is outer · inner, [V, K] · [K, D]; seen as a linear layer it is the outer one."""

    def __init__(self, inner_KD: Tensor, outer_VK: Tensor) -> None:
        (rank, hidden), vocab = inner_KD.shape, len(outer_VK)
        super().__init__(rank, vocab, bias=False, device="meta")
        self.weight = nn.Parameter(outer_VK)
        self.inner = nn.Linear(hidden, rank, bias=False, device="meta")
        self.inner.weight = nn.Parameter(inner_KD)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.inner(input))


def to_last(head: nn.Module, hidden_XD: Tensor) -> Tensor:
    """What the last matrix of an output layer reads: hidden states, or [..., K] of a layer of low rank."""
    last: Tensor = head.inner(hidden_XD) if isinstance(head, LowRankHead) else hidden_XD
    return last


def whole_matrix(head: Any) -> Tensor:
    """The matrix of an output layer [V, D], multiplied out where it has factors."""
    weight: Tensor = head.weight.detach()
    if not isinstance(head, LowRankHead):
        return weight
    return (weight.float() @ head.inner.weight.detach().float()).to(weight.dtype)


def factorise(model: Any, rank: int) -> None:
    """Give a decoder an output layer of a rank, apart from its embeddings: that of its own which is nearest in the rows
    of the tokens that it proposes, by squares (Eckart and Young 1936). Raises ValueError: a rank that is none, or no
    less than the hidden size; a layer with a bias."""
    head = model.get_output_embeddings()
    weight_VD, kept_R = whole_matrix(head), kept_tokens(model)
    if rank >= weight_VD.shape[1] or getattr(head, "bias", None) is not None:
        bias = "" if getattr(head, "bias", None) is None else ", with a bias"
        raise ValueError(f"rank {rank} of an output layer of {' x '.join(map(str, weight_VD.shape))}{bias}")
    rows_RD = (weight_VD if kept_R is None else weight_VD[kept_R]).double()
    inner_KD = torch.linalg.eigh(rows_RD.T @ rows_RD).eigenvectors[:, -rank:].T
    outer_VK = weight_VD @ inner_KD.T.to(weight_VD.dtype)
    _set_factors(model, inner_KD.to(weight_VD.dtype).contiguous(), outer_VK)


def _set_factors(model: Any, inner_KD: Tensor, outer_VK: Tensor) -> None:
    model.set_output_embeddings(LowRankHead(inner_KD, outer_VK))
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def state_of_whole(model: Any) -> dict[str, Tensor] | None:
    """Weights of a model for other programs, its output layer multiplied out; None where that has no factors."""
    head, state = model.get_output_embeddings(), model.state_dict()
    if not isinstance(head, LowRankHead):
        return None
    name = next(name for name, part in model.named_modules() if part is head)
    del state[f"{name}.inner.weight"]
    return state | {f"{name}.weight": whole_matrix(head)}


def keep_tokens(model: Any, ids_R: Tensor) -> None:
    """Have a model propose these tokens alone. Raises ValueError: ids that do not rise, or that it does not have."""
    weight = model.get_output_embeddings().weight
    check_tokens(ids_R, len(weight))
    model.register_buffer(_BUFFER, ids_R.long().to(weight.device), persistent=False)


def kept_tokens(model: Any) -> Tensor | None:
    """The ids that a model proposes, int64 [R], rising; None: all."""
    return getattr(model, _BUFFER, None)


def save_vocabulary(model: Any, folder: Path) -> None:
    """Write the file, if the model has less than a whole output layer."""
    head, ids_R = model.get_output_embeddings(), kept_tokens(model)
    tensors = {} if ids_R is None else {TOKENS: ids_R}
    if isinstance(head, LowRankHead):
        tensors |= {INNER: head.inner.weight, OUTER: head.weight}
    write_vocabulary(tensors, folder)


def load_vocabulary(model: Any, folder: Path) -> None:
    """Give a model what the file in its folder says, if there is one. Raises ValueError: not such a file."""
    weight_VD = model.get_output_embeddings().weight
    found = read_vocabulary(folder, len(weight_VD))
    if INNER in found:
        mine, theirs = weight_VD.shape[1], found[INNER].shape[1]
        if mine != theirs:
            raise ValueError(f"{folder}: the factors of its output layer are for {theirs} hidden units of {mine}")
        _set_factors(model, *(found[name].to(weight_VD, copy=True) for name in (INNER, OUTER)))  # no mapped memory
    if TOKENS in found:
        keep_tokens(model, found[TOKENS])


def take_vocabulary(model: Any, source: Any) -> None:
    """Give a model what another of its width has instead of a whole output layer."""
    head, ids_R = source.get_output_embeddings(), kept_tokens(source)
    if isinstance(head, LowRankHead):
        _set_factors(model, head.inner.weight.detach().clone(), head.weight.detach().clone())
    if ids_R is not None:
        model.register_buffer(_BUFFER, ids_R, persistent=False)  # checked where they are from
