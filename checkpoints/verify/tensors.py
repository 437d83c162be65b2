"""Whether the tensors of an artifact are those of what it is, by names and shapes in the headers of its files.

No weights are read. A file that lacks some is a good file all the same, and transformers puts random numbers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.manifest import Manifest
from ..artifact.model_ref import weight_files
from ..storage.names import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG_FILE, HEADS_FILE, TABLE_FILE
from ..storage.safe_read import check_safetensors, read_json
from ..table.table import TENSORS, BigramTable
from ..table.texts import TextStore

if TYPE_CHECKING:
    from .model_files import Fit

_SHOWN = 3

Shapes = dict[str, tuple[int, ...]]


def tensor_faults(directory: Path, manifest: Manifest) -> list[str]:
    """A sentence for each way in which an artifact's tensors are not those of what it is: too few, of other shapes; of
    heads and tables too many. Unreadable files and exports for other programs are left out."""
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

    if is_adapter(folder):
        yield from adapter_faults(folder)
        return
    if not (folder / CONFIG_FILE).is_file() or not any(folder.glob("model*.safetensors")):
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
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{len(names):,} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:_SHOWN])}{more})"


def header_shapes(files: list[Path]) -> Shapes:
    """Shapes by name. Raises ValueError for a file that is none of safetensors."""
    shapes: Shapes = {}
    for path in files:
        shapes |= {name: tuple(shape) for name, (_, shape) in check_safetensors(path).items()}
    return shapes


def adapter_faults(folder: Path) -> list[str]:
    """The same of a LoRA adapter: both halves of each layer. Nothing is known of other kinds that peft has."""
    try:
        settings, shapes = read_json(folder / ADAPTER_CONFIG), header_shapes([folder / ADAPTER_FILE])
    except (ValueError, OSError):
        return []  # which is another fault
    if settings.get("peft_type") != "LORA":
        return []
    path, faults = folder / ADAPTER_FILE, []
    if not any(".lora_" in name for name in shapes):
        return [f"{path} holds no tensors of a LoRA adapter"]
    for name in sorted(shapes):
        half = name.replace(".lora_A.", ".lora_B.")
        half = half if half != name else name.replace(".lora_B.", ".lora_A.")
        if half not in shapes:
            faults.append(f"{path} lacks the other half of {name}")
        elif ".lora_A." in name and shapes[name][:1] != shapes[half][1:2]:
            faults.append(f"{path}: {name} is {shapes[name]}, its other half {shapes[half]}")
    return faults


def _heads_faults(directory: Path) -> list[str]:
    path = directory / HEADS_FILE
    if not path.is_file() or not (directory / CONFIG_FILE).is_file():
        return []
    try:
        check_safetensors(path)
    except ValueError:
        return []  # which is another fault
    from ..heads.layouts import read_heads

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
