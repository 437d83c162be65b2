"""Loading and rendering of losslessness certificates (see `draftsmith certify`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.artifact.model_ref import is_unchanged
from ...checkpoints.storage.safe_read import read_document
from .tables import DASH, Cell, Column, Table, number_cell, render

if TYPE_CHECKING:  # Reports do not import the decoding libraries.
    from ...decode.evaluation.certify.certify import Certificate

SCHEMA = 1
KIND = "certificate"
VERDICTS = ("not claimed", "lossless", "too little text", "undecided", "not lossless")
"""Verdicts from best to worst."""
_COLUMNS = [
    Column("method", numeric=False), Column("T"), Column("verdict"), Column("tokens", "judged"), Column("faults"),
    Column("near-ties"), Column("smallest p"), Column("bias", "%"), Column("detectable", "bias, %"),
]  # fmt: skip


def load_certificate(path: Path) -> dict[str, Any]:
    """Load a certificate. Raise ValueError if the file is not a certificate or has a newer schema version."""
    certificate = read_document(path, SCHEMA, "draftsmith certify")
    if certificate.get("kind") != KIND:
        raise ValueError(f"{path} is not a certificate: its kind is {certificate.get('kind')!r}, expected {KIND!r}")
    return certificate


def certificate_section(certificate: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Render a certificate as HTML, with warnings if it is incomplete or does not match the recipe."""
    notes = []
    for name in ("target", "drafter", "heads", "table", "dtype"):
        certified, evaluated = ((each or {}).get(name) for each in (certificate.get("recipe"), recipe))
        if certified != evaluated:
            notes.append(f"This certificate does not match the results: {name} {certified}, expected {evaluated}.")
    for name, one in certificate["artifacts"].items():
        if not is_unchanged(one):
            notes.append(f"This certificate is outdated: {name} {one['source']} changed. Certify again.")
    if not certificate["complete"]:
        notes.append("This certificate is incomplete: certification was stopped before all methods were tested.")
    table = certificates_table("Certificates", certificate["certificates"], certificate["stress"])
    return render("certificate.html", notes=notes, table=table)


def certificates_table(
    title: str, certificates: Sequence[Mapping[str, Any]], stress: Sequence[Mapping[str, Any]]
) -> Table:
    """Return a table of certificates. All certificates of a method on the small test pair share one row."""
    rows = []
    groups = {one["label"]: [other for other in stress if other["label"] == one["label"]] for one in stress}
    for one in [*map(_merge, groups.values()), *certificates]:
        smallest = min((test["p_value"] for test in one["tests"]), default=None)
        temperature, bias = one["sampling"]["temperature"], one["bias"]
        interval = bias.get("interval")
        reach = "" if interval is None else f" ± {50 * (interval[1] - interval[0]):.1f}"
        rows.append([
            Cell(one["label"]),
            Cell("all" if temperature is None else f"{temperature:g}", temperature),
            Cell(one["verdict"], float(one["verdict"] == "lossless")),
            *(number_cell(one[key], 0) for key in ("tokens", "faults", "near_ties")),
            Cell(DASH if smallest is None else f"{smallest:.1g}", smallest),
            Cell(f"{100 * bias['estimate']:.1f}{reach}" if bias else DASH, bias.get("estimate")),
            number_cell(100 * one["power"]["detectable_bias_99"], 1),
        ])  # fmt: skip
    return Table(title, _COLUMNS, rows)


def _merge(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the certificates of a method on the small test pair, with the worst verdict and the lowest power."""
    worst = max(group, key=lambda one: VERDICTS.index(one["verdict"]))
    sums = {key: sum(one[key] for one in group) for key in ("tokens", "faults", "near_ties")}
    merged = {"label": worst["label"], "verdict": worst["verdict"], "sampling": {"temperature": None}, "bias": {}}
    merged["tests"] = [test for one in group for test in one["tests"]]
    return merged | {"power": {"detectable_bias_99": max(one["power"]["detectable_bias_99"] for one in group)}} | sums


def explanations(certificates: Sequence[Certificate], stress: Sequence[Certificate] = ()) -> list[str]:
    """Return lines that explain failed tests, tests with too few tokens, and rounding errors at each temperature."""
    lines = []
    for certificate in [*stress, *certificates]:
        bias, undecided = certificate.power["detectable_bias_99"], certificate.verdict == "undecided"
        if undecided or certificate.verdict == "too little text":
            remedy = "repeat it with another seed" if undecided else "increase --tokens, or the number of prompts"
            lines.append(
                f"{certificate.label}: {certificate.verdict}: {certificate.power['tokens']:,} tokens detect a bias of "
                f"{100 * bias:.1f} % or more with 99 % probability; {remedy}"
            )
        if not certificate.is_suspect:
            continue
        lines += [
            f"error: {certificate.label}: prompt {finding.prompt}, new token {finding.position}: token "
            f"{finding.token} ({finding.kind}), expected {finding.expected}, logit difference {finding.margin}"
            for finding in [each for each in certificate.findings if each.kind not in ("near-tie", "edge")][:3]
        ]
        lowest = min((test["p_value"] for test in certificate.tests), default=1.0)
        lines += [
            f"error: {certificate.label}: the output distribution differs from the target's: {test['test']}, ordered "
            f"by {test['order']}: p = {test['p_value']:.1g} is below {test['level']:.1g}"
            for test in certificate.tests
            if test["p_value"] <= (lowest if undecided else test["level"])
        ]
    for temperature, rounding in {one.sampling["temperature"]: one.rounding for one in certificates}.items():
        lines.append(
            f"temperature {temperature:g}: logits of forward passes with different shapes differ by up to "
            f"{rounding.spread:.2g} ({rounding.dtype}); a near-tie is a difference of up to {rounding.near_tie:.2g}; "
            f"total variation due to rounding: {rounding.total_variation:.2g}"
        )
    return lines
