"""Commands that hand artifacts on: `doctor`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .terminal import console


def doctor() -> None:
    """Versions, devices, number formats, and which optional parts are missing and how to get them."""
    from .doctor import findings

    table = Table(show_header=False, box=None)
    for finding in findings():
        table.add_row(finding.name, finding.state, escape(finding.advice))
    console().print(table)


def export(
    artifact: Annotated[
        Path | None, typer.Argument(help="An artifact's folder; without one, formats are listed.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="The format.")] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder; by default beside the artifact.")] = None,
    target: Annotated[str | None, typer.Option(help="The target that is served; by default the artifact's.")] = None,
    speculative_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to draft a step.")] = None,
    merge: Annotated[bool | None, typer.Option(help="LoRA: in the weights, or an adapter beside them.")] = None,
    pickle: Annotated[bool, typer.Option("--pickle", help="Write a pickled file, where the format is one.")] = False,
    llama_cpp: Annotated[Path | None, typer.Option(help="A checkout of llama.cpp, for its converter.")] = None,
) -> None:
    """Write an artifact in the form that another program reads, and compare what was written with it."""
    from .exporting import ExportOptions, list_formats, run_export

    if artifact is None:
        list_formats()
        return
    if to is None:
        raise ValueError(f"say with --to in which format to export {artifact}; `draftsmith export` lists them")
    options = ExportOptions(target, speculative_tokens, merge, pickle, llama_cpp)
    run_export(artifact, to, out, options)
