"""Artifacts looked into: what one is, everything that is wrong with it, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open

from ..artifact.artifact import check_target, file_faults, load_manifest, verify_artifact
from ..artifact.fingerprints import model_fingerprint, tokenizer_fingerprint
from ..artifact.manifest import Manifest
from ..storage.atomic import read_consistent
from ..storage.messages import brief, shown
from ..storage.names import CONFIG_FILE, HEADS_FILE, TABLE_FILE
from ..storage.safe_read import check_safetensors, is_blob, read_json, shards_of
from .tensors import tensor_faults

_NEEDED = {"heads": (HEADS_FILE, CONFIG_FILE), "table": (TABLE_FILE,)}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_CHUNK = 1 << 22
"""Values that are compared at a time."""

Tensors = dict[tuple[str, str], tuple[str, str, list[int]]]
"""By folder and name: the file that holds a tensor, its dtype and its shape."""


def find_faults(directory: Path, kind: str | None = None) -> tuple[Manifest | None, list[str]]:
    """The manifest, where it can be read, and a sentence for each fault: files, tensors, shards that are not there."""
    directory = Path(directory)

    def find() -> tuple[Manifest | None, list[str]]:
        try:
            manifest = load_manifest(directory, kind)
        except ValueError as error:
            return None, [str(error)]
        faults = file_faults(directory, manifest)
        faults += [*_kind_faults(directory, manifest), *_unreadable(directory, manifest)]
        return manifest, faults + tensor_faults(directory, manifest)

    return read_consistent(directory, find)


def target_faults(directory: Path, manifest: Manifest, target: Path, tokenizer: Any) -> list[str]:
    """Where an artifact is not for the target in a folder: its vocabulary, its tokenizer, the model itself."""
    faults = []
    what = f"{directory} ({manifest.kind})"
    try:
        vocab_size = _vocabulary(target)
        mine = tokenizer_fingerprint(tokenizer)
        check_target(manifest, vocab_size=vocab_size, tokenizer_fingerprint=mine, what=what)
    except ValueError as error:
        faults.append(str(error))
    base = Path(directory) / "base"  # heads that were trained together with their target hold it
    trained = (base / "config.json").is_file()
    theirs = model_fingerprint(base) if trained else (manifest.target or {}).get("fingerprint")
    if manifest.kind == "target":
        theirs = model_fingerprint(directory)
    if theirs is None:
        return faults
    try:
        mine = model_fingerprint(target)
    except ValueError as error:
        return [*faults, str(error)]
    if mine != theirs:
        named = base if trained else (manifest.target or {}).get("id")
        faults.append(
            f"{what} was made for another model than {target}: for {named}, whose fingerprint is {str(theirs)[:16]}…, "
            f"and this one's is {mine[:16]}…"
        )
    return faults


def _vocabulary(target: Path) -> int:
    config = read_json(target / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    size = (text or {}).get("vocab_size")
    if type(size) is not int:
        raise ValueError(f"{target / 'config.json'} has no vocab_size")
    return size


def _kind_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Files that an artifact of its kind cannot do without. An export for other programs has what these need."""
    files = set(manifest.files)
    if manifest.export is not None and not manifest.export["native"]:
        return []
    lacking = [name for name in _NEEDED.get(manifest.kind, ()) if name not in files]
    if manifest.kind in ("drafter", "target"):
        if _ADAPTER[0] in files:
            lacking = [name for name in _ADAPTER if name not in files]
        elif "config.json" not in files:
            lacking = ["config.json"]
        if _ADAPTER[0] not in files and not files & set(_WEIGHTS):
            lacking.append(" or ".join(_WEIGHTS))
    return [f"{directory} lacks {name}, which a {manifest.kind} artifact needs" for name in lacking]


def _unreadable(directory: Path, manifest: Manifest) -> list[str]:
    faults = []
    for name in manifest.files:
        path = directory / name
        if not path.exists() or (path.is_symlink() and not is_blob(directory, path)):
            continue  # which is a fault already
        try:
            if name.endswith(".safetensors"):
                check_safetensors(path)
            if name.endswith(".safetensors.index.json"):
                faults += _index_faults(path, name, manifest)
        except (ValueError, OSError) as error:
            faults.append(f"{path}: {error}")
    return faults


def _index_faults(path: Path, name: str, manifest: Manifest) -> list[str]:
    shards, within = sorted(set(shards_of(path).values())), PurePosixPath(name).parent
    return [
        f"{path} names {shard!r}, which is not there" for shard in shards if str(within / shard) not in manifest.files
    ]


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two artifacts, a line each: fields, files, values of tensors. Raises ValueError: unsound
    ones."""
    one, other = (asdict(verify_artifact(place)) | {"digest": None} for place in (first, second))
    files, others = one.pop("files"), other.pop("files")
    lines = list(_values(one, other, ""))
    lines += [f"{name}: in {first} alone" for name in sorted(set(files) - set(others))]
    lines += [f"{name}: in {second} alone" for name in sorted(set(others) - set(files))]
    changed = [name for name in sorted(set(files) & set(others)) if files[name] != others[name]]
    lines += [
        f"{name}: {files[name]['bytes']:,} and {others[name]['bytes']:,} bytes, other content" for name in changed
    ]
    differing = [name for name in (*changed, *set(files) ^ set(others)) if name.endswith(".safetensors")]
    if differing:
        lines += _tensor_lines(first, second)
    return lines


def _values(one: Any, other: Any, key: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(set(one) | set(other)):
            yield from _values(one.get(name), other.get(name), f"{key}.{name}" if key else name)
    elif one != other or type(one) is not type(other):
        yield f"{shown(key)}: {brief(one)} and {brief(other)}"


def tensors_of(directory: Path) -> Tensors:
    """All tensors in an artifact's safetensors files. Raises ValueError: one is none."""
    found: Tensors = {}
    for name in load_manifest(directory).files:
        if name.endswith(".safetensors"):
            try:
                tensors = check_safetensors(directory / name)
            except (ValueError, OSError) as error:
                raise ValueError(f"{directory / name}: {error}") from error
            within = str(PurePosixPath(name).parent)
            found |= {(within, key): (name, *described) for key, described in tensors.items()}
    return found


def _tensor_lines(first: Path, second: Path) -> Iterator[str]:
    one, other = tensors_of(first), tensors_of(second)
    for within, name in sorted(set(one) | set(other)):
        place = (within, name)
        label = f"tensor {shown(name)}" + ("" if within == "." else f" in {within}")
        if place not in one or place not in other:
            yield f"{label}: in {first if place in one else second} alone"
            continue
        (file, *mine), (other_file, *theirs) = one[place], other[place]
        if mine != theirs:
            yield f"{label}: {mine[0]} {mine[1]} and {theirs[0]} {theirs[1]}"
            continue
        greatest, count = _greatest_difference(first / file, second / other_file, name, one[place][2])
        if count:
            yield f"{label}: {count:,} values differ, by at most {greatest:.6g}"


def _greatest_difference(first: Path, second: Path, name: str, shape: list[int]) -> tuple[float, int]:
    """The greatest absolute difference of two tensors of one shape and dtype, and how many values differ; where one
    alone is not a number, infinity."""
    greatest, count = 0.0, 0
    with safe_open(first, framework="pt") as one, safe_open(second, framework="pt") as other:
        sides = (one.get_slice(name), other.get_slice(name)) if shape else (one, other)
        rows = max(1, _CHUNK // max(1, torch.Size(shape[1:]).numel())) if shape else 1
        for start in range(0, shape[0] if shape else 1, rows):
            parts = [side[start : start + rows] if shape else side.get_tensor(name) for side in sides]
            wide = torch.float64 if parts[0].is_floating_point() else torch.int64
            mine, theirs = (part if part.is_complex() else part.to(wide) for part in parts)
            differing = (mine != theirs) & ~((mine != mine) & (theirs != theirs))
            if bool(differing.any()):
                count += int(differing.sum())
                apart = (mine[differing] - theirs[differing]).abs().double().nan_to_num(nan=float("inf"))
                greatest = max(greatest, float(apart.max()))
    return greatest, count
