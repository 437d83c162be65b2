"""Commands about publishing: `export`, `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from ...session.terminal import console, log

Replace = Annotated[bool, typer.Option("--replace", help="Also where something else stands; that is deleted.")]


def export(
    artifact: Annotated[
        Path | None, typer.Argument(help="An artifact's folder; without one, formats are listed.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="The format.")] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder; by default beside the artifact.")] = None,
    target: Annotated[str | None, typer.Option(help="The target that is served; by default the artifact's.")] = None,
    speculative_tokens: Annotated[int | None, typer.Option(min=1, max=64, help="Tokens to draft a step.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="A checkout of llama.cpp, for its converter.")] = None,
) -> None:
    """Write an artifact in the form that another program reads, and compare what was written with it."""
    from ....checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact, option_name
    from ....checkpoints.storage.places import here, hub_place
    from .export import FORMATS

    if artifact is None:
        short = (Column(heading, no_wrap=True) for heading in ("format", "for"))
        table = Table(*short, "what", "read by", "options", box=None)
        for form in FORMATS.values():
            typed = " ".join(map(option_name, form.options))
            table.add_row(form.name, form.kind, form.summary, form.readers, typed)
        console().print(table)
        return
    if to is None:
        raise ValueError(f"say with --to in which format to export {artifact}; `draftsmith export` lists them")
    if target is not None and here(target) is None:
        hub_place(target)  # what can be no id is not looked for
    artifact = artifact.expanduser()
    folder = out.expanduser() if out else artifact.resolve().with_name(f"{artifact.resolve().name}-{to}")
    options = ExportOptions(target, speculative_tokens, llama_cpp)
    for line in export_artifact(artifact, to, folder, FORMATS, options):
        log(f"export: {line}")
    log(f"export: wrote {folder}; how to serve it stands in {folder / SERVING_FILE}")


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
    replace: Replace = False,
) -> None:
    """Publish an artifact on the hub, with a card that has its evidence; shows what would be done, and stops."""
    from ....checkpoints.artifact.card import model_card
    from ....checkpoints.artifact.manifest import Manifest
    from ....checkpoints.hub.push_pull import address, plan_push
    from ....checkpoints.hub.push_pull import push as upload
    from .publish import evidence_of, show_plan

    def card(manifest: Manifest) -> str:
        return model_card(manifest, repo, evidence_of(artifact, manifest, licence, results))

    settings: dict[str, Any] = {"branch": revision, "private": private, "message": message, "replace_other": replace}
    plan = plan_push(artifact, repo, card, **settings)
    show_plan(plan)
    if not yes:
        log("push: nothing was uploaded; the same command with --yes does it")
        return
    commit = upload(plan)
    there = f"{address()}/{repo}/commit/{commit}"
    log(f"push: {there} holds the {len(plan.files)} files")
