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
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "draft_vocabulary.safetensors"
"""Beside a drafter's weights, which are those of all tokens: other readers of the folder let it propose any."""
_KEY = "d2t"
_BUFFER = "draft_tokens_R"


def keep_tokens(model: Any, ids_R: Tensor) -> None:
    """Have a model propose these tokens alone. Raises ValueError: ids that do not rise, or that it does not have."""
    vocab = model.get_output_embeddings().weight.shape[0]
    if not len(ids_R) or int(ids_R[0]) < 0 or int(ids_R[-1]) >= vocab or not bool((ids_R.diff() > 0).all()):
        raise ValueError(f"tokens of a draft vocabulary must rise from 0 or more to less than {vocab}")
    device = model.get_output_embeddings().weight.device
    model.register_buffer(_BUFFER, ids_R.long().to(device), persistent=False)


def kept_tokens(model: Any) -> Tensor | None:
    """The ids that a model proposes, int64 [R], rising; None: all."""
    return getattr(model, _BUFFER, None)


def save_vocabulary(model: Any, folder: Path) -> None:
    """Write the file, if the model has a vocabulary of its own."""
    ids_R = kept_tokens(model)
    if ids_R is not None:
        save_file({_KEY: ids_R.cpu()}, folder / FILE)


def load_vocabulary(model: Any, folder: Path) -> None:
    """Have a model propose what the file in its folder says, if there is one. Raises ValueError: not such a file."""
    path = folder / FILE
    if not path.is_file():
        return
    found = load_file(path)
    if set(found) != {_KEY} or found[_KEY].dim() != 1:
        raise ValueError(f"{path} holds {', '.join(sorted(found))}, expected one list of tokens, {_KEY}")
    keep_tokens(model, found[_KEY])


def widen(logits_XR: Tensor, ids_R: Tensor, vocab: int) -> Tensor:
    """Logits of all tokens [..., V]: minus infinity for those that are not proposed."""
    logits_XV = logits_XR.new_full((*logits_XR.shape[:-1], vocab), -torch.inf)
    return logits_XV.index_copy_(-1, ids_R, logits_XR)
