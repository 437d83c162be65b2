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
"""Errors of reading safetensors; RuntimeError is torch's if a file disappears while it is opened."""
UNPICKLE = "DRAFTSMITH_UNPICKLE"
"""Environment variable that allows pickled weights if it is 1."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ValueError, naming the file, if it is not a regular UTF-8 file of JSON.
    """
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_json(text: str) -> dict[str, Any]:
    """Return the object in a JSON text. Raises ValueError if it is not JSON or not an object."""
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"it contains a JSON {type(values).__name__}, expected an object")
    return values


def load_json(path: Path, *keys: str) -> dict[str, Any]:
    """Return the object in a JSON file with these keys. Raises ValueError, naming the file."""
    try:
        values = parse_json(read_text(path))
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"it has no {missing[0]!r}")
        return values
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


class OtherSchemaError(ValueError):
    """Raised for a document with another schema version."""


def read_document(path: Path, schema: int, command: str) -> dict[str, Any]:
    """Return a command's JSON document with this schema number. Raises ValueError, naming the file."""
    document = load_json(path, "schema")
    if document["schema"] != schema:
        raise OtherSchemaError(f"{path} has schema {brief(document['schema'])}, expected {schema}: run `{command}`")
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
    """Return the safetensors files by tensor of an index, for tensors whose name is `is_selected`.

    Raises ValueError: it is not an index, or names other files than safetensors in its folder.
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
    """Check if the user allows pickled weights, which are then read with `weights_only=True`."""
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
    """Return a file's `sha256` (hex) and `bytes`, as stored in manifests."""
    return {"sha256": file_hash(path), "bytes": path.stat().st_size}


def name_fault(name: str) -> str | None:
    """Return why a name is not a portable, printable relative path within a folder; None if it is one."""
    is_plain = not {"", ".", ".."} & set(name.split("/")) and not {"\\", ":"} & set(name)
    return None if is_plain and name.isprintable() else "it is not a plain path within the folder"


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it and with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def copy_files(folder: Path, out: Path, patterns: Iterable[str]) -> None:
    """Copy the files in a folder (not below) that match a pattern."""
    for path in (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()):
        shutil.copyfile(path, out / path.name)


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return names, dtypes and shapes of the tensors in a file. Raises ValueError, naming it, if it is damaged."""
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            return {name: (str(part.get_dtype()), list(part.get_shape())) for name, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{path}: it is not a complete safetensors file: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
