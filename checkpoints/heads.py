"""Prediction heads: small networks on a target's last hidden state that guess the tokens after the next one.

Letters: K heads, L residual blocks of a head, V vocabulary, D hidden, X any leading shape.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HEADS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
STACK_LIMIT = 1 << 26
"""Most elements of all projections that are stacked for decoding; stacking doubles the memory that they take."""

_BLOCK_KEY = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION_KEY = re.compile(r"(\d+)\.(\d+)\.weight")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b) with W and b zero at first, so that the block begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD + F.silu(self.linear(hidden_XD))


class PredictionHeads(nn.Module):
    """K heads, each L residual blocks and a projection without bias; head k at position t speaks of token t + 2 + k.

    Source: SLiM, section 3.3, first paragraph; with the tensor names of Medusa-1, `{k}.{l}.linear.weight`,
    `{k}.{l}.linear.bias` and `{k}.{L}.weight`.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "num_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
        for name, size in sizes.items():
            if size < (0 if name == "num_layers" else 1):
                raise ValueError(f"{name} is {size}, expected at least {0 if name == 'num_layers' else 1}")
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self._stacked: tuple[list[Any], list[tuple[Tensor, Tensor]], Tensor] | None = None
        for k in range(num_heads):
            blocks = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            self.add_module(str(k), nn.Sequential(*blocks, nn.Linear(hidden_size, vocab_size, bias=False)))

    @classmethod
    def from_lm_head(cls, lm_head_weight_VD: Tensor, num_heads: int, num_layers: int) -> Self:
        """Heads that all begin as copies of the target's projection, in its dtype and on its device."""
        vocab_size, hidden_size = lm_head_weight_VD.shape
        with torch.device("meta"):
            heads = cls(num_heads, num_layers, hidden_size, vocab_size)
        heads = heads.to(lm_head_weight_VD.dtype).to_empty(device=lm_head_weight_VD.device)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.zero_()
            for k in range(num_heads):
                heads.projection(k).copy_(lm_head_weight_VD)
        return heads

    def _head(self, k: int) -> nn.Sequential:
        if not 0 <= k < self.num_heads:
            raise ValueError(f"there is no head {k}: there are {self.num_heads}, counted from 0")
        head = self._modules[str(k)]
        assert isinstance(head, nn.Sequential)
        return head

    def projection(self, k: int) -> Tensor:
        """[V, D] weight of head k's projection: the parameter itself."""
        weight = self._head(k)[self.num_layers].weight
        assert isinstance(weight, Tensor)
        return weight

    def head_forward(self, k: int, hidden_XD: Tensor) -> Tensor:
        """[..., D] hidden states to head k's logits [..., V]."""
        return self._head(k)(hidden_XD)

    def features(self, hidden_XD: Tensor) -> Tensor:
        """[..., D] hidden states to what each head projects, [..., K, D]."""
        return torch.stack([self._head(k)[: self.num_layers](hidden_XD) for k in range(self.num_heads)], -2)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        """[..., D] hidden states to logits [..., K, V].

        In evaluation mode without gradients all heads run as one batched product over stacked copies of the weights,
        unless the copies would be larger than `STACK_LIMIT`. The copies follow every change made through the
        parameters, and are dropped by `train()`, `eval()` and `to()`.
        """
        assert hidden_XD.shape[-1] == self.hidden_size
        if (
            self.training
            or torch.is_grad_enabled()
            or self.num_heads * self.vocab_size * self.hidden_size > STACK_LIMIT
        ):
            return torch.stack([self.head_forward(k, hidden_XD) for k in range(self.num_heads)], -2)
        blocks, projection_KDV = self._stacks()
        shape = hidden_XD.shape[:-1]
        features_KXD = hidden_XD.reshape(1, -1, self.hidden_size).expand(self.num_heads, -1, -1)
        for weight_KDD, bias_K1D in blocks:
            features_KXD = features_KXD + F.silu(torch.baddbmm(bias_K1D, features_KXD, weight_KDD))
        logits_XKV = torch.bmm(features_KXD, projection_KDV).transpose(0, 1)
        return logits_XKV.reshape(*shape, self.num_heads, self.vocab_size)

    def _stacks(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The blocks' weights [K, D, D] and biases [K, 1, D], and the projections [K, D, V], transposed for `bmm`."""
        state = [(p.data_ptr(), None if p.is_inference() else p._version) for p in self.parameters()]
        if self._stacked is None or self._stacked[0] != state:
            heads = [self._head(k) for k in range(self.num_heads)]
            blocks = []
            for layer in range(self.num_layers):
                linears: list[Any] = [head[layer].linear for head in heads]
                weight_KDD = torch.stack([linear.weight.detach().mT for linear in linears])
                blocks.append((weight_KDD, torch.stack([linear.bias.detach() for linear in linears])[:, None]))
            projection_KDV = torch.stack([self.projection(k).detach().mT for k in range(self.num_heads)])
            self._stacked = (state, blocks, projection_KDV)
        return self._stacked[1], self._stacked[2]

    def train(self, mode: bool = True) -> Self:
        self._stacked = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._stacked = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stacked": None}


def save_heads(heads: PredictionHeads, directory: Path, base_model_name_or_path: str) -> None:
    """Write `medusa_lm_head.safetensors` and the `config.json` that serving engines read beside it.

    The config has no `architectures`, says `medusa_fc_bias` (readers that do not find it drop every bias), and gives
    the number of heads under both names in use.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, directory / HEADS_FILE, metadata={"format": "pt"})
    config = {
        "model_type": "medusa",
        "base_model_name_or_path": base_model_name_or_path,
        "medusa_num_heads": heads.num_heads,
        "num_medusa_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "medusa_fc_bias": True,
        "version": "1",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_heads(
    directory: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PredictionHeads:
    """Read a folder of heads in evaluation mode; heads and blocks are counted from the tensors, never from the config.

    Warns where `config.json` says something else than the tensors.

    Raises:
        ValueError: no such file, not heads of this form, or tensors whose shapes do not fit each other.
    """
    path = Path(directory) / HEADS_FILE
    if not path.is_file():
        raise ValueError(f"there are no heads at {path}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    sizes = _count(tensors, path)
    _compare_config(Path(directory) / CONFIG_FILE, sizes)
    with torch.device("meta"):
        heads = PredictionHeads(**sizes)
    for name, parameter in heads.state_dict().items():
        if name not in tensors:
            raise ValueError(f"{path} lacks {name}: it has tensors of {sizes['num_heads']} heads")
        if tensors[name].shape != parameter.shape:
            raise ValueError(f"{path}: {name} is {list(tensors[name].shape)}, expected {list(parameter.shape)}")
    heads.load_state_dict(tensors, assign=True)
    return heads.to(device=device, dtype=dtype).requires_grad_(True).eval()


def _count(tensors: dict[str, Tensor], path: Path) -> dict[str, int]:
    """Sizes as the tensors have them."""
    projections: dict[int, tuple[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if found := _PROJECTION_KEY.fullmatch(name):
            k, layer = int(found[1]), int(found[2])
            if k in projections:
                raise ValueError(f"{path}: head {k} has two projections, {k}.{projections[k][0]}.weight and {name}")
            projections[k] = (layer, tensor)
        elif not _BLOCK_KEY.fullmatch(name):
            raise ValueError(
                f"{path}: {name} is not a tensor of prediction heads, such as 0.0.linear.weight or 0.1.weight"
            )
    if not projections:
        raise ValueError(
            f"{path} has no projections such as 0.1.weight: heads that reuse the target's are not supported"
        )
    num_layers, weight = projections[min(projections)]
    if weight.dim() != 2:
        raise ValueError(f"{path}: a projection is {list(weight.shape)}, expected two dimensions")
    sizes = {
        "num_heads": max(projections) + 1,
        "num_layers": num_layers,
        "hidden_size": weight.shape[1],
        "vocab_size": weight.shape[0],
    }
    beyond = [
        name
        for name in tensors
        if (found := _BLOCK_KEY.fullmatch(name)) and not (int(found[1]) in projections and int(found[2]) < num_layers)
    ]
    if beyond:
        raise ValueError(f"{path}: {beyond[0]} belongs to no head of {num_layers} blocks and a projection")
    return sizes


def _compare_config(path: Path, sizes: dict[str, int]) -> None:
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    names = {"medusa_num_heads": "num_heads", "num_medusa_heads": "num_heads", "medusa_num_layers": "num_layers"}
    for key, size in (names | {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}).items():
        said = config.get(key) if isinstance(config, dict) else None
        if said is not None and said != sizes[size]:
            warnings.warn(
                f"{path} says {key} {said}, the tensors have {sizes[size]}: going by the tensors", stacklevel=3
            )
