"""The file beside the weights of a drafter or of heads that have less than a whole output layer.

It holds the ids of the tokens that are proposed (d2t), the factors of a layer of low rank (inner, outer), or both; a
drafter's weights are those of all tokens. Letters: R tokens that are proposed, K rank, V vocabulary, D hidden, X any
leading shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .messages import first_line
from .names import DRAFT_VOCABULARY
from .safe_read import UNREADABLE

TOKENS, INNER, OUTER = "d2t", "inner", "outer"
MASK_TOKEN = "pard_token"
"""In the configuration of a drafter that drafts several tokens at once."""
_KINDS = ({TOKENS}, {INNER, OUTER}, {TOKENS, INNER, OUTER})


def check_tokens(ids_R: Tensor, vocab: int) -> None:
    """Raises ValueError: ids that do not rise, or of which a vocabulary lacks some."""
    whole = ids_R.dim() == 1 and not ids_R.is_floating_point() and len(ids_R) > 0
    if not whole or int(ids_R[0]) < 0 or int(ids_R[-1]) >= vocab or not bool((ids_R.diff() > 0).all()):
        raise ValueError(f"tokens of a draft vocabulary must rise from 0 or more to less than {vocab}")


def write_vocabulary(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the file: `TOKENS` int64 [R], rising, `INNER` [K, D] and `OUTER` [V, K]. Without tensors there is none."""
    if tensors:
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, folder / DRAFT_VOCABULARY)


def read_vocabulary(folder: Path, vocab: int) -> dict[str, Tensor]:
    """What the file in a folder holds; nothing where there is none. Raises ValueError: not such a file, or not one for
    a vocabulary of this size."""
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return {}
    try:
        found = load_file(path)
        if set(found) not in _KINDS:
            raise ValueError(f"it holds {', '.join(sorted(found))}, expected {TOKENS}, {INNER} and {OUTER}, or all")
        if TOKENS in found:
            check_tokens(found[TOKENS], vocab)
        if INNER in found and found[OUTER].shape != (vocab, len(found[INNER])):
            sizes = [" x ".join(map(str, found[name].shape)) for name in (INNER, OUTER)]
            raise ValueError(f"its factors are {sizes[0]} and {sizes[1]}, and the vocabulary has {vocab} tokens")
    except (ValueError, *UNREADABLE) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    return found


def widen(logits_XR: Tensor, ids_R: Tensor, vocab: int, other: float = -torch.inf) -> Tensor:
    """Logits of all tokens [..., V]: minus infinity, or what `other` says, for those that are not proposed."""
    logits_XV = logits_XR.new_full((*logits_XR.shape[:-1], vocab), other)
    return logits_XV.index_copy_(-1, ids_R, logits_XR)


def mask_token(config: Any) -> int | None:
    """The token at which a drafter drafts several tokens at once, by the names that engines know; None: it does not."""
    found = (getattr(config, name, None) for name in (MASK_TOKEN, "mask_token_id"))
    return next((int(token) for token in found if token is not None), None)
