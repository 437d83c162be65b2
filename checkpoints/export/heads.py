"""Export of Medusa heads for serving engines in the format of Medusa-1, with one output projection per head.

The templates in `serving/` describe how each engine uses the heads. Shape letters: R rank, D hidden size.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..heads.files import engine_config, load_heads
from ..heads.layouts import read_heads
from ..heads.module import PredictionHeads
from ..storage.names import CONFIG_FILE, HEADS_FILE
from ..storage.places import split_revision
from ..storage.safe_read import read_json
from .base import ExportOptions, Format, Source, check_same_tensors, needed_target, target_name
from .target import compare_copy, copy_tokenizer, has_tokenizer, output_projection


def _target_name(source: Source, options: ExportOptions) -> str:
    """Return the target's name to store in the heads' config. Raises ValueError if it is unknown."""
    named = target_name(source, options) or read_heads(source.folder).base_model
    return named or needed_target(source, options, "engines read its name from the heads' config")


def _load(source: Source, options: ExportOptions) -> PredictionHeads:
    """Load the heads with their output projections. Raises ValueError if serving engines do not support them."""
    heads = load_heads(source.folder).propose(None)  # engines compute the logits of all tokens
    if heads.states != "after-norm":
        raise ValueError(f"{source.folder}: the heads use pre-norm hidden states: train with `states: after-norm`")
    if heads.scale != 1:
        raise ValueError(f"{source.folder} has heads of scale {heads.scale:g}: engines require scale 1")
    if heads.projection_kind == "target":
        reason = "the format stores its output projection with each head"
        heads.attach(output_projection(needed_target(source, options, reason), source))
    return heads


def _tensors(heads: PredictionHeads) -> dict[str, Tensor]:
    """Return the tensors to export, with low-rank projections multiplied out to full matrices."""
    tensors = {name: tensor.detach() for name, tensor in heads.state_dict().items() if ".linear." in name}
    for k in range(heads.num_heads):
        tail = heads.projection(k).detach()
        if heads.projection_kind == "low-rank":
            down_RD = heads.get_parameter(f"{k}.{heads.num_layers}.down.weight").detach()
            tail = (tail.double() @ down_RD.double()).to(tail.dtype)
        tensors[f"{k}.{heads.num_layers}.weight"] = tail
    return tensors


def _sizes(heads: PredictionHeads, source: Source) -> tuple[int, int, int, int]:
    vocab_size = heads.vocab_size if heads.knows_vocab_size else source.manifest.vocab_size
    return heads.num_heads, heads.num_layers, heads.hidden_size, vocab_size


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    heads = _load(source, options)
    tensors = {name: tensor.clone() for name, tensor in _tensors(heads).items()}  # shared tensors cannot be saved
    save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})
    copy_tokenizer(_target_name(source, options), folder)
    with torch.device("meta"):
        config = engine_config(PredictionHeads(*_sizes(heads, source)), _target_name(source, options))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    heads, written, config = _load(source, options), load_file(folder / HEADS_FILE), read_json(folder / CONFIG_FILE)
    check_same_tensors(written, _tensors(heads), folder)
    for name, tensor in written.items():
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name} in {folder} has values that are not finite in {tensor.dtype}")
    stored = tuple(config.get(key) for key in ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"))
    if stored != (sizes := _sizes(heads, source)):
        raise ValueError(f"{folder / CONFIG_FILE} has the sizes {stored}, expected {sizes}")
    notes = {"target": " and the target's projection", "low-rank": ", with factors multiplied", "own": ""}
    line = f"all {len(written)} tensors are identical to those of the heads{notes[heads.projection_kind]}"
    return [f"{line}; the config has the same sizes", *compare_copy(_target_name(source, options), folder)]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    heads, target = read_heads(source.folder), split_revision(_target_name(source, options))[0]
    about = {"target": target, "is_here": Path(target).is_dir(), "has_tokenizer": has_tokenizer(folder)}
    return about | {"heads": heads.num_heads, "layers": heads.num_layers}


MEDUSA = Format(
    "medusa",
    "heads",
    "Medusa-1 heads, each with its own output projection",
    "TGI ≥ 2.0, TensorRT-LLM ≥ 0.11, vLLM 0.25 to 0.32",
    _write,
    _compare,
    _values,
    ("target",),
    native=True,
)
