"""Artifacts on disk: a folder of files and `artifact.json`, written whole or not at all, checked when read."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .card import model_card
from .fingerprints import model_fingerprint, tokenizer_fingerprint
from .manifest import KINDS, MANIFEST_FILE, SCHEMA_VERSION, Manifest, library_versions, plain

__all__ = [
    "MANIFEST_FILE",
    "SCHEMA_VERSION",
    "Manifest",
    "check_target",
    "load_manifest",
    "model_fingerprint",
    "plain",
    "save_artifact",
    "tokenizer_fingerprint",
    "verify_artifact",
]

CARD_FILE = "README.md"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP)


def save_artifact(
    out_dir: Path,
    *,
    kind: str,
    write: Callable[[Path], None],
    vocab_size: int,
    tokenizer_fingerprint: str | None,
    target: dict[str, Any] | None,
    shapes: dict[str, Any],
    recipe: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    evaluation: dict[str, Any] | None = None,
    card: str | None = None,
    command: str | None = None,
    export: dict[str, Any] | None = None,
) -> Manifest:
    """Write an artifact to `out_dir`, replacing one that stands there; a reader sees the old or the new, never a part.

    Everything is written to a hidden folder beside `out_dir`, flushed to the disk and then renamed. Where anything
    fails, that folder is removed, what stood at `out_dir` stays, and the error goes on to the caller.

    Args:
        kind: drafter, heads, table or target.
        write: given an empty folder, writes the artifact's own files into it.
        vocab_size: V of the artifact's tensors.
        target: id, revision and fingerprint of the model it is made for.
        recipe: the resolved recipe; secrets in it are redacted (as in all other dictionaries).
        card: text of README.md; by default a small card made from the manifest.
        command: what made it, as one would type it.
        export: of an export (`export.py`), what it is.

    Raises:
        ValueError: an unknown kind, values that JSON cannot hold, or an `out_dir` that holds other files.
        OSError: the disk is full or cannot be written.
    """
    out = Path(out_dir)
    if kind not in KINDS:
        raise ValueError(f"unknown kind of artifact {kind!r}, expected one of {', '.join(KINDS)}")
    _check_replaceable(out)
    manifest = Manifest(
        kind=kind,
        vocab_size=int(vocab_size),
        tokenizer_fingerprint=tokenizer_fingerprint,
        target=plain(target),
        shapes=plain(shapes),
        recipe=plain(recipe),
        data=plain(data),
        training=plain(training),
        evaluation=plain(evaluation),
        versions=library_versions(),
        files={},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=plain(command),
        export=plain(export),
    )
    return _write_all(out, manifest, write, card)


def _write_all(out: Path, manifest: Manifest, write: Callable[[Path], None], card: str | None) -> Manifest:
    """Write to a hidden folder beside `out` and put it in place; the manifest with the files' hashes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".saving", dir=out.parent))
    try:
        write(unfinished)
        assert any(unfinished.iterdir()), "write left no files"
        assert not (unfinished / MANIFEST_FILE).exists(), f"{MANIFEST_FILE} is written here, not by `write`"
        _make_readable(unfinished)
        text = card if card is not None else model_card(manifest, out.name)
        (unfinished / CARD_FILE).write_text(text, encoding="utf-8")
        manifest = replace(manifest, files=_hash_all(unfinished))
        (unfinished / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        _sync_all(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes a private folder
        _put_in_place(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _make_readable(folder: Path) -> None:
    """safetensors writes files that their owner alone may read, and others serve them."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def load_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """Read an artifact's manifest; the other files are not looked at.

    Args:
        kind: where given, the kind that the artifact must be.

    Raises:
        ValueError: no such folder, no `artifact.json`, one that is not of this form, or an artifact of another kind.
    """
    directory = Path(directory)
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise ValueError(f"there is no artifact at {directory}: no such folder")
    if not path.is_file():
        raise ValueError(f"{directory} is not an artifact: it has no {MANIFEST_FILE}")
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: it is not UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if kind is not None and manifest.kind != kind:
        raise ValueError(f"{directory} holds an artifact of kind {manifest.kind!r}, expected {kind!r}")
    return manifest


def verify_artifact(directory: Path, kind: str | None = None) -> Manifest:
    """Check every file of an artifact against its manifest. Hidden files at the top (`.gitattributes`) do not count.

    Raises:
        ValueError: what `load_manifest` raises; a file that is missing, not listed, or of other size or hash, named.
    """
    directory = Path(directory)
    manifest = load_manifest(directory, kind)
    present = {name for name in _files(directory) if not name.startswith(".")} - {MANIFEST_FILE}
    listed = set(manifest.files)
    if missing := sorted(listed - present):
        raise ValueError(f"{directory} lacks {', '.join(missing)}, which its {MANIFEST_FILE} lists")
    if extra := sorted(present - listed):
        raise ValueError(f"{directory} holds {', '.join(extra)}, which its {MANIFEST_FILE} does not list")
    for name, entry in manifest.files.items():
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{directory / name} has {size} bytes, its {MANIFEST_FILE} says {entry['bytes']}")
        digest = _sha256(directory / name)
        if digest != entry["sha256"]:
            raise ValueError(f"{directory / name} has the hash {digest}, its {MANIFEST_FILE} says {entry['sha256']}")
    return manifest


def check_target(manifest: Manifest, *, vocab_size: int, tokenizer_fingerprint: str | None, what: str) -> None:
    """Check that an artifact fits the target it is used with.

    Args:
        vocab_size: the target's.
        tokenizer_fingerprint: the target's tokenizer's; None, here or in the manifest, where it is not known.
        what: the artifact's name in messages, such as "the heads runs/quickstart/heads".

    Raises:
        ValueError: another vocabulary size or tokenizer; both sides are named.
    """
    if manifest.vocab_size != vocab_size:
        # A padded embedding has rows for tokens that no text holds; a table can be counted with as many.
        padded = manifest.kind == "table" and manifest.vocab_size < vocab_size
        hint = f"; if the target's is padded, count the table with `vocab_size: {vocab_size}`" if padded else ""
        raise ValueError(
            f"{what} has a vocabulary of {manifest.vocab_size} tokens, the target of {vocab_size}: "
            f"they must be the same{hint}"
        )
    mine, theirs = manifest.tokenizer_fingerprint, tokenizer_fingerprint
    if mine is not None and theirs is not None and mine != theirs:
        raise ValueError(
            f"{what} was made with another tokenizer than the target's: the fingerprints are {mine[:16]}… and "
            f"{theirs[:16]}…, though both have {vocab_size} tokens"
        )


def _check_replaceable(out: Path) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: an artifact is a folder")
    if not (out / MANIFEST_FILE).is_file() and any(out.iterdir()):
        raise ValueError(f"{out} holds other files and no artifact; it is not written over")


def _files(directory: Path) -> list[str]:
    """Paths of all files below a folder, relative to it, with forward slashes."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _hash_all(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        name: {"sha256": _sha256(directory / name), "bytes": (directory / name).stat().st_size}
        for name in _files(directory)
    }


def _sync_all(directory: Path) -> None:
    """Flush every file to the disk, and every folder, so that names are there as well."""
    for path in (*(directory / name for name in _files(directory)), *directory.rglob("*/"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(new: Path, out: Path) -> None:
    """Rename `new` to `out`. What stood there ends up under the name `new` or is removed."""
    out = out.resolve()  # a link to a folder stays a link
    if not out.exists():
        new.rename(out)
    elif not _exchange(new, out):
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
        out.rename(aside)  # onto an empty folder: allowed
        try:
            new.rename(out)
        except OSError:
            aside.rename(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    sync(out.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, so that each name always stands for one of them. False where that is not known."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
