"""Inspection of artifacts: files, tensors by the names and shapes in their headers, and values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..artifact.artifact import file_faults, load_manifest
from ..artifact.manifest import Manifest
from ..artifact.model_ref import weight_files
from ..storage.messages import first_line
from ..storage.names import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG_FILE,
    HEADS_FILE,
    TABLE_FILE,
    WHOLE_FILES,
)
from ..storage.safe_read import UNREADABLE, check_safetensors, read_json, shards_of
from ..table.table import TENSORS, BigramTable
from ..table.texts import TextStore

if TYPE_CHECKING:
    from torch import Tensor

    from .model_files import Fit

Shapes = dict[str, tuple[int, ...]]

_NEEDED = {
    "heads": ((HEADS_FILE,), (CONFIG_FILE,)),
    "table": ((TABLE_FILE,),),
    "adapter": ((ADAPTER_CONFIG,), (ADAPTER_FILE,)),
    "model": ((CONFIG_FILE,), WHOLE_FILES),
}
"""Files that an artifact cannot do without, each by the names that it may have."""
_FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_NUMBERS_AT_ONCE = 1 << 24
_TENSORS_SHOWN = 3


def find_faults(directory: Path, kind: str | None = None) -> tuple[Manifest | None, list[str]]:
    """The manifest, where it can be read, and a sentence for each fault: files, tensors, shards that are not there."""
    try:
        manifest = load_manifest(directory, kind)
    except ValueError as error:
        return None, [str(error)]
    faults = file_faults(directory, manifest)
    faults += [*_kind_faults(directory, manifest), *_unreadable(directory, manifest)]
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


def tensor_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Return a sentence for each way in which tensors differ from what the artifact's kind declares.

    No weights are read. Unreadable files and exports for other programs are left out.
    """
    try:
        if manifest.kind in ("drafter", "target"):
            return list(_model_faults(directory))
        if manifest.export is not None and not manifest.export["native"]:
            return []
        if manifest.kind == "table":
            return list(_table_faults(directory / TABLE_FILE, manifest.vocab_size))
        base = directory / "base"  # heads that were trained together with their target hold it
        return [*_heads_faults(directory), *(_model_faults(base) if base.is_dir() else ())]
    except ValueError as error:
        return [str(error)]


def check_tensors(directory: Path, manifest: Manifest) -> None:
    """Raises ValueError with what `tensor_faults` finds."""
    if faults := tensor_faults(directory, manifest):
        raise ValueError("; ".join(faults))


def _model_faults(folder: Path) -> Iterator[str]:
    from .model_files import fit_to_model, is_adapter, load_config

    if is_adapter(folder) or not (folder / CONFIG_FILE).is_file() or not any(folder.glob("model*.safetensors")):
        return
    try:
        shapes = header_shapes(weight_files(folder))
    except ValueError:
        return  # which is another fault
    if not _is_known(folder / CONFIG_FILE):
        return
    config = load_config(folder)
    try:
        found = fit_to_model(config, shapes)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    yield from describe(found, f"{folder}")


def _is_known(config: Path) -> bool:
    from transformers import CONFIG_MAPPING

    try:
        kind = read_json(config).get("model_type")
    except (ValueError, OSError):
        return True  # which is a fault
    return not isinstance(kind, str) or kind in CONFIG_MAPPING


def describe(found: Fit, what: str) -> Iterator[str]:
    """A sentence for each way in which tensors do not fit."""
    if found.lacking:
        yield f"{what} lacks {some_tensors(found.lacking)} that its configuration declares"
    if found.other:
        both = [f"{name} {list(mine)}, expected {list(wanted)}" for name, (mine, wanted) in found.other.items()]
        yield f"{what} holds {some_tensors(both)} of other shapes than its configuration declares"
    if found.broken:
        yield f"{what} holds tensors of which its model's cannot be made: {found.broken}"


def some_tensors(names: Sequence[str]) -> str:
    """How many tensors, and the first few by name."""
    more = f" and {len(names) - _TENSORS_SHOWN:,} more" if len(names) > _TENSORS_SHOWN else ""
    return f"{len(names):,} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:_TENSORS_SHOWN])}{more})"


def header_shapes(files: list[Path]) -> Shapes:
    """Shapes by name. Raises ValueError for a file that is none of safetensors."""
    shapes: Shapes = {}
    for path in files:
        shapes |= {name: tuple(shape) for name, (_, shape) in check_safetensors(path).items()}
    return shapes


def _heads_faults(directory: Path) -> list[str]:
    path = directory / HEADS_FILE
    if not path.is_file() or not (directory / CONFIG_FILE).is_file():
        return []
    from ..heads.layouts import read_heads

    try:
        check_safetensors(path)
    except ValueError:
        return []  # which is another fault
    return read_heads(directory).disagreements


def _table_faults(path: Path, vocab_size: int) -> Iterator[str]:
    if not path.is_file():
        return
    try:
        stored = check_safetensors(path)
    except ValueError:
        return
    table = BigramTable.read(path)
    if table.vocab_size != vocab_size:
        yield f"{path} has {table.vocab_size:,} tokens, expected {vocab_size:,}"
    if extra := sorted(set(stored) - set(TENSORS)):
        yield f"{path} holds {', '.join(extra)}, which no table has"
    try:
        TextStore.load(path.parent, vocab_size)
    except ValueError as error:
        yield str(error)
