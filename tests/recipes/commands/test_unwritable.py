"""Unwritable outputs are reported before any model is loaded.

The parent of each output is a file, which also prevents the root user from writing.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.storage.atomic import atomic_text, check_writable
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.commands.artifacts.imports import import_drafter
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.tune import run_tune
from draftsmith.recipes.commands.pairs.quickstart import run_quickstart
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import DrafterRecipe


def recipe(name: str, *changes: str) -> Any:
    return load_recipe(name, changes)


def prepare(out: str) -> None:
    loaded = recipe("drafter/vicuna-68m", f"data.cache={out}", "data.source=nowhere.json")
    assert isinstance(loaded, DrafterRecipe)
    prepare_data(loaded.data, None)


COMMANDS: dict[str, Callable[[str], Any]] = {
    "evaluate": lambda out: run_evaluate(recipe("evaluate/all-methods", f"out={out}/r.json")),
    "tune": lambda out: run_tune(recipe("evaluate/all-methods", f"out={out}/r.json")),
    "doctor": lambda out: check_pair("a/b", ".", prompts="spec-bench", out=Path(out) / "r.json"),
    "train": lambda out: run_train(recipe("drafter/vicuna-68m", f"out={out}/drafter")),
    "train a table": lambda out: run_train(recipe("table/any-corpus", f"out={out}/table", "tokenizer=a/b")),
    "prepare": prepare,
    "regenerate": lambda out: run_regenerate(recipe("regenerate/vicuna-7b", f"out={out}/answers.jsonl")),
    "quickstart": lambda out: run_quickstart(recipe("quickstart", f"out={out}/quickstart")),
    "import": lambda out: import_drafter("a/b", Path("nowhere"), Path(out) / "drafter", "c/d"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_outputs_are_refused_before_loading(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("")
    with pytest.raises(ValueError, match=r"a-file.*: Not a directory$") as refused:
        COMMANDS[command]("a-file")
    assert "Errno" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


@pytest.mark.parametrize("kind", ["device", "FIFO", "link", "dangling link", "directory"])
def test_results_replace_regular_files_only(kind: str, tmp_path: Path) -> None:
    out, other = tmp_path / "r.json", tmp_path / "other"
    if kind == "device":
        out = Path("/dev/null")
    elif kind == "FIFO":
        os.mkfifo(out)
    elif kind == "directory":
        out.mkdir()
    else:
        out.symlink_to(other)
        if kind == "link":
            other.write_text("kept")
    with pytest.raises(ValueError, match="is not a regular file"):
        run_evaluate(recipe("evaluate/all-methods", f"out={out}"))
    with pytest.raises(ValueError, match="is not a regular file"):
        atomic_text(out, "{}")


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_artifacts_replace_directories_only(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    out.symlink_to(tmp_path / "nowhere") if kind == "dangling link" else out.write_text("")
    with pytest.raises(ValueError, match="is not a directory"):
        run_train(recipe("drafter/vicuna-68m", f"out={out}"))


def test_the_check_of_a_writable_output_leaves_no_files(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "c.json")
    check_writable(tmp_path, folder=True)
    assert list(tmp_path.iterdir()) == []
