"""Where published prediction heads lie, and how they are read: FasterDecoding's layouts and ours.

Letters: K heads, L residual blocks of a head, V vocabulary, D hidden, R rank.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..storage.names import CONFIG_FILE, HEADS_FILE, PICKLED_FILE, PICKLED_WHOLE_FILES, PREFIX, WHOLE_FILES
from ..storage.safe_read import UNREADABLE, check_safetensors, read_json
from .module import PROJECTIONS, STATES, PredictionHeads

_KEY = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.(linear\.weight|linear\.bias|weight|up\.weight|down\.weight)")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class StoredHeads:
    """Heads as they lie on the disk: read and checked against each other, but not yet a module."""

    place: Path
    """The file that holds them, or its index."""
    tensors: dict[str, Tensor]
    """On the CPU, under the names of `PredictionHeads`."""
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    """As the projections have it; for heads without one as the config has it, if it does."""
    projection: str
    rank: int
    states: str
    scale: float
    """Of the hidden states, as the config has it; else 1."""
    whole_model: bool
    """A model lies in the same folder or files: the heads were trained together with it, or on it."""
    base_model: str | None
    """The target that the config names."""
    disagreements: list[str]
    """Where the config says something else than the tensors."""

    @property
    def inside(self) -> bool:
        """Whether they lie among a whole model's tensors."""
        return self.place.name in WHOLE_FILES + PICKLED_WHOLE_FILES

    @property
    def dtype(self) -> torch.dtype:
        """The type that all tensors fit into."""
        dtypes = [tensor.dtype for tensor in self.tensors.values()]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    def build(self, vocab_size: int | None = None) -> PredictionHeads:
        """The heads as a module, in the tensors' widest type.

        Args:
            vocab_size: the target's, for heads that reuse its projection; None: as the config has it.
        """
        sizes = (self.num_heads, self.num_layers, self.hidden_size, vocab_size or self.vocab_size)
        with torch.device("meta"):
            heads = PredictionHeads(*sizes, self.projection, self.rank, self.states, self.scale)
        heads.load_state_dict({name: tensor.to(self.dtype) for name, tensor in self.tensors.items()}, assign=True)
        return heads


def read_heads(directory: Path, *, unpickle: bool = False, states: str | None = None) -> StoredHeads:
    """Read the heads in a folder, from the first that is there of

    - `medusa_lm_head.safetensors`, or pickled `medusa_lm_head.pt`: names as in `PredictionHeads`;
    - `model.safetensors` or `pytorch_model.bin`, whole or with an index of shards: the same after `medusa_head.`. Of
      these only the heads' tensors are read.

    Blocks that the files hold once and name several times are read as distinct ones.

    Args:
        unpickle: read `.pt` and `.bin` as well, of which only tensors are loaded (`weights_only`).
        states: what the heads read, where the folder's config does not say it or is wrong.

    Raises:
        ValueError: naming the file, and the tensor where one is at fault, and what was expected.
    """
    if states is not None and states not in STATES:
        raise ValueError(f"states is {states!r}, expected one of {', '.join(STATES)}")
    directory = Path(directory)
    place = _find(directory, unpickle)
    inside = place.name in WHOLE_FILES + PICKLED_WHOLE_FILES
    tensors = _read_inside(place) if inside else _read_all(place)
    config = _read_config(directory / CONFIG_FILE)
    whole_model = inside or any((directory / name).is_file() for name in WHOLE_FILES + PICKLED_WHOLE_FILES)
    config_place = directory / CONFIG_FILE
    return assemble_heads(tensors, config, place, config_place=config_place, whole_model=whole_model, states=states)


def assemble_heads(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    place: Path,
    *,
    config_place: Path,
    whole_model: bool = False,
    states: str | None = None,
) -> StoredHeads:
    """Heads from their tensors, checked against each other and compared with what a config says of them.

    Args:
        tensors: under the names of `PredictionHeads`.
        place: the file that they were read from, and `config_place` that of the config, for messages.
        whole_model: a model lies in the same folder or files.
        states: what the heads read, where the config does not say it or is wrong.

    Raises:
        ValueError: naming the file, the tensor where one is at fault, and what was expected.
    """
    projection, sizes = _count(tensors, place)
    says = states or config.get("states") or STATES[0]
    if says not in STATES:
        raise ValueError(f"{config_place}: states is {says!r}, expected one of {', '.join(STATES)}")
    base_model = config.get("base_model_name_or_path")
    stored = StoredHeads(
        place=place,
        tensors=tensors,
        num_heads=sizes["num_heads"],
        num_layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes.get("vocab_size") or _whole_number(config.get("vocab_size")),
        projection=projection,
        rank=sizes.get("rank", 0),
        states=says,
        scale=_scale(config.get("scale"), config_place),
        whole_model=whole_model,
        base_model=base_model if isinstance(base_model, str) else None,
        disagreements=_disagreements(config, projection, sizes, config_place),
    )
    _check_shapes(stored)
    return stored


def _scale(value: Any, path: Path) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: scale is {value!r}, expected a number above 0")
    return float(value)


def _find(directory: Path, unpickle: bool) -> Path:
    """The file to read, or the index of several."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file; heads are read from the folder that holds them")
    order = (HEADS_FILE, PICKLED_FILE, *WHOLE_FILES, *PICKLED_WHOLE_FILES)
    place = next((directory / name for name in order if (directory / name).is_file()), None)
    if place is None:
        raise ValueError(f"there are no heads at {directory / HEADS_FILE}, nor in any of {', '.join(order[1:])} there")
    if place.name in (PICKLED_FILE, *PICKLED_WHOLE_FILES) and not unpickle:
        raise ValueError(
            f"{place} is pickled, and nothing is unpickled unless that is asked for: "
            "say `unpickle=True`, or --unpickle on the command line"
        )
    return place


def holds_heads(directory: Path, *, unpickle: bool = False) -> bool:
    """Whether `read_heads` finds heads in a folder. Into a pickled model it is looked only with `unpickle`.

    Raises:
        ValueError: files that cannot be read.
    """
    if any((directory / name).is_file() for name in (HEADS_FILE, PICKLED_FILE)):
        return True
    wanted = (*WHOLE_FILES, *PICKLED_WHOLE_FILES)
    place = next((directory / name for name in wanted if (directory / name).is_file()), None)
    if place is None:
        return False
    if place.suffix == ".json":
        return bool(shards_of_heads(place))
    if place.name in WHOLE_FILES:
        try:
            return any(name.startswith(PREFIX) for name in check_safetensors(place))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    return unpickle and bool(_read_pickled(place, lambda name: name.startswith(PREFIX)))


def _read_all(path: Path) -> dict[str, Tensor]:
    return _read_pickled(path, None) if path.name == PICKLED_FILE else _read_safetensors(path, None)


def _read_inside(place: Path) -> dict[str, Tensor]:
    """The heads' tensors of a whole model, without their prefix."""
    read = _read_pickled if place.name in PICKLED_WHOLE_FILES else _read_safetensors
    if place.suffix != ".json":
        tensors = read(place, lambda name: name.startswith(PREFIX))
    else:
        tensors = {}
        for shard, names in shards_of_heads(place).items():
            if not (place.parent / shard).is_file():
                raise ValueError(f"{place} says that {names[0]} is in {shard}, which is not there")
            found = read(place.parent / shard, set(names).__contains__)
            if missing := sorted(set(names) - set(found)):
                raise ValueError(f"{place} says that {missing[0]} is in {shard}, which lacks it")
            tensors |= found
    if not tensors:
        raise ValueError(f"there are no heads in {place}: no tensor's name begins with {PREFIX}")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def shards_of_heads(index: Path) -> dict[str, list[str]]:
    """Files that hold heads' tensors, by an index of shards, with those tensors' names in order.

    Raises:
        ValueError: not such an index, or one that names files outside its folder.
    """
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} is no index of shards: it has no `weight_map`")
    shards: dict[str, list[str]] = {}
    for name in sorted(name for name in places if name.startswith(PREFIX)):
        shard = places[name]
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} says that {name} is in {shard!r}, expected the name of a file beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _read_safetensors(path: Path, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
            # safetensors' `save_model` writes shared tensors once, and in the metadata under which other names
            aliases = {name: kept for name, kept in (opened.metadata() or {}).items() if kept in names}
            every = {name: name for name in names} | {name: kept for name, kept in aliases.items() if name not in names}
            return {name: opened.get_tensor(kept) for name, kept in every.items() if wanted is None or wanted(name)}
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _read_pickled(path: Path, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _UNREADABLE as error:
        # torch's own words end in the advice to load anything
        raise ValueError(f"{path} is not a pickled file of tensors alone; it was not loaded") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected tensors by name")
    chosen = {name: tensor for name, tensor in loaded.items() if wanted is None or wanted(str(name))}
    for name, tensor in chosen.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name!r} is a {type(tensor).__name__}, expected a dense tensor")
    # copies: several names may share their memory, which is that of the file
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in chosen.items()}


def _count(tensors: dict[str, Tensor], place: Path) -> tuple[str, dict[str, int]]:
    """The kind of projection and the sizes, as the tensors have them."""
    blocks: dict[int, set[int]] = {}
    tails: dict[int, set[tuple[int, str]]] = {}
    for name, tensor in tensors.items():
        found = _KEY.fullmatch(name)
        if found is None:
            raise ValueError(
                f"{place}: {name} is not a tensor of prediction heads, such as 0.0.linear.weight or 0.1.weight"
            )
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{place}: {name} is {tensor.dtype}, expected float32, float16 or bfloat16")
        k, layer, part = int(found[1]), int(found[2]), found[3]
        if part.startswith("linear"):
            blocks.setdefault(k, set()).add(layer)
        else:
            tails.setdefault(k, set()).add((layer, part))
    heads = sorted({*blocks, *tails})
    if not heads:
        raise ValueError(f"{place} holds no tensors")
    if heads[-1] >= len(heads):
        lacking = min(set(range(len(heads))) - set(heads))
        raise ValueError(f"{place} holds tensors of head {heads[-1]}, but none of head {lacking}")
    if not tails:
        num_layers = 1 + max(layer for layers in blocks.values() for layer in layers)
        return "target", {"num_heads": len(heads), "num_layers": num_layers} | _sizes(tensors, {}, place)
    kind, num_layers, parts = _tail_of(tails, place)
    for k in heads:
        if beyond := sorted(layer for layer in blocks.get(k, ()) if k not in tails or layer >= num_layers):
            raise ValueError(
                f"{place}: {k}.{beyond[0]}.linear.weight belongs to no head of {num_layers} blocks and a projection"
            )
    return kind, {"num_heads": len(heads), "num_layers": num_layers} | _sizes(tensors, parts, place)


def _tail_of(tails: dict[int, set[tuple[int, str]]], place: Path) -> tuple[str, int, dict[str, str]]:
    """The kind of projection, the layer it is, and the first head's tensors of it: what they are, by name."""
    for k, found in sorted(tails.items()):
        names = sorted(f"{k}.{layer}.{part}" for layer, part in found)
        if len({layer for layer, _ in found}) > 1 or len({part == "weight" for _, part in found}) > 1:
            raise ValueError(f"{place}: head {k} has two projections, {names[0]} and {names[-1]}")
    first = min(tails)
    layer, part = next(iter(tails[first]))
    if part == "weight":
        return PROJECTIONS[0], layer, {"own": f"{first}.{layer}.weight"}
    for part in ("down", "up"):
        if (layer, f"{part}.weight") not in tails[first]:
            raise ValueError(f"{place} lacks {first}.{layer}.{part}.weight, the other half of a low-rank projection")
    return PROJECTIONS[1], layer, {part: f"{first}.{layer}.{part}.weight" for part in ("down", "up")}


def _sizes(tensors: dict[str, Tensor], parts: dict[str, str], place: Path) -> dict[str, int]:
    """Sizes of hidden states, vocabulary and rank, from a projection's tensors; where there is none, from a block."""
    chosen = parts or {
        "block": next((name for name in sorted(tensors) if name.endswith("weight")), "0.0.linear.weight")
    }
    for name in chosen.values():
        if name not in tensors:
            raise ValueError(f"{place} lacks {name}: it has biases alone")
        if tensors[name].dim() != 2 or not tensors[name].numel():
            raise ValueError(f"{place}: {name} is {list(tensors[name].shape)}, expected two dimensions, neither 0")
    shapes = {part: tensors[name].shape for part, name in chosen.items()}
    if "own" in shapes:
        return {"hidden_size": shapes["own"][1], "vocab_size": shapes["own"][0]}
    if "up" in shapes:
        return {"hidden_size": shapes["down"][1], "vocab_size": shapes["up"][0], "rank": shapes["down"][0]}
    return {"hidden_size": shapes["block"][0]}


def _check_shapes(stored: StoredHeads) -> None:
    """ValueError for the first tensor that is missing, or whose shape the others do not allow."""
    for k in range(stored.num_heads):  # before the module is made: a name alone may promise millions of blocks
        for layer in range(stored.num_layers):
            _check_there(stored, f"{k}.{layer}.linear.weight")
    sizes = (stored.num_heads, stored.num_layers, stored.hidden_size, stored.vocab_size)
    with torch.device("meta"):
        whole = PredictionHeads(*sizes, stored.projection, stored.rank, stored.states).state_dict()
    for name, expected in whole.items():
        _check_there(stored, name)
        shape = stored.tensors[name].shape
        if shape != expected.shape:
            raise ValueError(f"{stored.place}: {name} is {list(shape)}, expected {list(expected.shape)}")


def _check_there(stored: StoredHeads, name: str) -> None:
    if name not in stored.tensors:
        raise ValueError(
            f"{stored.place} lacks {name}: it has tensors of {stored.num_heads} heads "
            f"with {stored.num_layers} blocks each"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _whole_number(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _disagreements(config: dict[str, Any], projection: str, sizes: dict[str, int], path: Path) -> list[str]:
    """One sentence for each key of the config that contradicts the tensors."""
    names = {"medusa_num_heads": "num_heads", "num_medusa_heads": "num_heads", "medusa_num_layers": "num_layers"}
    same = ("hidden_size", "vocab_size", "projection", "rank")
    found: dict[str, Any] = {"rank": 0, **sizes, "projection": projection}
    return [
        f"{path} says {key} {config[key]}, the tensors have {found[size]}: going by the tensors"
        for key, size in (names | {key: key for key in same}).items()
        if config.get(key) is not None and size in found and config[key] != found[size]
    ]
