"""`draftsmith show`, and `draftsmith doctor ARTIFACT`."""

import json
import shutil
from pathlib import Path

from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.recipes.commands.cli import app
from typer.testing import CliRunner, Result


def draftsmith(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_an_artifact_is_shown(tiny_pair: Path) -> None:
    output = draftsmith("show", tiny_pair / "heads").stdout
    manifest = load_manifest(tiny_pair / "heads")
    for part in (
        "heads, 3 files of",
        "320 tokens",
        str(manifest.created),
        *manifest.files,
        *(name for name, version in manifest.versions.items() if version is not None),
    ):
        assert part in output
    printed = json.loads(draftsmith("show", tiny_pair / "heads", "--json").stdout)
    assert printed == json.loads((tiny_pair / "heads" / "artifact.json").read_text())


def test_control_characters_are_shown_escaped(tiny_pair: Path, tmp_path: Path) -> None:
    values = json.loads((tiny_pair / "heads" / "artifact.json").read_text())
    values["command"], values["target"] = "\x1b[2J[bold]rm -rf", {"id": "\u202eevil [link=x]"}
    (tmp_path / "artifact.json").write_text(json.dumps(values))
    done = draftsmith("show", tmp_path)
    assert done.exit_code == 0
    assert "[bold]rm -rf" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout


def test_the_doctor_verifies_an_artifact(tiny_pair: Path, tmp_path: Path) -> None:
    good = draftsmith("doctor", tiny_pair / "heads")
    assert good.exit_code == 0
    assert "no faults" in good.stdout
    shutil.copytree(tiny_pair / "table", tmp_path / "table")
    (tmp_path / "table" / "extra").write_text("")
    (tmp_path / "table" / "table.safetensors").unlink()
    bad = draftsmith("doctor", tmp_path / "table")
    assert bad.exit_code == 1
    assert bad.stdout.count("fault:") == 2
    for part in ("lacks table.safetensors", "contains extra"):
        assert part in bad.stdout
