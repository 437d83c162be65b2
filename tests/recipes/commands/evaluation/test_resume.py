"""An evaluation that is killed goes on with the runs that had finished; what belongs to another one is not used."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.decode.evaluation.energy import Energy
from draftsmith.decode.evaluation.measure import Decoded, RunKey
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.journal import RunJournal
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.results import load_results

METHODS: list[dict[str, Any]] = [
    {"method": "autoregressive"},
    {"method": "speculative"},
    {"method": "prompt-lookup"},
]
PROMPTS = 12


@pytest.fixture
def recipe(evaluation: dict[str, Any], tmp_path: Path) -> Path:
    """Twelve prompts of sixty tokens with three methods and transformers: some seconds of work."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(evaluation | {"limit": PROMPTS, "max_new_tokens": 60, "methods": METHODS}))
    return path


def evaluate(recipe: Path, *changes: str) -> None:
    """Run it in this process."""
    loaded = load_recipe(str(recipe), changes)
    assert isinstance(loaded, EvaluateRecipe)
    run_evaluate(loaded)


def identity(recipe: Path, *changes: str) -> dict[str, Any]:
    """What the evaluation calls its own, taken from the journal of one that is stopped before its first run."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[dict[str, Any]] = []

        def noted(out: Path, named: dict[str, Any]) -> None:
            found.append(named)
            raise KeyboardInterrupt

        patch.setattr("draftsmith.recipes.commands.evaluation.evaluate.RunJournal", noted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(recipe, *changes)
    return found[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_evaluation_goes_on(
    recipe: Path, stop: Any, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    out, journal = recipe.parent / "results.json", recipe.parent / "results.json.state" / "runs.jsonl"
    code, errors = stop(journal, 9, number, "evaluate", str(recipe))
    lines = journal.read_text().splitlines()
    assert not out.exists()
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        with journal.open("a") as file:
            file.write(lines[-1][: len(lines[-1]) // 2])  # what a kill in the middle of a write leaves
    else:
        assert code == 128 + number
        assert f"stopped by signal {int(number)}" in errors
        assert "Traceback" not in errors
    kept = [json.loads(line) for line in lines[1:]]
    kept = [row for row in kept if isinstance(row, list)]
    assert 9 <= len(kept) < 4 * PROMPTS
    evaluate(recipe)
    captured = capsys.readouterr()
    assert f"resuming; {len(kept)} runs are finished already" in captured.err
    assert f"{len(kept)} runs were timed by an earlier process" in captured.out
    results = load_results(out)
    assert results["resumed"] == len(kept)
    assert results["errors"] == []
    assert not journal.parent.exists()
    rows = {row["label"]: row for row in results["methods"]}
    assert {label for label, *_ in kept} <= {*rows, "transformers"}
    for label, place, _, ids, _, seconds, _ in kept:
        if label in rows:
            part = rows[label]["by_prompt"][place]
            assert (part["seconds"], part["tokens"]) == (seconds, len(ids))
    assert all(row["identical_to_greedy"] == [PROMPTS, PROMPTS] for row in rows.values())


def test_another_recipe_or_artifact_starts_anew(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("max_new_tokens=8", "limit=2", "compare_with_transformers=false", "methods=[{method: autoregressive}]")
    out, changes = recipe.parent / "results.json", (*few, "seed=3", "show_categories=true")
    others = ((changes, None), ((*changes, "limit=3"), "(limit, prompts read differ)"), (few, "(seed differ"))
    for words, changed in others:
        with RunJournal(out, identity(recipe, *words)) as journal:
            journal.add(RunKey("autoregressive", 0, 0), Decoded([1, 2], Tally(2, 2, 2), 1234.5, 0.0))
        evaluate(recipe, *changes)
        results = load_results(out)
        assert results["resumed"] == (changed is None)
        assert (results["methods"][0]["by_prompt"][0]["seconds"] == 1234.5) == (changed is None)
        assert changed is None or f"runs of another evaluation {changed}" in capsys.readouterr().err
    with RunJournal(out, identity(recipe, *changes)) as journal:
        journal.add(RunKey("autoregressive", 0, 0), Decoded([1, 2], Tally(2, 2, 2), 1234.5, 0.0))
    weights = recipe.parent / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    evaluate(recipe, *changes)
    assert load_results(out)["resumed"] == 0, "the drafter was written anew"
    assert "(artifacts differ)" in capsys.readouterr().err


def runs(count: int) -> list[tuple[RunKey, Decoded]]:
    """Some runs, each another."""
    return [
        (RunKey("a\nb", place, 0), Decoded([place, 7], Tally(2, 1, 5, 1, 2, 1, [1], [place % 2]), 0.1 * place, 0.0))
        for place in range(count)
    ]


def written(folder: Path, count: int = 3, identity: dict[str, Any] | None = None) -> Path:
    """The journal of that many runs."""
    with RunJournal(folder / "results.json", identity or {"seed": 1}) as journal:
        for key, run in runs(count):
            journal.add(key, run)
        return journal.path


def test_the_journal_gives_back_joules(tmp_path: Path) -> None:
    found = {
        "a\nb": Energy("nvml", 2.0, 0.5, None, 120.0, 30.0, 0.1, (1.5, 2.5)),
        "c": Energy("rapl", 2.0, 0.5, 1.25, 120.0, 30.0, 0.1, (2.0,)),
    }
    with RunJournal(tmp_path / "results.json", {"seed": 1}) as journal:
        for (label, energy), (key, run) in zip(found.items(), runs(2), strict=True):
            journal.add(key, run)
            journal.add_energy(label, energy)
    with RunJournal(tmp_path / "results.json", {"seed": 1}) as journal:
        assert (journal.energies, journal.finished) == (found, dict(runs(2)))
    with RunJournal(tmp_path / "results.json", {"seed": 2}) as journal:
        assert journal.energies == {}


def test_half_a_last_line_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for end in range(ends[0], len(whole) + 1, 5):
        path.write_bytes(whole[:end])
        kept = sum(each <= end for each in ends[1:])
        with RunJournal(tmp_path / "results.json", {"seed": 1}) as journal:
            assert journal.finished == dict(runs(kept))
            journal.add(*runs(4)[3])
        with RunJournal(tmp_path / "results.json", {"seed": 1}) as journal:
            assert journal.finished == dict([*runs(kept), runs(4)[3]])


DAMAGES = [b'["a", 0, 0, [1], {"tokens": 1}, 0.1, 0.0]\n', b"\xff\n", b'{"label": "a", "energy": {"joules": 1.0}}\n']


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, damage: bytes) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"runs\.jsonl:3"):
        RunJournal(tmp_path / "results.json", {"seed": 1})
    assert path.read_bytes() == before
    path.write_bytes(b"".join([damage, *lines[1:]]))
    with pytest.raises(ValueError, match=r"runs\.jsonl:1"):
        RunJournal(tmp_path / "results.json", {"seed": 1})


def test_runs_of_something_else_are_dropped_and_the_difference_named(tmp_path: Path) -> None:
    path = written(tmp_path, identity={"seed": 1, "limit": 3, "gone": 0})
    with RunJournal(tmp_path / "results.json", {"seed": 2, "limit": 3, "new": [1]}) as journal:
        assert journal.changed == ["seed", "new", "gone"]
        assert journal.finished == {}
    assert len(path.read_text().splitlines()) == 1


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    with (
        RunJournal(tmp_path / "results.json", {}),
        pytest.raises(ValueError, match=r"results\.json"),
    ):
        RunJournal(tmp_path / "results.json", {})
