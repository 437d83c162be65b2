"""Draft vocabulary file of a draft model or heads, and the mask token of drafters with parallel drafting.

The file contains the ids of the draft tokens (`d2t`). The model's weights still cover the whole vocabulary.

Shape letters: R draft vocabulary, V vocabulary, X any leading shape.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .messages import first_line
from .names import DRAFT_VOCABULARY
from .safe_read import UNREADABLE

TOKENS = "d2t"
MASK_TOKEN = "pard_token"
"""Config key of the mask token of a drafter with parallel drafting."""


def check_tokens(ids_R: Tensor, vocab: int) -> None:
    """Raise ValueError if token ids are not strictly ascending or not in a vocabulary of size `vocab`."""
    whole = ids_R.dim() == 1 and not ids_R.is_floating_point() and len(ids_R) > 0
    if not whole or int(ids_R[0]) < 0 or int(ids_R[-1]) >= vocab or not bool((ids_R.diff() > 0).all()):
        raise ValueError(f"token ids of a draft vocabulary must be strictly ascending and between 0 and {vocab - 1}")


def write_vocabulary(ids_R: Tensor | None, folder: Path) -> None:
    """Write the token ids of a draft vocabulary, int64 [R], to a file in a folder. Do nothing if `ids_R` is None."""
    if ids_R is not None:
        save_file({TOKENS: ids_R.detach().cpu().contiguous()}, folder / DRAFT_VOCABULARY)


def read_vocabulary(folder: Path, vocab: int) -> Tensor | None:
    """Load the draft vocabulary of a folder; None if there is none. Raises ValueError if the file is invalid."""
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    try:
        tensors = load_file(path)
        if set(tensors) != {TOKENS}:
            raise ValueError(f"it contains {', '.join(sorted(tensors))}, expected {TOKENS}")
        check_tokens(tensors[TOKENS], vocab)
    except (ValueError, *UNREADABLE) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    return tensors[TOKENS]


def widen(logits_XR: Tensor, ids_R: Tensor, vocab: int, other: float = -torch.inf) -> Tensor:
    """Expand logits of draft tokens to logits of all tokens [..., V], and fill the other entries with `other`."""
    logits_XV = logits_XR.new_full((*logits_XR.shape[:-1], vocab), other)
    return logits_XV.index_copy_(-1, ids_R, logits_XR)


def mask_token(config: Any) -> int | None:
    """Return the mask token id in the config of a drafter with parallel drafting; None if it has none."""
    tokens = (getattr(config, name, None) for name in (MASK_TOKEN, "mask_token_id"))
    return next((int(token) for token in tokens if token is not None), None)
