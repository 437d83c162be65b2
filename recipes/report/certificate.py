"""Certificates of losslessness (`draftsmith certify`) as files, and as a section of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.artifact.fingerprints import source_hash
from ...checkpoints.storage.safe_read import read_document
from .tables import DASH, Cell, Column, Table, number_cell, render

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


def _is_certificate(told: Any) -> bool:
    known = told["kind"] == KIND and told["schema"] == SCHEMA and isinstance(told["complete"], bool)
    for one in told["certificates"]:
        known = known and isinstance(one["label"], str) and isinstance(one["verdict"], str)
        known = known and all(math.isfinite(one[key]) for key in ("tokens", "faults", "near_ties"))
        known = known and all(math.isfinite(test["p_value"]) for test in one["tests"])
        known = known and math.isfinite(one["power"]["found_99"]) and one["sampling"]["temperature"] >= 0
    for one in told["artifacts"].values():
        known = known and isinstance(one["source"], str) and isinstance(one["hash"], str | None)
    return bool(known)


def changed_since(told: Mapping[str, Any]) -> list[str]:
    """Names of the artifacts whose files are others now than those that were certified, as far as they are here."""
    changed = []
    for name, one in told["artifacts"].items():
        # Of the target the weights were taken, also where it has a manifest.
        now = source_hash(one["source"], weights_alone=name == "target")
        if None not in (now, one["hash"]) and now != one["hash"]:
            changed.append(name)
    return changed


def certificate_section(told: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The certificate as HTML.

    Args:
        told: a certificate (see `load_certificate`).
        recipe: of the evaluation that it lies beside: where it names other artifacts or another type, that is said, and
            where artifacts are others now than were certified.
    """
    theirs = told.get("recipe") or {}
    other = [name for name in SOURCES if theirs.get(name) != recipe.get(name)]
    notes = []
    if other:
        named = "; ".join(f"{name} {theirs.get(name)}, here {recipe.get(name)}" for name in other)
        notes.append(f"This certificate is of other artifacts than the results: {named}.")
    types = [each.get("dtype") for each in (theirs, recipe)]
    if None not in types and types[0] != types[1]:
        notes.append(f"This certificate is of another type of weights than the results: {types[0]}, here {types[1]}.")
    if changed := changed_since(told):
        named = ", ".join(f"{name} {told['artifacts'][name]['source']}" for name in changed)
        notes.append(f"This certificate is stale: changed since it was made: {named}. Certify again.")
    if not told["complete"]:
        notes.append("The certificate is not complete: certifying was stopped before all methods were judged.")
    table = Table("Certificates", COLUMNS, [_cells(one) for one in told["certificates"]])
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
