"""`draftsmith doctor`: check this machine, an artifact, or a target/drafter pair."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ...session.terminal import console


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET_OR_ARTIFACT]", help="Directory or hub id; if omitted, the machine is checked."),
    ] = None,
    draft: Annotated[
        str | None, typer.Argument(help="Drafter, heads or table for the target; the target itself for MTP layers.")
    ] = None,
    fix: Annotated[Path | None, typer.Option(help="Write a repaired drafter or heads to this new directory.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts on which to measure acceptance: prompt set, file or hub id.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="Results file to compare; pass one file of `bench` and one of `evaluate`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --prompts: output file (.json; default: in runs/evaluate/NAME).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="With --prompts: evaluation settings, such as limit=20.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings for a pair as JSON.")] = False,
) -> None:
    """Check this machine, an artifact or a target/drafter pair.

    Examples: `doctor`, `doctor runs/drafter`, `doctor Qwen/Qwen3-8B Qwen/Qwen3-0.6B`. For a pair, the exit code is 0 if
    no fault is found and the pair works in draftsmith and transformers (heads and block drafters: in every listed
    engine). With --prompts, acceptance is measured: for draft models, Medusa and EAGLE-3 heads in each stage from
    training to decoding, for block drafters with their config and with variants of it. With --fix, a repaired drafter
    is written and checked; with --prompts as well, its config is the variant with the longest acceptance. With
    --results, the report explains why a server accepts fewer tokens per step than draftsmith.
    """
    if target is not None and draft is not None:
        from .pair import check_pair, check_server

        if results:
            raise typer.Exit(0 if check_server(target, results) else 1)
        sound = check_pair(target, draft, fix=fix, prompts=prompts, out=out, overrides=overrides or (), as_json=as_json)
        raise typer.Exit(0 if sound else 1)
    if fix is not None or prompts is not None or results or as_json:
        raise ValueError("the options require a target/drafter pair: use draftsmith doctor TARGET DRAFT")
    if target is not None:
        from ..artifacts.show import verify_artifact

        raise typer.Exit(0 if verify_artifact(target) else 1)
    from ...session.machine import findings

    table = Table(show_header=False, box=None)
    for finding in findings():
        table.add_row(finding.name, finding.state, finding.advice)
    console().print(table)
