"""Output and error messages of `draftsmith export`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.commands import cli as command_line
from draftsmith.recipes.commands.artifacts.export import FORMATS

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command in this process and returns its exit code and output."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["draftsmith", *arguments])
        code: Any = 0
        try:
            command_line.main()
        except SystemExit as ended:
            code = ended.code or 0
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_formats_are_listed(run: Run) -> None:
    code, printed = run("export")
    assert code == 0
    assert all(form in printed for form in FORMATS)
    assert "--speculative-tokens" in "".join(printed.split())


def test_the_default_output_is_a_sibling_of_the_artifact(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_pair / "heads", tmp_path / "heads")
    code, printed = run("export", str(tmp_path / "heads"), "--to", "medusa")
    assert code == 0, printed
    assert "are identical" in printed
    assert "SERVING.md" in printed
    assert json.loads((tmp_path / "heads-medusa" / "config.json").read_text())["medusa_num_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [(["{pair}/heads"], ("--to",)), (["{pair}/drafter", "--to", "transformers", "--target", "a//b"], ("a//b",))],
)
def test_user_errors_are_one_line(
    arguments: list[str], parts: tuple[str, ...], run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    replaced = [argument.replace("{pair}", str(tiny_pair)) for argument in arguments]
    code, printed = run("export", *replaced, "--out", str(tmp_path / "out"))
    assert code == 2, printed
    for part in parts:
        assert part.replace("{pair}", str(tiny_pair)) in "".join(printed.splitlines())
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
