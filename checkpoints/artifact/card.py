"""The model card, README.md: what an artifact is, for which target, what it is worth and how that is known.

What the manifest says stands on every card; what is known beside it (a licence, results, names of data sets) is given
as `Evidence`. The text is `card.md.j2`, in which words of others are escaped and folders of this machine left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .manifest import Manifest
from .markdown import environment, line, public, python, text

_WHAT = {
    "drafter": "a draft model for speculative decoding",
    "heads": "prediction heads on a target's hidden states, for speculative decoding",
    "table": "a bigram table: counts of neighbouring tokens, for pruning and drafting in speculative decoding",
    "target": "a target model for speculative decoding",
}
_TAGS = {"drafter": ["draft-model"], "heads": ["medusa", "prediction-heads"], "table": ["bigram-table"], "target": []}
_EAGLE = ["eagle3", "prediction-heads"]
_MODELS = ("drafter", "target")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_TARGET = "the-target"
_METHODS = {"drafter": "speculative", "heads": "medusa", "table": "bigram"}


@dataclass(frozen=True)
class Measured:
    """Rows of an evaluation of this very artifact, as `draftsmith evaluate` writes them, and what they are of."""

    rows: list[dict[str, Any]]
    machine: Mapping[str, Any]
    target: str
    prompts: int
    source: str
    """Of the prompts."""
    created: str | None
    certificates: list[dict[str, Any]] = field(default_factory=list)
    """Verdicts of `draftsmith certify` about these methods."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an artifact besides its manifest."""

    licence: str | None = None
    base_model: str | None = None
    """A hub id that it is made from or for."""
    datasets: tuple[str, ...] = ()
    """Hub ids of its data."""
    licences: Mapping[str, str] = field(default_factory=dict)
    """Of the data, by name of the source."""
    measured: Measured | None = None


def model_card(manifest: Manifest, name: str, evidence: Evidence | None = None) -> str:
    """README.md of an artifact in a folder or repository called `name`."""
    known, sources = evidence or Evidence(), data_sources(manifest)
    pulled = _HUB_NAME.fullmatch(name) is not None and manifest.kind not in _MODELS
    place = name.partition("/")[2] if pulled else name
    digests = manifest.data.get("sha256")
    hashed = digests if isinstance(digests, dict) else {"data": digests}
    sums = {f"sha256 of {part}": digest for part, digest in hashed.items() if isinstance(digest, str)}
    values = {
        "head": _head(manifest, known),
        "what": _WHAT[manifest.role],
        "facts": _facts(manifest),
        "export": manifest.export,
        "is_ours": _is_ours(manifest),
        "pulled": pulled,
        "place": place,
        "method": None if _is_eagle(manifest) else _METHODS.get(manifest.role),
        "is_eagle": _is_eagle(manifest),
        "loader": "AutoModelForSeq2SeqLM" if _is_encoder_decoder(manifest) else "AutoModelForCausalLM",
        "target": python(place) if manifest.role == "target" else _target(manifest.target or {}),
        "measured": known.measured,
        "evaluation": _scalars(manifest.evaluation or {}),
        "data": _scalars(manifest.data) | sums,
        "sources": sources,
        "licences": None if evidence is None else evidence.licences,
        "hashes": [pair for found in sources for pair in sorted(found["files"].items())],
        "contamination": _contamination(manifest.data),
        "training": _scalars(manifest.training),
    }
    template = environment(Path(__file__).parent).get_template("card.md.j2")
    return template.render(values, manifest=manifest, name=name)


def base_model(manifest: Manifest) -> str | None:
    """What on the hub an artifact is made from, else made for, by its name: a folder that lies here is none."""
    source = (manifest.recipe.get("model") or {}).get("source") if manifest.kind == "drafter" else None
    for found in (source, (manifest.target or {}).get("id")):
        name = found.partition("@")[0] if isinstance(found, str) and not Path(found).exists() else ""
        if _HUB_NAME.fullmatch(name):
            return name
    return None


def data_sources(manifest: Manifest) -> list[dict[str, Any]]:
    """The corpora of an artifact: `source` (public name), `hub` (id or corpus; None of files), `files`, counts."""
    found = []
    for part in _parts(manifest.data):
        if not (identity := part.get("source")):
            continue
        options, counts = identity.get("options") or {}, (part.get("corpus") or {}).get("sources") or []
        for i, one in enumerate(options.get("mixture") or [options]):
            hashes, count = (each[i] if i < len(each) else {} for each in (identity.get("sources") or [], counts))
            source, is_local = str(one.get("source")), "files" in hashes and not one.get("path")
            about: dict[str, Any] = {
                "source": Path(source).name if is_local else source,
                "hub": None if is_local else source,
            }
            about |= {"files": hashes.get("files") or {}, "weight": one.get("weight")}
            found.append(about | {key: count.get(key) for key in ("rows", "kept")})
    return found


def _parts(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts that a merged table was made of; otherwise the data itself."""
    return [each for part in data["parts"] for each in _parts(part)] if data.get("parts") else [data]


def _is_eagle(manifest: Manifest) -> bool:
    """Whether it is EAGLE-3 heads, which transformers has no use for."""
    return manifest.shapes.get("architecture") == "eagle3"


def _is_ours(manifest: Manifest) -> bool:
    return manifest.export is None or bool(manifest.export.get("native"))


def _head(manifest: Manifest, known: Evidence) -> str:
    """The block of YAML at a card's top; texts are lines, as one of theirs could end it."""
    base, made_from = known.base_model, (manifest.recipe.get("model") or {}).get("source")
    relation = {"heads": "adapter"}.get(manifest.kind, "finetune" if base == made_from else None)
    is_model = manifest.kind in _MODELS
    values = {
        "library_name": "transformers" if is_model and _is_ours(manifest) else "draftsmith",
        "pipeline_tag": "text-generation" if is_model else None,
        "license": known.licence and line(known.licence),
        "base_model": base and line(base),
        "base_model_relation": relation if base else None,
        "datasets": [line(each) for each in known.datasets],
        "tags": ["speculative-decoding", "draftsmith", *(_EAGLE if _is_eagle(manifest) else _TAGS[manifest.role])],
    }
    kept = {key: value for key, value in values.items() if value}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1 << 20)


def _facts(manifest: Manifest) -> dict[str, Any]:
    target = manifest.target or {}
    facts: dict[str, Any] = {"vocabulary": f"{manifest.vocab_size:,} tokens"}
    facts |= _scalars(manifest.shapes)
    facts |= {"made for": target.get("id"), "its revision": target.get("revision")}
    facts |= {"its sha256": target.get("sha256"), "tokenizer fingerprint": manifest.tokenizer_fingerprint}
    return {key: value for key, value in facts.items() if value is not None and key != "vocab_size"}


def _target(known: Mapping[str, Any]) -> str:
    """What transformers is given to load it."""
    name, revision = str(known.get("id", _TARGET)), known.get("revision")
    if revision is None or not _HUB_NAME.fullmatch(name):
        return python(public(name))
    return f"{python(name)}, revision={python(str(revision))}"


def _is_encoder_decoder(manifest: Manifest) -> bool:
    """Whether the target is one, as its drafter is then; by the type that the manifest names, where it is known."""
    from transformers import CONFIG_MAPPING

    kind = manifest.shapes.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    return known and bool(getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))


def _contamination(data: Mapping[str, Any]) -> str:
    """Whether evaluation texts were looked for among the data."""
    parts = _parts(data)
    checked = [part for part in parts if (part.get("source") or {}).get("cleaning", {}).get("contamination")]
    sets = {str(name) for part in checked for name in part["source"]["cleaning"]["contamination"]}
    total = sum((part.get("corpus") or {}).get("dropped", {}).get("contamination", 0) for part in checked)
    if not sets:
        return "Contamination with evaluation texts was not checked."
    some = "" if len(checked) == len(parts) else f" in {len(checked)} of {len(parts)} parts"
    count = f"{total:,} rows" if all(part.get("corpus") is not None for part in checked) else "rows"
    return f"Contamination was checked{some}: {count} with texts of {', '.join(map(text, sorted(sets)))} were dropped."


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float)) and "sha256" not in key}
