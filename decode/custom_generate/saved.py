"""Saved methods as files: heads, a table and drafters in one folder, with the method that they are for.

custom_generate.json          method, options, parts, and the hash of every other file
draftsmith.safetensors        heads and table, `heads.…` and `table.…`, with what they are in its metadata
drafter-1/ drafter-2/ …       drafters that were given as a model or a folder; those of the hub stay names
custom_generate/generate.py   what transformers runs for `generate(custom_generate=FOLDER, trust_remote_code=True)`
custom_generate/requirements.txt
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ... import __version__
from ...checkpoints.artifact.artifact import verify_artifact
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.heads.layouts import assemble_heads
from ...checkpoints.storage.atomic import atomic_dir
from ...checkpoints.storage.names import MANIFEST_FILE
from ...checkpoints.storage.places import check_repository_name, check_revision
from ...checkpoints.storage.safe_read import (
    UNREADABLE,
    check_safetensors,
    file_hash,
    files_of,
    name_fault,
    parse_json,
    read_json,
)
from ...checkpoints.table.table import TENSORS, BigramTable
from ..proposers.head_trees import HeadModule

SETTINGS_FILE = "custom_generate.json"
PARTS_FILE = "draftsmith.safetensors"
CODE_FOLDER = "custom_generate"
SCHEMA = 1

_PARTS = ("heads", "table")
_GENERATE = '''"""Decodes with the method that custom_generate.json beside this folder names."""

from draftsmith.decode.custom_generate.attached import generate_attached


def generate(inputs=None, *, model, **asked):
    """What transformers calls for `generate(custom_generate=FOLDER, trust_remote_code=True)`."""
    return generate_attached(model, inputs, **asked)
'''
_FIELDS = {"schema": int, "method": str, "options": dict, "parts": list, "drafters": list, "files": dict}


@dataclass(frozen=True)
class StoredMethod:
    """A method and its parts, as they are written and read."""

    name: str
    options: dict[str, Any]
    drafters: Sequence[PreTrainedModel | str]
    """Models, which are written with it, and names on the hub; as they are read: folders and names on the hub."""
    heads: HeadModule | None
    table: BigramTable | None


def save_method(stored: StoredMethod, folder: Path) -> None:
    """`write_method`, whole or not at all; ValueError where the folder holds other files than an earlier method's."""
    _check_replaceable(folder)
    with atomic_dir(folder) as unfinished:
        write_method(stored, unfinished)
        _check_replaceable(folder)  # again: writing may have taken minutes


def write_method(stored: StoredMethod, folder: Path) -> None:
    """The files of a method in an empty folder; ValueError for heads or drafters that cannot be saved."""
    tensors, metadata = stored_parts(stored)
    if tensors:
        save_file(tensors, folder / PARTS_FILE, metadata={"format": "pt"} | metadata)
    drafters: list[dict[str, str]] = []
    for number, drafter in enumerate(stored.drafters, 1):
        if isinstance(drafter, str):
            drafters.append({"id": drafter})
            continue
        if getattr(drafter, "_hf_peft_config_loaded", False):
            raise ValueError("the drafter has adapters, which would be saved without it: merge them into its weights")
        drafter.save_pretrained(folder / f"drafter-{number}")
        drafters.append({"folder": f"drafter-{number}"})
    weights = sorted(name for name, _ in files_of(folder))
    (folder / CODE_FOLDER).mkdir()
    (folder / CODE_FOLDER / "generate.py").write_text(_GENERATE, encoding="utf-8")
    (folder / CODE_FOLDER / "requirements.txt").write_text(f"draftsmith>={__version__}\n", encoding="utf-8")
    settings = {
        "schema": SCHEMA,
        "method": stored.name,
        "options": stored.options,
        "parts": [part for part in _PARTS if getattr(stored, part) is not None],
        "drafters": drafters,
        "files": {name: file_hash(folder / name) for name in weights},
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def stored_parts(stored: StoredMethod) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of heads and table by name, and what the file's metadata says of them."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    heads, table = getattr(stored.heads, "_orig_mod", stored.heads), stored.table
    if heads is not None:
        if not isinstance(heads, PredictionHeads):
            raise ValueError(f"heads of type {type(heads).__name__} cannot be saved, only PredictionHeads can")
        known = {"vocab_size": heads.vocab_size} if heads.knows_vocab_size else {}
        metadata["heads"] = json.dumps(known | {"states": heads.states, "scale": heads.scale})
        tensors |= {f"heads.{name}": value.detach().cpu().contiguous() for name, value in heads.state_dict().items()}
    if stored.options.get("datastore") == "table":
        raise ValueError("a table's texts are not saved with a method: `datastore` is 'table', expected 'none'")
    if table is not None:
        metadata["table.vocab_size"] = str(table.vocab_size)
        tensors |= {f"table.{name}": getattr(table, name) for name in TENSORS}
    return tensors, metadata


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: a method is saved to a folder")
    ours = {SETTINGS_FILE, PARTS_FILE, CODE_FOLDER}
    if (folder / SETTINGS_FILE).is_file():
        ours |= {name.partition("/")[0] for name in read_settings(folder)["files"]}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        raise ValueError(
            f"{folder} holds other files ({', '.join(others[:3])}) and is not written over: save the method to a "
            "folder of its own, and a model that shall lie beside it there afterwards"
        )


def read_method(folder: Path) -> StoredMethod:
    """What `save_method` wrote; drafters are named, not loaded. ValueError for files missing, added or changed."""
    if (folder / MANIFEST_FILE).is_file():
        verify_artifact(folder)
    settings = read_settings(folder)
    _check_files(folder, settings)
    parts = _read_parts(folder / PARTS_FILE, settings["parts"], folder / SETTINGS_FILE)
    drafters = [_drafter(folder, entry) for entry in settings["drafters"]]
    return StoredMethod(settings["method"], settings["options"], drafters, parts.get("heads"), parts.get("table"))


def read_settings(folder: Path) -> dict[str, Any]:
    """`custom_generate.json`, each field of its type; ValueError if there is none, or not of this form."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no saved method: it has no {SETTINGS_FILE}")
    try:
        settings = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, kind in _FIELDS.items():
        if type(settings.get(name)) is not kind:
            raise ValueError(f"{path}: {name} is {settings.get(name)!r}, expected a {kind.__name__}")
    if settings["schema"] != SCHEMA:
        raise ValueError(f"{path}: its schema is {settings['schema']}, this draftsmith reads {SCHEMA}")
    for name, digest in settings["files"].items():
        if (fault := name_fault(name)) is None and not name.endswith((".safetensors", ".json")):
            fault = "it is no file of weights or settings"
        if fault is not None or not isinstance(digest, str):
            raise ValueError(f"{path}: files names {name!r} with {digest!r}: {fault or 'expected a hash'}")
    return settings


def _check_files(folder: Path, settings: dict[str, Any]) -> None:
    """ValueError for a file of the method that is missing, no file, of another hash, or too many."""
    files: dict[str, str] = settings["files"]
    folders = [entry["folder"] for entry in settings["drafters"] if isinstance(entry, dict) and "folder" in entry]
    for name, fault in files_of(folder):
        if fault is not None and name in files:
            raise ValueError(f"{folder / name} {fault}")
        if name not in files and (name == PARTS_FILE or name.partition("/")[0] in folders):
            raise ValueError(f"{folder} holds {name}, which its {SETTINGS_FILE} does not list")
    for name, digest in files.items():
        try:
            found = file_hash(folder / name)
        except FileNotFoundError as error:
            raise ValueError(f"{folder} lacks {name}, which its {SETTINGS_FILE} lists") from error
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
        if found != digest:
            raise ValueError(f"{folder / name} has the hash {found}, its {SETTINGS_FILE} says {digest}")


def _read_parts(path: Path, parts: list[Any], listed_in: Path) -> dict[str, Any]:
    if unknown := [part for part in parts if part not in _PARTS]:
        raise ValueError(f"{listed_in}: parts names {unknown[0]!r}, expected some of {', '.join(_PARTS)}")
    if not parts:
        return {}
    names = check_safetensors(path)
    if strange := sorted(name for name in names if name.partition(".")[0] not in parts):
        raise ValueError(f"{path} holds {strange[0]}, which is of none of the parts {', '.join(parts)}")
    heads = _read_heads(path) if "heads" in parts else None
    return {"heads": heads, "table": BigramTable.read(path, "table.") if "table" in parts else None}


def _read_heads(path: Path) -> PredictionHeads:
    try:
        with safe_open(path, framework="pt") as opened:
            prefix = "heads."
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dictionary)
            tensors = {name.removeprefix(prefix): opened.get_tensor(name) for name in names}
            text = (opened.metadata() or {}).get("heads", "")
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: of the heads in its metadata, {error}") from error
    stored = assemble_heads(tensors, config, path, path)
    if stored.disagreements:
        raise ValueError(stored.disagreements[0])
    return stored.build().eval()


def _drafter(folder: Path, entry: Any) -> str:
    """Folder or hub id of a drafter."""
    if isinstance(entry, dict) and list(entry) == ["folder"] and isinstance(name := entry["folder"], str):
        if name_fault(name) is None and "/" not in name:
            return str(folder / name)
    elif isinstance(entry, dict) and list(entry) == ["id"] and isinstance(entry["id"], str):
        name, at, revision = entry["id"].partition("@")
        check_repository_name(name if "/" in name else f"_/{name}")  # the hub's oldest have no user
        if at:
            check_revision(revision)
        return str(entry["id"])
    raise ValueError(f"{folder / SETTINGS_FILE}: a drafter is {entry!r}, expected a folder beside it or a hub id")
