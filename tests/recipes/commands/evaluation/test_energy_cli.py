"""Energy measurements of an evaluation with a simulated energy counter of constant power."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.evaluation import energy as counting
from draftsmith.decode.evaluation.energy import Energy, EnergyMeter, batch_row, measure_batches
from draftsmith.decode.evaluation.profile import raw_forward
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.commands.evaluation import evaluate
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import load_results

WATTS, TICK = 20.0, 0.005
EXACT = 1e-12
"""Relative tolerance for rounding errors of the simulated clock."""


@pytest.fixture
def target(stand_ins: Any) -> str:
    """Save a tiny Llama with a tokenizer."""
    return str(stand_ins.target("JackFram/llama-68m"))


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an energy counter of 20 W, with a clock that advances by `TICK` at each reading."""
    now = 0.0

    def clock(seconds: float = TICK) -> float:
        nonlocal now
        now += seconds
        return now

    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    monkeypatch.setattr(counting, "POWERCAP", zone.parent)
    monkeypatch.setattr(counting, "RAPL", dataclasses.replace(counting.RAPL, seconds=0.5, discard=0.02, trials=2))
    monkeypatch.setattr(counting, "RaplCounter", lambda zones: lambda: WATTS * (now + TICK))
    monkeypatch.setattr(counting, "EnergyMeter", partial(EnergyMeter, clock=clock, sleep=clock))
    return zone


def test_joules_are_those_of_one_forward(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, watts = 0.0, WATTS

    def wait(seconds: float) -> torch.Tensor:
        nonlocal now
        now += seconds
        return torch.zeros(1)

    monkeypatch.setattr(counting, "raw_forward", lambda *_, batch, **__: partial(wait, 0.001 * batch))
    timing = dataclasses.replace(counting.RAPL, seconds=0.2, discard=0.02, trials=2)
    meter = EnergyMeter(lambda: watts * now, "rapl", "a counter", timing, clock=lambda: now, sleep=wait)
    model = wrap_model(load_model(target))
    result = measure_batches(model, [8, 2], 3, 4, meter)
    assert (result["source"], result["failure"]) == ("rapl", None)
    assert [row["joules_per_run"] for row in result["rows"]] == pytest.approx([WATTS * 0.002, WATTS * 0.008])
    watts = 0.0
    result = measure_batches(model, [2, 8], 3, 4, meter)
    assert result["source"] is None
    assert "a counter" in result["failure"], "the counter does not advance"
    assert [row["joules_per_run"] for row in result["rows"]] == [None, None]


def test_rows_have_values_per_run_and_per_input() -> None:
    energy = Energy("nvml", 12.0, 0.5, 9.0, 120.0, 30.0, 0.1, [11.5, 12.5])
    row = batch_row(4, [1.0, 2.0, 3.0], energy)
    assert (row["seconds_per_run"], row["seconds_per_input"]) == (2.0, 0.5)
    assert (row["joules_per_run"], row["joules_per_input"]) == (12.0, 3.0)
    assert row["errors"] == {"seconds_per_run": pytest.approx(3**-0.5), "joules_per_run": 0.5}


@pytest.mark.parametrize("name", ["JackFram/llama-68m", "google-t5/t5-small", "facebook/opt-125m"])
@torch.inference_mode()
def test_a_batched_forward_with_a_filled_cache_equals_the_model(stand_ins: Any, name: str) -> None:
    """The logits of each row equal those of the model without a cache."""
    model = load_model(str(stand_ins.target(name)))
    scorer = wrap_model(model)
    logits_BMV = raw_forward(scorer, 1, 7, batch=3, seed=5, fill_cache=True)()
    assert logits_BMV.shape == (3, 1, scorer.vocab_size)
    tokens_BT = torch.randint(scorer.vocab_size, (3, 8), generator=torch.Generator().manual_seed(5))
    if model.config.is_encoder_decoder:
        expected = model(input_ids=tokens_BT[:, :7], decoder_input_ids=tokens_BT).logits
    else:
        expected = model(tokens_BT).logits
    torch.testing.assert_close(logits_BMV[:, 0], expected[:, -1], atol=1e-4, rtol=1e-3)


@pytest.fixture
def recipe(target: str, stand_ins: Any, tmp_path: Path) -> dict[str, Any]:
    """Return a recipe with two rows and two prompts."""
    options = {"prompts": str(stand_ins.rows), "template": "chatml", "limit": 2, "max_new_tokens": 5, "device": "cpu"}
    rows = [{"method": "autoregressive"}, {"method": "autoregressive", "temperature": 1.0}]
    return {"kind": "evaluate", "out": str(tmp_path / "results.json"), "target": target, "methods": rows} | options


def test_energy_by_batch_is_a_section_of_the_results(
    counter: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"energy_batches": [8, 1], "energy_runs": 2, "energy_context": 4, "energy": "off"}
    evaluation = EvaluateRecipe(**recipe | sizes)
    run_evaluate(evaluation)
    energy = load_results(recipe["out"])["energy_by_batch"]
    assert "batch 8" in capsys.readouterr().out
    assert "batch 8" in Path(recipe["out"]).with_name("report.html").read_text()
    assert (energy["source"], energy["covers"]) == ("rapl", "processor packages (1)")
    assert energy["idle_watts"] == pytest.approx(WATTS, rel=EXACT)
    assert [row["label"] for row in energy["rows"]] == ["batch 1", "batch 8"]
    for row in energy["rows"]:
        assert row["watts"] == pytest.approx(WATTS, rel=EXACT)
        assert row["errors"]["seconds_per_run"] > 0

    model = wrap_model(load_model(recipe["target"]))
    with pytest.raises(ValueError, match=r"energy_context` must be below 512"):
        evaluate.measure_energy(model, evaluation.model_copy(update={"energy_context": 512}))


def test_an_evaluation_has_joules_if_there_is_an_energy_counter(
    counter: Path, recipe: dict[str, Any], interrupted_when: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an interruption, the evaluation does not repeat the energy measurement of the first row."""
    out = Path(recipe["out"])
    journal = out.with_name("results.json.state") / "runs.jsonl"
    with interrupted_when(lambda: journal.is_file() and '"joules of ' in journal.read_text()):
        run_evaluate(EvaluateRecipe(**recipe))
    assert "(rapl); skip it with `energy: off`" in capsys.readouterr().err
    work = dict(map(json.loads, journal.read_text().splitlines()[1:]))
    (measured,) = [name for name in work if name.startswith("joules of ")]
    run_evaluate(EvaluateRecipe(**recipe))
    rows = {row["label"]: row for row in load_results(out)["methods"]}
    assert rows[measured.removeprefix("joules of ")]["energy"] == work[measured]
    for row in rows.values():
        assert row["energy_source"] == "rapl"
        assert row["energy"]["watts"] == pytest.approx(WATTS, rel=EXACT)
        assert row["joules_per_token"] == row["energy"]["joules"] > 0
    capsys.readouterr()
    run_evaluate(EvaluateRecipe(**recipe, energy="off"))
    assert "joules" not in capsys.readouterr().err
    (counter / "name").write_text("core\n")
    run_evaluate(EvaluateRecipe(**recipe))
    assert "evaluate: energy is not measured: the processor has no energy counter (RAPL)" in capsys.readouterr().err
    for row in load_results(out)["methods"]:
        assert row["joules_per_token"] is row["energy_source"] is row["energy"] is None
