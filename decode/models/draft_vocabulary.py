"""Drafters that propose some tokens only: of their output layer, the rows of these are computed.

What is never proposed has probability 0 in q, which no exact verifier minds; and the projection, most of a small
drafter's work, shrinks (FR-Spec: Zhao et al. 2025, arXiv 2502.14856; EAGLE-3: Li et al. 2025, arXiv 2503.01840, whose
map is called d2t).

Letters: R rows that are computed, V vocabulary, X any leading shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.verify.draft_vocabulary import check_tokens, read_vocabulary, write_vocabulary

_BUFFER = "draft_tokens_R"


def keep_tokens(model: Any, ids_R: Tensor) -> None:
    """Have a model propose these tokens alone. Raises ValueError: ids that do not rise, or that it does not have."""
    weight_VD = model.get_output_embeddings().weight
    check_tokens(ids_R, weight_VD.shape[0])
    model.register_buffer(_BUFFER, ids_R.long().to(weight_VD.device), persistent=False)


def kept_tokens(model: Any) -> Tensor | None:
    """The ids that a model proposes, int64 [R], rising; None: all."""
    return getattr(model, _BUFFER, None)


def save_vocabulary(model: Any, folder: Path) -> None:
    """Write the file, if the model has a vocabulary of its own."""
    ids_R = kept_tokens(model)
    if ids_R is not None:
        write_vocabulary(ids_R, folder)


def load_vocabulary(model: Any, folder: Path) -> None:
    """Have a model propose what the file in its folder says, if there is one. Raises ValueError: not such a file."""
    ids_R = read_vocabulary(folder, model.get_output_embeddings().weight.shape[0])
    if ids_R is not None:
        keep_tokens(model, ids_R)


def widen(logits_XR: Tensor, ids_R: Tensor, vocab: int) -> Tensor:
    """Logits of all tokens [..., V]: minus infinity for those that are not proposed."""
    logits_XV = logits_XR.new_full((*logits_XR.shape[:-1], vocab), -torch.inf)
    return logits_XV.index_copy_(-1, ids_R, logits_XR)
