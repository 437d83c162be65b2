"""Base class of heads that read auxiliary hidden states of a target: EAGLE-3 and DFlash.

Their embeddings and output projection are the target's, and are frozen.

Shape letters: X any, D hidden size, V vocabulary, R draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..storage.draft_vocabulary import TOKENS, check_tokens
from .logits import LogitShape

HEAD = "lm_head.weight"


class Attention(nn.Module):
    """Attention projections, as in Llama and Qwen3 layers, for inputs of size `size`."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        width = config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=False)


class Mlp(nn.Module):
    """SwiGLU feed-forward network, as in Llama and Qwen3 layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_XD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_XD)) * self.up_proj(x_XD))


class Norm(nn.RMSNorm):
    """RMSNorm computed in the dtype of its input, which has lower precision under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class AuxiliaryHeads(nn.Module):
    """Base class of heads that share the target's embeddings and output projection, which `attach` sets.

    Args:
        config: Configuration of the heads' decoder layers, with the target's sizes.
        layers: Indices (from 0) of the target layers whose inputs are the auxiliary hidden states.
        proposed: Token ids of the draft vocabulary, int64 [R], ascending; None for all tokens.
        num_heads: Number of draft tokens (for EAGLE-3, drafting steps) that are predicted from a position in training.
    """

    projection_kind = "target"
    output = bias_V = None
    """Transformation and bias of the logits: none, as in serving engines."""
    fc: nn.Linear
    norm: Norm
    own_head: Tensor | None = None
    """Output projection [R, D] stored with the heads, which may differ from the target's; None if there is none."""

    def __init__(self, config: Any, layers: Sequence[int], proposed: Tensor | None, num_heads: int) -> None:
        super().__init__()
        self.config, self.layers, self.num_heads = config, tuple(layers), num_heads
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        if proposed is not None and not proposed.is_meta:
            check_tokens(proposed, self.vocab_size)
        self.register_buffer(TOKENS, None if proposed is None else proposed.long(), persistent=False)
        self._attached: tuple[Tensor, Tensor] | None = None  # tuples are not registered as parameters

    @property
    def states(self) -> str:
        """Identifier of the hidden states that training requires, such as `layers-2-8-13`."""
        return "-".join(["layers", *map(str, self.layers)])

    @property
    def states_size(self) -> int:
        """Size per position of the hidden states that training requires, including the last hidden state."""
        return (len(self.layers) + 1) * self.hidden_size

    @property
    def proposed(self) -> Tensor | None:
        """Token ids of the draft vocabulary, int64 [R], ascending; None for all tokens."""
        return getattr(self, TOKENS)

    @property
    def embedding(self) -> Tensor:
        """Token embeddings of the target, [V, D]."""
        assert self._attached is not None, "call heads.attach with the target's weights first"
        return self._attached[0]

    def projection(self, step: int = 0) -> Tensor:
        """Return the output projection [R, D] for the draft vocabulary. It is the same for every drafting step."""
        assert self._attached is not None, "call heads.attach with the target's weights first"
        return self._attached[1]

    def attach(self, embedding_VD: Tensor, lm_head_VD: Tensor) -> Self:
        """Attach the target's embeddings and (if `own_head` is None) output projection, but not as parameters."""
        expected = [self.vocab_size, self.hidden_size]
        for name, weight in (("embeddings", embedding_VD), ("output projection", lm_head_VD)):
            if list(weight.shape) != expected:
                raise ValueError(f"the target's {name} must be {expected}, got {list(weight.shape)}")
        ids_R, rows_RD = self.proposed, self.own_head
        if rows_RD is None:
            rows_RD = lm_head_VD.detach() if ids_R is None else lm_head_VD.detach()[ids_R.to(lm_head_VD.device)]
        self._attached = (embedding_VD.detach(), rows_RD.to(lm_head_VD.device))
        return self

    def begin_with(self, target: Any) -> nn.ModuleList:
        """Initialise `fc` and the final norm from the target, and return the target's layers."""
        config, decoder = target.config.get_text_config(decoder=True), target.get_decoder()
        weight_DG = self.fc.weight.zero_()
        weight_DG[:, -self.hidden_size :].copy_(torch.eye(self.hidden_size))
        if (scale_D := norm_scale(getattr(decoder, "norm", None))) is not None:
            self.norm.weight.copy_(scale_D * LogitShape.of(config).scale)
        return decoder_layers(decoder, config.num_hidden_layers)

    def copy_layer(self, layer: nn.Module, source: nn.Module, renamed: Mapping[str, str | None]) -> None:
        """Copy weights of a target's layer to those of a drafter's layer that have the same name and shape.

        `renamed` maps names of submodules to other names in `source`, or to None if they are not copied.
        """
        modules = dict[str | None, nn.Module](source.named_modules())
        for name, module in layer.named_modules():
            weight, other = getattr(module, "weight", None), modules.get(renamed.get(name, name))
            initial = norm_scale(other) if name.endswith("norm") else getattr(other, "weight", None)
            if isinstance(weight, Tensor) and initial is not None:
                # EAGLE-3 layers read a token embedding in the first columns.
                part = weight if weight.shape == initial.shape else weight[..., self.hidden_size :]
                if part.shape == initial.shape:
                    part.copy_(initial)

    @staticmethod
    def layer_sizes(config: Any) -> dict[str, Any]:
        """Return the settings of a drafter's Llama or Qwen3 layers for a target's text configuration.

        Only the hidden size and the vocabulary must be the target's. Its other sizes are used if its configuration has
        them, because the weights of its layers can then initialise the drafter.
        """
        config = getattr(config, "per_layer_config", [config])[-1]  # fields that differ between layers are not readable

        def first(*names: str) -> Any:
            return next((value for name in names if (value := getattr(config, name, None))), None)

        hidden, rope = config.hidden_size, first("rope_parameters") or {}
        heads = first("num_attention_heads") or max(hidden // 64, 1)
        rope = rope.get("full_attention") or rope
        # Engines do not read partial or multimodal rotations of drafters.
        portable = rope.get("partial_rotary_factor", 1.0) == 1.0 and not any(name.startswith("mrope") for name in rope)
        if not portable or rope.get("rope_type") not in ("linear", "dynamic", "yarn", "llama3", "longrope"):
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0}
        return {
            "hidden_size": hidden,
            "vocab_size": config.vocab_size,
            "intermediate_size": first("intermediate_size") or 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": first("num_key_value_heads") or heads,
            "head_dim": first("head_dim") or max(hidden // heads // 2 * 2, 2),
            "rms_norm_eps": first("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps") or 1e-6,
            "max_position_embeddings": first("max_position_embeddings", "max_seq_len") or 1 << 15,
            "rope_parameters": rope,
        }

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, on the CPU, including the draft vocabulary (`d2t`, `t2d`) and its projection."""
        tensors = dict(self.state_dict())
        if self.proposed is not None or self.own_head is not None:
            rows_RD = self.projection() if self.own_head is None else self.own_head
            tensors[HEAD] = rows_RD.to(next(iter(tensors.values())).dtype)
        if (ids_R := self.proposed) is not None:
            tensors[TOKENS] = ids_R - torch.arange(len(ids_R), device=ids_R.device)
            known_V = torch.zeros(self.vocab_size, dtype=torch.bool)
            known_V[ids_R.cpu()] = True
            tensors["t2d"] = known_V
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """Return the list of a decoder's `count` layers. Raises ValueError if there is none."""
    lists = (part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    if (layers := next(lists, None)) is None:
        raise ValueError(f"{type(decoder).__name__} has no list of {count} layers, so their inputs cannot be read")
    return layers


def input_embeddings(model: Any) -> Tensor:
    """Return a model's token embeddings [V, D], multiplied by the scale that its embedding module applies (Gemma)."""
    module = model.get_input_embeddings()
    weight_VD, scale = module.weight.detach(), getattr(module, "embed_scale", 1.0)
    return weight_VD if scale == 1 else weight_VD * torch.as_tensor(scale).to(weight_VD)


def norm_scale(norm: Any) -> Tensor | None:
    """Return the factors [D] by which a norm multiplies normalised states; None if it has none.

    Some RMSNorms store the factors minus 1 (Gemma, Qwen3-Next), so they are computed from an output of the norm.
    """
    if (weight_D := getattr(norm, "weight", None)) is None or weight_D.dim() != 1:
        return None
    signs_1D = torch.ones(1, len(weight_D), dtype=weight_D.dtype, device=weight_D.device)
    signs_1D[:, 1::2] = -1  # the mean is 0 and the mean square is 1
    scale_D: Tensor = ((norm(signs_1D) - norm(-signs_1D)) / 2 * signs_1D)[0]
    return scale_D


Heads = TypeVar("Heads", bound=AuxiliaryHeads)


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ValueError unless the layers are distinct, ascending and among the `count` layers of the target."""
    if not layers or not all(0 <= layer < count for layer in layers) or [*layers] != sorted(set(layers)):
        raise ValueError(f"layers must be distinct, ascending and between 0 and {count - 1}, got {[*layers]}")


def draft_tokens_in(stored: Mapping[str, Tensor]) -> Tensor | None:
    """Convert the stored offsets `d2t` to the token ids of the draft vocabulary; None if there are no offsets."""
    offsets_R = stored.get(TOKENS)
    return None if offsets_R is None else offsets_R.long() + torch.arange(len(offsets_R))


def fill_heads(heads: Heads, stored: Mapping[str, Tensor], directory: Path) -> Heads:
    """Load tensors into heads, which take the dtype of the tensors. Raises ValueError if a tensor is invalid."""
    weights = {name: tensor for name, tensor in stored.items() if name not in (TOKENS, "t2d", HEAD)}
    heads = heads.to(next(iter(weights.values())).dtype)
    try:
        heads.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{directory}: {error}") from error
    if (rows_RD := stored.get(HEAD)) is not None:
        expected = [heads.vocab_size if heads.proposed is None else len(heads.proposed), heads.hidden_size]
        if list(rows_RD.shape) != expected:
            raise ValueError(f"{directory}: {HEAD} is {list(rows_RD.shape)}, expected {expected}")
        heads.own_head = rows_RD
    own = {HEAD: heads.own_head} if heads.own_head is not None else {}
    if wrong := [name for name, each in (*heads.named_parameters(), *own.items()) if not bool(each.isfinite().all())]:
        raise ValueError(f"{directory}: {wrong[0]} contains NaN or infinite values")
    return heads
