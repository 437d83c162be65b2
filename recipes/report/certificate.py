"""Certificates of losslessness (`draftsmith certify`) as files, and as a section of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.artifact.model_ref import is_unchanged
from ...checkpoints.storage.safe_read import read_document
from .tables import DASH, Cell, Column, Table, number_cell, render

if TYPE_CHECKING:  # a report is made without the libraries that decode
    from ...decode.evaluation.certify.certify import Certificate

SCHEMA = 1
KIND = "certificate"
VERDICTS = ("not claimed", "lossless", "too little text", "undecided", "not lossless")
"""From best to worst."""
SOURCES = ("target", "drafter", "heads", "table")
_COLUMNS = [
    Column("method", numeric=False), Column("T"), Column("verdict"), Column("tokens", "judged"), Column("faults"),
    Column("near-ties"), Column("smallest p"), Column("bias", "%"), Column("found", "with 99 %, %"),
]  # fmt: skip


def load_certificate(path: Path) -> dict[str, Any]:
    """A certificate that `draftsmith certify` wrote. Raises ValueError: it is none, or a newer one, naming the file."""
    found = read_document(path, SCHEMA, "draftsmith certify")
    if found.get("kind") != KIND:
        raise ValueError(f"{path} is no certificate, its kind is {found.get('kind')!r}")
    return found


def certificate_section(certificate: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The certificate as HTML; noted are artifacts and a type that are not those of the `recipe` which it lies beside,
    and artifacts that changed since they were certified."""
    notes = []
    for name in (*SOURCES, "dtype"):
        theirs, here = ((each or {}).get(name) for each in (certificate.get("recipe"), recipe))
        if theirs != here and not (name == "dtype" and None in (theirs, here)):  # older recipes have none
            notes.append(f"This certificate is of something else than the results: {name} {theirs}, here {here}.")
    for name, one in certificate["artifacts"].items():
        if not is_unchanged(one):
            notes.append(f"This certificate is stale: {name} {one['source']} changed since it was made. Certify again.")
    if not certificate["complete"]:
        notes.append("The certificate is not complete: certifying was stopped before all methods were judged.")
    return render(
        "certificate.html",
        notes=notes,
        table=certificates_table("Certificates", certificate["certificates"], certificate.get("stress", [])),
    )


def certificates_table(
    title: str, certificates: Sequence[Mapping[str, Any]], stress: Sequence[Mapping[str, Any]] = ()
) -> Table:
    """A row a method, and one for all that was tried of a method on the small pair."""
    rows = []
    groups = {one["label"]: [other for other in stress if other["label"] == one["label"]] for one in stress}
    for one in [*map(_merged, groups.values()), *certificates]:
        smallest = min((test["p_value"] for test in one["tests"]), default=None)
        temperature, bias = one["sampling"]["temperature"], one.get("bias") or {}
        interval = bias.get("interval")
        reach = "" if interval is None else f" ± {50 * (interval[1] - interval[0]):.1f}"
        rows.append([
            Cell(one["label"]),
            Cell("all" if temperature is None else f"{temperature:g}", temperature),
            Cell(one["verdict"], float(one["verdict"] == "lossless")),
            *(number_cell(one[key], 0) for key in ("tokens", "faults", "near_ties")),
            Cell(DASH if smallest is None else f"{smallest:.1g}", smallest),
            Cell(f"{100 * bias['estimate']:.1f}{reach}" if bias else DASH, bias.get("estimate")),
            number_cell(100 * one["power"]["found_99"], 1),
        ])  # fmt: skip
    return Table(title, _COLUMNS, rows)


def _merged(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method's certificates on the small pair as one: the worst verdict, the least power."""
    worst = max(group, key=lambda one: VERDICTS.index(one["verdict"]))
    sums = {key: sum(one[key] for one in group) for key in ("tokens", "faults", "near_ties")}
    weakest = max(one["power"]["found_99"] for one in group)
    tests = [test for one in group for test in one["tests"]]
    together = {"sampling": {"temperature": None}, "bias": None, "tests": tests, "power": {"found_99": weakest}}
    return {"label": worst["label"], "verdict": worst["verdict"]} | sums | together


def explanations(certificates: Sequence[Certificate], stress: Sequence[Certificate] = ()) -> list[str]:
    """What the table cannot show: what failed and where, what a near-tie is, at which level the tests were made."""
    lines = []
    for certificate in [*stress, *certificates]:
        found, doubts = certificate.power["found_99"], certificate.verdict == "undecided"
        if doubts or certificate.verdict == "too little text":
            why = "more --tokens, or prompts, would tell" if not doubts else "another seed= would tell"
            lines.append(
                f"{certificate.label}: {certificate.verdict}: of {certificate.power['tokens']:,} tokens a bias of "
                f"{100 * found:.1f} % would be found with 99 % probability, no smaller one; {why}"
            )
        if not certificate.failed:
            continue
        wrong = [finding for finding in certificate.findings if finding.kind not in ("near-tie", "edge")]
        for finding in wrong[:3]:
            lines.append(
                f"error: {certificate.label}: prompt {finding.prompt}, new token {finding.position}: token "
                f"{finding.token} ({finding.kind}), expected {finding.expected}, logits apart {finding.margin}"
            )
        lowest = min((test["p_value"] for test in certificate.tests), default=1.0)
        for test in certificate.tests:
            if test["p_value"] <= (lowest if doubts else test["level"]):
                lines.append(
                    f"error: {certificate.label}: the text does not follow the target: {test['test']}, ordered by "
                    f"{test['order']}: p = {test['p_value']:.1g}; below {test['level']:.1g} is a fault"
                )
    for sampling, rounding in {json.dumps(one.sampling): one.rounding for one in certificates}.items():
        lines.append(
            f"temperature {json.loads(sampling)['temperature']:g}: forwards of other shapes differ by up to "
            f"{rounding.spread:.2g} in a logit ({rounding.dtype}); a near-tie is a difference of up to "
            f"{rounding.near_tie:.2g}; total variation by rounding {rounding.total_variation:.2g}"
        )
    return lines
