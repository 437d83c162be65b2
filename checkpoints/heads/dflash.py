"""DFlash drafter: a few decoder layers that predict a block of tokens with one forward pass.

Source: Chen et al. 2026, arXiv 2602.06036; tensors, config and norms follow serving engines. The block contains the
newest token (the anchor) and mask tokens. Its queries attend to the whole block and to keys and values of all earlier
tokens, which are projections of c = hidden_norm(fc(auxiliary hidden states)). c is the same for all layers, so the keys
and values of a token never change. Slot j of the block predicts the token at its own position, j tokens after the
anchor. The embeddings and the output projection are the target's, and are frozen.

Shape letters: B batch, T tokens, N blocks of a row, S slots of a block, Q = N · S queries, X blocks of the batch,
K predicting slots of a block, D hidden size, G concatenated auxiliary hidden states, H query heads, J key heads,
E head size, V vocabulary, R draft vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .auxiliary import HEAD, Attention, AuxiliaryHeads, Mlp, Norm, check_layers, draft_tokens_in, fill_heads
from .layouts import DFLASH, DSPARK

SETTINGS, LAYER_IDS, MASK, BLOCK = "dflash_config", "target_layer_ids", "mask_token_id", "block_size"
"""Config keys: section of DFlash settings, ids of target layers, id of the mask token, and tokens of a block."""


class _Attention(Attention):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm, self.k_norm = (Norm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        self.scaling = config.head_dim**-0.5


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class DFlashHeads(AuxiliaryHeads):
    """DFlash drafter, created from a Qwen3 configuration. See `AuxiliaryHeads` for `config`, `layers` and `proposed`.

    `mask` is the id of the mask token, and `block_size` the number of tokens per block, including the newest known
    token (the anchor).
    """

    architecture = DFLASH
    first_slot = 1
    """First slot of a block that predicts a token."""

    def __init__(
        self, config: Qwen3Config, layers: Sequence[int], mask: int, block_size: int, proposed: Tensor | None = None
    ) -> None:
        if block_size < 2:
            raise ValueError(f"{BLOCK} must be at least 2, got {block_size}")
        if not 0 <= mask < config.vocab_size:
            raise ValueError(f"{MASK} must be between 0 and {config.vocab_size - 1}, got {mask}")
        super().__init__(config, layers, proposed, block_size - 1)
        self.mask, self.block_size = mask, block_size
        hidden = config.hidden_size
        self.fc = nn.Linear(len(self.layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden, config.rms_norm_eps), Norm(hidden, config.rms_norm_eps)
        self.layer_stack = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    @property
    def facts(self) -> dict[str, int]:
        """Sizes that the manifest of an artifact lists."""
        return {"num_layers": len(self.layer_stack), "block_size": self.block_size, "mask_token": self.mask}

    @classmethod
    def for_target(
        cls,
        config: Any,
        mask: int,
        block_size: int,
        num_layers: int = 1,
        layers: Sequence[int] | None = None,
        proposed: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Create a float32 drafter with `num_layers` layers for a target's configuration.

        `options` are passed to the constructor.

        Raises ValueError if the target does not have the given layers (default: `default_layers`).
        """
        count = config.num_hidden_layers
        layers = default_layers(count) if layers is None else layers
        check_layers(layers, count)
        if layers[0] == 0:  # ids in the config count the outputs of layers, so that 0 would be stored as -1
            raise ValueError(
                f"layers must be at least 1, since a DFlash drafter reads outputs of layers, got {[*layers]}"
            )
        sizes = cls.layer_sizes(config)
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes["rope_parameters"]["rope_theta"]}
        own = Qwen3Config(
            **sizes,
            num_hidden_layers=num_layers,
            num_target_layers=count,
            tie_word_embeddings=False,
            layer_types=["full_attention"] * num_layers,
        )
        return cls(own, layers, mask, block_size, proposed, **options)

    @torch.no_grad()
    def begin_as(self, target: Any) -> Self:
        """Initialise the weights from the target's last layers and final norm, where the shapes are equal."""
        sources = [*self.begin_with(target)][-len(self.layer_stack) :]
        for layer, source in zip(self.layer_stack, sources, strict=False):
            self.copy_layer(layer, source, {})
        return self

    def context(self, aux_BTG: Tensor) -> Tensor:
        """Compute the context features [B, T, D], to which all layers attend, from auxiliary hidden states."""
        return self.hidden_norm(self.fc(aux_BTG))

    def features(
        self, aux_BTG: Tensor, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor, rows_X: Tensor
    ) -> Tensor:
        """Compute the inputs of `projection`, [X, K, D], for K predicting slots of X blocks in packed rows.

        Args:
            aux_BTG: Auxiliary hidden states of the target.
            tokens_BT: Token ids.
            positions_BT: Positions, which restart in each document.
            documents_BT: Document of each token.
            rows_X: Flattened positions of the tokens before the blocks' anchors, int64 [X], ascending.
        """
        length, device = tokens_BT.shape[1], tokens_BT.device
        row_X, last_X = rows_X // length, rows_X % length
        counts_B = torch.bincount(row_X, minlength=len(tokens_BT))
        number_X = torch.arange(len(rows_X), device=device) - (counts_B.cumsum(0) - counts_B)[row_X]
        last_BN = torch.zeros(len(tokens_BT), int(counts_B.max()), dtype=torch.int64, device=device)
        last_BN[row_X, number_X] = last_X
        context_BTD = self.context(aux_BTG)
        anchor_BN = (last_BN + 1).clamp(max=length - 1)
        blocks_BNS = torch.full((*last_BN.shape, self.block_size), self.mask, device=device)
        blocks_BNS[..., 0] = tokens_BT.gather(1, anchor_BN)
        offset_S = torch.arange(self.block_size, device=device)
        places_BQ = (positions_BT.gather(1, anchor_BN)[..., None] + offset_S).flatten(1)
        hidden_BQD = F.embedding(blocks_BNS.flatten(1), self.embedding).to(context_BTD.dtype)
        visible_BNT = documents_BT.gather(1, last_BN)[..., None] == documents_BT[:, None]
        visible_BNT = visible_BNT & (torch.arange(length, device=device) <= last_BN[..., None])
        block_N = torch.arange(last_BN.shape[1], device=device)
        own_NN = (block_N[:, None] == block_N).expand(len(tokens_BT), -1, -1)
        mask_BQ = torch.cat((visible_BNT, own_NN.repeat_interleave(self.block_size, 2)), 2)
        mask_B1QX = mask_BQ.repeat_interleave(self.block_size, 1)[:, None]
        hidden_BQD = self.through_layers(hidden_BQD, context_BTD, places_BQ, positions_BT, mask_B1QX)
        features_BNSD = hidden_BQD.unflatten(1, blocks_BNS.shape[1:])
        return features_BNSD[row_X, number_X, self.first_slot :]

    def through_layers(
        self, hidden_BQD: Tensor, context_BTD: Tensor, places_BQ: Tensor, positions_BT: Tensor, mask_B1QX: Tensor | None
    ) -> Tensor:
        """Run the layers and the final norm on block tokens at positions `places_BQ`, given context features.

        `mask_B1QX` is the attention mask over the T context tokens and then the Q block tokens (None: no mask).
        """
        turn_context, turn_block = self.rotary_emb(context_BTD, positions_BT), self.rotary_emb(hidden_BQD, places_BQ)
        layer: Any
        for layer in self.layer_stack:
            attention, read_BQD = layer.self_attn, layer.input_layernorm(hidden_BQD)
            query_BHQE = attention.q_norm(self._split(attention.q_proj(read_BQD)))
            keys, values = list[Tensor](), list[Tensor]()
            for states, turn in ((context_BTD, turn_context), (read_BQD, turn_block)):
                key = attention.k_norm(self._split(attention.k_proj(states)))
                keys.append(apply_rotary_pos_emb(key, key, *turn)[1])
                values.append(self._split(attention.v_proj(states)))
            query_BHQE = apply_rotary_pos_emb(query_BHQE, query_BHQE, *turn_block)[0]
            attended_BHQE = F.scaled_dot_product_attention(
                query_BHQE,
                torch.cat(keys, 2),
                torch.cat(values, 2),
                attn_mask=mask_B1QX,
                enable_gqa=query_BHQE.shape[1] != keys[0].shape[1],
            )
            hidden_BQD = hidden_BQD + attention.o_proj(attended_BHQE.transpose(1, 2).flatten(2))
            hidden_BQD = hidden_BQD + layer.mlp(layer.post_attention_layernorm(hidden_BQD))
        return self.norm(hidden_BQD)

    def stored_config(self) -> dict[str, Any]:
        """Return the entries of `config.json` that are specific to the architecture."""
        # ids count the outputs of layers
        section = {BLOCK: self.block_size, MASK: self.mask, LAYER_IDS: [layer - 1 for layer in self.layers]}
        return {BLOCK: self.block_size, SETTINGS: section}

    def _split(self, states_BTO: Tensor) -> Tensor:
        return states_BTO.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


def default_layers(count: int) -> list[int]:
    """Return up to five evenly spaced layers of a target with `count` layers, whose inputs a drafter reads.

    For 36 layers, these are 2, 10, 18, 26 and 34, as in DFlash's published drafters for Qwen3-8B.
    """
    last = max(count - 2, 1)
    reads = min(5, max(1, last - 1))
    return sorted({min(round(2 + index * (last - 2) / max(reads - 1, 1)), count - 1) for index in range(reads)})


def save_dflash(heads: DFlashHeads, directory: Path) -> None:
    """Write `model.safetensors` and `config.json` in the format of serving engines."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name.replace("layer_stack.", "layers."): tensor for name, tensor in heads.stored_tensors().items()}
    save_file(stored, directory / WHOLE_FILES[0], metadata={"format": "pt"})
    config = heads.config.to_diff_dict() | {
        "architectures": [heads.architecture],
        "dtype": str(stored["fc.weight"].dtype).removeprefix("torch."),
        "draft_vocab_size": len(stored[HEAD]) if HEAD in stored else None,
        **heads.stored_config(),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_dflash(directory: Path, dtype: torch.dtype | None = None) -> DFlashHeads:
    """Load a drafter that `save_dflash` wrote, in evaluation mode. The target's weights are not attached.

    Raises ValueError if the config is invalid, or a tensor is missing, has the wrong shape or non-finite values.
    """
    directory = Path(directory)
    stored, config = load_file(directory / WHOLE_FILES[0]), Qwen3Config.from_pretrained(directory)
    return build_dflash(config, read_json(directory / CONFIG_FILE), stored, directory).to(dtype=dtype).eval()


def build_dflash(
    sizes: Qwen3Config, config: Mapping[str, Any], stored: Mapping[str, Tensor], directory: Path
) -> DFlashHeads:
    """Create a drafter from stored tensors and a config, whose settings must be those that DFlash drafters support.

    Raises ValueError as `load_dflash` does. `directory` is named in messages.
    """
    path = directory / CONFIG_FILE
    if faults := setting_faults(config):
        raise ValueError(f"{path}: {next(iter(faults.values()))}, which is not supported")
    layers, mask, block_size = _read_settings(config, path)
    return fill_dflash(DFlashHeads(sizes, layers, mask, block_size, draft_tokens_in(stored)), stored, directory)


Block = TypeVar("Block", bound=DFlashHeads)


def fill_dflash(heads: Block, stored: Mapping[str, Tensor], directory: Path) -> Block:
    """Load stored tensors into a drafter. Raises ValueError if a tensor is invalid."""
    stored = {name.replace("layers.", "layer_stack.", 1): tensor for name, tensor in stored.items()}
    return fill_heads(heads, stored, directory)


def setting_faults(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config with which the forward pass differs from `DFlashHeads` or `DSparkHeads`.

    The keys are short names of what differs, the values show the settings.
    """
    section = settings_section(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    kinds = {*(config.get("layer_types") or ())} - {"full_attention"}
    is_sliding = kinds or section.get("use_swa") or config.get("use_sliding_window")
    is_spark = DSPARK in (config.get("architectures") or ()) or config.get("speculators_model_type") == "dspark"
    from_anchor = not is_spark and (config.get("sample_from_anchor") or section.get("sample_from_anchor"))
    faults = {
        "partial rotary positions": factor not in (None, 1) and f"partial_rotary_factor is {factor}",
        "multimodal rotary positions": next((f"{name} is set" for name in rope if name.startswith("mrope")), ""),
        "rotary layout": config.get("is_neox_style", True) is False and "is_neox_style is false",
        "causal attention": (config.get("is_causal") or section.get("causal")) and "the block is causal",
        "sliding layers": is_sliding and f"layers have sliding attention ({', '.join(sorted(kinds)) or 'by a flag'})",
        "predicting anchor": from_anchor and "sample_from_anchor is true",
        "activation": config.get("hidden_act") not in (None, "silu") and f"hidden_act is {config.get('hidden_act')}",
    }
    return {name: str(fault) for name, fault in faults.items() if fault}


def settings_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of DFlash settings in a config; empty if there is none."""
    section = config.get(SETTINGS)
    return section if isinstance(section, dict) else {}


def dflash_settings(directory: Path) -> tuple[list[int], int, int]:
    """Return the target layers whose inputs a drafter reads, its mask token id and its block size.

    Raises ValueError if a setting is missing from the config or invalid.
    """
    path = Path(directory) / CONFIG_FILE
    return _read_settings(read_json(path), path)


def _read_settings(config: Mapping[str, Any], path: Path) -> tuple[list[int], int, int]:
    section = settings_section(config)
    named, mask = (section.get(key, config.get(key)) for key in (LAYER_IDS, MASK))
    if not isinstance(named, list) or not named or not all(type(layer) is int and layer >= 0 for layer in named):
        raise ValueError(f"{path}: {SETTINGS}.{LAYER_IDS} must be a list of layers of the target, got {named!r}")
    size = section.get(BLOCK, config.get(BLOCK))
    for name, value in ((f"{SETTINGS}.{MASK}", mask), (BLOCK, size)):
        if type(value) is not int:
            raise ValueError(f"{path}: {name} must be an integer, got {value!r}")
    assert isinstance(mask, int)
    assert isinstance(size, int)
    return [layer + 1 for layer in named], mask, size
