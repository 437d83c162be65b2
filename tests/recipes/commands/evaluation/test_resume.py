"""Interrupted evaluations resume with their finished runs, and ignore those of different evaluations."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.recipes.assemble.evaluation import open_case, open_recipe
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.journal import Journal
from draftsmith.recipes.commands.evaluation.tune import run_tune
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.results import load_results
from pydantic import TypeAdapter

METHODS: list[dict[str, Any]] = [{"method": "autoregressive"}, {"method": "speculative"}, {"method": "prompt-lookup"}]
PROMPTS = 12


@pytest.fixture
def recipe(evaluation: dict[str, Any], tmp_path: Path) -> Path:
    """Write a recipe whose evaluation takes some seconds."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(evaluation | {"limit": PROMPTS, "max_new_tokens": 60, "methods": METHODS}))
    return path


def evaluate(recipe: Path, *changes: str) -> None:
    loaded = load_recipe(str(recipe), changes)
    assert isinstance(loaded, EvaluateRecipe)
    run_evaluate(loaded)


def test_a_killed_evaluation_resumes(recipe: Path, stop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, journal = recipe.parent / "results.json", recipe.parent / "results.json.state" / "runs.jsonl"
    code, _ = stop(journal, 9, signal.SIGKILL, "evaluate", str(recipe))
    lines = journal.read_text().splitlines()
    assert (code, out.exists()) == (-signal.SIGKILL, False)
    with journal.open("a") as file:
        file.write(lines[-1][: len(lines[-1]) // 2])  # an incomplete line, as after a kill during a write
    work = dict(json.loads(line) for line in lines[1:])
    finished = {
        tuple(json.loads(name.removeprefix("run"))): run for name, run in work.items() if name.startswith("run ")
    }
    assert 9 <= len(finished) < 4 * PROMPTS
    evaluate(recipe)
    captured = capsys.readouterr()
    assert f"resuming with {len(lines) - 1} finished" in captured.err
    assert f"{len(finished)} runs were completed by an earlier" in captured.out
    results = load_results(out)
    assert results["resumed"] == len(finished)
    assert results["errors"] == []
    assert not journal.parent.exists()
    rows = {row["label"]: row for row in results["methods"]}
    assert {label for label, *_ in finished} <= {*rows, "transformers"}
    for (label, number, _), (ids, _, seconds, _) in finished.items():
        if label in rows:
            part = rows[label]["by_prompt"][number]
            assert (part["seconds"], part["tokens"]) == (seconds, len(ids))
    assert all(row["identical_to_greedy"] == [PROMPTS, PROMPTS] for row in rows.values())


def test_killed_tuning_resumes(recipe: Path, stop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuning is killed in its second round and continues with this round."""
    folder = recipe.parent / "results.tune"
    journal = folder / "round-2.json.state" / "runs.jsonl"
    code, _ = stop(journal, 5, signal.SIGKILL, "tune", str(recipe), "max_new_tokens=16")
    assert (code, (folder / "round-1.json").exists(), (folder / "round-2.json").exists()) == (
        -signal.SIGKILL,
        True,
        False,
    )
    count, first = len(journal.read_text().splitlines()) - 1, (folder / "round-1.json").stat().st_mtime_ns
    loaded = load_recipe(str(recipe), ["max_new_tokens=16"])
    assert isinstance(loaded, EvaluateRecipe)
    results = run_tune(loaded)
    log = capsys.readouterr().err
    assert "round-1.json is finished" in log
    assert f"resuming with {count} finished" in log
    assert (folder / "round-1.json").stat().st_mtime_ns == first
    rows = load_results(folder / "round-2.json")["methods"][1:]
    assert {each.label: each.speedup for each in results} == {row["label"]: row["speedup"] for row in rows}


@pytest.mark.parametrize("command", ["evaluate", "tune"])
def test_ctrl_c_names_the_command_that_resumes(recipe: Path, stop: Any, command: str) -> None:
    name, lines = {"evaluate": ("results.json.state/runs", 5), "tune": ("results.tune/round-1.json.state/runs", 6)}[
        command
    ]
    typed = (command, str(recipe), "seed=3")
    code, log = stop(recipe.parent / f"{name}.jsonl", lines, signal.SIGINT, *typed)
    assert code == 128 + signal.SIGINT
    assert f"to resume: draftsmith {' '.join(typed)}" in log
    assert "Traceback" not in log


def test_runs_belong_to_a_recipe_and_its_artifacts(recipe: Path) -> None:
    def identity(*changes: str) -> dict[str, Any]:
        loaded = load_recipe(str(recipe), changes)
        assert isinstance(loaded, EvaluateRecipe)
        return open_case(loaded).identity

    first = identity()
    assert identity("energy=off", "energy_batches=[1]", "out=other.json") == first
    assert identity("seed=3") == first | {"seed": 3}
    weights = recipe.parent / "drafter" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content)
    assert identity() == first
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert {name for name, value in identity().items() if value != first[name]} == {"hash of the drafter"}


def test_loaded_models_do_not_change_with_their_files(tiny_pair: Path, corpus: Path, tmp_path: Path) -> None:
    pair = shutil.copytree(tiny_pair, tmp_path / "pair")
    names = ("target", "drafter", "heads", "table")
    values = {"prompts": str(corpus / "rows.json"), "methods": [{"method": "autoregressive"}], "device": "cpu"}
    values |= {name: str(pair / name) for name in names}
    case = open_recipe(EvaluateRecipe(kind="evaluate", out=str(tmp_path / "results.json"), **values))
    heads, table = case.parts.heads, case.parts.table
    assert table is not None
    state = {f"model {name}": tensor for name, tensor in case.model.state_dict().items()}
    state |= {f"heads {name}": tensor for name, tensor in heads.state_dict().items()}  # type: ignore[union-attr]
    state |= {f"table {name}": torch.as_tensor(array) for name, array in vars(table).items() if hasattr(array, "shape")}
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert {name.split()[0] for name in state} == {"model", "heads", "table"}
    for name in names:
        for path in (pair / name).glob("*.safetensors"):
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


NUMBER: TypeAdapter[int] = TypeAdapter(int)


def opened(folder: Path, **changes: Any) -> Journal:
    return Journal(folder / "results.json", "runs", {"seed": 1, "limit": 3} | changes)


def journal_file(folder: Path) -> Path:
    """Write a journal with three numbers and return its path."""
    with opened(folder) as journal:
        for number in range(3):
            assert journal(f"number {number}", NUMBER, lambda number=number: number) == number
        return journal.path


def numbers_in(journal: Journal) -> list[int]:
    return [journal.known(f"number {number}", NUMBER) for number in range(4) if f"number {number}" in journal]


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = journal_file(tmp_path)
    whole = path.read_bytes()
    ends = [offset + 1 for offset, byte in enumerate(whole) if byte == 10]
    for end in range(ends[0], len(whole) + 1, 5):
        path.write_bytes(whole[:end])
        count = sum(each <= end for each in ends[1:])
        with opened(tmp_path) as journal:
            assert numbers_in(journal) == list(range(count))
            journal.add("number 3", NUMBER, 3)
        with opened(tmp_path) as journal:
            assert numbers_in(journal) == [*range(count), 3]


@pytest.mark.parametrize(
    ("line", "damage"),
    [(2, b"\xff\n"), (0, b'["a", 0,\n'), (0, b"[1]\n"), (0, b'{"identity": 3}\n'), (1, b"3\n")],
)
def test_a_damaged_line_is_refused(tmp_path: Path, line: int, damage: bytes) -> None:
    path = journal_file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:line], damage, *lines[line + 1 :]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"runs\.jsonl is damaged"):
        opened(tmp_path)
    assert path.read_bytes() == before


def test_a_result_of_another_type_is_refused(tmp_path: Path) -> None:
    journal_file(tmp_path)
    with opened(tmp_path) as journal, pytest.raises(ValueError, match="'number 1' has an unexpected format"):
        journal.known("number 1", TypeAdapter(list[str]))


def test_other_journals_are_dropped_and_the_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal_file(tmp_path)
    with opened(tmp_path, seed=2, other="b") as journal:
        assert numbers_in(journal) == []
    assert "(seed, other differ)" in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 1


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ValueError, match=r"results\.json"):
        opened(tmp_path)
