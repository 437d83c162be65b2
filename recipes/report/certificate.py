"""Certificates of losslessness (`draftsmith certify`) as files, and as a section of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table as RichTable

from ...checkpoints.artifact.fingerprints import source_hash
from ...checkpoints.storage.safe_read import read_document
from .tables import DASH, Cell, Column, Table, number_cell, render

if TYPE_CHECKING:  # a report is made without the libraries that decode
    from ...decode.evaluation.certify.certify import Certificate

SCHEMA = 1
KIND = "certificate"
SOURCES = ("target", "drafter", "heads", "table")
COLUMNS = (
    Column("method", numeric=False),
    Column("T"),
    Column("verdict"),
    Column("tokens", "judged"),
    Column("faults"),
    Column("near-ties"),
    Column("smallest p"),
    Column("bias found", "with 99 %, %"),
)


def certificate_beside(results: Path) -> Path:
    """Where the certificate of an evaluation lies: `certificate.json` beside `results.json`."""
    if results.stem == "results":
        return results.with_name("certificate.json")
    return results.with_name(f"{results.stem}.certificate.json")


def load_certificate(path: Path) -> dict[str, Any]:
    """A certificate that `draftsmith certify` wrote.

    Raises:
        ValueError: it is none, or a newer one, naming the file.
    """
    return read_document(path, "certificate", "draftsmith certify", SCHEMA, _is_certificate)


def _is_certificate(certificate: Any) -> bool:
    known = certificate["kind"] == KIND and certificate["schema"] == SCHEMA
    known = known and isinstance(certificate["complete"], bool)
    for one in certificate["certificates"]:
        known = known and isinstance(one["label"], str) and isinstance(one["verdict"], str)
        known = known and all(math.isfinite(one[key]) for key in ("tokens", "faults", "near_ties"))
        known = known and all(math.isfinite(test["p_value"]) for test in one["tests"])
        known = known and math.isfinite(one["power"]["found_99"]) and one["sampling"]["temperature"] >= 0
    for one in certificate["artifacts"].values():
        known = known and isinstance(one["source"], str) and isinstance(one["hash"], str | None)
    return bool(known)


def certificate_section(certificate: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The certificate as HTML.

    Args:
        certificate: a certificate (see `load_certificate`).
        recipe: of the evaluation that it lies beside: other artifacts or another type are noted, and artifacts that
            changed since they were certified.
    """
    theirs = certificate.get("recipe") or {}
    other = [name for name in SOURCES if theirs.get(name) != recipe.get(name)]
    notes = []
    if other:
        named = "; ".join(f"{name} {theirs.get(name)}, here {recipe.get(name)}" for name in other)
        notes.append(f"This certificate is of other artifacts than the results: {named}.")
    types = [each.get("dtype") for each in (theirs, recipe)]
    if None not in types and types[0] != types[1]:
        notes.append(f"This certificate is of another type of weights than the results: {types[0]}, here {types[1]}.")
    changed = []
    for name, one in certificate["artifacts"].items():
        now = source_hash(one["source"], weights_alone=name == "target")  # what is not here cannot have changed
        if None not in (now, one["hash"]) and now != one["hash"]:
            changed.append(f"{name} {one['source']}")
    if changed:
        notes.append(f"This certificate is stale: changed since it was made: {', '.join(changed)}. Certify again.")
    if not certificate["complete"]:
        notes.append("The certificate is not complete: certifying was stopped before all methods were judged.")
    table = Table("Certificates", COLUMNS, [_cells(one) for one in certificate["certificates"]])
    return render("certificate.html", notes=notes, table=table)


def _cells(one: Mapping[str, Any]) -> list[Cell]:
    smallest = min((test["p_value"] for test in one["tests"]), default=None)
    temperature = one["sampling"]["temperature"]
    return [
        Cell(one["label"]),
        Cell(f"{temperature:g}", temperature),
        Cell(one["verdict"], float(one["verdict"] == "lossless")),
        *(number_cell(one[key], 0) for key in ("tokens", "faults", "near_ties")),
        Cell(DASH if smallest is None else f"{smallest:.1g}", smallest),
        number_cell(100 * one["power"]["found_99"], 1),
    ]


def certificates_table(title: str, certificates: Sequence[Certificate]) -> RichTable:
    """A row a method, for the terminal."""
    table = RichTable(title=escape(title), title_justify="left")
    table.add_column("method", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for name in ("tokens", "faults", "near-ties", "smallest p", "bias", "found (99 %)", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in certificates:
        smallest = min((test["p_value"] for test in one.tests), default=None)
        interval = one.bias["interval"]
        reach = "" if interval is None else f" ± {50 * (interval[1] - interval[0]):.1f}"
        counts = (f"{one.tokens:,}", str(one.faults), str(one.near_ties))
        shares = (f"{100 * one.bias['estimate']:.1f}{reach} %", f"{100 * one.power['found_99']:.1f} %")
        p_value = DASH if smallest is None else f"{smallest:.1g}"
        table.add_row(escape(one.label), one.verdict, *counts, p_value, *shares, f"{one.seconds:.0f} s")
    return table


def explanations(certificates: Sequence[Certificate]) -> list[str]:
    """What the table cannot show: what failed and where, what a near-tie is, at which level the tests were made."""
    lines = []
    for certificate in certificates:
        if not certificate.failed:
            continue
        wrong = [finding for finding in certificate.findings if finding.kind not in ("near-tie", "edge")]
        for finding in wrong[:3]:
            lines.append(
                f"error: {certificate.label}: prompt {finding.prompt}, new token {finding.position}: token "
                f"{finding.token} ({finding.kind}), expected {finding.expected}, logits apart {finding.margin}"
            )
        for test in certificate.tests:
            if test["p_value"] < test["level"]:
                lines.append(
                    f"error: {certificate.label}: the text does not follow the target: {test['test']}, ordered by "
                    f"{test['order']}: p = {test['p_value']:.1g}, below {test['level']:.1g}"
                )
    for sampling, rounding in {json.dumps(one.sampling): one.rounding for one in certificates}.items():
        lines.append(
            f"temperature {json.loads(sampling)['temperature']:g}: forwards of other shapes differ by up to "
            f"{rounding.spread:.2g} in a logit ({rounding.dtype}); a near-tie is a difference of up to "
            f"{rounding.near_tie:.2g}; total variation by rounding {rounding.total_variation:.2g}"
        )
    return lines
