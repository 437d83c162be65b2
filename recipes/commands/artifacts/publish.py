"""Contents of the model card that `draftsmith push` uploads: licences, data sources and evaluation results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.card import Evidence, base_model, data_sources
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.hub.push_pull import is_on_hub
from ....data.sources.registry import find_corpus
from ....decode.methods import METHODS, method_config
from ...report.certificate import KIND, load_certificate
from ...schema.results import derive_path, load_results
from ...session.terminal import log


def evidence_of(
    artifact: Path, manifest: Manifest, licence: str | None = None, results: Path | None = None
) -> Evidence:
    """Collect the content of a model card. Raise ValueError if `results` were measured with other files."""
    licences, datasets = {}, dict[str, None]()
    for source in data_sources(manifest):
        corpus = None if source["hub"] is None else find_corpus(source["hub"])
        if corpus is not None:
            licences[source["source"]] = corpus.licence + (f" ({corpus.note})" if corpus.note else "")
        name = corpus.hub if corpus is not None else source["hub"]
        if name is not None and name.count("/") == 1:
            datasets[name] = None
    base = base_model(manifest)
    if base is not None and not is_on_hub(base):
        log(f"push: the model card does not link to the base model {base}, which is not on the hub")
        base = None
    measured = None if results is None else results_of(artifact, manifest, results)
    return Evidence(licence, base, tuple(datasets), licences, measured)


def results_of(artifact: Path, manifest: Manifest, path: Path) -> dict[str, Any]:
    """Load results, select the baseline and the methods that use an artifact, and add their certificates.

    For an export, the methods that use the original artifact are selected.
    """
    results = load_results(path)
    name = _name_in(results["artifacts"], artifact, manifest, path)
    rows = [row for row in results["methods"] if _is_row_of(row, name)]
    certificates, file = [], derive_path(path, KIND)
    if file.is_file():
        certificate = load_certificate(file)
        if (certificate["artifacts"].get(name) or {}).get("sha256") == results["artifacts"][name]["sha256"]:
            labels = {row["label"] for row in rows}
            certificates = [one for one in certificate["certificates"] if one["label"] in labels]
        else:
            log(f"push: the model card omits {file}, because it is for different files from {path}")
    return {**results, "methods": rows, "certificates": certificates}


def _name_in(evaluated: Mapping[str, Any], artifact: Path, manifest: Manifest, path: Path) -> str:
    """Return the key in `evaluated` of the artifact whose file hashes match the manifest, or raise ValueError."""
    hashes = (manifest.export or {"of": {name: entry["sha256"] for name, entry in manifest.files.items()}})["of"]
    drafting = {name: one for name, one in evaluated.items() if name != "target"}
    for name, one in drafting.items():
        files = one.get("files") or {}
        if files and files == {file: hashes.get(file) for file in files}:
            return str(name)
    named = ", ".join(f"{name} {one.get('source')}" for name, one in drafting.items())
    evaluated_files = f"{path} contains results of {named or 'no artifact'}"
    raise ValueError(f"{evaluated_files}, but the files of {artifact} differ: run `draftsmith evaluate` again")


def _is_row_of(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row of the results is the baseline or uses the artifact `name`."""
    method = row["method"]
    if method == "autoregressive" or method not in METHODS:
        return bool(method == "autoregressive")
    return method == "specinfer" if name.startswith("drafter ") else name in method_config(method, row["options"]).needs
