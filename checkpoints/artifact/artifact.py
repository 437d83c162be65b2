"""Artifact directories: atomic writing, loading, and verification of the files listed in `artifact.json`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..storage.atomic import atomic_dir, check_writable
from ..storage.names import MANIFEST_FILE
from ..storage.safe_read import file_entry, file_hash, files_of, name_fault, read_text
from .manifest import KINDS, Manifest, library_versions, to_json_safe

CARD_FILE = "README.md"
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FAULTS_SHOWN = 20


def save_artifact(
    out: Path,
    *,
    kind: str,
    write: Callable[[Path], None],
    vocab_size: int,
    tokenizer_fingerprint: str | None,
    target: dict[str, Any] | None,
    shapes: Mapping[str, Any] = _NOTHING,
    recipe: Mapping[str, Any] = _NOTHING,
    data: Mapping[str, Any] = _NOTHING,
    training: Mapping[str, Any] = _NOTHING,
    evaluation: dict[str, Any] | None = None,
    card: str | None = None,
    command: str | None = None,
    export: dict[str, Any] | None = None,
) -> Manifest:
    """Write an artifact to `out` atomically, replacing an existing artifact.

    `write` is called with an empty folder and writes the artifact's files. `card` is the text of README.md (default:
    generated from the manifest). The other arguments are fields of `Manifest`, from which secrets are removed.

    Raises ValueError if a value cannot be stored as JSON, a file name is not portable, or `out` contains other files.
    """
    assert kind in KINDS, kind
    check_replaceable(out)
    about: dict[str, Any] = {"target": target, "shapes": shapes, "recipe": recipe, "data": data, "training": training}
    about |= {"evaluation": evaluation, "command": command, "export": export}
    manifest = Manifest(
        kind=kind,
        vocab_size=int(vocab_size),
        tokenizer_fingerprint=tokenizer_fingerprint,
        versions=library_versions(),
        files={},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **to_json_safe(about),
    )
    with atomic_dir(out) as unfinished:
        write(unfinished)
        assert any(unfinished.iterdir()), "`write` created no files"
        assert not (unfinished / MANIFEST_FILE).exists(), f"`write` must not create {MANIFEST_FILE}"
        if card is None:
            from .card import model_card  # not needed for loading artifacts

            card = model_card(manifest, out.name)
        (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        manifest = replace(manifest, files=_hash_all(unfinished))
        (unfinished / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        check_replaceable(out)  # checked again, because writing may take minutes
    return manifest


def load_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """Load the manifest of an artifact. Raises ValueError if it is missing, invalid or of a different kind."""
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise ValueError(f"{directory} is not an artifact: the folder does not exist")
    try:
        manifest = Manifest.from_json(read_text(path))
    except FileNotFoundError as error:
        raise ValueError(f"{directory} is not an artifact: it has no {MANIFEST_FILE}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if kind is not None and manifest.kind != kind:
        raise ValueError(f"{directory} contains an artifact of kind {manifest.kind!r}, expected {kind!r}")
    if kind is not None and manifest.export is not None and not manifest.export["native"]:
        raise ValueError(f"{directory} is an export ({manifest.export['format']}): pass the exported {kind} artifact")
    return manifest


def verify_artifact(directory: Path, kind: str | None = None) -> Manifest:
    """Check the files of an artifact against its manifest, and return the manifest. Raises ValueError on mismatch."""
    manifest = load_manifest(directory, kind)
    if faults := file_faults(directory, manifest):
        more = [f"and {len(faults) - _FAULTS_SHOWN} more faults"] if len(faults) > _FAULTS_SHOWN else []
        raise ValueError("; ".join(faults[:_FAULTS_SHOWN] + more))
    return manifest


def file_faults(directory: Path, manifest: Manifest) -> list[str]:
    """Return an error message for each mismatch between files and manifest, ignoring changes to the model card."""
    listed = set(manifest.files) - {CARD_FILE}
    hidden = {name for name in files_of(directory) if name.startswith(".")} - listed
    present = set(files_of(directory)) - hidden - {MANIFEST_FILE, CARD_FILE}
    faults = []
    if missing := sorted(listed - present):
        faults.append(f"{directory} lacks {', '.join(missing)}, which its {MANIFEST_FILE} lists")
    if extra := sorted(present - listed):
        faults.append(f"{directory} contains {', '.join(extra)}, which its {MANIFEST_FILE} does not list")
    for name, entry in manifest.files.items():
        if name in present:
            fault = _content_fault(directory / name, entry)
            faults += [] if fault is None else [f"{directory / name} {fault}"]
    return faults


def _content_fault(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"has {size} bytes, but {MANIFEST_FILE} lists {entry['bytes']}"
        digest = file_hash(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if digest == entry["sha256"] else f"has SHA-256 {digest}, but {MANIFEST_FILE} lists {entry['sha256']}"


def check_target(manifest: Manifest, *, vocab_size: int, tokenizer_fingerprint: str | None, name: str) -> None:
    """Raise ValueError if the vocabulary size or tokenizer of an artifact differs from the target's.

    `tokenizer_fingerprint` is None if it is unknown, and `name` is the artifact's name for the error message.
    """
    if manifest.vocab_size != vocab_size:
        raise ValueError(f"{name} has a vocabulary of {manifest.vocab_size} tokens, but the target has {vocab_size}")
    stored, expected = manifest.tokenizer_fingerprint, tokenizer_fingerprint
    if stored is not None and expected is not None and stored != expected:
        raise ValueError(f"{name} has tokenizer fingerprint {stored[:16]}…, but the target has {expected[:16]}…")


def check_new(out: Path) -> None:
    """Raise ValueError if `out` exists and is not empty, or is not writable."""
    check_writable(out, folder=True)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not empty: choose another --out")


def check_replaceable(out: Path) -> None:
    """Raise ValueError if `out` contains files but no artifact, or is not writable."""
    check_writable(out, folder=True)
    if out.is_dir() and not (out / MANIFEST_FILE).is_file() and any(out.iterdir()):
        raise ValueError(f"{out} contains files of no artifact, which are not overwritten: choose another folder")


def _hash_all(directory: Path) -> dict[str, dict[str, Any]]:
    entries = {}
    for name in files_of(directory):
        if (wrong := name_fault(name)) is not None:
            raise ValueError(f"{name} is not a valid file name in an artifact: {wrong}")
        entries[name] = file_entry(directory / name)
    return entries
