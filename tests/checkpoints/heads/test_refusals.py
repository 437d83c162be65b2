"""What is refused of prediction heads: settings, files and tensors, with the names and numbers that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import HEADS_FILE, PredictionHeads, load_heads, save_heads
from draftsmith.checkpoints.heads.layouts import holds_heads
from draftsmith.checkpoints.storage.names import PICKLED_FILE
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def refused(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - all its parts are compared
        call()
    for part in parts:
        assert part in str(caught.value)


def heads(projection: str = "own") -> PredictionHeads:
    torch.manual_seed(0)
    made = PredictionHeads(3, 2, 8, 13, projection)
    return made.attach(torch.randn(13, 8)) if projection == "target" else made


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: PredictionHeads(0, 1, 8, 13), ("num_heads", "0", "1")),
        (lambda: PredictionHeads(1, 1, 8, 13, "lowrank"), ("projection", "lowrank", "low-rank")),
        (lambda: PredictionHeads(1, 1, 8, 13, "low-rank"), ("rank", "0", "1 to 8")),
        (lambda: heads().attach(torch.zeros(13, 8)), ("own",)),
        (lambda: heads("target").attach(torch.zeros(12, 8)), ("[12, 8]", "[13, 8]")),
        (lambda: heads().propose(torch.tensor([1])), ("d2t", "own")),
        (lambda: heads("target").propose(torch.tensor([3, 1])), ("rise",)),
        (lambda: PredictionHeads(1, 1, 8, None, "target")(torch.zeros(2, 8)), ("attach",)),
    ],
)
def test_settings_and_uses_of_heads(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    refused(call, parts)


def test_heads_that_are_not_finite_are_not_read(tmp_path: Path) -> None:
    save_heads(heads(), tmp_path, "target")
    tensors = load_file(tmp_path / HEADS_FILE)
    tensors["1.2.weight"][3, 3] = float("nan")
    save_file(tensors, tmp_path / HEADS_FILE)
    refused(lambda: load_heads(tmp_path), (str(tmp_path), "1.2.weight"))


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        (torch.zeros(13, 7), ("1.2.weight", "[13, 7]", "[13, 8]")),
        (torch.zeros(13, 8, device="meta"), ("1.2.weight", "104 of 104")),
        (torch.eye(13, 8, dtype=torch.float16) * 1e6, ("1.2.weight", "8 of 104")),
        (None, ("1.2.weight",)),
    ],
)
def test_what_would_be_no_heads_is_not_saved(tmp_path: Path, tensor: Any, parts: tuple[str, ...]) -> None:
    made = heads()
    state = made.state_dict() | {"1.2.weight": tensor}
    if tensor is None:
        refused(lambda: save_heads(made, tmp_path / "more", "target", state | {"3.2.weight": tensor}), ("2.weight",))
        del state["1.2.weight"]
    refused(lambda: save_heads(made, tmp_path / "given", "target", state), parts)
    assert list(tmp_path.iterdir()) == []


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: [tensors.pop(each) for each in list(tensors) if name in each]


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


TENSORS: list[tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = [
    (without("1.0.linear.bias"), ("1.0.linear.bias",)),
    (put("0.2.up.weight", 13, 2), ("0.2.down.weight",)),
    (put("2.2.weight", 12, 8), ("2.2.weight", "[12, 8]", "[13, 8]")),
    (put("1.0.linear.bias", 8, dtype=torch.int8), ("1.0.linear.bias", "int8", "float32")),
    (put("d2t", 2, dtype=torch.int64), ("d2t", "own")),
]


@pytest.mark.parametrize(("change", "parts"), TENSORS)
def test_tensors_that_are_no_heads(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], parts: tuple[str, ...]
) -> None:
    save_heads(heads(), tmp_path, "target")
    tensors = load_file(tmp_path / HEADS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / HEADS_FILE)
    refused(lambda: load_heads(tmp_path), (HEADS_FILE, *parts))


@pytest.mark.parametrize(
    ("content", "parts"), [(b"no pickle at all", ()), ([1, 2], ("list",)), ({"0.1.weight": 3}, ("0.1.weight", "int"))]
)
def test_pickled_files_of_something_else(tmp_path: Path, content: Any, parts: tuple[str, ...]) -> None:
    if isinstance(content, bytes):
        (tmp_path / PICKLED_FILE).write_bytes(content)
    else:
        torch.save(content, tmp_path / PICKLED_FILE)
    refused(lambda: load_heads(tmp_path, unpickle=True), (PICKLED_FILE, *parts))
    refused(lambda: load_heads(tmp_path), (PICKLED_FILE, "unpickle=True", "--unpickle"))


def in_index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content)
        (folder / INDEX).write_text(json.dumps(content))

    return edit


def points(name: str, shard: Any) -> Damage:
    return in_index(lambda content: content["weight_map"].update({f"medusa_head.{name}": shard}))


WHOLE_MODELS: list[tuple[Damage, tuple[str, ...]]] = [
    (lambda folder: (folder / "heads.safetensors").unlink(), (INDEX, "heads.safetensors")),
    (points("0.0.linear.bias", "../elsewhere.safetensors"), (INDEX, "../elsewhere.safetensors")),
    (lambda folder: (folder / "config.json").write_text('{"states": "later"}'), ("later", "after-norm")),
    (lambda folder: (folder / INDEX).unlink(), (HEADS_FILE, INDEX)),
]


@pytest.mark.parametrize(("damage", "parts"), WHOLE_MODELS)
def test_whole_models_that_are_broken(tmp_path: Path, damage: Damage, parts: tuple[str, ...]) -> None:
    tensors = {f"medusa_head.{name}": tensor for name, tensor in heads().state_dict().items()}
    save_file(tensors, tmp_path / "heads.safetensors")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "base.safetensors")
    places = dict.fromkeys(tensors, "heads.safetensors") | {"lm_head.weight": "base.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert load_heads(tmp_path).num_heads == 3
    assert holds_heads(tmp_path)
    damage(tmp_path)
    refused(lambda: load_heads(tmp_path), parts)
