"""The small model card that every artifact carries as README.md."""

from __future__ import annotations

from typing import Any

from .manifest import Manifest

_WHAT = {
    "drafter": "a draft model for speculative decoding",
    "heads": "prediction heads on a target's hidden states, for speculative decoding",
    "table": "a bigram table: counts of neighbouring tokens, for pruning and drafting in speculative decoding",
    "target": "a target model for speculative decoding",
}
_USE = {
    "drafter": 'AutoModelForCausalLM.from_pretrained("{name}")',
    "heads": 'draftsmith.checkpoints.heads.load_heads(Path("{name}"))',
    "table": 'draftsmith.checkpoints.table.BigramTable.load(Path("{name}"))',
    "target": 'AutoModelForCausalLM.from_pretrained("{name}")',
}


def model_card(manifest: Manifest, name: str) -> str:
    """README.md of an artifact in a folder called `name`: only what its manifest says."""
    lines = ["---", "library_name: draftsmith", "tags: [speculative-decoding]", "---", "", f"# {name}", ""]
    lines += [f"This folder holds {_WHAT[manifest.kind]}, made with draftsmith {manifest.versions['draftsmith']}.", ""]
    facts: dict[str, Any] = {"vocabulary": f"{manifest.vocab_size:,} tokens"} | _scalars(manifest.shapes)
    facts.pop("vocab_size", None)
    if manifest.target is not None:
        facts["made for"] = manifest.target.get("id")
    if manifest.tokenizer_fingerprint is not None:
        facts["tokenizer fingerprint"] = manifest.tokenizer_fingerprint
    lines += _section("", facts)
    lines += ["Load it with `" + _USE[manifest.kind].format(name=name) + "`.", ""]
    for heading, values in (
        ("Data", manifest.data),
        ("Training", manifest.training),
        ("Evaluation", manifest.evaluation),
    ):
        lines += _section(f"## {heading}", _scalars(values or {}))
    lines += _correlations(manifest.training)
    lines += ["The recipe, all versions and the hash of every file are in `artifact.json`.", ""]
    return "\n".join(lines)


def _correlations(training: dict[str, Any]) -> list[str]:
    """The most extreme correlations of a table, where its report has them."""
    lines: list[str] = []
    for name, key in (("highest", "highest_r"), ("lowest", "lowest_r")):
        pairs = training.get(key) or []
        if pairs:
            lines += [f"## Pairs with the {name} correlation", "", "| left | right | seen | expected | r |"]
            lines += ["|---|---|---|---|---|", *map(_pair_row, pairs), ""]
    return lines


def _pair_row(pair: dict[str, Any]) -> str:
    texts = [str(text).replace("|", "\\|").replace("`", "'") for text in pair.get("texts", ())]
    left, right = (f"`{text}`" for text in texts) if texts else (pair["left"], pair["right"])
    return f"| {left} | {right} | {pair['count']:,} | {pair['expected']:,.1f} | {pair['r']:.4g} |"


def _scalars(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float)) and "sha256" not in key}


def _section(heading: str, values: dict[str, Any]) -> list[str]:
    if not values:
        return []
    rows = [f"- {key.replace('_', ' ')}: {_shown(value)}" for key, value in values.items()]
    return [heading, "", *rows, ""] if heading else [*rows, ""]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else " ".join(str(value).split())
