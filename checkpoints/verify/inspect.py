"""Everything that is wrong with an artifact."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..artifact.artifact import file_faults, load_manifest
from ..artifact.manifest import Manifest
from ..storage.messages import first_line
from ..storage.names import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG_FILE,
    DRAFT_VOCABULARY,
    HEADS_FILE,
    TABLE_FILE,
    WHOLE_FILES,
)
from ..storage.safe_read import UNREADABLE, check_safetensors, shards_of
from .tensors import some_tensors, tensor_faults

if TYPE_CHECKING:
    from torch import Tensor

_NEEDED = {
    "heads": ((HEADS_FILE,), (CONFIG_FILE,)),
    "table": ((TABLE_FILE,),),
    "adapter": ((ADAPTER_CONFIG,), (ADAPTER_FILE,)),
    "model": ((CONFIG_FILE,), WHOLE_FILES),
}
"""Files that an artifact cannot do without, each by the names that it may have."""
_FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_NUMBERS_AT_ONCE = 1 << 24


def find_faults(directory: Path, kind: str | None = None) -> tuple[Manifest | None, list[str]]:
    """The manifest, where it can be read, and a sentence for each fault: files, tensors, shards that are not there."""
    try:
        manifest = load_manifest(directory, kind)
    except ValueError as error:
        return None, [str(error)]
    faults = file_faults(directory, manifest)
    faults += [*_kind_faults(directory, manifest), *_unreadable(directory, manifest)]
    faults += _vocabulary_faults(directory, manifest)
    return manifest, faults + tensor_faults(directory, manifest)


def _kind_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Files that are not there. An export for other programs has what these need."""
    if manifest.export is not None and not manifest.export["native"]:
        return []
    files, form = set(manifest.files), manifest.kind
    if form in ("drafter", "target"):
        form = "adapter" if ADAPTER_CONFIG in files else "model"
    if manifest.shapes.get("architecture") == "eagle3":
        form = "model"
    lacking = [" or ".join(names) for names in _NEEDED[form] if not files & set(names)]
    return [f"{directory} lacks {name}, which a {manifest.role} artifact needs" for name in lacking]


def _unreadable(directory: Path, manifest: Manifest) -> list[str]:
    faults = []
    for name in manifest.files:
        path = directory / name
        if not path.exists():
            continue  # which is a fault already
        try:
            if name.endswith(".safetensors"):
                faults += _not_finite(path)
            if name.endswith(".safetensors.index.json"):
                shards, within = sorted(set(shards_of(path).values())), PurePosixPath(name).parent
                gone = [shard for shard in shards if str(within / shard) not in manifest.files]
                faults += [f"{path} names {shard!r}, which is not there" for shard in gone]
        except ValueError as error:
            faults.append(first_line(error))
        except UNREADABLE as error:
            faults.append(f"{path}: {first_line(error)}")
    return faults


def _vocabulary_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Of what a drafter has instead of a whole output layer: whether it is that, and of the manifest's sizes."""
    if DRAFT_VOCABULARY not in manifest.files:
        return []
    from ..storage.draft_vocabulary import INNER, TOKENS, read_vocabulary

    try:
        held = read_vocabulary(directory, manifest.vocab_size)
    except ValueError as error:
        return [str(error)]
    path, faults = directory / DRAFT_VOCABULARY, []
    for name, size in (("proposed_tokens", TOKENS), ("output_rank", INNER)):
        found, said = len(held[size]) if size in held else None, manifest.shapes.get(name)
        if found != said:
            faults.append(f"{path} has {name} {found}, the manifest {said}")
    return faults


def _not_finite(path: Path) -> list[str]:
    """Tensors that hold NaN or infinities: what they compute is nothing."""
    floats = [name for name, (dtype, _) in check_safetensors(path).items() if dtype in _FLOATS]
    if not floats:
        return []  # a table's, which are looked at without torch
    with safe_open(path, framework="pt") as opened:
        wrong = [name for name in floats if not _is_finite(opened.get_tensor(name))]
    return [f"{path} holds {some_tensors(wrong)} with numbers that are NaN or infinite"] if wrong else []


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(part.float().isfinite().all()) for part in tensor.flatten().split(_NUMBERS_AT_ONCE))
