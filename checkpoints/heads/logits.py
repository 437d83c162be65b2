"""Scale and soft cap of a model's logits, as its configuration names them. Letters: V vocabulary, X any shape."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LogitShape(NamedTuple):
    """Function of the logits that an output projection gives: `scale`, then `softcap · tanh(logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitShape":
        """Return the shape of the logits for a decoder's configuration."""
        names = ("logit_scale", "lm_head_multiplier", "logits_scaling", "logits_mup_width_multiplier")
        first, second, granite, width = (getattr(config, name, None) or 1.0 for name in names)
        if config.model_type.startswith("hyperclovax"):  # Granite divides by this value
            granite = 1 / granite
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        softcap = next((float(getattr(config, name)) for name in caps if getattr(config, name, None)), None)
        return cls(first * second / (granite * width), softcap)

    def __call__(self, logits_XV: Tensor) -> Tensor:
        """Return the model's logits."""
        logits_XV = logits_XV if self.scale == 1 else logits_XV * self.scale
        return logits_XV if self.softcap is None else self.softcap * torch.tanh(logits_XV / self.softcap)
