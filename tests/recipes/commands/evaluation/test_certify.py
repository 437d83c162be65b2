"""`draftsmith certify`: certificates of recipes and artifacts, and exit codes."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.decode.evaluation.certify.stress import CHECKS
from draftsmith.decode.verifiers import lossless as verifiers
from draftsmith.recipes.commands.cli import app
from typer.testing import CliRunner

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(evaluation: dict[str, Any], tmp_path: Path) -> Path:
    """Return a recipe with greedy rows, sampled rows, and a lossy row."""
    options = {"gamma": 2}
    methods: list[dict[str, Any]] = [
        {"method": "autoregressive"},
        {"method": "speculative", "options": options},
        {"method": "bild"},
        {"method": "autoregressive", "temperature": 1},
        {"method": "speculative", "options": options, "temperature": 1},
    ]
    path = tmp_path / "evaluate.yaml"
    path.write_text(yaml.safe_dump(evaluation | {"methods": methods}))
    return path


def test_a_certificate_of_a_recipe(recipe: Path, cli: Command) -> None:
    done = cli("certify", str(recipe), "--tokens", "2500", "--batch", "4")
    assert done.returncode == 0, done.stderr
    for word in ("speculative T=1", "lossless", "not claimed", "a near-tie is a difference of up", "certificate.json"):
        assert word in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 120
    written = json.loads((recipe.parent / "certificate.json").read_text())
    assert (written["schema"], written["kind"], written["complete"]) == (1, "certificate", True)
    assert written["not_lossless"] == []
    assert set(written["artifacts"]) == {"target", "drafter"}
    assert all(len(artifact["sha256"]) == 64 for artifact in written["artifacts"].values())
    assert written["machine"]["device"] == "cpu"
    rows = {row["label"]: row for row in written["certificates"]}
    assert list(rows) == ["autoregressive", "speculative", "bild", "autoregressive T=1", "speculative T=1"]
    assert [row["verdict"] for row in rows.values()] == ["lossless", "lossless", "not claimed", "lossless", "lossless"]
    assert rows["speculative T=1"]["tokens"] >= 2500
    small = [(row["label"], row["sampling"]["temperature"], row["verdict"]) for row in written["stress"]]
    names = [f"{name}, small pair" for name in ("autoregressive", "speculative")]
    labels = [label for label, *_ in small]
    assert list(dict.fromkeys(labels)) == names, "each lossless method is tested once, for all temperatures"
    assert labels.count(names[0]) <= labels.count(names[1]) <= len(CHECKS)
    assert {verdict for *_, verdict in small} == {"lossless"}
    assert {temperature for _, temperature, _ in small} >= {0, 0.8, 1, 1.2}
    assert rows["speculative T=1"]["batch"] == 4
    assert rows["speculative T=1"]["level"] == pytest.approx(1e-6 / 8)
    assert rows["speculative"]["tokens"] == rows["autoregressive"]["tokens"] <= 4 * 24


def certified(recipe: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command in this process; return exit code, standard error, and the certificate without run times."""
    result = CliRunner().invoke(app, ["certify", str(recipe), "--batch", "4", *arguments])
    written = json.loads((recipe.parent / "certificate.json").read_text())
    for row in written["stress"] + written["certificates"]:
        assert row.pop("seconds") > 0
    return result.exit_code, result.stderr, written


def test_a_method_that_is_not_lossless_exits_with_1(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "residual", lambda target_BV, draft_BV: target_BV)
    rows = "methods=[{method: autoregressive}, {method: speculative}]"
    code, _, written = certified(recipe, "--tokens", "4000", "--batch", "16", rows, "temperature=1")
    assert code == 1
    assert written["not_lossless"][-1] == "speculative"
    assert "speculative, small pair" in written["not_lossless"]
    assert [row["sampling"]["temperature"] for row in written["certificates"]] == [1, 1]


def test_equal_rows_are_certified_once(recipe: Path) -> None:
    rows = "methods=[{method: autoregressive}, {method: speculative}, {method: speculative, label: again}]"
    code, _, written = certified(recipe, "--tokens", "20", rows)
    assert (code, written["complete"]) == (0, True)
    labels = ["autoregressive", "speculative", "autoregressive T=1", "speculative T=1"]
    assert [row["label"] for row in written["certificates"]] == labels, "greedy and sampled rows"
    few = {
        (row["verdict"], row["power"]["detectable_bias_99"] > 0.1)
        for row in written["stress"] + written["certificates"]
    }
    assert few == {("lossless", False), ("too little text", True)}


@pytest.mark.slow
def test_a_stopped_certificate_resumes(recipe: Path, stop: Any) -> None:
    """The certificate after SIGKILL and Ctrl-C equals that of an uninterrupted run."""
    path = recipe.parent / "certificate.json"
    options = ("--tokens", "600")
    code, _, whole = certified(recipe, *options)
    assert code == 0
    path.unlink()
    journal, lines = path.with_name("certificate.json.state") / "texts.jsonl", 0
    for number, more in ((signal.SIGKILL, 6), (signal.SIGINT, 4)):
        code, output = stop(journal, lines + more, number, "certify", str(recipe), "--batch", "4", *options)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        journal_lines, lines = journal.read_text().splitlines(), journal.read_text().count("\n")
        assert ("resuming with " in output) == (number == signal.SIGINT)
    assert "certify: stopped by signal 2" in output
    assert not json.loads(path.read_text())["complete"]
    texts, written = len(journal_lines[1:lines]), journal.read_bytes()
    code, output, _ = certified(recipe, "--tokens", "60", "methods=[{method: autoregressive}]")
    assert code == 0
    assert "(methods, plan differ)" in output, "texts of another certificate are not used"
    journal.parent.mkdir()
    journal.write_bytes(written.splitlines(keepends=True)[0] + b'["autoregressive", 7]\n["too", "many", 3]\n')
    result = CliRunner().invoke(app, ["certify", str(recipe), "--batch", "4", *options])
    assert isinstance(result.exception, ValueError)
    assert "texts.jsonl is damaged" in str(result.exception)
    journal.write_bytes(written)
    code, output, again = certified(recipe, *options)
    assert code == 0
    assert f"resuming with {texts} finished" in output
    assert again == whole
    assert not journal.parent.exists()
