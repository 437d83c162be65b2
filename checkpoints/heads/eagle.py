"""EAGLE-3 heads: one decoder layer that drafts autoregressively from auxiliary hidden states of a target.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), sections 3.1 and 3.2. Tensor names, config and the order of norms
follow serving engines. At position t, the layer's inputs are the embedding of token t + 1 and g_t, which `fc` computes
from the target's hidden states at token t. The layer predicts token t + 2, and its output replaces g in the next
drafting step. The embeddings and the output projection are the target's, and are frozen. EAGLE-3.1 adds norms (see
`NORMS`) that keep the scale of these inputs constant (arXiv 2605.09992).

Shape letters: B batch, T tokens, K drafting steps, A drafting steps after the first, D hidden size, G concatenated
auxiliary hidden states (3 · D), C attention input (2 · D), H query heads, J key heads, U query heads per key head,
E head size, V vocabulary, R draft vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .auxiliary import HEAD, Attention, AuxiliaryHeads, Mlp, Norm, check_layers, draft_tokens_in, fill_heads
from .layouts import EAGLE

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORMED = "norm_before_residual"
"""Config keys for the ids of the target layers, and for a residual stream that starts after `hidden_norm`."""
FC_NORM, NORM_BEFORE_FC, NORM_OUTPUT = NORMS = ("fc_norm", "norm_before_fc", "norm_output")
"""Config keys of the norms of EAGLE-3.1. The first two normalise the auxiliary hidden states before `fc`, either each
of them or their concatenation. With `norm_output`, the next drafting step reads the output of the final norm."""
_STORED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act"),
)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # the input of the attention is the concatenation of a token embedding and a hidden state
        self.self_attn, self.mlp = Attention(config, 2 * config.hidden_size), Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class EagleHeads(AuxiliaryHeads):
    """EAGLE-3 draft layer, created from a Llama configuration of one layer. See `AuxiliaryHeads` for the arguments."""

    def __init__(
        self, config: LlamaConfig, layers: Sequence[int], proposed: Tensor | None = None, num_heads: int = 3
    ) -> None:
        super().__init__(config, layers, proposed, num_heads)
        self.normed = bool(getattr(config, NORMED, False))
        """True if the residual stream starts after `hidden_norm`."""
        hidden = config.hidden_size
        self.norms = tuple(name for name in NORMS if getattr(config, name, False))
        """Norms of EAGLE-3.1 that the heads have (see `NORMS`)."""
        self.input_norm: Norm | None = None
        self.fc_norm: nn.ModuleList | None = None
        if NORM_BEFORE_FC in self.norms:
            self.input_norm = Norm(len(self.layers) * hidden, config.rms_norm_eps)
        if FC_NORM in self.norms:
            self.fc_norm = nn.ModuleList(Norm(hidden, config.rms_norm_eps) for _ in self.layers)
        self.fc = nn.Linear(len(self.layers) * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @classmethod
    def for_target(
        cls,
        config: Any,
        layers: Sequence[int] | None = None,
        proposed: Tensor | None = None,
        num_heads: int = 3,
        norms: Sequence[str] = (),
    ) -> Self:
        """Create float32 heads for a target's configuration. `layers` defaults to `default_layers`.

        `norms` lists the norms of EAGLE-3.1 (see `NORMS`).

        Raises ValueError if the target does not have these layers.
        """
        config = config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        layers = list(default_layers(count) if layers is None else layers)
        check_layers(layers, count)
        assert set(norms) <= set(NORMS), norms
        sizes = cls.layer_sizes(config) | dict.fromkeys(norms, True)
        return cls(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False), layers, proposed, num_heads)

    @torch.no_grad()
    def begin_as(self, target: Any) -> Self:
        """Initialise the weights from the target's layer `max(layers)` and final norm, where the shapes are equal."""
        source = self.begin_with(target)[max(self.layers)]
        self.copy_layer(self.midlayer, source, {"hidden_norm": "input_layernorm", "input_layernorm": None})
        return self

    def norm_aux(self, aux_XG: Tensor) -> Tensor:
        """Apply the norms before `fc` to auxiliary hidden states [..., G], if there are any."""
        if self.input_norm is not None:
            aux_XG = self.input_norm(aux_XG)
        if self.fc_norm is None:
            return aux_XG
        chunks = aux_XG.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(aux_XD) for norm, aux_XD in zip(self.fc_norm, chunks, strict=True)], -1)

    def features(self, given_BTG: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask_B1TT: Tensor) -> Tensor:
        """Compute the inputs of `projection`, [B, T, K, D], for K drafting steps from each position.

        This is training-time test (TTT). At position t, step k (from 0) takes the embedding of token t + 1 + k and the
        output of step k − 1 (for k = 0, auxiliary hidden states `given_BTG`), and predicts token t + 2 + k. With
        `norm_output`, the output is that of the final norm. It attends to the first step's keys where `mask_B1TT` is
        True, and to the keys of later steps at position t.
        """
        layer, features = self.midlayer, []
        states_BTD, after_BT = self.fc(self.norm_aux(given_BTG)), tokens_BT
        first: tuple[Tensor, Tensor] | None = None
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(self.num_heads):
            after_BT = F.pad(after_BT[:, 1:], (0, 1))
            embedded_BTD = F.embedding(after_BT, self.embedding).to(states_BTD.dtype)
            read_BTD = layer.hidden_norm(states_BTD)
            states_BTD = read_BTD if self.normed else states_BTD
            read_BTC = torch.cat((layer.input_layernorm(embedded_BTD), read_BTD), -1)
            query_BHTE, key_BJTE, value_BJTE = self._project(read_BTC, positions_BT + step)
            if first is None:
                first = key_BJTE, value_BJTE
                grouped = query_BHTE.shape[1] != key_BJTE.shape[1]
                attended_BHTE = F.scaled_dot_product_attention(
                    query_BHTE, *first, attn_mask=mask_B1TT, enable_gqa=grouped
                )
            else:
                keys.append(key_BJTE)
                values.append(value_BJTE)
                attended_BHTE = _attend_to_steps(query_BHTE, first, mask_B1TT, keys, values)
            states_BTD = states_BTD + layer.self_attn.o_proj(attended_BHTE.transpose(1, 2).flatten(2))
            states_BTD = states_BTD + layer.mlp(layer.post_attention_layernorm(states_BTD))
            features.append(self.norm(states_BTD))
            states_BTD = features[-1] if NORM_OUTPUT in self.norms else states_BTD
        return torch.stack(features, 2)

    def _project(self, read_BTC: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.midlayer.self_attn
        projected = (attention.q_proj(read_BTC), attention.k_proj(read_BTC), attention.v_proj(read_BTC))
        query, key, value = (states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for states in projected)
        cos_BTE, sin_BTE = self.rotary_emb(read_BTC, positions_BT)
        query, key = apply_rotary_pos_emb(query, key, cos_BTE, sin_BTE)
        return query, key, value


def default_layers(count: int) -> list[int]:
    """Return the layers that engines use by default for a target with `count` layers: 2, count // 2 and count − 3."""
    return sorted({min(2, count - 1), count // 2, max(count - 3, 0)})


def _attend_to_steps(
    query_BHTE: Tensor, first: tuple[Tensor, Tensor], mask_B1TT: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Attend to the first step's keys where the mask is True, and to later steps' `keys` at the same position."""
    key_BJTE, value_BJTE = first
    groups = query_BHTE.shape[1] // key_BJTE.shape[1]
    query_BJUTE = query_BHTE.unflatten(1, (-1, groups)) * query_BHTE.shape[-1] ** -0.5
    shared_BJUTT = query_BJUTE @ key_BJTE[:, :, None].mT
    shared_BJUTT = shared_BJUTT.masked_fill(~mask_B1TT[:, :, None], -torch.inf)
    own_BJTAE = torch.stack(keys, 3)
    own_BJUTA = torch.einsum("bjute,bjtae->bjuta", query_BJUTE, own_BJTAE)
    shares = torch.cat((shared_BJUTT, own_BJUTA), -1).softmax(-1)
    # gradients of `split` are concatenated, whereas gradients of two slices would be padded
    of_all, of_own = shares.split((key_BJTE.shape[2], len(keys)), -1)
    attended_BJUTE = of_all @ value_BJTE[:, :, None]
    attended_BJUTE = attended_BJUTE + torch.einsum("bjuta,bjtae->bjute", of_own, torch.stack(values, 3))
    return attended_BJUTE.flatten(1, 2)


def save_eagle(heads: EagleHeads, directory: Path) -> None:
    """Write `model.safetensors` and `config.json` in the format of serving engines.

    The layer is named `midlayer`. Layer ids are stored for both vLLM and SGLang, and draft tokens as offsets (`d2t`).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = heads.stored_tensors()
    save_file(stored, directory / WHOLE_FILES[0], metadata={"format": "pt"})
    named = {name: getattr(heads.config, name) for name in _STORED} | {
        "architectures": [EAGLE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # otherwise SGLang uses the embeddings as the output layer
        "dtype": str(stored["fc.weight"].dtype).removeprefix("torch."),
        # must be null if there is no output projection, otherwise SGLang leaves its output layer uninitialised
        "draft_vocab_size": len(stored[HEAD]) if HEAD in stored else None,
        NORMED: heads.normed,
        **dict.fromkeys(heads.norms, True),
        LAYER_IDS: [*heads.layers],
        # SGLang numbers the outputs of layers, other engines their inputs
        "eagle_config": {LAYER_IDS: [layer - 1 for layer in heads.layers]},
    }
    (directory / CONFIG_FILE).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def eagle_layers(directory: Path) -> list[int]:
    """Return the target layer ids in the config of EAGLE-3 heads. Raises ValueError if they are missing or invalid."""
    layers = read_json(Path(directory) / CONFIG_FILE).get(LAYER_IDS)
    named = isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)
    if not named or sorted(set(layers)) != layers:  # type: ignore[arg-type]
        raise ValueError(f"{directory}: {LAYER_IDS} must be ascending layers of the target, got {layers!r}")
    return layers


def load_eagle(directory: Path, dtype: torch.dtype | None = None) -> EagleHeads:
    """Load heads written by `save_eagle`, in evaluation mode. The target's weights are not attached.

    Raises ValueError if a tensor is missing, has the wrong shape, or has non-finite values.
    """
    directory = Path(directory)
    stored, config = load_file(directory / WHOLE_FILES[0]), LlamaConfig.from_pretrained(directory)
    heads = fill_heads(EagleHeads(config, eagle_layers(directory), draft_tokens_in(stored)), stored, directory)
    return heads.to(dtype=dtype).eval()
