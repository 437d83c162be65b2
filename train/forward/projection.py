"""What makes logits of a model's last hidden states.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Projected:
    """A model seen from its output projection; `plain_head`: logits are states times that matrix, nothing else."""

    model: Any
    plain_head: bool

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection: the number of logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def weight_VD(self) -> Tensor | None:
        """The output projection, or None where a call returns logits (heads with a bias, capping or scaling)."""
        return self.model.get_output_embeddings().weight if self.plain_head else None
