"""Detection of NaN and infinite logits, once per step and with the name of their source.

Shape letters: B batch, X distributions of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .products.product import is_int8


class Watch:
    """Record of one number per distribution of a step, which is finite only if the logits are.

    The number is the largest logit or probability, or the value that `draw_many` searched for. It should not be a view
    of the distribution, whose memory would be kept alive.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, Any]] = []
        self._step = 0

    def __call__(self, whose: str, number_BX: Tensor, ahead: Any) -> None:
        """Record these numbers.

        Args:
            whose: Source in the error message, such as "the drafter's", with {} for the number `ahead` + 1 of several.
            number_BX: Numbers of the distributions.
            ahead: Number of tokens between the root and the predicted token, [X] or [B, X].
        """
        self._seen.append((whose, number_BX, ahead))

    def seen(self) -> Tensor:
        """Return this step's numbers, float32 [X]."""
        return torch.cat([number_BX.flatten() for _, number_BX, _ in self._seen]).float()

    def end_step(self, on_host: Sequence[float], ended: Sequence[bool], lengths: Sequence[int]) -> None:
        """Clear this step's numbers, and raise ValueError for the first that is NaN or infinite.

        `on_host` are the numbers from `seen`, `ended` masks the rows to ignore, and `lengths` are the previous lengths
        of the rows.
        """
        seen, self._seen, self._step = self._seen, [], self._step + 1
        if math.isfinite(sum(on_host)):  # a sum is finite only if all terms are
            return
        going_B1 = ~torch.tensor(ended)[:, None]
        for whose, number_BX, ahead in seen:
            wrong_X2 = (~number_BX.isfinite().cpu() & going_B1).nonzero()
            if not len(wrong_X2):
                continue
            row, column = wrong_X2[0].tolist()
            place = int(torch.as_tensor(ahead).expand(number_BX.shape)[row, column])
            raise ValueError(
                f"{whose.format(place + 1)} logits for the token at position {lengths[row] + place} (row {row}, step "
                f"{self._step}) are NaN or infinite: its weights are damaged, or it overflows in its dtype"
            )


def check_finite(logits_XV: Tensor, model: Any) -> None:
    """Raise ValueError with the names of damaged weights if logits are NaN, infinite or all masked."""
    if bool(logits_XV.amax(-1).isfinite().all()):
        return
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.device.type != "meta")
    wrong = [name for name, weight in weights if not bool(weight.detach().float().isfinite().all())]
    why = f"so are {', '.join(wrong[:3])}{' …' * (len(wrong) > 3)}" if wrong else "its numbers overflow in their dtype"
    name = getattr(model, "name_or_path", "") or f"a model of type {model.config.model_type!r}"
    raise ValueError(f"the logits of {name} are NaN or infinite: {why}")


def check_close(found_XV: Tensor, wanted_XV: Tensor, model: Any, what: str) -> None:
    """Raise ValueError if logits are not finite, or differ from a model's own by more than rounding.

    The difference is relative to the largest logit (at least 1). Equal infinities do not count.
    """
    check_finite(torch.stack((wanted_XV, found_XV)), model)
    apart_XV = (found_XV - wanted_XV).abs().masked_fill(found_XV == wanted_XV, 0.0)
    largest = wanted_XV.abs().masked_fill(wanted_XV.isinf(), 0.0).max()
    difference = float(apart_XV.max() / largest.clamp(min=1.0))
    tolerance = 6e-2 if model.dtype != torch.float32 else 1e-2 if is_int8(model) else 1e-4
    if not difference <= tolerance:
        raise ValueError(f"{what} by {difference:.2g} (at most {tolerance:.0e} is allowed)")
