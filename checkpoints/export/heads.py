"""Forms of prediction heads for serving engines: Medusa's first and second version, vLLM's own names, a pickled file.

What each reader does stands in `serving/`; its rules are tests (`tests/checkpoints/export/test_export_heads.py`).
Letters: K heads, L residual blocks of a head, V vocabulary, D hidden, R rank, B hidden states to compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..heads.files import engine_config, load_heads
from ..heads.layouts import read_heads
from ..heads.module import PredictionHeads
from ..storage.names import CONFIG_FILE, FASTER_DECODING_HEADS, HEADS_FILE, PICKLED_FILE
from ..storage.places import split_revision
from .base import ExportOptions, Format, Source, check_same_tensors, target_name
from .target import needed_target, output_projection
from .tokenizer import compare_copy, copy_tokenizer, has_tokenizer

VLLM_FILE = "model.safetensors"
Tensors = dict[str, Tensor]

_STATES = 32
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of logits, as a share of the largest: what multiplying a low-rank projection out may change by rounding."""


def _target_name(source: Source, options: ExportOptions) -> str:
    """The target's name, under which engines look for it when they are given heads; ValueError where there is none."""
    named = target_name(source, options) or read_heads(source.folder).base_model
    return named or needed_target(source, options, "engines look for its name in the heads' config")


def _load(source: Source, form: str) -> PredictionHeads:
    """The artifact's heads; ValueError where they read what no engine hands them."""
    heads = load_heads(source.folder)
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
    return heads


def _projection(source: Source, options: ExportOptions, why: str) -> Tensor:
    """[V, D]: the target's output projection; ValueError where the target is not the one of the heads."""
    return output_projection(needed_target(source, options, why), source)


def _attached(source: Source, options: ExportOptions, form: str) -> PredictionHeads:
    """The artifact's heads, with the target's projection where they reuse it."""
    heads = _load(source, form)
    if heads.projection_kind == "target":
        heads.attach(_projection(source, options, f"{form} stores its output projection with each head"))
    return heads


def _first_version(heads: PredictionHeads, count: int) -> Tensors:
    """The tensors of `count` heads that compute the same with projections [V, D] of their own. Where there are fewer,
    the last stands for those that lack: what it proposes there is seldom accepted, and verified like any other."""
    tensors = _blocks(heads)
    for k in range(heads.num_heads):
        tail = heads.projection(k).detach()
        if heads.projection_kind == "low-rank":
            down_RD = heads.get_parameter(f"{k}.{heads.num_layers}.down.weight").detach()
            tail = (tail.double() @ down_RD.double()).to(tail.dtype)
        tensors[f"{k}.{heads.num_layers}.weight"] = tail
    parts = sorted({name.partition(".")[2] for name in tensors})
    # copies, as safetensors stores no tensor twice
    return {
        f"{k}.{part}": tensors[f"{min(k, heads.num_heads - 1)}.{part}"].clone() for k in range(count) for part in parts
    }


def _blocks(heads: PredictionHeads) -> Tensors:
    return {name: tensor.detach() for name, tensor in heads.state_dict().items() if ".linear." in name}


def _write_config(heads: PredictionHeads, source: Source, options: ExportOptions, folder: Path) -> None:
    config = engine_config(heads, _target_name(source, options))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _FirstVersion:
    """A form that stores each head with its own projection."""

    name: str
    save: Callable[[Tensors, Path], None]
    """Writes tensors of the first version's names to a folder."""
    read: Callable[[Path], Tensors]
    """Reads them back."""
    count: int | None = None
    """How many heads its reader takes; None: any number."""

    def write(self, source: Source, folder: Path, options: ExportOptions) -> None:
        heads = _attached(source, options, self.name)
        count = self.count or heads.num_heads
        self.save(_first_version(heads, count), folder)
        with torch.device("meta"):
            written = PredictionHeads(count, heads.num_layers, heads.hidden_size, heads.vocab_size)
        _write_config(written, source, options, folder)

    def compare(self, source: Source, folder: Path, options: ExportOptions) -> list[str]:
        heads, found = _attached(source, options, self.name), self.read(folder)
        count, kind = self.count or heads.num_heads, heads.projection_kind
        check_same_tensors(found, _first_version(heads, count), folder)
        difference = _compare_logits(heads, found, count, folder)
        exact = "bit by bit" if not difference else f"to within {difference:.1e} of the largest (low rank, multiplied)"
        how = {"low-rank": ", their projections multiplied out", "target": " and the target's projection"}.get(kind, "")
        lines = [f"all {len(found)} tensors, bit by bit, with what the heads hold{how}"]
        lines += [f"logits of {min(count, heads.num_heads)} heads on {_STATES} random hidden states, {exact}"]
        if count < heads.num_heads:
            lines += [f"{count} heads from {heads.num_heads}: the last {heads.num_heads - count} are left out"]
        elif count > heads.num_heads:
            lines += [f"{count} heads from {heads.num_heads}: the last stands for those that lack"]
        return lines


@torch.no_grad()
def _compare_logits(heads: PredictionHeads, found: Tensors, count: int, folder: Path) -> float:
    """The largest difference of logits, as a share of the largest; ValueError where that is more than rounding.

    Both sides compute in the widest type that either is stored in.
    """
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in found.values()))
    heads = heads.to(dtype)
    if heads.projection_kind == "target":
        heads.attach(heads.projection(0).to(dtype))
    made = PredictionHeads(count, heads.num_layers, heads.hidden_size, heads.vocab_size)
    made.load_state_dict({name: tensor.to(dtype) for name, tensor in found.items()}, assign=True)
    states_BD = torch.randn(_STATES, heads.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest, allowed = 0.0, _TOLERANCE[dtype] if heads.projection_kind == "low-rank" else 0.0
    for k in range(count):
        mine_BV = heads.head_forward(min(k, heads.num_heads - 1), states_BD).float()
        theirs_BV = made.head_forward(k, states_BD).float()
        difference = ((mine_BV - theirs_BV).abs().max() / mine_BV.abs().max().clamp(min=1e-30)).item()
        if not difference <= allowed:
            raise ValueError(f"logits of head {k}, read back, differ from the artifact's by {difference:.1e}")
        largest = max(largest, difference)
    return largest


def _save_medusa(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})


def _save_vllm(tensors: Tensors, folder: Path) -> None:
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.(\w+)$", r"blocks.\1.layers.\2.\3", name)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    save_file(renamed, folder / VLLM_FILE, metadata={"format": "pt"})


def _read_vllm(folder: Path) -> Tensors:
    layers = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["medusa_num_layers"]
    found = {}
    for name, tensor in load_file(folder / VLLM_FILE).items():
        name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.(\w+)$", r"\1.\2.linear.\3", name)
        found[re.sub(r"^lm_heads\.(\d+)\.weight$", rf"\1.{layers}.weight", name)] = tensor
    return found


_MEDUSA = _FirstVersion("medusa", _save_medusa, lambda folder: load_file(folder / HEADS_FILE))
_VLLM = _FirstVersion("medusa-vllm", _save_vllm, _read_vllm)
_PICKLED = _FirstVersion(
    "medusa-pt",
    save=lambda tensors, folder: torch.save(tensors, folder / PICKLED_FILE),
    read=lambda folder: torch.load(folder / PICKLED_FILE, map_location="cpu", weights_only=True),
    count=FASTER_DECODING_HEADS,
)


def _write_medusa(source: Source, folder: Path, options: ExportOptions) -> None:
    _MEDUSA.write(source, folder, options)
    copy_tokenizer(_target_name(source, options), folder)


def _compare_medusa(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    return _MEDUSA.compare(source, folder, options) + compare_copy(_target_name(source, options), folder)


def _write_pickled(source: Source, folder: Path, options: ExportOptions) -> None:
    """ValueError also for a head whose blocks differ: FasterDecoding's modules hold one, and go through it L times."""
    if not options.pickle:
        raise ValueError("medusa-pt is a pickled file, which is written only where that is asked for: add --pickle")
    heads = _load(source, "medusa-pt")
    tensors = _blocks(heads)
    for name, tensor in tensors.items():
        first = re.sub(r"^(\d+)\.\d+\.linear", r"\1.0.linear", name)
        if not torch.equal(tensor, tensors[first]):
            raise ValueError(f"{name} in {source.folder} differs from {first}: this runtime has one, export as medusa")
    _PICKLED.write(source, folder, options)


def _second_version(source: Source, options: ExportOptions) -> PredictionHeads:
    """Heads of which the projections are the target's; ValueError where they are others."""
    heads = _load(source, "medusa-2")
    instead = "export them as medusa, or train them with `projection: target`"
    if not heads.num_layers:
        raise ValueError(f"the heads in {source.folder} have no residual blocks: nothing of them is left in medusa-2")
    if heads.projection_kind == "low-rank":
        raise ValueError(f"heads of rank {heads.rank} in {source.folder} lack the target's projection: {instead}")
    if heads.projection_kind == "own":
        target_VD = _projection(source, options, "in medusa-2 all heads use its output projection")
        for k in range(heads.num_heads):
            if not torch.equal(heads.projection(k).detach(), target_VD.to(heads.projection(k).dtype)):
                raise ValueError(f"head {k} in {source.folder} has another projection than the target's: {instead}")
    return heads


def _write_second(source: Source, folder: Path, options: ExportOptions) -> None:
    heads = _second_version(source, options)
    _save_medusa(_blocks(heads), folder)
    copy_tokenizer(_target_name(source, options), folder)
    vocab_size = heads.vocab_size if heads.knows_vocab_size else source.manifest.vocab_size
    with torch.device("meta"):
        written = PredictionHeads(heads.num_heads, heads.num_layers, heads.hidden_size, vocab_size, "target")
    _write_config(written, source, options, folder)


def _compare_second(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    heads = _second_version(source, options)
    expected = _blocks(heads)
    check_same_tensors(load_heads(folder).state_dict(), expected, folder)
    lines = [f"all {len(expected)} tensors, bit by bit"]
    if heads.projection_kind == "own":
        lines.append("the projections that are left out, with the target's, bit by bit")
    return [*lines, *compare_copy(_target_name(source, options), folder)]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    heads, target = read_heads(source.folder), split_revision(_target_name(source, options))[0]
    return {
        "target": target,
        "is_here": Path(target).is_dir(),
        "has_tokenizer": has_tokenizer(folder),
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "made": FASTER_DECODING_HEADS,
    }


HEADS_FORMATS = (
    Format(
        name="medusa",
        kind="heads",
        summary="Medusa heads, version 1: each with its own projection, under the names of the first release",
        readers="TGI ≥ 2.0, TensorRT-LLM ≥ 0.11, vLLM 0.25 to 0.32",
        write=_write_medusa,
        compare=_compare_medusa,
        values=_values,
        options=("target",),
        native=True,
    ),
    Format(
        name="medusa-vllm",
        kind="heads",
        summary="Medusa heads under the names of vLLM's own module",
        readers="vLLM 0.10 to 0.32",
        write=_VLLM.write,
        compare=_VLLM.compare,
        values=_values,
        options=("target",),
    ),
    Format(
        name="medusa-2",
        kind="heads",
        summary="Medusa heads, version 2: without projections, they use the target's",
        readers="TGI ≥ 2.0 (one block a head)",
        write=_write_second,
        compare=_compare_second,
        values=_values,
        options=("target",),
        native=True,
    ),
    Format(
        name="medusa-pt",
        kind="heads",
        summary="Medusa heads, version 1, as a pickled file; always five, cut or filled with copies of the last",
        readers="FasterDecoding/Medusa",
        write=_write_pickled,
        compare=_PICKLED.compare,
        values=_values,
        options=("target", "pickle"),
    ),
)
"""Formats of heads for serving engines."""
