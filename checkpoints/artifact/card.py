"""Model card (README.md) of an artifact, rendered with `card.md.j2` from the manifest and `Evidence`.

The template escapes Markdown in all values and removes local paths from them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .manifest import Manifest
from .markdown import environment, line, public, python

_KINDS = {
    "drafter": ("a draft model for speculative decoding", "speculative", ["draft-model"]),
    "heads": ("prediction heads on a target's hidden states", "medusa", ["medusa", "prediction-heads"]),
    "table": ("a bigram table: counts of adjacent token pairs", "bigram", ["bigram-table"]),
    "target": ("a target model for speculative decoding", None, []),
    "dflash": ("a DFlash drafter, which predicts a block of tokens with one forward pass", None, ["dflash"]),
    "dspark": ("a DSpark drafter, which predicts a block of tokens with one forward pass", None, ["dspark"]),
    "eagle3": ("EAGLE-3 heads on a target's hidden states", None, ["eagle3", "prediction-heads"]),
}
"""Description, decoding method and hub tags of each type of artifact."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Evidence:
    """Information for the model card that is not in the manifest."""

    licence: str | None = None
    base_model: str | None = None
    """Hub id of the model that the artifact was derived from or trained for."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the training datasets."""
    licences: Mapping[str, str] = field(default_factory=dict)
    """Mapping from data source to licence."""
    results: Mapping[str, Any] | None = None
    """Results of `draftsmith evaluate`, with the `methods` and `certificates` for this artifact."""


def model_card(manifest: Manifest, name: str, evidence: Evidence | None = None) -> str:
    """Render the README.md of an artifact. `name` is the name of its folder or repository."""
    known = evidence or Evidence()
    architecture = str(manifest.shapes.get("architecture"))
    reads_states = architecture in ("eagle3", "dflash", "dspark")
    is_native = manifest.export is None or bool(manifest.export.get("native"))
    description, method, tags = _KINDS[architecture if reads_states else manifest.role]
    is_model = manifest.kind in ("drafter", "target")
    head = {
        "library_name": "transformers" if is_model and is_native else "draftsmith",
        "pipeline_tag": "text-generation" if is_model else None,
        "license": known.licence and line(known.licence),
        "base_model": known.base_model and line(known.base_model),
        "datasets": [line(each) for each in known.datasets],
        "tags": ["speculative-decoding", "draftsmith", *tags],
    }
    head = {key: value for key, value in head.items() if value}  # single lines, so that no value ends the block
    template = environment(Path(__file__).parent).get_template("card.md.j2")
    return template.render(
        manifest=manifest,
        name=name,
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=1 << 20),
        what=description,
        method=method,
        reads_states=reads_states,
        is_native=is_native,
        loader="AutoModelForSeq2SeqLM" if _is_encoder_decoder(manifest) else "AutoModelForCausalLM",
        target=python(name) if manifest.role == "target" else _target(manifest.target or {}),
        results=known.results,
        sources=data_sources(manifest),
        licences=known.licences,
        cleaning=(manifest.data.get("source") or {}).get("cleaning") or {},
    )


def base_model(manifest: Manifest) -> str | None:
    """Return the hub id of the model that an artifact was derived from or trained for; None if it is a local model."""
    source = (manifest.recipe.get("model") or {}).get("source") if manifest.kind == "drafter" else None
    for source_name in (source, (manifest.target or {}).get("id")):
        name = source_name.partition("@")[0] if isinstance(source_name, str) and not Path(source_name).exists() else ""
        if _HUB_NAME.fullmatch(name):
            return name
    return None


def data_sources(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the name, hub id, files, row count and number of kept rows of each data source, as dictionaries."""
    identity, corpora = manifest.data.get("source") or {}, []
    options, counts = identity.get("options") or {}, (manifest.data.get("corpus") or {}).get("sources") or []
    hashes = identity.get("sources") or []
    for i, one in enumerate(options.get("mixture") or [options]):
        files, count = (each[i] if i < len(each) else {} for each in (hashes, counts))
        source, is_local = str(one.get("source")), "files" in files and not one.get("path")
        name, hub = (Path(source).name, None) if is_local else (source, source)
        about = {"files": files.get("files") or {}, "rows": count.get("rows"), "kept": count.get("kept")}
        corpora.append({"source": name, "hub": hub} | about)
    return corpora if identity else []


def _target(known: Mapping[str, Any]) -> str:
    """Return the `from_pretrained` arguments for a manifest's target entry, as Python code."""
    name, revision = str(known.get("id", "the-target")), known.get("revision")
    if revision is None or not _HUB_NAME.fullmatch(name):
        return python(public(name))
    return f"{python(name)}, revision={python(str(revision))}"


def _is_encoder_decoder(manifest: Manifest) -> bool:
    from transformers import CONFIG_MAPPING

    kind = manifest.shapes.get("model_type")
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
    return is_known and bool(getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))
