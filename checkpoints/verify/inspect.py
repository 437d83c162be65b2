"""Checks of artifacts: files, tensor names and shapes in the safetensors headers, and non-finite values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..artifact.artifact import file_faults, load_manifest
from ..artifact.manifest import Manifest
from ..storage.messages import first_line
from ..storage.names import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG_FILE, HEADS_FILE, TABLE_FILE, WHOLE_FILES
from ..storage.safe_read import UNREADABLE, check_safetensors, shards_of
from ..table.table import TENSORS, BigramTable
from ..table.texts import TextStore

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]

_NEEDED = {
    "heads": ((HEADS_FILE,), (CONFIG_FILE,)),
    "table": ((TABLE_FILE,),),
    "adapter": ((ADAPTER_CONFIG,), (ADAPTER_FILE,)),
    "model": ((CONFIG_FILE,), WHOLE_FILES),
}
"""Required files of each type of artifact, with alternative names for each file."""
_FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_NUMBERS_AT_ONCE = 1 << 24
_TENSORS_SHOWN = 3


def find_faults(directory: Path, kind: str | None = None) -> tuple[Manifest | None, list[str]]:
    """Check an artifact, and return its manifest (None if it is invalid) and an error message for each fault."""
    try:
        manifest = load_manifest(directory, kind)
    except ValueError as error:
        return None, [str(error)]
    faults = file_faults(directory, manifest)
    faults += [*_kind_faults(directory, manifest), *_unreadable(directory, manifest)]
    return manifest, faults + _tensor_faults(directory, manifest)


def _kind_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Return an error message for each missing required file; none for exports that draftsmith cannot load."""
    if manifest.export is not None and not manifest.export["native"]:
        return []
    files, form = set(manifest.files), manifest.kind
    if form in ("drafter", "target"):
        form = "adapter" if ADAPTER_CONFIG in files else "model"
    if manifest.shapes.get("architecture") in ("eagle3", "dflash", "dspark"):
        form = "model"
    lacking = [" or ".join(names) for names in _NEEDED[form] if not files & set(names)]
    return [f"{directory} lacks {name}, which a {manifest.role} artifact requires" for name in lacking]


def _unreadable(directory: Path, manifest: Manifest) -> list[str]:
    faults = []
    for name in manifest.files:
        path = directory / name
        if not path.exists():
            continue  # reported by `file_faults`
        try:
            if name.endswith(".safetensors"):
                faults += _find_non_finite(path)
            if name.endswith(".safetensors.index.json"):
                shards, folder = sorted(set(shards_of(path).values())), PurePosixPath(name).parent
                missing = [shard for shard in shards if str(folder / shard) not in manifest.files]
                faults += [f"{path} lists {shard!r}, which is missing" for shard in missing]
        except ValueError as error:
            faults.append(first_line(error))
        except UNREADABLE as error:
            faults.append(f"{path}: {first_line(error)}")
    return faults


def _find_non_finite(path: Path) -> list[str]:
    """Return a list with an error message if tensors contain NaN or infinite values, otherwise an empty list."""
    floats = [name for name, (dtype, _) in check_safetensors(path).items() if dtype in _FLOATS]
    if not floats:
        return []  # tables are read without torch
    with safe_open(path, framework="pt") as file:
        wrong = [name for name in floats if not _is_finite(file.get_tensor(name))]
    return [f"{path} contains {_some_tensors(wrong)} with NaN or infinite values"] if wrong else []


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(part.float().isfinite().all()) for part in tensor.flatten().split(_NUMBERS_AT_ONCE))


def _tensor_faults(directory: Path, manifest: Manifest) -> list[str]:
    if manifest.kind in ("drafter", "target") or (manifest.export is not None and not manifest.export["native"]):
        return []
    try:
        if manifest.kind == "table":
            return list(_table_faults(directory / TABLE_FILE, manifest.vocab_size))
        return _heads_faults(directory)
    except ValueError as error:
        return [str(error)]


def _some_tensors(names: Sequence[str]) -> str:
    more = f" and {len(names) - _TENSORS_SHOWN:,} more" if len(names) > _TENSORS_SHOWN else ""
    return f"{len(names):,} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:_TENSORS_SHOWN])}{more})"


def header_shapes(files: list[Path]) -> Shapes:
    """Return the mapping from tensor name to shape in safetensors files. Raises ValueError if a file is invalid."""
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
        return []  # reported separately
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
        yield f"{path} contains {', '.join(extra)}, expected only the tensors of a table"
    try:
        TextStore.load(path.parent, vocab_size)
    except ValueError as error:
        yield str(error)
