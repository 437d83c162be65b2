"""`draftsmith artifact`: artifacts shown, verified and compared."""

from __future__ import annotations

from typing import Annotated

import typer

artifact_app = typer.Typer(help="Show, verify and compare artifacts: folders, or hub ids.", no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="An artifact's folder, or user/name[@revision] on the hub.")]


@artifact_app.command()
def show(
    place: Place,
    everything: Annotated[bool, typer.Option("--all", help="Also what is empty, and values within values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as it stands, in the newest schema.")] = False,
) -> None:
    """What an artifact is, what it was made for and from, and what it holds."""
    from .show import show_artifact

    show_artifact(place, everything=everything, as_json=as_json)


@artifact_app.command()
def verify(
    places: Annotated[list[str], typer.Argument(help="Artifacts' folders, or hub ids.")],
    target: Annotated[str | None, typer.Option(help="Folder of the target that they must be for.")] = None,
) -> None:
    """Look for everything that is wrong with artifacts; exit code 1 where there is something."""
    from .show import verify_artifacts

    if verify_artifacts(places, target):
        raise typer.Exit(1)


@artifact_app.command()
def diff(first: Place, second: Place) -> None:
    """What differs between two artifacts: manifests, files, tensors; exit code 1 where anything does."""
    from .show import compare_artifacts

    if compare_artifacts(first, second):
        raise typer.Exit(1)
