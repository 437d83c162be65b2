"""Saving of prediction heads for serving engines, and loading from all published layouts."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..storage.names import CONFIG_FILE, HEADS_FILE
from ..storage.places import split_revision
from .layouts import read_heads
from .module import PredictionHeads

__all__ = ["CONFIG_FILE", "HEADS_FILE", "PredictionHeads", "engine_config", "load_heads", "save_heads"]

_VERSIONS = {"own": "1", "target": "2", "low-rank": "low-rank"}


def save_heads(
    heads: PredictionHeads, directory: Path, base_model_name_or_path: str, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write `medusa_lm_head.safetensors` and the `config.json` that serving engines read.

    `base_model_name_or_path` is the name of the target, and `state` the heads' state dict, if their parameters are
    sharded (ZeRO-3).

    Raises ValueError if a tensor is missing, has the wrong shape, is on the meta device, or has non-finite values.
    """
    weights = heads.state_dict() if state is None else dict(state)
    _check_complete(heads, weights)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / HEADS_FILE, metadata={"format": "pt"})
    config = engine_config(heads, base_model_name_or_path) | {"projection": heads.projection_kind}
    config |= {"rank": heads.rank, "states": heads.states, "scale": heads.scale}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def engine_config(heads: PredictionHeads, base_model_name_or_path: str) -> dict[str, Any]:
    """Return the contents of the `config.json` that serving engines expect for heads.

    Engines ignore biases unless `medusa_fc_bias` is set. They read the number of heads from either of two keys.
    `version` follows FasterDecoding: "1" if each head has its own projection, "2" if heads share the target's.
    """
    return {
        "model_type": "medusa",
        "base_model_name_or_path": split_revision(base_model_name_or_path)[0],  # engines do not support revisions
        "medusa_num_heads": heads.num_heads,
        "num_medusa_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        **({"vocab_size": heads.vocab_size} if heads.knows_vocab_size else {}),
        "medusa_fc_bias": True,
        "version": _VERSIONS[heads.projection_kind],
    }


def load_heads(
    directory: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lm_head: Tensor | None = None,
    unpickle: bool = False,
) -> PredictionHeads:
    """Load heads in evaluation mode from any supported layout. Raises ValueError if files are invalid.

    Sizes are taken from the tensors, with a warning if the config contradicts them. `lm_head` [V, D] is the target's
    output projection for heads that share it, which can also be attached later. `unpickle` allows `.pt` files.
    """
    stored = read_heads(Path(directory), unpickle=unpickle)
    for disagreement in stored.disagreements:
        warnings.warn(disagreement, stacklevel=2)
    heads = stored.build().to(device=device, dtype=dtype).requires_grad_(True).eval()
    if wrong := [name for name, weight in heads.named_parameters() if not bool(weight.isfinite().all())]:
        raise ValueError(f"{directory}: {wrong[0]} contains NaN or infinite values")
    if lm_head is not None and heads.projection_kind == "target":
        heads.attach(lm_head)
    return heads


def _check_complete(heads: PredictionHeads, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if tensors are missing, unexpected, non-finite or of the wrong shape."""
    vocab_size = heads.vocab_size if heads.knows_vocab_size else None
    sizes = (heads.num_heads, heads.num_layers, heads.hidden_size, vocab_size)
    with torch.device("meta"):
        forms = (heads.projection_kind, heads.rank, heads.states, heads.scale)
        whole = PredictionHeads(*sizes, *forms, proposed=heads.proposed).state_dict()
    if other := sorted(set(whole) ^ set(state)):
        raise ValueError(f"heads cannot be saved: {other[0]} is {'missing' if other[0] in whole else 'unexpected'}")
    for name, tensor in state.items():
        shape, expected = list(tensor.shape), list(whole[name].shape)
        if shape != expected:
            raise ValueError(f"heads cannot be saved: {name} is {shape}, expected {expected}")
        wrong = tensor.numel() if tensor.device.type == "meta" else int((~tensor.isfinite()).sum())
        if wrong:
            raise ValueError(f"heads cannot be saved: {wrong} of {tensor.numel()} values of {name} are not finite")
