"""Commands that publish artifacts: `export` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ...session.terminal import console, log

if TYPE_CHECKING:
    from ....checkpoints.hub.push_pull import Plan


def export(
    artifact: Annotated[Path | None, typer.Argument(help="Artifact directory; omit it to list the formats.")] = None,
    to: Annotated[str | None, typer.Option(help="Export format, such as transformers or vllm-sglang.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory (default: next to the artifact).")] = None,
    target: Annotated[str | None, typer.Option(help="Target to serve (default: from the artifact).")] = None,
    speculative_tokens: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of draft tokens per step (default: from the artifact).")
    ] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Directory of a llama.cpp checkout, for GGUF.")] = None,
) -> None:
    """Export an artifact to a serving engine or transformers.

    The exported files are loaded again and compared with the artifact. Example: `export runs/drafter --to vllm-sglang`.
    """
    from ....checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact, option_name
    from ....checkpoints.storage.places import find_local, parse_hub_id
    from .export import FORMATS

    if artifact is None:
        short = (Column(heading, no_wrap=True) for heading in ("format", "for"))
        table = Table(*short, "description", "supported by", "options", box=None)
        for form in FORMATS.values():
            options_text = " ".join(map(option_name, form.options))
            table.add_row(form.name, form.kind, form.summary, form.readers, options_text)
        console().print(table)
        return
    if to is None:
        raise ValueError("the format of the export is missing: pass --to (`draftsmith export` lists the formats)")
    if target is not None and find_local(target) is None:
        parse_hub_id(target)  # raises if this cannot be a hub id
    artifact = artifact.expanduser()
    folder = out.expanduser() if out else artifact.resolve().with_name(f"{artifact.resolve().name}-{to}")
    options = ExportOptions(target, speculative_tokens, llama_cpp)
    for line in export_artifact(artifact, to, folder, FORMATS, options):
        log(f"export: {line}")
    log(f"export: wrote {folder}; see {folder / SERVING_FILE} for how to serve it")


def push(
    artifact: Annotated[Path, typer.Argument(help="Directory of an artifact or an export.")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub: user/name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Upload the files (default: only print the plan).")] = False,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    licence: Annotated[str | None, typer.Option("--license", help="Licence, such as apache-2.0 or mit.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results file of `draftsmith evaluate` to include in the model card.")
    ] = None,
) -> None:
    """Upload an artifact to the hub, with a model card.

    Example: `push runs/drafter user/drafter --results results.json --license mit --yes`.
    """
    from ....checkpoints.artifact.card import model_card
    from ....checkpoints.artifact.manifest import Manifest
    from ....checkpoints.hub.push_pull import plan_push
    from ....checkpoints.hub.push_pull import push as upload
    from .publish import evidence_of

    def card(manifest: Manifest) -> str:
        return model_card(manifest, repo, evidence_of(artifact, manifest, licence, results))

    plan = plan_push(artifact, repo, card, private=private)
    _show_plan(plan)
    if not yes:
        log("push: nothing was uploaded; add --yes to upload")
        return
    commit = upload(plan)
    log(f"push: uploaded {len(plan.files)} files: {plan.url}/commit/{commit}")


def _show_plan(plan: Plan) -> None:
    state = "new" if plan.parent is None else f"at {plan.parent[:12]}"
    out = console()
    out.print(f"{plan.url} ({'private' if plan.private else 'public'}, {state})", soft_wrap=True)
    files = Table(Column("file", overflow="fold"), Column("bytes", justify="right", no_wrap=True), box=None)
    for name, file in sorted(plan.files.items()):
        files.add_row(name, f"{file.upload_info.size:,}")
    for name in plan.deleted:
        files.add_row(name, "deleted on the hub")
    out.print(files)
    total = sum(file.upload_info.size for file in plan.files.values())
    out.print(f"{len(plan.files)} files, {total:,} bytes, in one commit", soft_wrap=True)
    out.print(f"account: {plan.account or 'none: log in with `hf auth login`'}")
    out.rule("README.md", align="left")
    out.print(plan.card, soft_wrap=True)
    out.rule()
