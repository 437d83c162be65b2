"""`draftsmith push` and `draftsmith import`: dry runs, uploads, and results that belong to other files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact, verify_artifact
from draftsmith.recipes.commands.artifacts.publish import evidence_of, results_of
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe

REPO = "somebody/tiny-drafter"


def run(*arguments: object) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


def make_artifact(folder: Path, seed: int = 0, **extra: bytes) -> Path:
    """Write an artifact with small files."""

    def write(unfinished: Path) -> None:
        (unfinished / "weights.bin").write_bytes(bytes([0, seed]) * 100)
        (unfinished / "few.json").write_text(f'{{"seed": {seed}}}')
        for name, content in extra.items():
            (unfinished / name).write_bytes(content)

    save_artifact(folder, kind="table", write=write, vocab_size=8, tokenizer_fingerprint=None, target=None)
    return folder


@pytest.fixture(scope="module")
def evaluated(tiny_pair: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write results for the drafter and the heads of the tiny pair, with a certificate."""
    folder = tmp_path_factory.mktemp("evaluated")
    recipe = EvaluateRecipe(
        kind="evaluate",
        out=str(folder / "results.json"),
        prompts=str(corpus / "rows.json"),
        template="chatml",
        limit=2,
        max_new_tokens=8,
        device="cpu",
        energy="off",
        methods=[{"method": name} for name in ("autoregressive", "speculative", "medusa")],
        **{name: str(tiny_pair / name) for name in ("target", "drafter", "heads")},
    )
    results = run_evaluate(recipe)
    one = {"label": results["methods"][1]["label"], "verdict": "lossless", "tokens": 5, "faults": 0, "near_ties": 0}
    one |= {"tests": [], "power": {"detectable_bias_99": 0.1}, "sampling": {"temperature": 0.0}}
    certificate = {"schema": 1, "kind": "certificate", "complete": True, "certificates": [one]}
    certificate |= {"artifacts": results["artifacts"], "recipe": {}}
    (folder / "certificate.json").write_text(json.dumps(certificate))
    return folder / "results.json"


def test_a_dry_run_uploads_nothing(
    hub: Any, tiny_pair: Path, evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("push", tiny_pair / "drafter", REPO, "--results", evaluated, "--license", "mit", "--private")
    captured = capsys.readouterr()
    assert hub.repos == {}
    assert not {"create", "preupload", "commit"} & set(hub.requests)
    assert "nothing was uploaded; add --yes to upload" in captured.err
    output = " ".join(captured.out.split())
    size = (tiny_pair / "drafter" / "model.safetensors").stat().st_size
    for part in (f"model.safetensors {size:,}", f"{hub.url}/{REPO} (private, new)"):
        assert part in output
    for part in ("account: somebody", "license: mit", "## Measured", "artifact.json", "lossless"):
        assert part in output
    assert re.search(r"\d+ files, [\d,]+ bytes, in one commit", output)


def test_push_and_import_round_trip(
    hub: Any, tiny_pair: Path, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: ModuleType
) -> None:
    run("push", tiny_pair / "drafter", REPO, "--yes", "--results", evaluated)
    (commit,) = re.findall(rf"files: {hub.url}/{REPO}/commit/(\w+)", "".join(capsys.readouterr().err.split("\n")))
    run("import", f"{REPO}@{commit}", "--out", tmp_path / "out")
    log = capsys.readouterr().err
    assert f"the drafter of {REPO}@{commit} at {commit}" in log
    manifest = verify_artifact(tmp_path / "out", "drafter")
    original = load_manifest(tiny_pair / "drafter")
    assert {name: entry for name, entry in manifest.files.items() if name != "README.md"} == {
        name: entry for name, entry in original.files.items() if name != "README.md"
    }
    card = (tmp_path / "out" / "README.md").read_text()
    rows = json.loads(evaluated.read_text())["methods"]
    assert f"| {rows[1]['label']} | 0 | {rows[1]['tokens_per_step']:.2f}" in card
    assert [row["label"] in card for row in rows] == [True, True, False], "a drafter card has no rows of heads"
    assert "smallest bias detected" in card
    assert str(tiny_pair) not in card
    run("push", tiny_pair / "drafter", REPO, "--yes", "--results", evaluated)
    assert commit in "".join(capsys.readouterr().err.split()), "an unchanged artifact needs no commit"
    run("push", tmp_path / "out", "somebody/elsewhere", "--results", evaluated)  # only the card differs
    assert "## Measured" in capsys.readouterr().out


def test_results_of_other_files_are_refused(hub: Any, tiny_pair: Path, evaluated: Path, tmp_path: Path) -> None:
    pushed, other = tiny_pair / "drafter-stage1", tiny_pair / "drafter"
    with pytest.raises(ValueError, match=rf"{evaluated}.*{other}, .*{pushed} differ: "):
        run("push", pushed, REPO, "--results", evaluated)
    assert hub.requests.count("create") == 0


def test_the_card_of_heads_and_of_an_export(
    tiny_pair: Path, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = load_manifest(tiny_pair / "heads")
    rows = results_of(tiny_pair / "heads", manifest, evaluated)["methods"]
    assert [row["method"] for row in rows] == ["autoregressive", "medusa"]
    hashes = {name: entry["sha256"] for name, entry in manifest.files.items()}
    export = {"format": "x", "readers": "y", "native": False, "of": hashes}
    assert results_of(tmp_path, replace(manifest, export=export, files={}), evaluated)["methods"] == rows
    for name in ("results.json", "certificate.json"):
        shutil.copy(evaluated.with_name(name), tmp_path / name)
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    certificate["artifacts"]["drafter"]["sha256"] = "00"
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    drafter = load_manifest(tiny_pair / "drafter")
    assert results_of(tiny_pair / "drafter", drafter, tmp_path / "results.json")["certificates"] == []
    assert "is for different files from" in capsys.readouterr().err
    assert len(results_of(tiny_pair / "drafter", drafter, evaluated)["certificates"]) == 1


def test_licences_data_sets_and_models_of_the_hub(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = [{"source": name, "weight": 1.0} for name in ("sharegpt-v3", "tatsu-lab/alpaca", "me/own", "vicuna-80")]
    data = {"source": {"options": {"mixture": mixture}, "sources": [{"hub": part["source"]} for part in mixture]}}
    folder = make_artifact(tmp_path / "t")
    manifest = replace(load_manifest(folder), data=data, kind="heads", target={"id": "lmsys/vicuna-7b-v1.3"})
    (folder / "artifact.json").write_text(manifest.to_json())
    known = evidence_of(folder, manifest)
    assert known.datasets == ("anon8231489123/ShareGPT_Vicuna_unfiltered", "tatsu-lab/alpaca", "me/own")
    assert {name: one.partition(" ")[0] for name, one in known.licences.items()} == {
        "sharegpt-v3": "apache-2.0", "tatsu-lab/alpaca": "cc-by-nc-4.0", "vicuna-80": "apache-2.0",
    }  # fmt: skip
    assert known.base_model is None
    assert "the base model lmsys/vicuna-7b-v1.3, which is not on the hub" in capsys.readouterr().err
    hub.repo("lmsys/vicuna-7b-v1.3", {"config.json": b"{}"})
    assert evidence_of(folder, manifest).base_model == "lmsys/vicuna-7b-v1.3"
    run("push", folder, "somebody/heads", "--yes")
    head = yaml.safe_load(hub.repos["somebody/heads"].head()["README.md"].decode().split("---")[1])
    assert head["base_model"] == "lmsys/vicuna-7b-v1.3"
    assert "me/own" in head["datasets"]
