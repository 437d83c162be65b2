"""`draftsmith export` as it is typed: every format of the embedded pair, what is said, and how it fails."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.recipes.commands import cli as command_line
from draftsmith.recipes.commands.artifacts.export import FORMATS
from transformers import AutoModelForCausalLM


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command line in this process: its exit code, and all that it said."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["draftsmith", *arguments])
        try:
            command_line.main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_formats_are_listed(run: Callable[..., tuple[int, str]]) -> None:
    code, said = run("export")
    assert code == 0
    for form in FORMATS.values():
        assert form.name in said
    assert "--speculative-tokens" in "".join(said.split())


@pytest.mark.parametrize(
    ("artifact", "form", "options"),
    [
        ("drafter", "transformers", ["--target", "{pair}/target", "--speculative-tokens", "3"]),
        ("heads", "medusa", ["--target", "{pair}/target"]),
        ("heads", "medusa-vllm", []),
        ("heads", "medusa-2", ["--target", "{pair}/target"]),
        ("table", "npz", []),
    ],
)
def test_the_pairs_artifacts_are_exported(
    artifact: str, form: str, options: list[str], run: Callable[..., tuple[int, str]], tiny_pair: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = [option.replace("{pair}", str(tiny_pair)) for option in options]
    code, said = run("export", str(tiny_pair / artifact), "--to", form, "--out", str(out), *given)
    assert code == 0, said
    assert "bit by bit" in said or form == "npz"
    assert "SERVING.md" in said
    assert verify_artifact(out).export
    if form == "transformers":
        assert AutoModelForCausalLM.from_pretrained(out).generation_config.num_assistant_tokens == 3


def test_the_folder_lies_beside_the_artifact_by_default(
    run: Callable[..., tuple[int, str]], tiny_pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "heads").mkdir()
    for path in (tiny_pair / "heads").iterdir():
        (tmp_path / "heads" / path.name).write_bytes(path.read_bytes())
    code, said = run("export", str(tmp_path / "heads"), "--to", "medusa")
    assert code == 0, said
    assert json.loads((tmp_path / "heads-medusa" / "config.json").read_text())["medusa_num_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{pair}/heads"], ["say with --to"]),
        (["{pair}/heads", "--to", "meduza"], ["unknown format 'meduza'", "Did you mean 'medusa'?"]),
        (["{pair}/heads", "--to", "medusa", "--merge"], ["has no option --merge/--no-merge"]),
        (["{pair}/heads", "--to", "medusa-pt"], ["add --pickle"]),
        (["{pair}/drafter", "--to", "vllm-sglang", "--target", "{pair}/target"], ["it has no tokenizer"]),
        (["{pair}/drafter", "--to", "gguf"], ["say with --llama-cpp"]),
        (["{pair}/drafter", "--to", "transformers", "--no-merge"], ["--no-merge is for LoRA adapters"]),
        (["{pair}/target", "--to", "transformers"], ["is not an artifact"]),
    ],
)
def test_mistakes_are_one_message(
    arguments: list[str], words: list[str], run: Callable[..., tuple[int, str]], tiny_pair: Path, tmp_path: Path
) -> None:
    given = [argument.replace("{pair}", str(tiny_pair)) for argument in arguments]
    code, said = run("export", *given, "--out", str(tmp_path / "out"))
    assert code == 2, said
    for word in words:
        assert word in " ".join(said.split())
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said(
    run: Callable[..., tuple[int, str]], tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(export_heads, "save_file", full)
    code, said = run("export", str(tiny_pair / "heads"), "--to", "medusa", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "no space left on the disk while writing" in " ".join(said.split())
    assert not list(tmp_path.iterdir())
