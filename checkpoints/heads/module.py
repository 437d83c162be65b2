"""Prediction heads: small networks that predict the tokens after the next one from a target's hidden state.

Shape letters: K heads, L residual blocks of a head, V vocabulary, D hidden size, R rank, F input size of a projection
(D or R), X any leading shape, P draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..storage.draft_vocabulary import TOKENS, check_tokens, widen
from .logits import LogitShape

PROJECTIONS = ("own", "low-rank", "target")
STATES = ("after-norm", "before-norm")
STACK_LIMIT = 1 << 26
"""Maximum number of weights that are stacked for faster decoding. Stacking doubles their memory."""

_SVD_ROWS = 4096


class ResidualBlock(nn.Module):
    """Residual block x + SiLU(W x + b), with W and b initialised to zero, so that it starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD + F.silu(self.linear(hidden_XD))


class LowRankProjection(nn.Module):
    """Projection of rank R: `up` [V, R] times `down` [R, D], without bias."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        return self.up(self.down(hidden_XD))


@dataclass(frozen=True)
class _Stacks:
    """Copies of the heads' weights, stacked and transposed for `bmm`."""

    state: list[Any]
    """Addresses and versions of the original weights, to detect changes."""
    blocks: list[tuple[Tensor, Tensor]]
    """Weights [K, D, D] and biases [K, 1, D] of each residual block."""
    tails: list[Tensor]
    """Projections [K, D, V]; for low-rank heads [K, D, R] and [K, R, V]; empty if the target's projection is shared."""


class PredictionHeads(nn.Module):
    """Medusa heads, each with L residual blocks and a projection; head k at position t predicts token t + 2 + k.

    Source: SLiM (Lin et al., Findings of NAACL 2024), section 3.3. Tensors are named as in Medusa-1:
    `{k}.{l}.linear.weight`, `{k}.{l}.linear.bias` and `{k}.{L}.weight`.

    Args:
        num_heads: Number of heads K.
        num_layers: Number of residual blocks L.
        hidden_size: Hidden size D of the target.
        vocab_size: Vocabulary size V; None if it is unknown before `attach`, with projection "target".
        projection: "own", a matrix [V, D] per head; "low-rank", `{k}.{L}.up.weight` [V, R] and `{k}.{L}.down.weight`
            [R, D]; "target", the target's projection (FasterDecoding's version 2), set by `attach`.
        rank: Rank R of low-rank heads, otherwise 0.
        states: Hidden states of the target that are the input of the heads: "after-norm" or "before-norm".
        scale: Factor by which the hidden states are multiplied, since pre-norm hidden states can be large.
        proposed: Token ids of the draft vocabulary, int64 [P], ascending, stored as `d2t`; None for all tokens.
            Requires projection "target".
    """

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int | None,
        projection: str = "own",
        rank: int = 0,
        states: str = "after-norm",
        scale: float = 1.0,
        proposed: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, value, known in (("projection", projection, PROJECTIONS), ("states", states, STATES)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
        reuses = projection == "target"
        sizes = {"num_heads": (num_heads, 1), "num_layers": (num_layers, int(reuses)), "hidden_size": (hidden_size, 1)}
        sizes["vocab_size"] = (1 if reuses and vocab_size is None else vocab_size or 0, 1)
        for name, (size, least) in sizes.items():
            if size < least:
                raise ValueError(f"{name} is {size}, expected at least {least}")
        least, most = (1, min(hidden_size, vocab_size or 0)) if projection == "low-rank" else (0, 0)
        if not least <= rank <= most:
            raise ValueError(f"rank is {rank}, expected {least} to {most} with {projection} projections")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}, expected a number above 0")
        self.num_heads, self.num_layers, self.hidden_size = num_heads, num_layers, hidden_size
        self.projection_kind, self.rank, self.states, self.scale = projection, rank, states, float(scale)
        self._vocab_size = vocab_size
        self._attached: tuple[Tensor, Tensor | None] | None = None  # a tuple is not registered as parameters
        self.shape = LogitShape()
        self._rows: tuple[tuple[int, torch.device], Tensor] | None = None
        self._product: tuple[Any, Callable[[Tensor], Tensor]] | None = None
        self.register_buffer(TOKENS, None)
        self.propose(proposed)
        self._stacked: _Stacks | None = None
        for k in range(num_heads):
            parts: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            if projection == "own":
                parts.append(nn.Linear(hidden_size, vocab_size or 0, bias=False))
            elif projection == "low-rank":
                parts.append(LowRankProjection(hidden_size, vocab_size or 0, rank))
            self.add_module(str(k), nn.Sequential(*parts))
        self._elements = sum(parameter.numel() for parameter in self.parameters())

    @classmethod
    def from_lm_head(
        cls,
        lm_head_weight_VD: Tensor,
        num_heads: int,
        num_layers: int,
        projection: str = "own",
        rank: int = 0,
        states: str = "after-norm",
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
    ) -> Self:
        """Create heads initialised from the target's output projection, on its device and, by default, in its dtype.

        With projection "own", each head has a copy of the output projection; with "low-rank", its best approximation
        (see `best_factors`). With "target", the output projection itself is attached.
        """
        vocab_size, hidden_size = lm_head_weight_VD.shape
        with torch.device("meta"):
            heads = cls(num_heads, num_layers, hidden_size, vocab_size, projection, rank, states, scale)
        heads = heads.to(dtype or lm_head_weight_VD.dtype).to_empty(device=lm_head_weight_VD.device)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.zero_()
            if projection == "own":
                for k in range(num_heads):
                    heads.projection(k).copy_(lm_head_weight_VD)
            elif projection == "low-rank" and lm_head_weight_VD.device.type != "meta":
                up_VR, down_RD = best_factors(lm_head_weight_VD, rank)
                for k in range(num_heads):
                    heads.projection(k).copy_(up_VR)
                    heads._tail(k).down.weight.copy_(down_RD)
        if projection == "target":
            heads.attach(lm_head_weight_VD)
        return heads

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V. Raises ValueError if it is unknown because the target's projection is not attached."""
        if self._vocab_size is None:
            raise ValueError(_UNATTACHED)
        return self._vocab_size

    @property
    def states_size(self) -> int:
        """Size of the hidden states per position."""
        return self.hidden_size

    @property
    def knows_vocab_size(self) -> bool:
        """True if `vocab_size` is known."""
        return self._vocab_size is not None

    @property
    def proposed(self) -> Tensor | None:
        """Token ids of the draft vocabulary, int64 [P], ascending; None for all tokens."""
        return getattr(self, TOKENS, None)

    def propose(self, ids_P: Tensor | None) -> Self:
        """Set the draft vocabulary (None: all tokens). Raises ValueError for invalid ids or unshared projections."""
        if ids_P is not None:
            if self.projection_kind != "target":
                raise ValueError(f"{TOKENS} requires projection_kind 'target', got {self.projection_kind!r}")
            if not ids_P.is_meta and self._vocab_size is not None:
                check_tokens(ids_P, self._vocab_size)
            ids_P = ids_P.long()
        setattr(self, TOKENS, ids_P)
        self._rows = None
        return self

    def attach(self, lm_head_weight_VD: Tensor, bias_V: Tensor | None = None, shape: LogitShape | None = None) -> Self:
        """Attach the target's output projection [V, D] to heads that share it (projection "target").

        The projection is not a parameter, is not in the state dict, and is not moved with the heads. Features are cast
        to its dtype. The bias [V] and the transformation `shape` of the target's logits are applied as well. Raises
        ValueError if the heads have their own projections or the sizes differ.
        """
        if self.projection_kind != "target":
            raise ValueError(f"heads with {self.projection_kind} projections cannot attach the target's projection")
        size = list(getattr(lm_head_weight_VD, "ds_shape", lm_head_weight_VD.shape))  # shape before ZeRO-3's sharding
        expected = [self._vocab_size if self._vocab_size is not None else "V", self.hidden_size]
        if len(size) != 2 or size[1] != expected[1] or expected[0] not in ("V", size[0]):
            raise ValueError(f"the target's output projection must be {expected}, got {size}".replace("'", ""))
        if (ids_P := self.proposed) is not None and not ids_P.is_meta:
            check_tokens(ids_P, size[0])
        self._vocab_size, self._attached, self._rows = size[0], (lm_head_weight_VD, bias_V), None
        self.shape = shape or LogitShape()
        return self

    def _head(self, k: int) -> nn.Sequential:
        if not 0 <= k < self.num_heads:
            raise ValueError(f"head must be between 0 and {self.num_heads - 1}, got {k}")
        head = self._modules[str(k)]
        assert isinstance(head, nn.Sequential)
        return head

    def _tail(self, k: int) -> Any:
        return self._head(k)[self.num_layers]

    def projection(self, k: int) -> Tensor:
        """Return head k's projection [V, D], or [V, R] if low-rank, or its rows [P, D] for a draft vocabulary."""
        if self.projection_kind == "own":
            return self._tail(k).weight
        if self.projection_kind == "low-rank":
            return self._tail(k).up.weight
        self._head(k)
        if self._attached is None:
            raise ValueError(_UNATTACHED)
        (weight_VD, _), ids_P = self._attached, self.proposed
        if ids_P is None:
            return weight_VD
        key = (weight_VD.data_ptr(), weight_VD.device)  # the target may have been moved to another device
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, weight_VD.detach()[ids_P.to(weight_VD.device)])
        return self._rows[1]

    @property
    def output(self) -> Callable[[Tensor], Tensor] | None:
        """Function that applies bias, scale and soft cap of the target to products with `projection`; None if unset."""
        return None if self.bias_V is None and self.shape == LogitShape() else self._to_logits

    @property
    def bias_V(self) -> Tensor | None:
        """Bias of the attached output projection of the target; None if there is none."""
        return None if self._attached is None else self._attached[1]

    def _to_logits(self, products_XP: Tensor) -> Tensor:
        if (bias_P := self.bias_V) is not None:
            bias_P = bias_P if self.proposed is None else bias_P[self.proposed.to(bias_P.device)]
            products_XP = products_XP + bias_P.to(products_XP)
        return self.shape(products_XP)

    def multiply_by(self, product: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
        """Use `product(weight)`, a function from [X, D] to [X, V], to apply the shared projection in inference."""
        if self.projection_kind == "target" and (self._product is None or self._product[0] != self._projection_state()):
            self._product = self._projection_state(), product(self.projection(0))

    def _projection_state(self) -> Any:
        """Return address, device and version of the target's projection, to detect changes."""
        weight_VD = self.projection(0)
        return weight_VD.data_ptr(), weight_VD.device, None if weight_VD.is_inference() else weight_VD._version

    def _features(self, k: int, hidden_XD: Tensor) -> Tensor:
        features_XD = self._head(k)[: self.num_layers](self._scale_states(hidden_XD))
        return self._tail(k).down(features_XD) if self.projection_kind == "low-rank" else features_XD

    def _scale_states(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD if self.scale == 1 else hidden_XD * self.scale

    def _apply_target_projection(self, features_XD: Tensor) -> Tensor:
        weight_VD, ids_P = self.projection(0), self.proposed
        features_XD = features_XD.to(weight_VD.dtype)
        if self._product is None or torch.is_grad_enabled() or self._product[0] != self._projection_state():
            logits_XP = F.linear(features_XD, weight_VD)
        else:
            rows_XP = self._product[1](features_XD.reshape(-1, self.hidden_size))
            logits_XP = rows_XP.view(*features_XD.shape[:-1], -1)
        logits_XP = logits_XP if self.output is None else self.output(logits_XP)
        return logits_XP if ids_P is None else widen(logits_XP, ids_P.to(logits_XP.device), self.vocab_size)

    def features(self, hidden_XD: Tensor) -> Tensor:
        """Compute the inputs of the projections, [..., K, D] or (low-rank) [..., K, R], for hidden states [..., D].

        Head k's logits are features[..., k, :] @ `projection(k)`.T.
        """
        return torch.stack([self._features(k, hidden_XD) for k in range(self.num_heads)], -2)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        """Compute logits [..., K, V] for hidden states [..., D], which are cast to the heads' dtype.

        In evaluation mode without gradients, all heads run as one batched matrix product over stacked copies of their
        weights, unless these exceed `STACK_LIMIT`. The target's projection is not copied. The copies are updated if the
        parameters change, and deleted by `train()`, `eval()` and `to()`.
        """
        assert hidden_XD.shape[-1] == self.hidden_size
        hidden_XD = hidden_XD.to(next(self.parameters()).dtype)
        one_by_one = self.training or torch.is_grad_enabled() or self._elements > STACK_LIMIT
        if self.projection_kind == "target":
            features_XKD = self.features(hidden_XD) if one_by_one else self._stacked_forward(hidden_XD)
            return self._apply_target_projection(features_XKD)
        if one_by_one:
            scaled_XD = self._scale_states(hidden_XD)
            return torch.stack([self._head(k)(scaled_XD) for k in range(self.num_heads)], -2)
        return self._stacked_forward(hidden_XD)

    def _stacked_forward(self, hidden_XD: Tensor) -> Tensor:
        """Compute logits [..., K, V], or features [..., K, D] if the heads share the target's projection."""
        stacks = self._stacks()
        found_KXF = self._scale_states(hidden_XD).reshape(1, -1, self.hidden_size).expand(self.num_heads, -1, -1)
        for weight_KDD, bias_K1D in stacks.blocks:
            found_KXF = found_KXF + F.silu(torch.baddbmm(bias_K1D, found_KXF, weight_KDD))
        for tail_KFF in stacks.tails:
            found_KXF = torch.bmm(found_KXF, tail_KFF)
        return found_KXF.transpose(0, 1).reshape(*hidden_XD.shape[:-1], self.num_heads, found_KXF.shape[-1])

    def _stacks(self) -> _Stacks:
        state = [(p.data_ptr(), None if p.is_inference() else p._version) for p in self.parameters()]
        if self._stacked is None or self._stacked.state != state:
            heads = range(self.num_heads)
            blocks = []
            for layer in range(self.num_layers):
                linears: list[Any] = [self._head(k)[layer].linear for k in heads]
                biases_K1D = torch.stack([linear.bias.detach() for linear in linears])[:, None]
                blocks.append((_stack_transposed([linear.weight for linear in linears]), biases_K1D))
            tails = []
            if self.projection_kind == "low-rank":
                tails.append(_stack_transposed([self._tail(k).down.weight for k in heads]))
            if self.projection_kind != "target":
                tails.append(_stack_transposed([self.projection(k) for k in heads]))
            self._stacked = _Stacks(state, blocks, tails)
        return self._stacked

    def train(self, mode: bool = True) -> Self:
        self._stacked = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._stacked = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stacked": None, "_rows": None, "_product": None}


@torch.no_grad()
def best_factors(weight_VD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute the best approximation of rank R of a matrix: float64 factors `up` [V, R] and `down` [R, D].

    This is the truncated singular value decomposition, which is optimal in the Frobenius norm (Eckart and Young, 1936).
    The error is about 1e-7 of the largest singular value, since the right singular vectors are computed from the D x D
    Gram matrix. The rows of `down` are orthonormal, in descending order of singular values.
    """
    columns_DD = torch.zeros(weight_VD.shape[1], weight_VD.shape[1], dtype=torch.float64, device=weight_VD.device)
    for rows_XD in weight_VD.split(_SVD_ROWS):
        columns_DD.addmm_(rows_XD.double().mT, rows_XD.double())
    down_RD = torch.linalg.eigh(columns_DD).eigenvectors[:, -rank:].flip(1).mT.contiguous()
    return torch.cat([rows_XD.double() @ down_RD.mT for rows_XD in weight_VD.split(_SVD_ROWS)]), down_RD


_UNATTACHED = (
    "these heads share the target's output projection: attach it with `heads.attach(weight)`, "
    "or load them with `load_heads(folder, lm_head=weight)`"
)


def _stack_transposed(weights: list[Tensor]) -> Tensor:
    return torch.stack([weight.detach().mT for weight in weights])
