"""`draftsmith export`: an artifact written for what serves it."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ....checkpoints.export.base import ExportOptions, Format, export_artifact, option_name
from ....checkpoints.export.drafter import ASSISTANT
from ....checkpoints.export.engines import DRAFT_MODEL
from ....checkpoints.export.gguf import GGUF
from ....checkpoints.export.heads import HEADS_FORMATS
from ....checkpoints.export.table import TABLE_FORMATS
from ....checkpoints.storage.places import here, hub_place
from ....decode.custom_generate.export import ATTACHED_FORMATS
from ...session.terminal import console, log

FORMATS: dict[str, Format] = {
    form.name: form for form in (ASSISTANT, DRAFT_MODEL, GGUF, *HEADS_FORMATS, *TABLE_FORMATS, *ATTACHED_FORMATS)
}


def run_export(artifact: Path, form: str, out: Path | None, options: ExportOptions) -> Path:
    """Export, and say what was compared.

    Returns:
        The folder: `out`, or one beside the artifact, named for the format.

    Raises:
        ValueError: what `export_artifact` raises.
    """
    artifact = artifact.expanduser()
    if options.target is not None and here(options.target) is None:
        hub_place(options.target)  # what can be no id is not looked for
    folder = out.expanduser() if out else artifact.resolve().with_name(f"{artifact.resolve().name}-{form}")
    for line in export_artifact(artifact, form, folder, FORMATS, options):
        log(f"export: {line}")
    log(f"export: wrote {folder}; how to serve it stands in {folder / 'SERVING.md'}")
    return folder


def list_formats() -> None:
    """Every format: its name, the kind of artifact, what it is, who reads it, and its options."""
    table = Table(box=None)
    for heading in ("format", "for", "what", "read by", "options"):
        table.add_column(heading, no_wrap=heading in ("format", "for"))
    for form in FORMATS.values():
        options = " ".join(map(option_name, form.options))
        table.add_row(form.name, form.kind, *map(escape, (form.summary, form.readers, options)))
    console().print(table)
