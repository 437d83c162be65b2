"""Numbers that are none: logits that are NaN or infinite, told once a step and named by whose they are.

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
    """Remembers one number of every distribution of a step: finite only if of its logits none was NaN or plus infinity,
    and one at least was finite.

    Such a number is at hand where a token is chosen: the largest logit or probability, or what `draw_many` looked for.
    It should be no part of the distribution, whose memory would be kept with it.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, Any]] = []
        self._step = 0

    def __call__(self, whose: str, number_BX: Tensor, ahead: Any) -> None:
        """Remember these numbers.

        Args:
            whose: "the drafter's"; of several, with {} where the number, `ahead` + 1, shall stand.
            ahead: how many tokens stand between the root and the token that a distribution speaks of, [X] or [B, X].
        """
        self._seen.append((whose, number_BX, ahead))

    def seen(self) -> Tensor:
        """float32 [X]; this step's numbers."""
        return torch.cat([number_BX.flatten() for _, number_BX, _ in self._seen]).float()

    def end_step(self, on_host: Sequence[float], ended: Sequence[bool], lengths: Sequence[int]) -> None:
        """Forget this step's numbers: `on_host` is what `seen` gave, `ended` says which rows are not looked at,
        `lengths` how many tokens each row had before.

        Raises ValueError: the first logits of this step that are NaN or infinite, whose they are, and where.
        """
        seen, self._seen, self._step = self._seen, [], self._step + 1
        if math.isfinite(sum(on_host)):  # as a sum is only if all of it is
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
    """ValueError, naming a model and its weights that are not finite, where logits are NaN, infinite or all masked."""
    if bool(logits_XV.amax(-1).isfinite().all()):
        return
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.device.type != "meta")
    wrong = [name for name, weight in weights if not bool(weight.detach().float().isfinite().all())]
    why = f"so are {', '.join(wrong[:3])}{' …' * (len(wrong) > 3)}" if wrong else "its numbers overflow in their dtype"
    name = getattr(model, "name_or_path", "") or f"a model of type {model.config.model_type!r}"
    raise ValueError(f"the logits of {name} are NaN or infinite: {why}")


def check_close(found_XV: Tensor, wanted_XV: Tensor, model: Any, what: str) -> None:
    """`check_finite`, and ValueError, `what` and by how much, where logits differ from a model's own by more than
    rounding, as a share of the largest, at least of 1; equal infinities are no difference."""
    check_finite(torch.stack((wanted_XV, found_XV)), model)
    apart_XV = (found_XV - wanted_XV).abs().masked_fill(found_XV == wanted_XV, 0.0)
    largest = wanted_XV.abs().masked_fill(wanted_XV.isinf(), 0.0).max()
    difference = float(apart_XV.max() / largest.clamp(min=1.0))
    tolerance = 6e-2 if model.dtype != torch.float32 else 1e-2 if is_int8(model) else 1e-4
    if not difference <= tolerance:
        raise ValueError(f"{what} by {difference:.2g} (at most {tolerance:.0e} is allowed)")
