"""Export of artifacts to the formats of serving engines, with a round-trip check.

An export is an artifact of the same kind whose manifest has an `export` entry, so it can be verified and pushed. Its
SERVING.md is rendered from a template in `serving/`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.artifact import load_manifest, save_artifact, verify_artifact
from ..artifact.manifest import Manifest
from ..artifact.markdown import environment
from ..pairs.speculation import SPECULATIVE_TOKENS
from ..storage.atomic import check_writable
from ..storage.messages import did_you_mean
from ..storage.names import MANIFEST_FILE
from ..storage.places import split_revision
from ..verify.model_files import silence_transformers

SERVING_FILE = "SERVING.md"
_INHERITED = (
    *("kind", "vocab_size", "tokenizer_fingerprint", "target", "shapes"),
    *("recipe", "data", "training", "evaluation", "command"),
)
"""Manifest fields that are copied from the artifact to its export."""


@dataclass(frozen=True)
class Source:
    """Verified artifact to export."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export_artifact`.

    `Format.options` lists the options that a format accepts. Any other option raises ValueError.
    """

    target: str | None = None
    """Folder or hub id of the target (default: the target in the manifest)."""
    speculative_tokens: int | None = None
    """Number of draft tokens per step, for formats that store or recommend one."""
    llama_cpp: Path | None = None
    """Path of a llama.cpp checkout, which contains the GGUF converter."""


@dataclass(frozen=True)
class Format:
    """Export format, with the functions that write and check an export."""

    name: str
    kind: str
    """Kind of the artifacts that can be exported in this format."""
    summary: str
    """One-line description."""
    readers: str
    """Serving engines that load the format, with their versions."""
    write: Callable[[Source, Path, ExportOptions], None]
    """Function that writes the export to an empty folder. Raises ValueError if the artifact is not supported."""
    compare: Callable[[Source, Path, ExportOptions], list[str]]
    """Function that loads the export as a serving engine would, compares tensors and outputs with the artifact, and
    returns a line for each check that passed. Raises ValueError if any differ."""
    values: Callable[[Source, Path, ExportOptions], dict[str, Any]] = lambda source, folder, options: {}
    """Function that returns additional variables for the template in `serving/`."""
    options: tuple[str, ...] = ()
    """Names of the `ExportOptions` fields that the format accepts."""
    native: bool = False
    """True if this package can load the export like an artifact."""


def option_name(name: str) -> str:
    """Return the command-line form of an option name, such as `--llama-cpp`."""
    return f"--{name.replace('_', '-')}"


def target_name(source: Source, options: ExportOptions) -> str | None:
    """Return the folder or hub id of the target from the options or the manifest; None if it is unknown."""
    if options.target:
        return options.target
    known = source.manifest.target or {}
    at = f"@{known['revision']}" if known.get("revision") else ""
    return f"{known['id']}{at}" if known.get("id") else None


def known_target(source: Source, options: ExportOptions) -> str | None:
    """Return the target's name if the user passed it or it is a local folder, otherwise None."""
    name = target_name(source, options)
    return name if name is not None and (options.target or Path(name).is_dir()) else None


def needed_target(source: Source, options: ExportOptions, reason: str) -> str:
    """Return the folder or hub id of the target. Raises ValueError, with `reason` in the message, if it is unknown."""
    name = target_name(source, options)
    if name is None:
        raise ValueError(f"{source.folder} does not name its target, but {reason}: pass --target")
    return name


def export_artifact(
    artifact: Path, form: str, out: Path, formats: Mapping[str, Format], options: ExportOptions | None = None
) -> list[str]:
    """Export an artifact to `out` atomically, and return one line for each check that passed.

    Raises ValueError if the format or an option is invalid, the artifact is damaged or not supported, `out` contains
    other files, or the export differs from the artifact.
    """
    options, artifact, out = options or ExportOptions(), Path(artifact), Path(out)
    if form not in formats:
        raise ValueError(f"unknown format {form!r}.{did_you_mean(form, formats)} Known: {', '.join(sorted(formats))}")
    chosen = formats[form]
    source = Source(artifact, verify_artifact(artifact))
    known = source.manifest
    _check_request(source, chosen, options, formats)
    _check_out(out, source, chosen)
    findings: list[str] = []

    def write(folder: Path) -> None:
        with silence_transformers():
            chosen.write(source, folder, options)
            findings.extend(chosen.compare(source, folder, options))
        if load_manifest(artifact).files != known.files:
            raise ValueError(f"{artifact} was replaced by another artifact during the export: export it again")
        assert findings, f"format {form} compared nothing with the artifact"
        serving = _serving_text(source, folder, chosen, options, out.name, findings)
        (folder / SERVING_FILE).write_text(serving, encoding="utf-8")

    about: dict[str, Any] = {name: getattr(known, name) for name in _INHERITED}
    about["export"] = {"format": form, "readers": chosen.readers, "native": chosen.native}
    if options.speculative_tokens is not None:
        about["export"]["speculative_tokens"] = options.speculative_tokens
    about["export"]["of"] = {name: entry["sha256"] for name, entry in known.files.items()}
    save_artifact(out, write=write, **about)
    return findings


def check_same_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    """Raise ValueError if the tensors in `folder` differ from `expected` in names, dtypes or values."""
    if names := sorted(set(tensors) ^ set(expected)):
        raise ValueError(f"{folder} and the artifact have different tensors: {', '.join(names[:3])}")
    for name, tensor in expected.items():
        if tensors[name].dtype != tensor.dtype or not torch.equal(tensors[name], tensor):
            raise ValueError(f"tensor {name} in {folder} differs from the artifact's")


def _check_request(source: Source, chosen: Format, options: ExportOptions, formats: Mapping[str, Format]) -> None:
    if source.manifest.export is not None:
        form = source.manifest.export["format"]
        raise ValueError(f"{source.folder} is already an export ({form}): pass the original artifact")
    kind = source.manifest.kind
    if kind != chosen.kind:
        fitting = sorted(name for name, other in formats.items() if other.kind == kind)
        raise ValueError(
            f"format {chosen.name} exports artifacts of kind {chosen.kind!r}, but {source.folder} is of kind {kind!r}; "
            f"formats for {kind!r}: {', '.join(fitting) or 'none'}"
        )
    changed = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    if unused := [name for name in changed if name not in chosen.options]:
        takes = ", ".join(map(option_name, chosen.options)) or "none"
        raise ValueError(f"format {chosen.name} does not support {', '.join(map(option_name, unused))}, only {takes}")


def _check_out(out: Path, source: Source, chosen: Format) -> None:
    """Raise ValueError if `out` is in the artifact, or contains an artifact that is not an export in this format."""
    check_writable(out, folder=True)
    artifact = source.folder.resolve()
    if artifact in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out} is the artifact or a folder within it: choose another folder for the export")
    if (out / MANIFEST_FILE).is_file():
        manifest = load_manifest(out)
        form = manifest.export["format"] if manifest.export else None
        if (form, manifest.kind) != (chosen.name, chosen.kind):
            content = f"an export in the format {form}" if form else f"an artifact of kind {manifest.kind}"
            raise ValueError(f"{out} contains {content}, which is not overwritten: choose another folder")


def _serving_text(
    source: Source, folder: Path, chosen: Format, options: ExportOptions, name: str, findings: list[str]
) -> str:
    """Render SERVING.md for an export in `folder`, whose final name is `name`. `findings` are the passed checks."""
    named = target_name(source, options)
    target, revision = (None, None) if named is None else split_revision(named)  # engines do not accept a revision
    values = {"form": chosen, "folder": name, "findings": findings, "target": target, "revision": revision}
    values |= {"tokens": options.speculative_tokens or SPECULATIVE_TOKENS}
    values |= {"proposed": source.manifest.shapes.get("proposed_tokens"), "vocab": source.manifest.vocab_size}
    templates = environment(Path(__file__).with_name("serving"))
    templates.filters["in_json"] = _escape_json
    return templates.get_template(f"{chosen.name}.md.j2").render(values | chosen.values(source, folder, options))


def _escape_json(value: str) -> str:
    """Escape a value for a JSON string that is part of a single-quoted shell argument."""
    return json.dumps(value)[1:-1].replace("'", "\\u0027")
