"""Forms of prediction heads for serving engines: Medusa's first and second version, vLLM's own names, a pickled file.

Letters: K heads, L residual blocks of a head, V vocabulary, D hidden, B hidden states to compare with.

What each reader does stands in SERVING.md, whose texts are in `export_heads_serving.py`; its rules are tests
(`tests/checkpoints/export/test_export_heads.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..heads.files import CONFIG_FILE, HEADS_FILE, PredictionHeads, engine_config, load_heads
from ..storage.names import FASTER_DECODING_HEADS, PICKLED_FILE
from .base import ExportOptions, Format, Source
from .heads_serving import serve_medusa, serve_pickled, serve_second, serve_vllm
from .target import check_target_of, heads_target_name, needed_target, output_projection
from .tokenizer import compare_tokenizer, write_tokenizer

VLLM_FILE = "model.safetensors"
Tensors = dict[str, Tensor]

_STATES = 32
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of logits, as a share of the largest: what multiplying a low-rank projection out may change by rounding."""


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
            f"the heads in {source.folder} multiply hidden states by {heads.scale:g} first, for which {form} has no "
            "place; no weights of residual blocks have the same effect, as SiLU is not linear: train them with scale 1"
        )
    return heads


def _projection(source: Source, options: ExportOptions, why: str) -> Tensor:
    """[V, D]: the target's output projection; ValueError where the target is not the one of the heads."""
    target = needed_target(source, options, why)
    check_target_of(source, target)
    return output_projection(target)


def _attached(source: Source, options: ExportOptions, form: str) -> PredictionHeads:
    """The artifact's heads, with the target's projection where they reuse it."""
    heads = _load(source, form)
    if heads.projection_kind == "target":
        heads.attach(_projection(source, options, f"{form} stores its output projection with each head"))
    return heads


def _first_version(heads: PredictionHeads, count: int) -> Tensors:
    """The tensors of `count` heads that compute the same with projections [V, D] of their own. Where there are fewer,
    the last stands for those that lack: what it proposes there is seldom accepted, and verified like any other."""
    tensors = {name: tensor.detach() for name, tensor in heads.state_dict().items() if ".linear." in name}
    for k in range(heads.num_heads):
        tail = heads.projection(k).detach()
        if heads.projection_kind == "low-rank":
            down_RD = heads.get_parameter(f"{k}.{heads.num_layers}.down.weight").detach()
            tail = (tail.double() @ down_RD.double()).to(tail.dtype)
        tensors[f"{k}.{heads.num_layers}.weight"] = tail
    parts = {name.partition(".")[2] for name in tensors}
    places = [(k, min(k, heads.num_heads - 1)) for k in range(count)]
    # copies, as safetensors stores no tensor twice
    return {f"{k}.{part}": tensors[f"{of}.{part}"].clone() for k, of in places for part in sorted(parts)}


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
            outline = PredictionHeads(count, heads.num_layers, heads.hidden_size, heads.vocab_size)
        _write_config(outline, source, options, folder)

    def compare(self, source: Source, folder: Path, options: ExportOptions) -> list[str]:
        heads, found = _attached(source, options, self.name), self.read(folder)
        count = self.count or heads.num_heads
        _check_equal(found, _first_version(heads, count), folder)
        difference = _compare_logits(heads, found, count, folder)
        exact = "bit by bit" if not difference else f"to within {difference:.1e} of the largest (low rank, multiplied)"
        return [
            f"all {len(found)} tensors, bit by bit, with what the heads hold"
            + {"own": "", "low-rank": ", their projections multiplied out", "target": " and the target's projection"}[
                heads.projection_kind
            ],
            f"logits of {min(count, heads.num_heads)} heads on {_STATES} random hidden states, {exact}",
            *([f"{count} heads from {heads.num_heads}: {_filled(heads, count)}"] if count != heads.num_heads else []),
        ]


def _filled(heads: PredictionHeads, count: int) -> str:
    if count < heads.num_heads:
        return f"the last {heads.num_heads - count} are left out"
    return "the last stands for those that lack, and what it proposes there is seldom accepted"


def _write_config(heads: PredictionHeads, source: Source, options: ExportOptions, folder: Path) -> None:
    config = engine_config(heads, heads_target_name(source, options))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_equal(found: Tensors, expected: Tensors, folder: Path) -> None:
    if names := sorted(set(found) ^ set(expected)):
        raise ValueError(f"the tensors read back from {folder} are not those of the artifact: {', '.join(names[:3])}")
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise ValueError(f"{name}, read back from {folder}, differs from the artifact's")


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
            raise ValueError(
                f"logits of head {k}, read back from {folder}, differ from the artifact's by {difference:.1e} of the "
                f"largest; at most {allowed:.0e} is rounding"
            )
        largest = max(largest, difference)
    return largest


def _save_medusa(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})


def _read_medusa(folder: Path) -> Tensors:
    return load_file(folder / HEADS_FILE)


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


def _save_pickled(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / PICKLED_FILE)


def _read_pickled(folder: Path) -> Tensors:
    found: Tensors = torch.load(folder / PICKLED_FILE, map_location="cpu", weights_only=True)
    return found


def _write_pickled(source: Source, folder: Path, options: ExportOptions) -> None:
    if not options.pickle:
        raise ValueError("medusa-pt is a pickled file, which is written only where that is asked for: add --pickle")
    _check_blocks(_load(source, "medusa-pt"), source)
    _PICKLED.write(source, folder, options)


def _check_blocks(heads: PredictionHeads, source: Source) -> None:
    """ValueError where a head has blocks that differ: FasterDecoding's modules hold one, and go through it L times."""
    tensors = heads.state_dict()
    for name, tensor in tensors.items():
        first = re.sub(r"^(\d+)\.\d+\.linear", r"\1.0.linear", name)
        if not torch.equal(tensor, tensors[first]):
            raise ValueError(
                f"{name} in {source.folder} differs from {first}, and FasterDecoding's runtime goes through one block "
                f"{heads.num_layers} times, the last that it reads: export them as medusa, or train them with "
                "`num_layers: 1`"
            )


def _write_medusa(source: Source, folder: Path, options: ExportOptions) -> None:
    _MEDUSA.write(source, folder, options)
    write_tokenizer(heads_target_name(source, options), folder)


def _compare_medusa(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    return _MEDUSA.compare(source, folder, options) + compare_tokenizer(heads_target_name(source, options), folder)


_MEDUSA = _FirstVersion("medusa", _save_medusa, _read_medusa)
_VLLM = _FirstVersion("medusa-vllm", _save_vllm, _read_vllm)
_PICKLED = _FirstVersion("medusa-pt", _save_pickled, _read_pickled, FASTER_DECODING_HEADS)


def _second_version(source: Source, options: ExportOptions) -> tuple[PredictionHeads, Tensors]:
    """Heads without their projections; ValueError where those are not the target's."""
    heads = _load(source, "medusa-2")
    if not heads.num_layers:
        raise ValueError(f"the heads in {source.folder} have no residual blocks: nothing of them is left in medusa-2")
    if heads.projection_kind == "low-rank":
        raise ValueError(
            f"the heads in {source.folder} have projections of rank {heads.rank}, and in medusa-2 all heads use the "
            "target's: export them as medusa, or train them with `projection: target`"
        )
    if heads.projection_kind == "own":
        target_VD = _projection(source, options, "in medusa-2 all heads use its output projection")
        for k in range(heads.num_heads):
            if not torch.equal(heads.projection(k).detach(), target_VD.to(heads.projection(k).dtype)):
                raise ValueError(
                    f"head {k} in {source.folder} has a projection other than the target's, which all heads use in "
                    "medusa-2: export them as medusa, or train them with `projection: target`"
                )
    return heads, {name: tensor.detach() for name, tensor in heads.state_dict().items() if ".linear." in name}


def _write_second(source: Source, folder: Path, options: ExportOptions) -> None:
    heads, tensors = _second_version(source, options)
    _save_medusa(tensors, folder)
    write_tokenizer(heads_target_name(source, options), folder)
    vocab_size = heads.vocab_size if heads.knows_vocab_size else source.manifest.vocab_size
    with torch.device("meta"):
        outline = PredictionHeads(heads.num_heads, heads.num_layers, heads.hidden_size, vocab_size, "target")
    _write_config(outline, source, options, folder)


@torch.no_grad()
def _compare_second(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    heads, expected = _second_version(source, options)
    _check_equal(_read_medusa(folder), expected, folder)
    made = load_heads(folder, dtype=next(heads.parameters()).dtype)
    states_BD = torch.randn(_STATES, heads.hidden_size, generator=torch.Generator().manual_seed(0))
    states_BD = states_BD.to(next(heads.parameters()).dtype)
    for k in range(heads.num_heads):
        mine, theirs = (side.get_submodule(str(k))[: heads.num_layers](states_BD) for side in (heads, made))  # type: ignore[index]
        if not torch.equal(mine, theirs):
            raise ValueError(f"the features of head {k}, read back from {folder}, differ from the artifact's")
    own = heads.projection_kind == "own"
    return [
        f"all {len(expected)} tensors, bit by bit",
        f"what {heads.num_heads} heads hand to the target's projection for {_STATES} random hidden states, bit by bit",
        *(["the projections that are left out, with the target's, bit by bit"] if own else []),
        *compare_tokenizer(heads_target_name(source, options), folder),
    ]


HEADS_FORMATS = (
    Format(
        name="medusa",
        kind="heads",
        summary="Medusa heads, version 1: each with its own projection, under the names of the first release",
        readers="TGI ≥ 2.0, TensorRT-LLM ≥ 0.11, vLLM 0.25 to 0.32",
        write=_write_medusa,
        compare=_compare_medusa,
        serving=serve_medusa,
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
        serving=serve_vllm,
        options=("target",),
    ),
    Format(
        name="medusa-2",
        kind="heads",
        summary="Medusa heads, version 2: without projections, they use the target's",
        readers="TGI ≥ 2.0 (one block a head)",
        write=_write_second,
        compare=_compare_second,
        serving=serve_second,
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
        serving=serve_pickled,
        options=("target", "pickle"),
    ),
)
"""Formats of heads for serving engines."""
