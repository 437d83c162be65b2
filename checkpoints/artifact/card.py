"""The model card, README.md: what an artifact is, for which target, what it is worth and how that is known.

What the manifest says stands on every card. What is known beside it (a licence, results, names of data sets) is given
as `Evidence`. Words of others are escaped, and folders of the machine that an artifact was made on are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .manifest import Manifest
from .markdown import fenced, head, number, public, python, table, text

_WHAT = {
    "drafter": "a draft model for speculative decoding",
    "heads": "prediction heads on a target's hidden states, for speculative decoding",
    "table": "a bigram table: counts of neighbouring tokens, for pruning and drafting in speculative decoding",
    "target": "a target model for speculative decoding",
}
_TAGS = {"drafter": ["draft-model"], "heads": ["medusa", "prediction-heads"], "table": ["bigram-table"], "target": []}
_MODELS = ("drafter", "target")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_TARGET = "the-target"
_METHODS = {"drafter": "speculative", "heads": "medusa", "table": "bigram"}
_MOST_FILES = 20
_LAST = "The recipe, all versions and the hash of every file are in `artifact.json`."
SERVING_FILE = "SERVING.md"


@dataclass(frozen=True)
class Licence:
    """On what terms a source of the data is known to be."""

    licence: str
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """Rows of an evaluation of this very artifact."""

    rows: list[dict[str, Any]]
    """As `draftsmith evaluate` writes them."""
    machine: Mapping[str, Any]
    target: str
    prompts: int
    source: str
    """Of the prompts."""
    created: str | None
    """When it was measured."""
    certificates: list[dict[str, Any]] = field(default_factory=list)
    """Verdicts of `draftsmith certify` about these methods."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an artifact besides its manifest."""

    licence: str | None = None
    """Of the artifact, where the user says it."""
    base_model: str | None = None
    """A hub id that it is made from or for."""
    datasets: tuple[str, ...] = ()
    """Hub ids of its data."""
    licences: Mapping[str, Licence] = field(default_factory=dict)
    """Of the data, by name of the source."""
    measured: Measured | None = None


def model_card(manifest: Manifest, name: str, evidence: Evidence | None = None) -> str:
    """README.md of an artifact in a folder or repository called `name`."""
    known = evidence or Evidence()
    lines = [*_head(manifest, known), f"# {text(name)}", ""]
    lines += [f"{_introduction(manifest)}", "", *_facts(manifest)]
    lines += _use(manifest, name)
    lines += _measured(known.measured)
    lines += _section("Evaluation", manifest.evaluation or {}, "On held-out text, at the end of training.")
    lines += _data(manifest, evidence)
    lines += _section("Training", _scalars(manifest.training))
    lines += _made(manifest)
    return "\n".join(lines)


def base_model(manifest: Manifest) -> str | None:
    """What on the hub an artifact is made from, else made for, by its name: a folder that lies here is none."""
    source = _dict(manifest.recipe.get("model")).get("source") if manifest.kind == "drafter" else None
    for found in (source, (manifest.target or {}).get("id")):
        name = found.partition("@")[0] if isinstance(found, str) and not Path(found).exists() else ""
        if _HUB_NAME.fullmatch(name):
            return name
    return None


def data_sources(manifest: Manifest) -> list[dict[str, Any]]:
    """The corpora of an artifact: `source` (public name), `hub` (id or corpus; None of files), `files`, counts."""
    found = []
    for part in _parts(manifest.data):
        if isinstance(part.get("source"), dict):
            found += _sources_of(part["source"], _list(_dict(part.get("corpus")).get("sources")))
    return found


def _parts(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What merged tables were merged of; otherwise the data itself."""
    inner = [part for part in _list(data.get("parts")) if isinstance(part, dict)]
    return [each for part in inner for each in _parts(part)] if inner else [data]


def _sources_of(identity: Mapping[str, Any], counts: list[Any]) -> list[dict[str, Any]]:
    options = _dict(identity.get("options"))
    named = [_dict(part) for part in _list(options.get("mixture"))] or [options]
    hashed = _list(identity.get("sources"))
    found = []
    for place, part in enumerate(named):
        source, hashes = str(part.get("source")), _dict(hashed[place]) if place < len(hashed) else {}
        is_local = "files" in hashes and not part.get("path")
        count = _dict(counts[place]) if place < len(counts) else {}
        about = {"source": Path(source).name if is_local else source, "hub": None if is_local else source}
        found.append(about | {"files": _dict(hashes.get("files")), "weight": part.get("weight")})
        found[-1] |= {key: count.get(key) for key in ("rows", "kept", "dropped")}
    return found


def _head(manifest: Manifest, known: Evidence) -> list[str]:
    is_model = manifest.kind in _MODELS and (manifest.export is None or manifest.export.get("native"))
    base = known.base_model
    made_from = _dict(manifest.recipe.get("model")).get("source")
    relation = {"heads": "adapter"}.get(manifest.kind, "finetune" if base == made_from else None)
    return head(
        {
            "library_name": "transformers" if is_model else "draftsmith",
            "pipeline_tag": "text-generation" if manifest.kind in _MODELS else None,
            "license": known.licence,
            "base_model": base,
            "base_model_relation": relation if base else None,
            "datasets": list(known.datasets),
            "tags": ["speculative-decoding", "draftsmith", *_TAGS[manifest.kind]],
        }
    )


def _introduction(manifest: Manifest) -> str:
    made = f"made with draftsmith {text(manifest.versions.get('draftsmith'))}"
    if manifest.export is None:
        return f"This is {_WHAT[manifest.kind]}, {made}."
    form, readers = (text(manifest.export.get(key)) for key in ("format", "readers"))
    return f"This is {_WHAT[manifest.kind]}, in the form {form} for {readers}, {made}."


def _facts(manifest: Manifest) -> list[str]:
    facts: dict[str, Any] = {"vocabulary": f"{manifest.vocab_size:,} tokens"} | _scalars(manifest.shapes)
    facts.pop("vocab_size", None)
    target = manifest.target or {}
    facts |= {"made for": target.get("id"), "its revision": target.get("revision")}
    facts |= {"its fingerprint": target.get("fingerprint"), "tokenizer fingerprint": manifest.tokenizer_fingerprint}
    return _items({key: value for key, value in facts.items() if value is not None})


def _use(manifest: Manifest, name: str) -> list[str]:
    serving = [f"How to serve it stands in [{SERVING_FILE}]({SERVING_FILE}).", ""]
    if manifest.export is not None and not manifest.export.get("native"):
        return ["## Use", "", *serving]
    lines, place = ["## Use", ""], name
    if _HUB_NAME.fullmatch(name) and manifest.kind not in _MODELS:
        place = name.partition("/")[2]
        lines += [*fenced(f"draftsmith pull {name} {place}", "sh"), ""]
    lines += [*fenced("\n".join(_code(manifest, place)), "python"), ""]
    if manifest.kind == "drafter":
        lines += ["transformers alone takes it as `assistant_model` of `generate`.", ""]
    return lines + (serving if manifest.export is not None else [])


def _code(manifest: Manifest, name: str) -> list[str]:
    """Lines of Python that decode with it."""
    loaded = python(name)
    target = loaded if manifest.kind == "target" else _target(manifest.target or {})
    loader = "AutoModelForSeq2SeqLM" if _is_encoder_decoder(manifest) else "AutoModelForCausalLM"
    lines = [f"from transformers import {loader}, AutoTokenizer", ""]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({target})"]
    lines += [f"model = {loader}.from_pretrained({target})"]
    lines += ['inputs = tokenizer("What is a hash table?", return_tensors="pt")']
    given = ""
    if manifest.kind != "target":
        lines.insert(0, "from draftsmith.decode import method")
        drafting = f'method("{_METHODS[manifest.kind]}", {manifest.kind}={loaded})'
        lines.append(f"drafting = {drafting}")
        given = "custom_generate=drafting, "
    lines.append(f"output = model.generate(**inputs, {given}max_new_tokens=64)")
    return [*lines, "print(tokenizer.decode(output[0]))"]


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


def _measured(found: Measured | None) -> list[str]:
    """What was measured of it, with intervals; nothing where nothing was."""
    if found is None:
        return []
    machine = found.machine
    where = f"{text(machine.get('name'))} ({text(machine.get('device'))}, {number(machine.get('threads'))} threads)"
    when = f", {text(found.created)}" if found.created else ""
    asked = f"{found.prompts:,} prompts of {text(found.source)}, with the target {text(found.target)}"
    lines = ["## Measured", "", f"{asked}, on {where}{when}.", ""]
    rows = [
        [
            text(row["label"]),
            number(row["temperature"]),
            _with_interval(row["tokens_per_step"], row["tokens_per_step_interval"]),
            "–" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}",
            _with_interval(row["speedup"], row["speedup_interval"]),
            number(row["tokens_per_second"]),
            "yes" if row["lossless"] else "no",
        ]
        for row in found.rows
    ]
    headings = ("method", "temperature", "tokens a step", "accepted", "speed-up", "tokens a second", "lossless")
    lines += table(headings, rows)
    lines += ["In brackets: 95 % intervals over prompts. Speed-up is over plain decoding by the same engine.", ""]
    lines += ["Library versions: " + _versions(machine.get("versions") or {}) + ".", ""]
    if found.certificates:
        verdicts = [[text(one["label"]), text(one["verdict"]), number(one["tokens"])] for one in found.certificates]
        lines += ["### Losslessness, tested", "", *table(("method", "verdict", "tokens judged"), verdicts)]
    return lines


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if interval is None else f"{value:.2f} ({interval[0]:.2f}–{interval[1]:.2f})"


def _data(manifest: Manifest, known: Evidence | None) -> list[str]:
    """Sources with their counts, hashes and known licences; whether evaluation texts were looked for among them."""
    if not manifest.data:
        return []
    digests = manifest.data.get("sha256")
    hashed = digests if isinstance(digests, dict) else {"data": digests}
    sums = {f"sha256 of {name}": digest for name, digest in hashed.items() if isinstance(digest, str)}
    lines = ["## Data", "", *_items(_scalars(manifest.data) | sums)]
    rows, hashes = [], []
    for found in data_sources(manifest):
        counts = ["–" if found[key] is None else number(found[key]) for key in ("rows", "kept", "weight")]
        rows.append([text(found["source"]), *counts, *([] if known is None else [_terms(known, found["source"])])])
        hashes += [f"- {text(name)}: sha256 {text(digest)}" for name, digest in sorted(found["files"].items())]
    if rows:
        lines += table(("source", "rows", "kept", "weight", "licence")[: len(rows[0])], rows)
    if hashes:
        more = [f"- and {len(hashes) - _MOST_FILES:,} more files"] if len(hashes) > _MOST_FILES else []
        lines += [*hashes[:_MOST_FILES], *more, ""]
    return [*lines, _contamination(manifest.data), ""]


def _terms(known: Evidence, source: str) -> str:
    terms = known.licences.get(source, Licence("unknown"))
    return f"{text(terms.licence)} ({text(terms.note)})" if terms.note else text(terms.licence)


def _contamination(data: Mapping[str, Any]) -> str:
    parts, sets = _parts(data), set()
    dropped: list[int | None] = []
    for part in parts:
        names = _list(_dict(_dict(part.get("source")).get("cleaning")).get("contamination"))
        if names:
            sets |= set(map(str, names))
            report = _dict(_dict(part.get("corpus")).get("dropped"))
            count = report.get("contamination", 0) if "corpus" in part and part["corpus"] is not None else None
            dropped.append(count if isinstance(count, int) else None)
    if not dropped:
        return "Contamination with evaluation texts was not checked."
    some = "" if len(dropped) == len(parts) else f" in {len(dropped)} of {len(parts)} parts"
    named = ", ".join(map(text, sorted(sets)))
    if None in dropped:
        return f"Contamination was checked{some}: rows with texts of {named} were dropped, how many was not counted."
    total = sum(count for count in dropped if count is not None)
    return f"Contamination was checked{some}: {total:,} rows with texts of {named} were dropped."


def _made(manifest: Manifest) -> list[str]:
    """When, with which command and which libraries."""
    lines = ["## How it was made", ""]
    if manifest.command:
        lines += [*fenced(public(" ".join(manifest.command.split())), "sh"), ""]
    when = [f"Written on {text(manifest.created)}."] if manifest.created else []
    return [*lines, *when, f"Library versions: {_versions(manifest.versions)}.", "", _LAST, ""]


def _versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{text(name)} {text(version)}" for name, version in versions.items() if version is not None)


def _dict(value: Any) -> dict[str, Any]:
    """A value of somebody's `artifact.json` if it is a dictionary; the schema says no more than that it is JSON."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    """The same of a list."""
    return value if isinstance(value, list) else []


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float)) and "sha256" not in key}


def _section(heading: str, values: Mapping[str, Any], words: str = "") -> list[str]:
    listed = _items(_scalars(values))
    return [f"## {heading}", "", *([words, ""] if words else []), *listed] if listed else []


def _items(values: Mapping[str, Any]) -> list[str]:
    rows = [f"- {text(key.replace('_', ' '))}: {number(value)}" for key, value in values.items()]
    return [*rows, ""] if rows else []
