"""`draftsmith artifact`: artifacts shown, verified and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ....checkpoints.artifact.manifest import Manifest

artifact_app = typer.Typer(help="Show, verify and compare artifacts: folders, or hub ids.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="An artifact's folder, or user/name[@revision] on the hub.")]
_LONGEST = 100
_SECTIONS = ("export", "target", "shapes", "evaluation", "training", "data", "versions")


@artifact_app.command()
def show(
    place: Place,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as it stands, in the newest schema.")] = False,
) -> None:
    """What an artifact is, what it was made for and from, and what it holds."""
    from rich.table import Table
    from rich.text import Text

    from ....checkpoints.artifact.artifact import load_manifest
    from ....checkpoints.artifact.locate import resolve
    from ...session.terminal import console

    manifest = load_manifest(resolve(place))
    if as_json:
        sys.stdout.write(manifest.to_json())
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(place, manifest):
        table.add_row(Text(name), Text(value))
    console().print(table)


@artifact_app.command()
def verify(
    places: Annotated[list[str], typer.Argument(help="Artifacts' folders, or hub ids.")],
    target: Annotated[str | None, typer.Option(help="Folder of the target that they must be for.")] = None,
) -> None:
    """Look for everything that is wrong with artifacts; exit code 1 where there is something."""
    from ....checkpoints.artifact.locate import resolve
    from ....checkpoints.storage.messages import shown
    from ....checkpoints.verify.inspect import find_faults, target_faults
    from ....data.tokenizers import load_tokenizer
    from ...session.terminal import gigabytes

    model = None if target is None else resolve(target)
    tokenizer = None if model is None else load_tokenizer(str(model))
    wrong = False
    for place in places:
        try:
            manifest, faults = find_faults(resolve(place))
        except ValueError as error:
            manifest, faults = None, [str(error)]
        if manifest is not None and model is not None:
            faults += target_faults(resolve(place), manifest, model, tokenizer)
        for fault in faults:
            _print(f"fault: {shown(fault)}")
        if manifest is not None and not faults:
            size = gigabytes(sum(entry["bytes"] for entry in manifest.files.values()))
            fits = "" if model is None else f", for {model}"
            _print(f"{shown(place)}: {manifest.kind}, {len(manifest.files)} files of {size}, nothing wrong{fits}")
        wrong = wrong or bool(faults)
    if wrong:
        raise typer.Exit(1)


@artifact_app.command()
def diff(first: Place, second: Place) -> None:
    """What differs between two artifacts: manifests, files, tensors; exit code 1 where anything does."""
    from ....checkpoints.artifact.locate import resolve
    from ....checkpoints.verify.inspect import differences

    lines = differences(resolve(first), resolve(second))
    for line in lines:
        _print(line)
    if lines:
        raise typer.Exit(1)


def _print(line: str) -> None:
    from ...session.terminal import console

    console().print(line, markup=False, highlight=False, soft_wrap=True)


def _facts(place: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What is said of an artifact, by heading; of long lists and texts the beginning."""
    from ....checkpoints.storage.messages import shown
    from ...session.terminal import gigabytes

    total = sum(entry["bytes"] for entry in manifest.files.values())
    made = f", an export in the format {manifest.export['format']}" if manifest.export is not None else ""
    yield "what", f"{manifest.kind}{shown(made)}, {len(manifest.files)} files of {gigabytes(total)} in {place}"
    yield "created", shown(manifest.created or "not known")
    yield "command", shown(manifest.command or "not known")
    yield "vocabulary", f"{manifest.vocab_size:,} tokens"
    yield "tokenizer", shown(manifest.tokenizer_fingerprint or "not known")
    for section in _SECTIONS:
        for number, (key, value) in enumerate(_plain_values(getattr(manifest, section) or {})):
            yield "" if number else section, shown(f"{key}: {value}")
    for number, (name, entry) in enumerate(manifest.files.items()):
        yield "" if number else "files", f"{name}: {entry['bytes']:,} bytes, sha256 {entry['sha256']}"
    yield "", "recipe, nested and empty values: --json"


def _plain_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of values that are neither nested nor empty."""
    for name, value in values.items():
        if value not in (None, "") and not isinstance(value, (dict, list)):
            text = f"{value:,}" if type(value) is int else f"{value:.4g}" if isinstance(value, float) else str(value)
            yield name, text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
