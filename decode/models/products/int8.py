"""Weights of eight bits: integers, and what they are multiplied by, a number a row.

Letters: O and I rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOST = 127


def round_to_int8(model: nn.Module) -> None:
    """Round a model's matrices in place to what eight bits hold of each row, and mark the model."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = rounded(parameter.detach())
    model.is_int8 = True  # type: ignore[assignment]


def rounded(weight_OI: Tensor) -> Tensor:
    """What int8 holds of a matrix, in its own type."""
    integers_OI, scale_O = integers_of(weight_OI)
    return (integers_OI * scale_O[..., None]).to(weight_OI.dtype)


def is_int8(model: nn.Module) -> bool:
    """Whether its weights were rounded by `round_to_int8`."""
    return bool(getattr(model, "is_int8", False))


def integers_of(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers from -127 to 127, int8, and what a row's are multiplied by, float32 [O]; of rounded weights
    in float32 these are what they were rounded to."""
    scale_O = (weight_OI.float().abs().amax(-1) / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight_OI.float() / scale_O[..., None]).round().clamp(-_MOST, _MOST).to(torch.int8), scale_O
