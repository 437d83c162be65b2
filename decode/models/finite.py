"""Detection of NaN and infinite logits. Logits are checked once per step, and error messages name the faulty model.

Shape letters: B batch, X distributions of a row, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .products.product import is_int8


class Watch:
    """Detector of NaN and infinite logits that checks one number per distribution.

    The number, such as the largest logit, must be NaN or infinite if the distribution is damaged. It should not be a
    view of the distribution, because a view would keep the distribution's memory alive.
    """

    def __init__(self) -> None:
        self._numbers: list[tuple[str, Tensor, Any]] = []
        self._step = 0

    def __call__(self, whose: str, number_BX: Tensor, ahead: Any) -> None:
        """Record one number per distribution, to be checked in `end_step`.

        Args:
            whose: Owner of the logits in the error message, such as "the drafter's". {} is replaced by `ahead` + 1.
            number_BX: Number that represents each distribution, such as its largest logit.
            ahead: Number of tokens between the root and the predicted token, [X] or [B, X].
        """
        self._numbers.append((whose, number_BX, ahead))

    def numbers(self) -> Tensor:
        """Return all numbers recorded in this step, float32 [X]."""
        return torch.cat([number_BX.flatten() for _, number_BX, _ in self._numbers]).float()

    def end_step(self, on_host: Sequence[float], ended: Sequence[bool], lengths: Sequence[int]) -> None:
        """Clear the recorded numbers, and raise ValueError if any of them is NaN or infinite.

        `on_host` contains the values of `numbers()`, `ended` is True for rows to ignore, and `lengths` are the rows'
        lengths before the step.
        """
        numbers, self._numbers, self._step = self._numbers, [], self._step + 1
        if math.isfinite(sum(on_host)):  # a sum is finite only if all terms are
            return
        running_B1 = ~torch.tensor(ended)[:, None]
        for whose, number_BX, ahead in numbers:
            wrong_X2 = (~number_BX.isfinite().cpu() & running_B1).nonzero()
            if not len(wrong_X2):
                continue
            row, column = wrong_X2[0].tolist()
            offset = int(torch.as_tensor(ahead).expand(number_BX.shape)[row, column])
            raise ValueError(
                f"{whose.format(offset + 1)} logits for the token at position {lengths[row] + offset} (row {row}, step "
                f"{self._step}) are NaN or infinite: the weights are damaged, or the dtype overflows"
            )


def check_finite(logits_XV: Tensor, model: Any) -> None:
    """Raise ValueError if logits are NaN, infinite or all masked. The message names weights that are not finite."""
    if bool(logits_XV.amax(-1).isfinite().all()):
        return
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.device.type != "meta")
    wrong = [name for name, weight in weights if not bool(weight.detach().float().isfinite().all())]
    cause = f"check the weights {', '.join(wrong[:3])}{' …' * (len(wrong) > 3)}" if wrong else "the dtype overflows"
    name = getattr(model, "name_or_path", "") or f"a model of type {model.config.model_type!r}"
    raise ValueError(f"the logits of {name} are NaN or infinite: {cause}")


def tolerances_of(model: Any) -> tuple[float, float]:
    """Return the two tolerances of `check_close` for the dtype of a model's weights.

    The first applies to a chain compared with the model's own forward, which rounds differently. The second applies to
    a tree compared with chains of the same implementation.
    """
    if model.dtype == torch.float32 and not is_int8(model):
        return 1e-4, 1e-4
    return (2e-2 if model.dtype == torch.float32 else 5e-2), 5e-3


def check_close(
    actual_XV: Tensor, expected_XV: Tensor, model: Any, what: str, tolerance: float, noise: Callable[[], float] = float
) -> None:
    """Raise ValueError if logits are not finite, or their `relative_rms` exceeds `tolerance` and `noise()`."""
    check_finite(torch.stack((expected_XV, actual_XV)), model)
    difference = relative_rms(actual_XV, expected_XV)
    if not difference <= tolerance and not difference <= (tolerance := max(tolerance, noise())):
        raise ValueError(f"{what} (relative RMS difference {difference:.2g}, tolerance {tolerance:.1g})")


def relative_rms(actual_XV: Tensor, expected_XV: Tensor) -> float:
    """Return the RMS difference between logits, relative to the expected logits' standard deviation.

    The result is the maximum over all rows, and does not grow with the vocabulary size. Infinite logits are ignored.
    """
    is_finite_XV = expected_XV.isfinite() & actual_XV.isfinite()
    count_X1 = is_finite_XV.sum(-1, keepdim=True).clamp(min=1)
    expected_XV, actual_XV = (each.double().masked_fill(~is_finite_XV, 0.0) for each in (expected_XV, actual_XV))
    centred_XV = (expected_XV - expected_XV.sum(-1, keepdim=True) / count_X1).masked_fill(~is_finite_XV, 0.0)
    spread_X = centred_XV.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((actual_XV - expected_XV).square().sum(-1) / spread_X).max().sqrt())
