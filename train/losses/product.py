"""Matrix product of hidden states and an output projection, with an optional low-rank term.

Letters: C positions of a chunk, D hidden, V vocabulary, F rank of the low-rank term.
"""

import torch
from torch import Tensor


class Product:
    """Matrix product of hidden states and a projection in `dtype`. Each call overwrites the previous result.

    With `low_rank_VF`, the last F columns of the states are factors, whose product with it is added.
    """

    def __init__(self, dtype: torch.dtype, low_rank_VF: Tensor | None = None) -> None:
        self._dtype = dtype
        self._low_rank_VF = None if low_rank_VF is None else low_rank_VF.detach().to(dtype)
        self._weight_VD: Tensor | None = None
        self._out_CV: Tensor | None = None

    def cast(self, weight_VD: Tensor) -> Tensor:
        """Convert a projection to the dtype of the products. Only the most recent result is cached."""
        if self._weight_VD is not weight_VD:
            self._weight_VD = self._cast_VD = None
            self._weight_VD, self._cast_VD = weight_VD, weight_VD.detach().to(self._dtype)
        assert self._cast_VD is not None
        return self._cast_VD

    def __call__(self, hidden_CD: Tensor, weight_VD: Tensor | None) -> Tensor:
        """Compute logits [C, V] from detached states [C, D]. Without a projection, the states are logits."""
        if weight_VD is None:
            return hidden_CD
        if self._out_CV is None or len(self._out_CV) < len(hidden_CD):
            self._out_CV = None
            self._out_CV = hidden_CD.new_empty((len(hidden_CD), len(weight_VD)), dtype=self._dtype)
        out_CV = self._out_CV[: len(hidden_CD)]
        states_CD, *factors = self.split(hidden_CD.to(self._dtype))
        torch.mm(states_CD, self.cast(weight_VD).T, out=out_CV)
        for factors_CF in factors:
            assert self._low_rank_VF is not None
            out_CV.addmm_(factors_CF, self._low_rank_VF.T)
        return out_CV

    def split(self, hidden_CD: Tensor) -> tuple[Tensor, ...]:
        """Return the states and, if there are any, the factors."""
        if self._low_rank_VF is None:
            return (hidden_CD,)
        return hidden_CD.split((hidden_CD.shape[1] - self._low_rank_VF.shape[1], self._low_rank_VF.shape[1]), 1)

    def to_states(self, grad_CV: Tensor, weight_VD: Tensor | None) -> Tensor:
        """Return the gradient of the states [C, D], given that of the product."""
        if weight_VD is None:
            return grad_CV
        grad_CD = grad_CV @ self.cast(weight_VD)
        return grad_CD if self._low_rank_VF is None else torch.cat((grad_CD, grad_CV @ self._low_rank_VF), 1)
