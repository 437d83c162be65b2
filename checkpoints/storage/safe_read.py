"""Reading, hashing and copying of untrusted files."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .messages import brief, first_line

UNREADABLE = (SafetensorError, OSError, RuntimeError)
"""Exceptions raised when reading safetensors files. RuntimeError occurs if a file is deleted while it is opened."""
UNPICKLE = "DRAFTSMITH_UNPICKLE"
"""Environment variable that allows loading pickled weights if it is set to 1."""


def read_json(path: Path) -> dict[str, Any]:
    """Load a JSON object from a UTF-8 file. Raises a ValueError that names the file if it is invalid."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_json(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if the text is not JSON or not an object."""
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"it contains a JSON {type(values).__name__}, expected an object")
    return values


def load_json(path: Path, *keys: str) -> dict[str, Any]:
    """Load a JSON object that must contain `keys`. Raises a ValueError that names the file if it is invalid."""
    try:
        values = parse_json(read_text(path))
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"it has no {missing[0]!r}")
        return values
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_document(path: Path, schema: int, command: str) -> dict[str, Any]:
    """Load a JSON document with schema version `schema`. Error messages suggest `command`, which recreates it."""
    document = load_json(path, "schema")
    if document["schema"] != schema:
        raise ValueError(f"{path} has schema {brief(document['schema'])}, expected {schema}: run `{command}`")
    return document


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError if it is not a regular file or not UTF-8."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"it is not UTF-8 text (line {line})") from error


def shards_of(index: Path, is_selected: Callable[[str], bool] = lambda tensor: True) -> dict[str, str]:
    """Map the tensors in an index that `is_selected` accepts to the names of their safetensors files.

    Raises ValueError if the index is invalid, or lists files that are not safetensors files in its folder.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index}: it has no weight_map of tensors to files")
    files = {tensor: name for tensor, name in files.items() if is_selected(tensor)}
    for name in files.values():
        if not isinstance(name, str) or name_fault(name) is not None or not name.endswith(".safetensors"):
            raise ValueError(f"{index} lists the file {name!r}, expected a .safetensors file in its folder")
    return files


def pickles_allowed() -> bool:
    """Check if the user allows pickled weights, which are then loaded with `weights_only=True`."""
    return os.environ.get(UNPICKLE) == "1"


def file_hash(path: Path) -> str:
    """Return the SHA-256 (hex) of a regular file, cached per process until the file changes."""
    about = path.stat()
    return _hash_once(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=1 << 14)
def _hash_once(path: Path, *state: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """Return the SHA-256 (hex) and size in bytes of a file, as stored in manifests."""
    return {"sha256": file_hash(path), "bytes": path.stat().st_size}


def name_fault(name: str) -> str | None:
    """Return the reason why a name is not a portable relative path within a folder; None if it is valid."""
    is_plain = not {"", ".", ".."} & set(name.split("/")) and not {"\\", ":"} & set(name)
    return None if is_plain and name.isprintable() else "it is not a plain path within the folder"


def files_of(folder: Path) -> list[str]:
    """Return the sorted paths of all files below a folder, relative to the folder and with forward slashes."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def copy_files(folder: Path, out: Path, patterns: Iterable[str]) -> None:
    """Copy the files of a folder (without subfolders) that match one of the glob patterns to `out`."""
    for path in (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()):
        shutil.copyfile(path, out / path.name)


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and shape of each tensor in a file. Raises a ValueError that names the file if it is damaged."""
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            return {name: (str(part.get_dtype()), list(part.get_shape())) for name, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{path}: it is not a complete safetensors file: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
