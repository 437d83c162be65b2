"""What was loaded from a place, by the hashes of its files, which are taken while it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..storage.atomic import read_consistent
from ..storage.names import ADAPTER_CONFIG, CONFIG_FILE, DRAFT_VOCABULARY, MANIFEST_FILE, TOKENIZER_FILES
from ..storage.places import adapter_base, here
from ..storage.safe_read import file_state, known_hash, read_json
from .artifact import load_manifest
from .fingerprints import model_fingerprint, weight_files
from .locate import at_revision

Loaded = TypeVar("Loaded")

_SETTINGS = (CONFIG_FILE, "generation_config.json", ADAPTER_CONFIG, DRAFT_VOCABULARY, *TOKENIZER_FILES)
_TELLING = ("README.md", "recipe.yaml")  # with the manifest, which says when and how long an artifact was trained
_READERS = 8  # files at a time; hashing lets other threads run


@dataclass(frozen=True)
class Identity:
    """`files`: SHA-256 (hex) by name of those that decide what a model computes (configuration, weights, tokenizer; of
    an adapter also its model's), or of all that an artifact's manifest lists. `hash`: of that manifest, else of
    `files`; None of a model whose files are not on this machine."""

    source: str
    hash: str | None
    files: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_identified(source: str, load: Callable[[], Loaded], *, content: bool = False) -> tuple[Identity, Loaded]:
    """Load something and say what was loaded: where its files change meanwhile, it is loaded again. With `content` by
    the files of a model though a manifest lies beside them, with which they are compared. Raises ValueError: what
    `load` raises; files that are not as a manifest says, or change all the time."""
    folder = here(at_revision(source))
    if folder is None or not folder.is_dir():
        loaded = load()  # which fetches what is on the hub
        return identify(source, content=content), loaded

    def state() -> list[Any]:
        return [(name, file_state(path)) for name, path in _paths(folder, content).items()]

    return read_consistent(folder, lambda: (identify(source, content=content), load()), state)


def identify(source: str, *, content: bool = False) -> Identity:
    """What lies at a place, read now. Arguments and what it raises as of `load_identified`."""
    folder = here(at_revision(source)) or _snapshot(source)
    if folder is None or not folder.is_dir():
        return Identity(source, None, {})
    paths = _paths(folder, content)
    with ThreadPoolExecutor(_READERS) as readers:
        found = dict(zip(paths, readers.map(known_hash, paths.values()), strict=True))
    entries = load_manifest(folder).files if (folder / MANIFEST_FILE).is_file() else {}
    for name, digest in found.items():
        if name in entries and (written := entries[name]["sha256"]) != digest:
            raise ValueError(f"{paths[name]} has the hash {digest}, its {MANIFEST_FILE} says {written}")
    whole = found.pop(MANIFEST_FILE, None) or hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return Identity(source, whole, found)


def source_state(source: str) -> Any:
    """What changes with what a source computes or holds: the hashes of an artifact's or a model's files, without those
    that only tell of it; else names, sizes and times."""
    folder = Path(source)
    if (folder / MANIFEST_FILE).is_file() or (folder / CONFIG_FILE).is_file():
        return {name: digest for name, digest in identify(source).files.items() if name not in _TELLING}
    files = sorted(path for path in (folder, *folder.rglob("*")) if path.is_file())
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def is_unchanged(recorded: Mapping[str, Any], *, content: bool = False) -> bool:
    """Whether a place holds what `Identity.as_dict` once said of it; true of what is not here to be asked. Records of
    0.1 have no files where there was no manifest, and a model's fingerprint as hash."""
    folder = here(str(recorded["source"]))
    if folder is None or recorded["hash"] is None:
        return True
    try:
        now = identify(str(folder), content=content).hash if recorded.get("files") else model_fingerprint(folder)
    except ValueError:
        return False
    return now == recorded["hash"]


def _paths(folder: Path, content: bool) -> dict[str, Path]:
    """The files of an identity by name; those of an adapter's model are called `base/NAME`."""
    if not content and (folder / MANIFEST_FILE).is_file():
        return {name: folder / name for name in (MANIFEST_FILE, *load_manifest(folder).files)}
    try:
        weights = weight_files(folder)
    except ValueError:
        weights = sorted([*folder.glob("adapter_model.*"), *folder.glob("pytorch_model*.bin")])
    settings = [folder / name for name in _SETTINGS] + sorted(folder.glob("*.index.json"))
    found = {path.name: path for path in (*settings, *weights) if path.is_file()}
    if ADAPTER_CONFIG in found and CONFIG_FILE not in found:
        named = adapter_base(read_json(folder / ADAPTER_CONFIG))
        base = None if named is None else here(at_revision(named)) or _snapshot(named)
        if base is not None and base.resolve() != folder.resolve():
            found |= {f"base/{name}": path for name, path in _paths(base, True).items()}
    return found


def _snapshot(source: str) -> Path | None:
    """The folder in the hub's cache that a model's id stands for."""
    from huggingface_hub import try_to_load_from_cache

    if "/" not in source:
        return None
    found = try_to_load_from_cache(source, CONFIG_FILE)
    return Path(found).parent if isinstance(found, str) else None
