"""References to models and artifacts, with the location and the hashes of their files."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..storage.names import ADAPTER_CONFIG, CONFIG_FILE, DRAFT_VOCABULARY, MANIFEST_FILE, TOKENIZER_FILES, WHOLE_FILES
from ..storage.places import adapter_base, find_local, is_path, split_revision
from ..storage.safe_read import file_hash, read_json, shards_of
from .artifact import load_manifest
from .locate import fetch_model, model_source

_SETTINGS = (CONFIG_FILE, "generation_config.json", ADAPTER_CONFIG, DRAFT_VOCABULARY, *TOKENIZER_FILES)
_DESCRIPTIONS = ("README.md", "recipe.yaml")
_READERS = 8  # threads; hashing releases the GIL


@dataclass(frozen=True)
class ModelRef:
    """Reference to a model, adapter, heads or table, with the location and the hashes of its files."""

    source: str
    """Folder, GGUF file or hub id, as given in the recipe."""
    path: str
    """Folder that the files are loaded from, or the hub id that transformers downloads."""
    revision: str | None
    """Commit on the hub; None if the source does not specify a revision."""
    sha256: str | None
    """Hash of `files`; None if the model has no local files."""
    files: dict[str, str]
    """Mapping from file name to SHA-256, for the configuration, weights and tokenizer. For an adapter, the base
    model's files are included. For an artifact, all files except README.md and recipe.yaml are included."""

    def record(self) -> dict[str, Any]:
        """Return all fields except `path` as a dictionary, as stored in results and certificates."""
        return {name: value for name, value in asdict(self).items() if name != "path"}


def resolve_model(source: str, path: str | None = None) -> ModelRef:
    """Find and hash the files of a model or an artifact.

    `source` is a folder, a GGUF file, or `user/name[@revision]` on the hub, which is downloaded. `path` is the folder
    of the files, if known. Raises ValueError if the model does not exist, or a file differs from the manifest of its
    artifact.
    """
    path = path or model_source(source)
    revision = Path(path).name if split_revision(source)[1] is not None else None
    folder = find_local(path)
    if folder is None and "/" in path and not is_path(path):
        folder = fetch_model(path)
        path = str(folder) if _weights(folder) else path  # transformers handles pickled weights
    if folder is None or not folder.is_dir():
        return ModelRef(source, path, revision, None, {})
    paths = _deciding_files(folder)
    with ThreadPoolExecutor(_READERS) as readers:
        files = dict(zip(paths, readers.map(file_hash, paths.values()), strict=True))
    entries = load_manifest(folder).files if (folder / MANIFEST_FILE).is_file() else {}
    for name, digest in files.items():
        if name in entries and (expected := entries[name]["sha256"]) != digest:
            raise ValueError(f"{paths[name]} has SHA-256 {digest}, but {MANIFEST_FILE} lists {expected}")
    whole = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return ModelRef(source, path, revision, whole, files)


def source_hash(source: str) -> Any:
    """Return the hash of a model or artifact folder; for any other path, a list of file paths and hashes."""
    folder = Path(source)
    if any((folder / name).is_file() for name in (MANIFEST_FILE, CONFIG_FILE)):
        return resolve_model(source).sha256
    paths = sorted(path for path in (folder, *folder.rglob("*")) if path.is_file())
    return [[str(path.relative_to(folder)), file_hash(path)] for path in paths]


def target_record(source: str, sha256: str | None = None) -> dict[str, str | None]:
    """Return the `target` entry of a manifest: id, SHA-256 and, if `source` has a revision, the commit."""
    name, revision = split_revision(source)
    commit = {} if revision is None else {"revision": Path(model_source(source, weights=False)).name}
    return {"id": name, **commit, "sha256": sha256}


def is_unchanged(record: dict[str, Any]) -> bool:
    """Check if a model's files match a `ModelRef.record`. Return True if there is no hash or no local copy."""
    folder = find_local(str(record["source"]))
    if folder is None or record["sha256"] is None:
        return True
    try:
        return resolve_model(str(folder)).sha256 == record["sha256"]
    except ValueError:
        return False


def _deciding_files(folder: Path) -> dict[str, Path]:
    if (folder / MANIFEST_FILE).is_file():
        names = [name for name in load_manifest(folder).files if name not in _DESCRIPTIONS]
        files = {name: folder / name for name in sorted(names)}
    else:
        settings = [folder / name for name in _SETTINGS] + sorted(folder.glob("*.index.json"))
        files = {path.name: path for path in (*settings, *_weights(folder)) if path.is_file()}
    if ADAPTER_CONFIG in files and CONFIG_FILE not in files:
        base = adapter_base(read_json(folder / ADAPTER_CONFIG))
        path = None if base is None else find_local(model_source(base)) or fetch_model(base)
        if path is not None and path.resolve() != folder.resolve():
            files |= {f"base/{name}": each for name, each in _deciding_files(path).items()}
    return files


def _weights(folder: Path) -> list[Path]:
    try:
        return weight_files(folder)
    except ValueError:
        return sorted([*folder.glob("adapter_model.*"), *folder.glob("pytorch_model*.bin")])


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers loads. Raises ValueError if any file is missing."""
    whole, index = (directory / name for name in WHOLE_FILES)
    if whole.is_file():
        return [whole]
    if index.is_file():
        shards = sorted(set(shards_of(index).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise ValueError(f"{index} lists {shard!r}, which is missing from the folder")
        return [directory / shard for shard in shards]
    if files := sorted(directory.glob("model*.safetensors")):
        return files
    raise ValueError(f"{directory} contains no safetensors weights (model*.safetensors)")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 (hex) of a tokenizer's vocabulary and special token ids.

    Tokenizers with the same fingerprint map every id to the same text. The choice of the padding token does not
    change the fingerprint.
    """
    pairs = sorted((int(number), token) for token, number in tokenizer.get_vocab().items())
    special = sorted({int(number) for number in tokenizer.all_special_ids})
    ends = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    text = json.dumps({"vocab": pairs, "special": special, "ends": ends}, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
