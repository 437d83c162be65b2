"""`draftsmith energy`, and joules in an evaluation, with a processor's counter that another process keeps."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.decode.evaluation import energy as counting
from draftsmith.decode.evaluation.energy import Energy, EnergyMeter, batch_forward, batch_row, count_joules
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.commands.evaluation.energy import energy_command, run_energy
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import load_results

Cli = Callable[..., subprocess.CompletedProcess[str]]
WATTS = 20.0


@pytest.fixture
def target(stand_ins: Any) -> str:
    """A tiny Llama with a tokenizer."""
    return str(stand_ins.target("JackFram/llama-68m"))


KEEP = f"""
import sys, time
from pathlib import Path
zone, start = Path(sys.argv[1]), time.perf_counter()
while True:
    (zone / "unfinished").write_text(str(round(1e6 * {WATTS} * (time.perf_counter() - start))))
    (zone / "unfinished").replace(zone / "energy_uj")
    time.sleep(0.003)
"""


@dataclasses.dataclass
class Kept:
    """A counter that rises until its process ends: a thread would hold up the work that is measured."""

    zone: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """A processor of 20 W. Windows of half a second: where others want its core, the counter's process is held up."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("1000000000000\n")
    monkeypatch.setattr(counting, "POWERCAP", zone.parent)
    monkeypatch.setattr(counting, "RAPL", dataclasses.replace(counting.RAPL, seconds=0.5, discard=0.02, trials=2))
    kept = Kept(zone, subprocess.Popen([sys.executable, "-S", "-c", KEEP, str(zone)]))
    while not (zone / "energy_uj").exists():
        time.sleep(0.01)
    yield kept
    kept.stop()


def test_the_command_measures_writes_and_shows(cli: Cli, target: str, tmp_path: Path) -> None:
    done = cli("energy", "--target", target, "--batch", "4,1", "--runs", "13", "--context", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs" / "energy").iterdir()
    found = json.loads(out.read_text())
    assert (found["schema"], found["kind"], found["runs"], found["context"]) == (1, "energy-by-batch", 13, 9)
    assert (found["target"], found["dtype"]) == (target, "float32")
    assert [row["label"] for row in found["rows"]] == ["batch 1", "batch 4"]
    for row in found["rows"]:
        assert row["inputs"] == 13 * row["batch"]
        assert row["seconds"] == pytest.approx(13 * row["seconds_per_run"])
        assert row["errors"]["seconds_per_run"] > 0
        assert f"{1e3 * row['seconds_per_run']:.3g}" in done.stdout.split(), "times are shown in milliseconds"
        if found["source"] is None:  # most machines: what nothing counts is null
            assert {row[key] for key in row if "joules" in key or key == "watts"} == {None}
        else:
            assert row["joules_per_run"] > 0
    if found["source"] is None:
        assert f"no joules: {found['covers']}" in done.stdout.replace("\n", "")
    assert out.name in done.stdout


def test_joules_come_from_the_counter(counter: Kept, target: str, tmp_path: Path) -> None:
    found = run_energy(target, batches=(2, 8), runs=11, context=5, device="cpu", out=tmp_path / "energy.json")
    assert found["source"] == "rapl"
    assert found["covers"] == "processor packages (1)"
    assert found["idle_watts"] == pytest.approx(WATTS, rel=0.1)
    for row in found["rows"]:
        assert row["watts"] == pytest.approx(WATTS, rel=0.1)
        assert row["joules"] == pytest.approx(11 * row["joules_per_run"])
        assert row["joules_per_input"] == pytest.approx(row["joules_per_run"] / row["batch"])
        assert (row["joules_per_run_above_idle"] or 0) < 0.2 * row["joules_per_run"], "it draws what it draws idle"
        above = row["joules_per_run"] * (1 - found["idle_watts"] / row["watts"])
        assert row["joules_per_run_above_idle"] == (pytest.approx(above) if above > 0 else None)
        assert {"joules", "joules_per_run", "joules_per_input"} < set(row["errors"])


class Paced:
    """Time that passes by forwards and sleep alone, at `WATTS`."""

    def __init__(self) -> None:
        self.now, self.watts = 0.0, WATTS

    def joules(self) -> float:
        return self.watts * self.now

    def pass_by(self, seconds: float) -> torch.Tensor:
        self.now += seconds
        return torch.zeros(1)


def test_joules_are_those_of_one_forward(target: str) -> None:
    world, model = Paced(), wrap_model(load_model(target))
    timing = dataclasses.replace(counting.RAPL, seconds=0.2, discard=0.02, trials=2)
    meter = EnergyMeter(world.joules, "rapl", "a counter", timing, clock=lambda: world.now, sleep=world.pass_by)
    calls = {batch: partial(world.pass_by, 0.001 * batch) for batch in (2, 8)}
    found, failure = count_joules(model, meter, calls, 0, lambda *_: None)
    assert not failure
    joules = {batch: energy.joules for batch, energy in found.items()}
    assert joules == pytest.approx({2: WATTS * 0.002, 8: WATTS * 0.008})
    world.watts = 0.0
    found, failure = count_joules(model, meter, calls, 0, lambda *_: None)
    assert not found
    assert "a counter" in failure, "it stands still"


def test_a_row_is_made_of_rounds() -> None:
    energy = Energy("nvml", 12.0, 0.5, 9.0, 120.0, 30.0, 0.1, [11.5, 12.5])
    row = batch_row(4, [[1.0, 2.0, 3.0], [2.0, 4.0]], energy)
    assert (row["inputs"], row["seconds_per_run"], row["seconds_per_input"], row["seconds"]) == (20, 2.0, 0.5, 10.0)
    assert (row["joules"], row["joules_per_run"], row["joules_per_input"]) == (60.0, 12.0, 3.0)
    assert row["errors"]["seconds_per_run"] == pytest.approx(0.5)  # rounds of 2 and of 3
    assert row["errors"]["joules_per_input"] == 0.125
    assert batch_row(1, [[1.0]], None)["errors"] == {"seconds": 0.0, "seconds_per_run": 0.0, "seconds_per_input": 0.0}


@pytest.mark.parametrize("name", ["JackFram/llama-68m", "google-t5/t5-small", "facebook/opt-125m"])
@torch.inference_mode()
def test_a_forward_serves_a_batch_of_inputs_that_were_read(stand_ins: Any, name: str) -> None:
    """Each row of a batch says what it says alone, and what the model itself says."""
    model = load_model(str(stand_ins.target(name)))
    scorer = wrap_model(model)
    logits_BMV = batch_forward(scorer, 3, 7, seed=5)()
    assert logits_BMV.shape == (3, 1, scorer.vocab_size)
    tokens_BT = torch.randint(scorer.vocab_size, (3, 8), generator=torch.Generator().manual_seed(5))
    if model.config.is_encoder_decoder:
        expected = model(input_ids=tokens_BT[:, :7], decoder_input_ids=tokens_BT).logits
    else:
        expected = model(tokens_BT).logits
    torch.testing.assert_close(logits_BMV[:, 0], expected[:, -1], atol=1e-4, rtol=1e-3)


@pytest.fixture
def recipe(target: str, stand_ins: Any, tmp_path: Path) -> dict[str, Any]:
    """Two rows on two prompts."""
    asked = {"prompts": str(stand_ins.rows), "template": "chatml", "limit": 2, "max_new_tokens": 5, "device": "cpu"}
    rows = [{"method": "autoregressive"}, {"method": "autoregressive", "temperature": 1.0}]
    return {"kind": "evaluate", "out": str(tmp_path / "results.json"), "target": target, "methods": rows} | asked


def test_a_recipe_names_the_target(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    found = energy_command(str(path), ["dtype=bfloat16"], None, "1", 2, 4)
    assert (found["target"], found["dtype"]) == (recipe["target"], "bfloat16")
    assert json.loads((tmp_path / "results.energy.json").read_text()) == found


def test_an_evaluation_has_joules_where_something_counts_them(
    counter: Kept, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_evaluate(EvaluateRecipe(**recipe))
    assert "counting joules of processor packages (1) (rapl)" in capsys.readouterr().err
    results = load_results(recipe["out"])
    assert len(results["methods"]) == 2, results["errors"]
    for row in results["methods"]:
        assert row["energy_source"] == "rapl"
        assert row["energy"]["watts"] == pytest.approx(WATTS, rel=0.1)
        assert row["joules_per_token"] == row["energy"]["joules"] > 0
    run_evaluate(EvaluateRecipe(**recipe, energy="off"))
    assert "joules" not in capsys.readouterr().err
    for row in load_results(recipe["out"])["methods"]:
        assert row["joules_per_token"] is row["energy_source"] is row["energy"] is None
        assert row["flops_per_token"]["checked"] == pytest.approx(1, abs=0.02)
    (counter.zone / "name").write_text("core\n")
    run_evaluate(EvaluateRecipe(**recipe))
    assert "evaluate: no joules: the processor's energy counter (RAPL) is not there" in capsys.readouterr().err
    results = load_results(recipe["out"])
    assert {row["joules_per_token"] for row in results["methods"]} == {None}
    for row in results["methods"]:  # as a version wrote them that knew of no `energy`
        del row["energy"]
    Path(recipe["out"]).write_text(json.dumps(results))
    assert {row["energy"] for row in load_results(recipe["out"])["methods"]} == {None}


def test_joules_that_were_counted_are_not_counted_again(
    counter: Kept, recipe: dict[str, Any], interrupted_when: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal comes once the first row is counted; then another process goes on."""
    out = Path(recipe["out"])
    journal = out.with_name("results.json.state") / "runs.jsonl"
    with interrupted_when(lambda: journal.is_file() and '"energy"' in journal.read_text().partition("\n")[2]):
        run_evaluate(EvaluateRecipe(**recipe))
    assert "2 rows, 2 s or more in all; `energy: off` leaves them out" in capsys.readouterr().err
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    (kept,) = [line for line in lines if isinstance(line, dict)]
    run_evaluate(EvaluateRecipe(**recipe))
    said = capsys.readouterr().err
    assert "(rapl): 1 rows, " in said
    rows = {row["label"]: row for row in load_results(out)["methods"]}
    assert rows.pop(kept["label"])["energy"] == kept["energy"]
    (other,) = rows.values()
    assert other["energy"]["watts"] == pytest.approx(WATTS, rel=0.1)
    assert not journal.exists()
