"""Artifacts written in the forms that other programs read; each is read back and compared before it stands.

A form is a `Format`: what it writes, how it is compared with its artifact, and what SERVING.md says. An export is an
artifact itself, of the same kind, with `export` in its manifest: it can be verified and pushed like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..artifact.artifact import load_manifest, save_artifact, verify_artifact
from ..artifact.manifest import Manifest
from ..artifact.markdown import fenced, python, shell, span, text
from ..storage.messages import did_you_mean
from ..storage.names import MANIFEST_FILE
from ..storage.places import split_revision
from ..verify.model_files import quietly
from ..verify.tensors import check_tensors

SERVING_FILE = "SERVING.md"
FOLDER, FOLDER_IN_JSON, FOLDER_IN_PYTHON = "\ue000", "\ue001", "\ue002"
"""What stands in serving texts for the export's folder: as a word of a shell, within double quotes of JSON that stands
within a shell's single quotes, and within Python's double quotes."""


@dataclass(frozen=True)
class Source:
    """What is exported: an artifact whose files have been checked."""

    folder: Path
    manifest: Manifest
    export: Path | None = None
    """Where its export lies, whole but for SERVING.md, when that is written."""


@dataclass(frozen=True)
class ExportOptions:
    """Choices of the user. A format takes those that it names; another that is given is refused."""

    target: str | None = None
    """Folder or hub id of the target that is served with it; by default the one that the manifest names."""
    speculative_tokens: int | None = None
    """Tokens to draft a step, where the format has a place for it."""
    merge: bool | None = None
    """LoRA: merged into the weights (True) or as an adapter beside them (False)."""
    pickle: bool = False
    """Write a pickled file, which some engines want and which can run code where it is loaded carelessly."""
    llama_cpp: Path | None = None
    """A checkout of llama.cpp, for its converter."""

    def given(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


@dataclass(frozen=True)
class Format:
    """A form that another program reads."""

    name: str
    kind: str
    """Of the artifacts that it is for."""
    summary: str
    """What it is, in one line."""
    readers: str
    """Which programs read it, with their versions."""
    write: Callable[[Source, Path, ExportOptions], None]
    """Fills an empty folder. Raises ValueError where the artifact does not fit the form."""
    compare: Callable[[Source, Path, ExportOptions], list[str]]
    """Reads the folder back as its readers would and compares tensors and outputs with the artifact's: a line for each
    thing that was found equal. Raises ValueError where one is not."""
    serving: Callable[[Source, ExportOptions], str]
    """The body of SERVING.md: the exact commands, and what to know beside them. For the folder's name stand `FOLDER`,
    `FOLDER_IN_JSON` and `FOLDER_IN_PYTHON`. Names that others gave stand in it as `card_text`'s `python`, `shell` and
    `span` write them, which leave no such characters."""
    options: tuple[str, ...] = ()
    """Names of the `ExportOptions` that it heeds."""
    native: bool = False
    """Whether this package's own loaders read it as they read the artifact."""


def export_artifact(
    artifact: Path, form: str, out: Path, formats: Mapping[str, Format], options: ExportOptions | None = None
) -> list[str]:
    """Write an artifact in another form to `out`, whole or not at all.

    Returns:
        What was compared and found equal, a line each.

    Raises:
        ValueError: an unknown form, or one for another kind of artifact; a damaged artifact, or one that does not fit;
            an option that the form does not have; a place that holds something else; an export that differs from its
            artifact.
        OSError: the disk is full or cannot be written.
    """
    options = options or ExportOptions()
    if form not in formats:
        raise ValueError(f"unknown format {form!r}.{did_you_mean(form, formats)} Known: {', '.join(sorted(formats))}")
    chosen = formats[form]
    source = Source(Path(artifact), verify_artifact(Path(artifact)))
    if source.manifest.export is not None:
        raise ValueError(f"{artifact} is an export itself ({source.manifest.export['format']}): export its artifact")
    if source.manifest.kind != chosen.kind:
        fitting = sorted(name for name, other in formats.items() if other.kind == source.manifest.kind)
        raise ValueError(
            f"{form} is a format for kind {chosen.kind!r}, and {artifact} is of kind {source.manifest.kind!r}; "
            f"for that there are: {', '.join(fitting) or 'none'}"
        )
    if unused := [name for name in options.given() if name not in chosen.options]:
        takes = ", ".join(map(option_name, chosen.options)) or "none"
        raise ValueError(f"{form} has no option {', '.join(map(option_name, unused))}; its options: {takes}")
    _check_place(Path(out), source, chosen)
    check_tensors(source.folder, source.manifest)
    findings: list[str] = []

    def write(folder: Path) -> None:
        with quietly():
            chosen.write(source, folder, options)
            findings.extend(chosen.compare(source, folder, options))
        if load_manifest(source.folder).files != source.manifest.files:
            raise ValueError(f"{artifact} was replaced by another artifact while it was exported: export it again")
        assert findings, f"{form} compares nothing"
        serving = _serving_text(replace(source, export=folder), chosen, options, Path(out).name, findings)
        (folder / SERVING_FILE).write_text(serving, encoding="utf-8")

    save_export(source, chosen, Path(out), write)
    return findings


def option_name(name: str) -> str:
    """An option as it is typed."""
    return "--merge/--no-merge" if name == "merge" else f"--{name.replace('_', '-')}"


def _check_place(out: Path, source: Source, chosen: Format) -> None:
    """An export replaces an earlier export in the same form, and nothing else."""
    place, artifact = out.resolve(), source.folder.resolve()
    if place == artifact:
        raise ValueError(f"{out} is the artifact itself: choose another folder for its export")
    if artifact in place.parents:
        raise ValueError(f"{out} lies in the artifact, which would not be whole with it: choose another folder")
    if (out / MANIFEST_FILE).is_file():
        there = load_manifest(out)
        held = f"an export in the form {there.export['format']}" if there.export else f"an artifact, {there.kind}"
        if there.export is None or there.export["format"] != chosen.name or there.kind != chosen.kind:
            raise ValueError(f"{out} holds {held}, which is not written over: choose another folder for {chosen.name}")


def save_export(source: Source, chosen: Format, out: Path, write: Callable[[Path], None]) -> Manifest:
    """The export as an artifact of its own: its source's manifest, with `export`."""
    known = source.manifest
    about: dict[str, Any] = {"format": chosen.name, "readers": chosen.readers, "native": chosen.native}
    about["of"] = {name: entry["sha256"] for name, entry in known.files.items()}
    return save_artifact(
        out,
        kind=known.kind,
        write=write,
        vocab_size=known.vocab_size,
        tokenizer_fingerprint=known.tokenizer_fingerprint,
        target=known.target,
        shapes=known.shapes,
        recipe=known.recipe,
        data=known.data,
        training=known.training,
        evaluation=known.evaluation,
        command=known.command,
        export=about,
    )


def _without_revision(source: Source, options: ExportOptions) -> tuple[Source, ExportOptions, list[str]]:
    """Source and options with the target's bare name, as engines take it; and how its revision is had, in lines."""
    known = source.manifest.target or {}
    given = options.target is not None
    name, revision = split_revision(str(options.target)) if given else (known.get("id"), known.get("revision"))
    if not isinstance(name, str) or revision is None:
        return source, options, []
    download = f"hf download {shell(name)} --revision {shell(str(revision))} --local-dir target"
    lines = [f"This is for {span(name)} at the revision {span(str(revision))}. Where the repository's main branch has"]
    lines += ["moved on, fetch that one and name the folder `target` below in place of the repository:", ""]
    lines += [*fenced(download, "bash"), ""]
    bare = replace(source.manifest, target=known | {"revision": None})
    return replace(source, manifest=bare), replace(options, target=name) if given else options, lines


def _serving_text(source: Source, chosen: Format, options: ExportOptions, name: str, findings: list[str]) -> str:
    lines = [f"# Serving {text(name)}", "", f"{chosen.summary}. Read by {chosen.readers}.", ""]
    source, options, revised = _without_revision(source, options)
    lines += revised
    in_json = json.dumps(name)[1:-1].replace("'", "\\u0027")
    written = str.maketrans({FOLDER: shell(name), FOLDER_IN_JSON: in_json, FOLDER_IN_PYTHON: python(name)[1:-1]})
    lines += [chosen.serving(source, options).translate(written).strip(), ""]
    lines += ["## What was compared with the artifact when this was written", ""]
    lines += [f"- {text(line)}" for line in findings]
    return "\n".join(lines) + "\n"
