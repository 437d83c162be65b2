"""Commands for single artifacts: `draftsmith show ARTIFACT` and `draftsmith doctor ARTIFACT`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ....checkpoints.storage.messages import gigabytes
from ...session.terminal import console, write_json

if TYPE_CHECKING:
    from ....checkpoints.artifact.manifest import Manifest

_SECTIONS = ("export", "target", "shapes", "evaluation", "training", "data", "versions")


def show(
    location: Annotated[str, typer.Argument(help="Artifact directory, or user/name[@revision] on the hub.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show the kind, origin and sizes of an artifact.

    Example: `show runs/drafter`, `show user/drafter@main --json`.
    """
    from ....checkpoints.artifact.artifact import load_manifest
    from ....checkpoints.artifact.locate import resolve

    folder = resolve(location)
    manifest = load_manifest(folder)
    if as_json:
        write_json(manifest.to_json())
        return
    table = Table(Column(no_wrap=True, style="bold"), Column(overflow="fold"), show_header=False, box=None)
    for name, value in _facts(location, manifest):
        table.add_row(name, value)
    console().print(table)


def verify_artifact(location: str) -> bool:
    """Verify the files of an artifact, print all faults, and return True if there are none."""
    from ....checkpoints.artifact.locate import resolve
    from ....checkpoints.verify.inspect import find_faults

    manifest, faults = find_faults(resolve(location))
    for fault in faults:
        console().print(f"fault: {fault}", soft_wrap=True)
    if manifest is not None and not faults:
        size = gigabytes(sum(entry["bytes"] for entry in manifest.files.values()))
        whole = f"{manifest.role}, {len(manifest.files)} files of {size}, no faults"
        console().print(f"{location}: {whole}", soft_wrap=True)
    return not faults


def _facts(location: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    total = sum(entry["bytes"] for entry in manifest.files.values())
    suffix = f", an export in the format {manifest.export['format']}" if manifest.export is not None else ""
    yield "what", f"{manifest.role}{suffix}, {len(manifest.files)} files of {gigabytes(total)} in {location}"
    yield "created", manifest.created or "unknown"
    yield "command", manifest.command or "unknown"
    yield "vocabulary", f"{manifest.vocab_size:,} tokens"
    yield "tokenizer", manifest.tokenizer_fingerprint or "unknown"
    for section in _SECTIONS:
        values = (getattr(manifest, section) or {}).items()
        plain = [f"{key}: {value}" for key, value in values if isinstance(value, (str, int, float)) and value != ""]
        for number, line in enumerate(plain):
            yield "" if number else section, line
    for number, (name, entry) in enumerate(manifest.files.items()):
        yield "" if number else "files", f"{name}: {entry['bytes']:,} bytes, sha256 {entry['sha256']}"
    yield "", "pass --json to print the recipe and nested values"
