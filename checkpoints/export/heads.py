"""Forms of prediction heads for serving engines: Medusa's first and second version, and vLLM's own names.

What each reader does stands in `serving/`; its rules are tests (`tests/checkpoints/export/test_export_heads.py`).
Letters: K heads, L residual blocks of a head, V vocabulary, D hidden, R rank.
"""

from __future__ import annotations

import json
import re
from functools import partial
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
from .base import ExportOptions, Source, check_same_tensors, format_of, target_name
from .target import needed_target, output_projection
from .tokenizer import compare_copy, copy_tokenizer, has_tokenizer

FIRST, VLLM, SECOND = "medusa", "medusa-vllm", "medusa-2"
VLLM_FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def _target_name(source: Source, options: ExportOptions) -> str:
    """The target's name, under which engines look for it when they are given heads; ValueError where there is none."""
    named = target_name(source, options) or read_heads(source.folder).base_model
    return named or needed_target(source, options, "engines look for its name in the heads' config")


def _load(form: str, source: Source, options: ExportOptions) -> PredictionHeads:
    """The artifact's heads, with the target's projection where a form stores it; ValueError where they do not fit."""
    heads = load_heads(source.folder).propose(None)  # these forms know no such thing; it changes no feature
    if heads.states != "after-norm":
        raise ValueError(
            f"the heads in {source.folder} read the hidden states {heads.states.replace('-', ' the final ')}, and what "
            f"reads {form} hands them those after it: train them with `states: after-norm`"
        )
    if heads.scale != 1:
        raise ValueError(
            f"the heads in {source.folder} multiply hidden states by {heads.scale:g} first, which {form} cannot store; "
            "no weights of residual blocks have the same effect, as SiLU is not linear: train them with scale 1"
        )
    if form == SECOND:
        _check_second(heads, source, options)
    elif heads.projection_kind == "target":
        why = f"{form} stores its output projection with each head"
        heads.attach(output_projection(needed_target(source, options, why), source))
    return heads


def _tensors(form: str, heads: PredictionHeads) -> Tensors:
    """What computes the same as the heads, under the names of the first release."""
    tensors = _blocks(heads)
    for k in range(heads.num_heads if form != SECOND else 0):
        tail = heads.projection(k).detach()
        if heads.projection_kind == "low-rank":
            down_RD = heads.get_parameter(f"{k}.{heads.num_layers}.down.weight").detach()
            tail = (tail.double() @ down_RD.double()).to(tail.dtype)
        tensors[f"{k}.{heads.num_layers}.weight"] = tail
    return tensors


def _blocks(heads: PredictionHeads) -> Tensors:
    return {name: tensor.detach() for name, tensor in heads.state_dict().items() if ".linear." in name}


def _check_second(heads: PredictionHeads, source: Source, options: ExportOptions) -> None:
    """ValueError for heads whose projections are others than the target's."""
    instead = "export them as medusa, or train them with `projection: target`"
    if not heads.num_layers:
        raise ValueError(f"the heads in {source.folder} have no residual blocks: nothing of them is left in {SECOND}")
    if heads.projection_kind == "low-rank":
        raise ValueError(f"heads of rank {heads.rank} in {source.folder} lack the target's projection: {instead}")
    if heads.projection_kind == "own":
        why = f"in {SECOND} all heads use its output projection"
        target_VD = output_projection(needed_target(source, options, why), source)
        for k in range(heads.num_heads):
            if not torch.equal(heads.projection(k).detach(), target_VD.to(heads.projection(k).dtype)):
                raise ValueError(f"head {k} in {source.folder} has another projection than the target's: {instead}")


def _write(form: str, source: Source, folder: Path, options: ExportOptions) -> None:
    heads = _load(form, source, options)
    tensors = {name: tensor.clone() for name, tensor in _tensors(form, heads).items()}  # none is stored twice
    if form == VLLM:
        save_file(_in_vllm(tensors), folder / VLLM_FILE, metadata={"format": "pt"})
    else:
        save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})
        copy_tokenizer(_target_name(source, options), folder)
    with torch.device("meta"):
        written = PredictionHeads(*_sizes(heads, source), "target" if form == SECOND else "own")
    config = engine_config(written, _target_name(source, options))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _sizes(heads: PredictionHeads, source: Source) -> tuple[int, int, int, int]:
    vocab_size = heads.vocab_size if heads.knows_vocab_size else source.manifest.vocab_size
    return heads.num_heads, heads.num_layers, heads.hidden_size, vocab_size


def _in_vllm(tensors: Tensors) -> Tensors:
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.(\w+)$", r"blocks.\1.layers.\2.\3", name)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return renamed


def _read_back(form: str, folder: Path) -> Tensors:
    """What the form's reader is filled with, under our names."""
    if form != VLLM:
        return load_file(folder / HEADS_FILE)
    layers = read_json(folder / CONFIG_FILE).get("medusa_num_layers")
    tensors = {}
    for name, tensor in load_file(folder / VLLM_FILE).items():
        kind, head, *rest = name.split(".")
        layer, part = (rest[1], f"linear.{rest[2]}") if kind == "blocks" else (layers, rest[0])
        tensors[f"{head}.{layer}.{part}"] = tensor
    return tensors


def _compare(form: str, source: Source, folder: Path, options: ExportOptions) -> list[str]:
    heads, found, config = _load(form, source, options), _read_back(form, folder), read_json(folder / CONFIG_FILE)
    check_same_tensors(found, _tensors(form, heads), folder)
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name}, read back from {folder}, has values that are not finite in {tensor.dtype}")
    said = tuple(config.get(key) for key in ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"))
    if said != (sizes := _sizes(heads, source)) or config.get("num_medusa_heads") != sizes[0]:
        raise ValueError(f"{folder / CONFIG_FILE}, read back from {folder}, says {said}, the heads are {sizes}")
    how = "" if form == SECOND else " and the target's projection" if heads.projection_kind == "target" else ""
    if heads.projection_kind == "low-rank":
        how = ", their projections multiplied out"
    lines = [f"all {len(found)} tensors, bit by bit, with what the heads hold{how}; the config's sizes"]
    if form == SECOND and heads.projection_kind == "own":
        lines.append("the projections that are left out, with the target's, bit by bit")
    return lines if form == VLLM else [*lines, *compare_copy(_target_name(source, options), folder)]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    heads, target = read_heads(source.folder), split_revision(_target_name(source, options))[0]
    about = {"target": target, "is_here": Path(target).is_dir(), "has_tokenizer": has_tokenizer(folder)}
    return about | {"heads": heads.num_heads, "layers": heads.num_layers}


HEADS_FORMATS = tuple(
    format_of(name, write=partial(_write, name), compare=partial(_compare, name), values=_values)
    for name in (FIRST, VLLM, SECOND)
)
"""Formats of heads for serving engines."""
