"""`draftsmith artifact` as it is typed, and what artifacts say of the command that made them."""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.recipes.commands.cli import app
from typer.testing import CliRunner, Result


def artifact(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["artifact", *map(str, arguments)])


def test_an_artifact_is_shown(tiny_pair: Path) -> None:
    shown = artifact("show", tiny_pair / "heads").stdout
    manifest = load_manifest(tiny_pair / "heads")
    for part in (
        "heads, 3 files of",
        "320 tokens",
        str(manifest.created),
        *manifest.files,
        *(name for name, version in manifest.versions.items() if version is not None),
    ):
        assert part in shown
    printed = json.loads(artifact("show", tiny_pair / "heads", "--json").stdout)
    assert printed == json.loads((tiny_pair / "heads" / "artifact.json").read_text())


def test_texts_of_others_are_shown_harmlessly(tiny_pair: Path, tmp_path: Path) -> None:
    values = json.loads((tiny_pair / "heads" / "artifact.json").read_text())
    values["command"], values["target"] = "\x1b[2J[bold]rm -rf", {"id": "\u202eevil [link=x]"}
    (tmp_path / "artifact.json").write_text(json.dumps(values))
    done = artifact("show", tmp_path)
    assert done.exit_code == 0
    assert "[bold]rm -rf" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout


def test_artifacts_are_verified_all_of_them(tiny_pair: Path, tmp_path: Path) -> None:
    good = artifact("verify", tiny_pair / "heads", tiny_pair / "table", tiny_pair / "drafter")
    assert good.exit_code == 0
    assert good.stdout.count("nothing wrong") == 3
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for path in (tiny_pair / "table").iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        (tmp_path / name / "extra").write_text("")
    (tmp_path / "one" / "README.md").unlink()
    bad = artifact("verify", tmp_path / "one", tiny_pair / "heads", tmp_path / "two", tmp_path / "three")
    assert bad.exit_code == 1
    assert bad.stdout.count("fault:") == 4
    for part in ("lacks README.md", "holds extra", "nothing wrong", f"no folder {tmp_path / 'three'}"):
        assert part in bad.stdout


def test_a_folder_of_artifacts_names_them(tiny_pair: Path) -> None:
    inside = [str(tiny_pair / name) for name in ("drafter", "drafter-stage1", "heads", "table")]
    verified = artifact("verify", tiny_pair, tiny_pair / "heads")
    assert verified.exit_code == 1
    assert all(path in verified.stdout.replace("\n", "") for path in inside)
    assert verified.stdout.count("nothing wrong") == 1
