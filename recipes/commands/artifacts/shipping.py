"""Commands that hand artifacts on: `doctor`, `export`, `push`, `pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ...session.terminal import console


def doctor(
    target: Annotated[
        str | None, typer.Argument(help="Folder or hub id of a target; without one, this machine is looked at.")
    ] = None,
    drafter: Annotated[str | None, typer.Argument(help="Folder or hub id of a drafter for it.")] = None,
    fix: Annotated[Path | None, typer.Option(help="Write a drafter that fits to this new folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: the pair's findings as JSON.")] = False,
) -> None:
    """What this machine has and lacks; or, of TARGET and DRAFTER, whether they are a pair.

    Of a pair the exit code is 0 where transformers and this engine take it as it is, 1 where one of them refuses it or
    takes it with a "but". With --fix that is said of the repaired drafter.
    """
    if target is not None or drafter is not None:
        if drafter is None:
            raise ValueError("a pair is two: draftsmith doctor TARGET DRAFTER")
        from .pair import examine_pair

        raise typer.Exit(0 if examine_pair(str(target), drafter, fix, as_json) else 1)
    if fix is not None or as_json:
        raise ValueError("--fix and --json are for pairs: draftsmith doctor TARGET DRAFTER")
    from ...session.machine import findings

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
    speculative_tokens: Annotated[int | None, typer.Option(min=1, max=64, help="Tokens to draft a step.")] = None,
    merge: Annotated[bool | None, typer.Option(help="LoRA: in the weights, or an adapter beside them.")] = None,
    pickle: Annotated[bool, typer.Option("--pickle", help="Write a pickled file, where the format is one.")] = False,
    llama_cpp: Annotated[Path | None, typer.Option(help="A checkout of llama.cpp, for its converter.")] = None,
) -> None:
    """Write an artifact in the form that another program reads, and compare what was written with it."""
    from .export import ExportOptions, list_formats, run_export

    if artifact is None:
        list_formats()
        return
    if to is None:
        raise ValueError(f"say with --to in which format to export {artifact}; `draftsmith export` lists them")
    options = ExportOptions(target, speculative_tokens, merge, pickle, llama_cpp)
    run_export(artifact, to, out, options)


def push(
    artifact: Annotated[Path, typer.Argument(help="An artifact's folder, or an export's.")],
    repo: Annotated[str, typer.Argument(help="The repository on the hub: user/name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise it is only shown.")] = False,
    revision: Annotated[str, typer.Option(help="The branch.")] = "main",
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    licence: Annotated[str | None, typer.Option("--license", help="Of the artifact: apache-2.0, mit, …")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results of `draftsmith evaluate` about this artifact, for its card.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where the repository holds something else; that is deleted.")
    ] = False,
) -> None:
    """Publish an artifact on the hub, with a card that has its evidence; shows what would be done, and stops."""
    from .publish import Asked, run_push

    run_push(artifact, repo, Asked(yes, revision, private, licence, results, message, replace))


def pull(
    repo: Annotated[str, typer.Argument(help="The repository on the hub: user/name, or user/name@revision.")],
    out: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where another artifact stands at OUT; that is deleted.")
    ] = False,
) -> None:
    """Fetch an artifact from the hub: with the hash of every file as it should be, or not at all."""
    from .publish import run_pull

    run_pull(repo, out, revision, replace)
