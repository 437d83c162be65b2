"""What `draftsmith push` puts on a card beside the manifest, and what it shows before it uploads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from ....checkpoints.artifact.card import Evidence, Measured, base_model, data_sources
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.hub.push_pull import Plan, address, is_on_hub
from ....data.sources.registry import find_corpus
from ...report.certificate import KIND, load_certificate
from ...schema.results import beside, load_results
from ...session.terminal import console, log

_CARD = "README.md"
_BASELINE = "autoregressive"


def evidence_of(
    artifact: Path, manifest: Manifest, licence: str | None = None, results: Path | None = None
) -> Evidence:
    """What a card can say besides its manifest: the artifact's licence as the hub names it, those of the data, a model
    on the hub, and results of `draftsmith evaluate`. Raises ValueError: the results are of another artifact."""
    licences, datasets = {}, []
    for found in data_sources(manifest):
        corpus = None if found["hub"] is None else find_corpus(found["hub"])
        if corpus is not None:
            licences[found["source"]] = corpus.licence + (f" ({corpus.note})" if corpus.note else "")
        name = corpus.hub if corpus is not None else found["hub"]
        if name is not None and name.count("/") == 1 and name not in datasets:
            datasets.append(name)
    base = base_model(manifest)
    if base is not None and not is_on_hub(base):
        log(f"push: the hub has no model {base}: the card names it as text")
        base = None
    measured = None if results is None else measured_of(artifact, manifest, results)
    return Evidence(licence, base, tuple(datasets), licences, measured)


def measured_of(artifact: Path, manifest: Manifest, path: Path) -> Measured:
    """The rows of results about this very artifact, or what it is an export of; ValueError for those of other files."""
    results = load_results(path)
    name = _name_in(results.get("artifacts"), artifact, manifest, path)
    rows = [row for row in results["methods"] if _uses(row, name)]
    machine = results["machine"]
    return Measured(
        rows=rows,
        machine=machine | {"versions": {"python": machine.get("python")} | (machine.get("versions") or {})},
        target=str(results["recipe"].get("target")),
        prompts=results["prompts"],
        source=str(results["recipe"].get("prompts")),
        created=results.get("created"),
        certificates=_certificates(path, results["artifacts"][name], name, {row["label"] for row in rows}),
    )


def _name_in(evaluated: Any, artifact: Path, manifest: Manifest, path: Path) -> str:
    """Under which name results have this artifact. Its card may be another than it was: it says nothing of weights."""
    if not isinstance(evaluated, dict):
        raise ValueError(f"{path} does not say of which files it is, as results of older versions: evaluate again")
    mine = (manifest.export or {"of": {name: entry["sha256"] for name, entry in manifest.files.items()}})["of"]
    evaluated = {name: one for name, one in evaluated.items() if name != "target"}  # rows are about what drafts
    for name, one in evaluated.items():
        theirs = one.get("files") or {}
        if theirs and theirs == {file: mine.get(file) for file in theirs}:
            return str(name)
    named = ", ".join(f"{name} {one.get('source')}" for name, one in evaluated.items())
    raise ValueError(f"{path} is not of {artifact} as it is now but of {named or 'nothing'}: evaluate it again")


def _uses(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row is about an artifact that results have under a name, or is what it is compared with."""
    from ....decode.methods import METHODS, method_config

    method = row["method"]
    if method == _BASELINE:
        return True
    if method not in METHODS:
        return False
    return method == "specinfer" if name.startswith("drafter ") else name in method_config(method, row["options"]).needs


def _certificates(path: Path, evaluated: Mapping[str, Any], name: str, labels: set[str]) -> list[dict[str, Any]]:
    """Verdicts of the certificate that lies beside results, where it is of the same files."""
    file = beside(path, KIND)
    if not file.is_file():
        return []
    found = load_certificate(file)
    certified = found["artifacts"].get(name) or {}
    if certified.get("sha256") is None or certified["sha256"] != evaluated.get("sha256"):
        log(f"push: {file} is of other files than {path}: the card leaves it out")
        return []
    return [one for one in found["certificates"] if one["label"] in labels]


def show_plan(plan: Plan) -> None:
    """Print what a push would do."""
    where = f"{address()}/{plan.repo}"
    kind = "private" if plan.private else "public"
    state = "to be made" if plan.parent is None else f"at {plan.parent[:12]}"
    branch = f"branch {plan.branch}" + (", to be begun" if plan.new_branch else "")
    out = console()
    out.print(f"{where} ({kind}, {state}, {branch})", soft_wrap=True)
    files = Table(Column("file", overflow="fold"), Column("bytes", justify="right", no_wrap=True), box=None)
    for name, file in sorted(plan.files.items()):
        files.add_row(name, f"{file.upload_info.size:,}")
    for name in plan.deleted:
        files.add_row(name, "is deleted there")
    out.print(files)
    total = sum(file.upload_info.size for file in plan.files.values())
    out.print(f"{len(plan.files)} files, {total:,} bytes, in one commit: {plan.message}", soft_wrap=True)
    account = "nobody: no token is stored (`hf auth login`)" if plan.account is None else plan.account
    out.print(f"as {account}")
    out.rule(_CARD, align="left")
    out.print(plan.card, soft_wrap=True)
    out.rule()
