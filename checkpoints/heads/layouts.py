"""Loading of prediction heads from the file layouts of FasterDecoding and of this package.

Shape letters: K heads, L residual blocks of a head, V vocabulary, D hidden size, R rank.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..storage.draft_vocabulary import TOKENS, check_tokens
from ..storage.names import CONFIG_FILE, HEADS_FILE, PICKLED_FILE, PREFIX, WHOLE_FILES
from ..storage.safe_read import UNREADABLE, check_safetensors, read_json, shards_of
from .module import STATES, PredictionHeads

_KEY = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.(linear\.weight|linear\.bias|weight|up\.weight|down\.weight)")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ORDER = (HEADS_FILE, PICKLED_FILE, *WHOLE_FILES)
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError, KeyError, AttributeError)


EAGLE = "LlamaForCausalLMEagle3"
DFLASH = "DFlashDraftModel"
DSPARK = "Qwen3DSparkModel"
"""Architecture names in the configs of EAGLE-3 heads, DFlash drafters and DSpark drafters."""


@dataclass(frozen=True)
class StoredHeads:
    """Validated tensors and sizes of stored heads."""

    path: Path
    """File that contains the tensors, or the index of its shards."""
    tensors: dict[str, Tensor]
    """Tensors on the CPU, under the names of `PredictionHeads`."""
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    """Vocabulary size from the projections or, for heads without projections, from the config; None if unknown."""
    projection: str
    rank: int
    states: str
    scale: float
    """Factor that the hidden states are multiplied by, from the config (default: 1)."""
    base_model: str | None
    """Name of the target in the config."""
    disagreements: list[str]
    """Warnings about config entries that contradict the tensors."""

    @property
    def whole_model(self) -> bool:
        """True if the files also contain the target, as for heads that were trained jointly with it."""
        return any((self.path.parent / name).is_file() for name in WHOLE_FILES)

    def build(self, vocab_size: int | None = None) -> PredictionHeads:
        """Create prediction heads with copies of the tensors, converted to the widest of their dtypes.

        `vocab_size` is the target's vocabulary size, for heads that share its projection (default: from the config).
        """
        sizes = (self.num_heads, self.num_layers, self.hidden_size, vocab_size or self.vocab_size)
        with torch.device("meta"):
            heads = PredictionHeads(*sizes, self.projection, self.rank, self.states, self.scale)
        heads.propose(self.tensors.get(TOKENS))
        dtype = reduce(torch.promote_types, (each.dtype for name, each in self.tensors.items() if name != TOKENS))
        tensors = {name: each.to(None if name == TOKENS else dtype, copy=True) for name, each in self.tensors.items()}
        heads.load_state_dict(tensors, assign=True)
        return heads


def is_eagle(directory: Path) -> bool:
    """Check if the config in a folder describes EAGLE-3 heads. Raises ValueError if the config cannot be read."""
    return _has_architecture(directory, EAGLE)


def is_dflash(directory: Path) -> bool:
    """Check if the config in a folder describes a DFlash drafter. Raises ValueError if the config cannot be read."""
    return _has_architecture(directory, DFLASH)


def is_dspark(directory: Path) -> bool:
    """Check if the config in a folder is that of a DSpark drafter. Raises ValueError if it cannot be read."""
    return _has_architecture(directory, DSPARK)


def drafts_blocks(directory: Path) -> bool:
    """Check if the config in a folder is that of a DFlash or DSpark drafter. Raises ValueError if it is unreadable."""
    return is_dflash(directory) or is_dspark(directory)


def _has_architecture(directory: Path, name: str) -> bool:
    path = directory / CONFIG_FILE
    return path.is_file() and name in (read_json(path).get("architectures") or [])


def read_heads(directory: Path, *, unpickle: bool = False, states: str | None = None) -> StoredHeads:
    """Load heads from the first of these files that exists in a folder.

    - `medusa_lm_head.safetensors` or pickled `medusa_lm_head.pt`, with the tensor names of `PredictionHeads`;
    - `model.safetensors` or its index of shards, with the same names after the prefix `medusa_head.`.

    `unpickle` allows `.pt` files, from which only tensors are loaded. `states` is the type of hidden states that the
    heads take as input (default: from the config). Raises ValueError if a file or tensor is missing or invalid.
    """
    directory = Path(directory)
    if is_eagle(directory):
        raise ValueError(f"{directory} contains EAGLE-3 heads: pass them as `drafter`")
    if drafts_blocks(directory):
        raise ValueError(f"{directory} contains a DFlash or DSpark drafter: pass it as `drafter`")
    path = _find(directory)
    if path is None:
        raise ValueError(f"{directory} contains no heads: expected one of {', '.join(_ORDER)}")
    if path.name == PICKLED_FILE and not unpickle:
        raise ValueError(f"{path} is pickled: pass `unpickle=True`, or use `draftsmith import --unpickle`")
    if path.name == PICKLED_FILE:
        tensors = read_pickled(path)
    else:
        tensors = _read_inside(path) if path.name in WHOLE_FILES else _read(path, None)
    config_path = directory / CONFIG_FILE
    config = read_json(config_path) if config_path.is_file() else {}
    proposed = tensors.get(TOKENS)
    projection, sizes = _sizes_of({name: tensor for name, tensor in tensors.items() if name != TOKENS}, path)
    states = states or config.get("states") or STATES[0]
    scale = config.get("scale", 1.0)
    if states not in STATES:
        raise ValueError(f"{config_path}: states is {states!r}, expected one of {', '.join(STATES)}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"{config_path}: scale is {scale!r}, expected a number above 0")
    base_model, vocab_size = config.get("base_model_name_or_path"), config.get("vocab_size")
    if proposed is not None:
        if projection != "target" or type(vocab_size) is not int:
            reason = f"the projection is {projection}" if projection != "target" else "the config has no vocab_size"
            raise ValueError(f"{path}: {TOKENS} requires heads that share the target's projection, but {reason}")
        try:
            check_tokens(proposed, vocab_size)
        except ValueError as error:
            raise ValueError(f"{path}: {TOKENS}: {error}") from error
    disagreements = _disagreements(config, sizes | {"projection": projection}, config_path)
    vocab_size = sizes.pop("vocab_size", vocab_size if type(vocab_size) is int and vocab_size > 0 else None)
    return StoredHeads(
        path=path,
        tensors=tensors,
        vocab_size=vocab_size,
        **sizes,
        projection=projection,
        states=states,
        scale=float(scale),
        base_model=base_model if isinstance(base_model, str) else None,
        disagreements=disagreements,
    )


def _find(directory: Path) -> Path | None:
    """Return the file that contains heads, or the index if it is sharded; None if there is neither."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file: pass the folder of the heads")
    return next((directory / name for name in _ORDER if (directory / name).is_file()), None)


def holds_heads(directory: Path) -> bool:
    """Check if a folder contains heads that `read_heads` can find. Raises ValueError if files cannot be read."""
    path = _find(directory)
    if path is None or path.name not in WHOLE_FILES:
        return path is not None
    return bool(shards_of_heads(path)) if path.suffix == ".json" else any(map(_is_of_heads, check_safetensors(path)))


def _is_of_heads(name: str) -> bool:
    return name.startswith(PREFIX)


def _read_inside(path: Path) -> dict[str, Tensor]:
    """Load the heads' tensors from the files of a complete model, and remove the prefix from their names."""
    tensors: dict[str, Tensor] = {}
    if path.suffix != ".json":
        tensors = _read(path, _is_of_heads)
    else:
        for shard, names in shards_of_heads(path).items():
            if not (path.parent / shard).is_file():
                raise ValueError(f"{path} lists {names[0]} in {shard}, which is missing")
            part = _read(path.parent / shard, set(names).__contains__)
            if missing := sorted(set(names) - set(part)):
                raise ValueError(f"{path} lists {missing[0]} in {shard}, which does not contain it")
            tensors |= part
    if not tensors:
        raise ValueError(f"{path} contains no heads: no tensor name starts with {PREFIX}")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def shards_of_heads(index: Path) -> dict[str, list[str]]:
    """Map each shard to the names of its tensors that belong to heads. Raises ValueError if the index is invalid."""
    shards: dict[str, list[str]] = {}
    for name, shard in sorted(shards_of(index, _is_of_heads).items()):
        shards.setdefault(shard, []).append(name)
    return shards


def _read(path: Path, is_selected: Callable[[str], bool] | None) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            # safetensors' `save_model` writes shared tensors once, and lists their other names in the metadata
            aliases = {name: stored for name, stored in (file.metadata() or {}).items() if stored in names}
            every = {name: name for name in names} | {name: key for name, key in aliases.items() if name not in names}
            return {
                name: file.get_tensor(key) for name, key in every.items() if is_selected is None or is_selected(name)
            }
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Load a pickled dictionary of tensors. Raises ValueError if the file contains anything else."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _UNREADABLE as error:
        # torch's own message recommends loading without `weights_only`
        raise ValueError(f"{path} is not a pickled file of tensors only, and was not loaded") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} contains a {type(loaded).__name__}, expected a dictionary of tensors")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name!r} is a {type(tensor).__name__}, expected a dense tensor")
    # copied, because tensors may share memory that is mapped from the file
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in loaded.items()}


def _sizes_of(tensors: dict[str, Tensor], path: Path) -> tuple[str, dict[str, int]]:
    """Infer the type of projection and the sizes from tensors. Raises ValueError for unexpected or missing tensors."""
    if not tensors:
        raise ValueError(f"{path} contains no tensors")
    places, tails = set[tuple[int, int]](), set[tuple[int, str]]()
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ValueError(f"{path}: unexpected tensor {name}, expected names such as 0.0.linear.weight")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} is {tensor.dtype}, expected float32, float16 or bfloat16")
        if name.endswith("weight") and (tensor.dim() != 2 or not tensor.numel()):
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, expected two non-empty dimensions")
        head, layer, part = int(match[1]), int(match[2]), match[3]
        places.add((head, layer))
        if not part.startswith("linear"):
            tails.add((layer, part))
    num_heads = 1 + max(head for head, _ in places)
    num_layers = min(tails)[0] if tails else 1 + max(layer for _, layer in places)
    parts = {part for layer, part in tails if layer == num_layers}
    kind = "target" if not parts else "own" if parts == {"weight"} else "low-rank"
    form = f"expected tensors of {num_heads} heads with {num_layers} blocks each"
    for name in _names(num_heads, num_layers, kind):  # stops at the first missing name, because indices may be huge
        if name not in tensors:
            raise ValueError(f"{path} lacks {name}: {form}")
    if extra := sorted(tensors.keys() - set(_names(num_heads, num_layers, kind))):
        raise ValueError(f"{path}: {extra[0]} is unexpected: {form} and a projection")
    sizes, tail = {"num_heads": num_heads, "num_layers": num_layers, "rank": 0}, f"0.{num_layers}"
    if kind == "own":
        sizes["vocab_size"], sizes["hidden_size"] = tensors[f"{tail}.weight"].shape
    elif kind == "low-rank":
        sizes["vocab_size"], sizes["rank"] = tensors[f"{tail}.up.weight"].shape
        sizes["hidden_size"] = tensors[f"{tail}.down.weight"].shape[1]
    else:
        sizes["hidden_size"] = tensors["0.0.linear.weight"].shape[1]
    hidden_size, vocab_size = sizes["hidden_size"], sizes.get("vocab_size")
    with torch.device("meta"):
        heads = PredictionHeads(num_heads, num_layers, hidden_size, vocab_size, kind, sizes["rank"])
    for name, expected in heads.state_dict().items():
        if tensors[name].shape != expected.shape:
            raise ValueError(f"{path}: {name} is {list(tensors[name].shape)}, expected {list(expected.shape)}")
    return kind, sizes


def _names(num_heads: int, num_layers: int, kind: str) -> Iterator[str]:
    tails = {"own": ("weight",), "low-rank": ("up.weight", "down.weight"), "target": ()}[kind]
    for k in range(num_heads):
        for layer in range(num_layers):
            yield from (f"{k}.{layer}.linear.weight", f"{k}.{layer}.linear.bias")
        yield from (f"{k}.{num_layers}.{tail}" for tail in tails)


def _disagreements(config: dict[str, Any], sizes: dict[str, Any], path: Path) -> list[str]:
    """Return a warning for each config entry that contradicts the tensors."""
    names = {"medusa_num_heads": "num_heads", "num_medusa_heads": "num_heads", "medusa_num_layers": "num_layers"}
    names |= {key: key for key in ("hidden_size", "vocab_size", "projection", "rank")}
    return [
        f"{path} has {key} {config[key]}, but the tensors have {sizes[name]}, which is used"
        for key, name in names.items()
        if config.get(key) is not None and name in sizes and config[key] != sizes[name]
    ]
