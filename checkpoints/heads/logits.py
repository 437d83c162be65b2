"""Logit scaling and soft-capping, as defined by a model's configuration. Shape letters: V vocabulary, X any shape."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LogitShape(NamedTuple):
    """Transformation of raw logits: multiplication by `scale`, then `softcap · tanh(logits / softcap)` if it is set."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitShape":
        """Return the transformation that a decoder's configuration defines."""
        names = ("logit_scale", "lm_head_multiplier", "logits_scaling", "logits_mup_width_multiplier")
        first, second, granite, width = (getattr(config, name, None) or 1.0 for name in names)
        if config.model_type.startswith("hyperclovax"):  # Granite divides by this value
            granite = 1 / granite
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        softcap = next((float(getattr(config, name)) for name in caps if getattr(config, name, None)), None)
        return cls(first * second / (granite * width), softcap)

    def __call__(self, logits_XV: Tensor) -> Tensor:
        """Apply the transformation to raw logits."""
        logits_XV = logits_XV if self.scale == 1 else logits_XV * self.scale
        return logits_XV if self.softcap is None else self.softcap * torch.tanh(logits_XV / self.softcap)
