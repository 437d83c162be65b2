"""Artifacts shown, verified and compared, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ....checkpoints.artifact.artifact import MANIFEST_FILE, load_manifest
from ....checkpoints.artifact.locate import resolve
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.storage.messages import shown
from ....checkpoints.verify.inspect import differences, find_faults, target_faults
from ....data.tokenizers import load_tokenizer
from ...session.terminal import console, gigabytes

_LONGEST = 100
_SECTIONS = ("export", "target", "shapes", "evaluation", "training", "data", "versions")


def show_artifact(place: str, *, everything: bool = False, as_json: bool = False) -> None:
    """Print what an artifact's manifest says; its files are not read.

    Args:
        everything: also what is empty, and values within values.
        as_json: the whole manifest instead.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    manifest = load_manifest(resolve(place))
    if as_json:
        sys.stdout.write(manifest.to_json())
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(place, manifest, everything):
        table.add_row(Text(name), Text(value))
    console().print(table)


def verify_artifacts(places: Sequence[str], target: str | None) -> int:
    """Print the faults of artifacts; how many there are.

    Args:
        target: folder of a model that they must be made for.

    Raises:
        ValueError: there is no such artifact, target or tokenizer.
    """
    count = 0
    model = None if target is None else resolve(target)
    tokenizer = None if model is None else load_tokenizer(str(model))
    for place in places:
        faults, verdict = _judge(place, model, tokenizer)
        for line in [f"fault: {shown(fault)}" for fault in faults] or [f"{shown(place)}: {verdict}"]:
            console().print(Text(line), soft_wrap=True)
        count += len(faults)
    return count


def _judge(place: str, target: Path | None, tokenizer: Any) -> tuple[list[str], str]:
    """What is wrong with an artifact; where nothing is, what it is."""
    try:
        folder = resolve(place)
    except ValueError as error:
        return [str(error)], ""
    manifest, faults = find_faults(folder)
    if manifest is None:
        return faults, ""
    if target is not None:
        faults += target_faults(folder, manifest, target, tokenizer)
    size = gigabytes(sum(entry["bytes"] for entry in manifest.files.values()))
    fits = "" if target is None else f", for {target}"
    return faults, f"{manifest.kind}, {len(manifest.files)} files of {size}, nothing wrong{fits}"


def compare_artifacts(first: str, second: str) -> int:
    """Print what differs between two artifacts; how many things do.

    Raises:
        ValueError: one of them is not there or cannot be read.
    """
    lines = differences(resolve(first), resolve(second))
    for line in lines:
        console().print(Text(line), soft_wrap=True)
    return len(lines)


def _facts(place: str, manifest: Manifest, everything: bool) -> Iterator[tuple[str, str]]:
    """What is said of an artifact, by heading; of long lists and texts the beginning."""
    total = sum(entry["bytes"] for entry in manifest.files.values())
    made = f", an export in the format {manifest.export['format']}" if manifest.export is not None else ""
    yield "what", f"{manifest.kind}{shown(made)}, {len(manifest.files)} files of {gigabytes(total)} in {place}"
    yield "created", shown(manifest.created or "not known")
    yield "command", shown(manifest.command or "not known")
    yield "vocabulary", f"{manifest.vocab_size:,} tokens"
    yield "tokenizer", shown(manifest.tokenizer_fingerprint or "not known")
    for section in _SECTIONS:
        values = getattr(manifest, section)
        for number, (key, value) in enumerate(_flat(values or {}, "", everything)):
            yield "" if number else section, shown(f"{key}: {value}")
    for number, (name, entry) in enumerate(manifest.files.items()):
        yield "" if number else "files", f"{name}: {entry['bytes']:,} bytes, sha256 {entry['sha256']}"
    yield "recipe", f"in {MANIFEST_FILE}; --json shows it" if manifest.recipe else "none"
    if not everything:
        yield "", "--all shows what is nested or empty, too"


def _flat(values: Any, key: str, everything: bool) -> Iterator[tuple[str, str]]:
    """Values by dotted keys, a line each; nested and empty ones only where everything is wanted."""
    for name, value in values.items():
        place = f"{key}.{name}" if key else str(name)
        if not everything and (value in (None, "") or isinstance(value, (dict, list))):
            continue
        if isinstance(value, dict) and value:
            yield from _flat(value, place, everything)
        else:
            text = f"{value:,}" if type(value) is int else f"{value:.4g}" if isinstance(value, float) else str(value)
            yield place, text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
