"""`draftsmith artifact` and `draftsmith table`: show and verify artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ....checkpoints.storage.messages import shown
from ...session.terminal import console, gigabytes, write_json

if TYPE_CHECKING:
    from ....checkpoints.artifact.manifest import Manifest

artifact_app = typer.Typer(help="Show and verify artifacts: folders, or hub ids.", no_args_is_help=True)
table_app = typer.Typer(help="Show correlation tables.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="An artifact's folder, or user/name[@revision] on the hub.")]
TableFolder = Annotated[Path, typer.Argument(help="A table's folder.")]
_SECTIONS = ("export", "target", "shapes", "evaluation", "training", "data", "versions")


@artifact_app.command()
def show(
    place: Place,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as it stands, in the newest schema.")] = False,
) -> None:
    """What an artifact is, what it was made for and from, and what it holds."""
    from ....checkpoints.artifact.artifact import load_manifest
    from ....checkpoints.artifact.locate import resolve

    manifest = load_manifest(resolve(place))
    if as_json:
        write_json(manifest.to_json())
        return
    table = Table(Column(no_wrap=True, style="bold"), Column(overflow="fold"), show_header=False, box=None)
    for name, value in _facts(place, manifest):
        table.add_row(name, value)
    console().print(table)


@artifact_app.command()
def verify(places: Annotated[list[str], typer.Argument(help="Artifacts' folders, or hub ids.")]) -> None:
    """Look for everything that is wrong with artifacts; exit code 1 where there is something."""
    from ....checkpoints.artifact.locate import resolve
    from ....checkpoints.verify.inspect import find_faults

    wrong = False
    for place in places:
        try:
            manifest, faults = find_faults(resolve(place))
        except ValueError as error:
            manifest, faults = None, [str(error)]
        for fault in faults:
            console().print(f"fault: {shown(fault)}", soft_wrap=True)
        if manifest is not None and not faults:
            size = gigabytes(sum(entry["bytes"] for entry in manifest.files.values()))
            whole = f"{manifest.role}, {len(manifest.files)} files of {size}, nothing wrong"
            console().print(f"{shown(place)}: {whole}", soft_wrap=True)
        wrong = wrong or bool(faults)
    if wrong:
        raise typer.Exit(1)


def _facts(place: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What is said of an artifact, by heading; of long lists and texts the beginning."""
    total = sum(entry["bytes"] for entry in manifest.files.values())
    made = f", an export in the format {manifest.export['format']}" if manifest.export is not None else ""
    yield "what", f"{manifest.role}{shown(made)}, {len(manifest.files)} files of {gigabytes(total)} in {place}"
    yield "created", shown(manifest.created or "not known")
    yield "command", shown(manifest.command or "not known")
    yield "vocabulary", f"{manifest.vocab_size:,} tokens"
    yield "tokenizer", shown(manifest.tokenizer_fingerprint or "not known")
    for section in _SECTIONS:
        values = (getattr(manifest, section) or {}).items()
        plain = [f"{key}: {value}" for key, value in values if isinstance(value, (str, int, float)) and value != ""]
        for number, line in enumerate(plain):
            yield "" if number else section, shown(line)
    for number, (name, entry) in enumerate(manifest.files.items()):
        yield "" if number else "files", f"{name}: {entry['bytes']:,} bytes, sha256 {entry['sha256']}"
    yield "", "recipe, nested and empty values: --json"


@table_app.command("show")
def show_counts(
    table: TableFolder,
    tokenizer: Annotated[
        str | None, typer.Option(help="Shows tokens as text; by default the recipe's, where it lies here.")
    ] = None,
) -> None:
    """Sizes, sources and the most extreme correlations of a table."""
    from .table_show import show_table

    show_table(table, tokenizer)
