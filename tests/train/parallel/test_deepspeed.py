"""ZeRO 1, 2 and 3 with two processes equal one process, and their checkpoints can be resumed in any mode.

Sums over two processes and over flat shards are rounded in a different order: a float32 loss of 3.5 changes by a few
last bits (2e-7 each), and by at most 1e-6 after six steps. The tolerance is ten times larger.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import fit
from safetensors.torch import load_file

pytest.importorskip("deepspeed")

LOSS = {"abs": 1e-5}
NORM = {"rel": 1e-5}
SETTINGS = {"micro_batch": 2, "save_every": 3, "clip_norm": 0.5}  # every gradient is clipped
# sizes that cannot be divided evenly by two processes
UNEVEN = {
    "hidden_size": 17,
    "intermediate_size": 33,
    "vocab_size": 33,
    "head_dim": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TIED = UNEVEN | {"tie_word_embeddings": True}
Logged = Callable[..., list[Any]]
Launch = Callable[..., dict[str, dict[str, Any]]]


STAGES = pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])


@dataclass(frozen=True)
class Runs:
    """Directories and reports of the jobs of each ZeRO stage; a stage is launched on first use."""

    folder: Path
    begun: Path
    launch: Launch
    results: dict[int, dict[str, dict[str, Any]]]

    def report(self, stage: int, name: str) -> dict[str, Any]:
        if stage not in self.results:
            # "resumed" continues a run of a different stage (or of one process)
            before = self.folder / f"zero{next(iter(self.results))}" / "untied" if self.results else self.begun
            as_if_killed(before, self.folder / f"zero{stage}" / "resumed")
            jobs = [job | {"config": SETTINGS | job.get("config", {})} for job in JOBS]
            self.results[stage] = self.launch(self.folder / f"zero{stage}", stage, jobs)
        return self.results[stage][name]

    def state(self, stage: int, name: str) -> Path:
        self.report(stage, name)
        return self.folder / f"zero{stage}" / name

    def weights(self, stage: int, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"zero{stage}" / f"{name}.safetensors")


def as_if_killed(state: Path, target: Path) -> None:
    """Copy the state folder of a finished run as it was after step 3 of 6."""
    shutil.copytree(state, target)
    shutil.rmtree(target / "checkpoints" / "step-000006")


@pytest.fixture(scope="module")
def one(worker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains in this process and returns the state folder."""
    folder = tmp_path_factory.mktemp("one")

    def run(name: str, **options: Any) -> Path:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        import zero_worker

        if not (folder / name).exists():
            task = zero_worker.make_task(options, rank=0)
            fit(task, worker.make_data(), worker.make_config(**SETTINGS | options.get("config", {})), folder / name)
        return folder / name

    return run


JOBS: list[dict[str, Any]] = [
    {"name": "untied", "model": UNEVEN},
    {"name": "tied", "model": TIED},
    {"name": "skipping", "model": UNEVEN, "uneven_at": 4, "config": {"on_bad_step": "skip", "max_norm": 0.9}},
    {"name": "failing", "model": UNEVEN, "uneven_at": 5},
    {"name": "stopped", "model": UNEVEN, "kill_at": 2, "kill_rank": 1},
    {"name": "went on", "model": UNEVEN, "folder": "stopped"},
    {"name": "resumed", "model": UNEVEN},
    {"name": "heads", "model": UNEVEN, "task": "heads"},
    {"name": "eagle", "model": UNEVEN, "task": "eagle"},
    {"name": "dflash", "model": UNEVEN, "task": "dflash"},
    {"name": "dspark", "model": UNEVEN, "task": "dspark"},
    {"name": "parallel", "model": UNEVEN, "parallel": True},
    {"name": "bf16", "model": UNEVEN, "config": {"precision": "bf16"}},
]


@pytest.fixture(scope="module")
def runs(one: Callable[..., Path], launch_zero: Launch, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("zero"), one("untied", model=UNEVEN), launch_zero, {})


@STAGES
@pytest.mark.parametrize("name", ["untied", "tied", "heads", "eagle", "dflash", "dspark", "parallel"])
def test_losses_norms_and_weights_equal_those_of_one_process(
    runs: Runs, one: Callable[..., Path], logged: Logged, stage: int, name: str
):
    job = next(job for job in JOBS if job["name"] == name)
    alone, state = one(name, **{key: value for key, value in job.items() if key != "name"}), runs.state(stage, name)
    report = runs.report(stage, name)
    assert report["distributed_type"] == "DEEPSPEED"
    assert report["processes"] == 2
    assert logged(state, "step") == logged(alone, "step")
    assert logged(state) == pytest.approx(logged(alone), **LOSS)
    assert logged(state, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), **NORM)
    assert logged(state, "evaluation")[-1] == pytest.approx(logged(alone, "evaluation")[-1], rel=1e-5)
    expected = load_file(alone / "checkpoints" / "step-000006" / "model.safetensors")
    for weights in (load_file(state / "checkpoints" / "step-000006" / "model.safetensors"), runs.weights(stage, name)):
        assert set(expected) <= set(weights)
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "options", [*({"task": kind} for kind in ("heads", "eagle", "dflash", "dspark")), {"parallel": True}], ids=str
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    one: Callable[..., Path], worker: ModuleType, logged: Logged, options: dict[str, Any], tmp_path: Path
):
    import zero_worker

    whole = one(next(job["name"] for job in JOBS if job | options == job), model=UNEVEN, **options)
    as_if_killed(whole, tmp_path / "on")
    task = zero_worker.make_task({"model": UNEVEN, **options}, rank=0)
    result = fit(task, worker.make_data(), worker.make_config(**SETTINGS), tmp_path / "on")
    assert result.resumed_from == 3
    assert logged(tmp_path / "on") == logged(whole)
    saved = [folder / "checkpoints" / "step-000006" / "model.safetensors" for folder in (tmp_path / "on", whole)]
    actual, expected = map(load_file, saved)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@STAGES
def test_zero_3_shards_weights_only_during_training(runs: Runs, stage: int):
    report = runs.report(stage, "untied")
    assert report["between_steps"] == (21 if stage == 3 else 0)  # all parameters
    assert report["in_evaluation"] == 0
    assert report["afterwards"] == 0
    assert report["gradients"]


@STAGES
def test_a_bad_gradient_is_skipped_or_stops_the_run_before_the_weights_change(
    runs: Runs, one: Callable[..., Path], logged: Logged, stage: int
):
    job = next(job for job in JOBS if job["name"] == "skipping")
    alone = one(**job)
    lines = [
        {line["step"]: line["skipped"] for line in map(json.loads, (state / "log.jsonl").open()) if "skipped" in line}
        for state in (runs.state(stage, "skipping"), alone)
    ]
    assert set(lines[0]) == {2, 4}  # a norm above max_norm, and NaN
    assert lines[0].keys() == lines[1].keys()
    assert logged(runs.state(stage, "skipping")) == pytest.approx(logged(alone), **LOSS)

    error = runs.report(stage, "failing")["error"]
    assert error.startswith("TrainingError: the gradient's norm is inf at step 5, blocks [")
    assert "stopped before the weights were changed" in error
    assert [path.name for path in (runs.state(stage, "failing") / "checkpoints").iterdir()] == ["step-000003"]


@STAGES
def test_a_stopped_run_resumes_to_the_same_weights(runs: Runs, logged: Logged, stage: int):
    assert runs.report(stage, "stopped")["error"].startswith("Interrupted: stopped by SIGTERM after step 2 of 6")
    assert runs.report(stage, "went on")["resumed_from"] == 2
    assert logged(runs.state(stage, "stopped")) == logged(runs.state(stage, "untied"))
    weights = runs.weights(stage, "went on")
    assert all(torch.equal(weights[name], tensor) for name, tensor in runs.weights(stage, "untied").items())
    assert {tensor.dtype for tensor in runs.weights(stage, "bf16").values()} == {torch.bfloat16}
    # bfloat16 has 8 bits of mantissa
    assert logged(runs.state(stage, "bf16")) == pytest.approx(logged(runs.state(stage, "untied")), abs=5e-3)


@STAGES
def test_a_run_resumes_with_a_different_kind_of_parallelism(
    runs: Runs, one: Callable[..., Path], worker: ModuleType, logged: Logged, stage: int, tmp_path: Path
):
    alone = one("untied", model=UNEVEN)
    assert runs.report(stage, "resumed")["resumed_from"] == 3
    assert logged(runs.state(stage, "resumed")) == pytest.approx(logged(alone), **LOSS)

    as_if_killed(runs.state(stage, "untied"), tmp_path / "on")
    model = worker.make_model(attention_dropout=0.0, seed=3, **UNEVEN)
    task = worker.SignallingTask(model, worker.make_data(4, seed=1))
    result = fit(task, worker.make_data(), worker.make_config(**SETTINGS), tmp_path / "on")
    assert result.resumed_from == 3
    assert logged(tmp_path / "on") == pytest.approx(logged(alone), **LOSS)
    assert logged(tmp_path / "on", "grad_norm") == pytest.approx(logged(alone, "grad_norm"), **NORM)


@pytest.mark.slow
def test_heads_and_medusa2_resume_to_the_same_weights(launch_zero: Launch, logged: Logged, tmp_path: Path):
    common = {"model": UNEVEN, "config": SETTINGS | {"steps": 4, "save_every": 2}}
    kinds = {"heads": {"task": "heads"}, "medusa2": {"task": "medusa2"}}
    stops = [("heads", 3), ("medusa2", 1), ("medusa2", 3)]
    # float32 jobs follow it in the same processes
    jobs = [common | kinds["heads"] | {"name": "bf16", "config": common["config"] | {"precision": "bf16"}}]
    jobs += [common | options | {"name": kind} for kind, options in kinds.items()]
    for kind, at in stops:
        jobs.append(common | kinds[kind] | {"name": f"{kind} {at}", "kill_at": at, "kill_rank": 1})
        jobs.append(common | kinds[kind] | {"name": f"{kind} {at} went on", "folder": f"{kind} {at}"})
    report = launch_zero(tmp_path, 3, jobs)
    for kind, at in stops:
        assert report[kind]["afterwards"] == 0, "weights must not be sharded at the end"
        assert report[f"{kind} {at}"]["error"].startswith(f"Interrupted: stopped by SIGTERM after step {at} of 4")
        assert report[f"{kind} {at} went on"]["resumed_from"] == at
        assert logged(tmp_path / f"{kind} {at}") == logged(tmp_path / kind)
        expected, result = (load_file(tmp_path / f"{name}.safetensors") for name in (kind, f"{kind} {at} went on"))
        assert result.keys() == expected.keys()
        assert all(tensor.numel() and torch.equal(result[name], tensor) for name, tensor in expected.items())
    assert logged(tmp_path / "bf16") == pytest.approx(logged(tmp_path / "heads"), abs=2e-2)  # 8 bits of mantissa
    heads, medusa2 = (
        load_file(tmp_path / kind / "checkpoints" / "step-000004" / "model.safetensors") for kind in kinds
    )
    assert not any(name.startswith("target.") for name in heads)
    adapters = {name for name in medusa2 if name.startswith("target.")}
    assert medusa2.keys() - adapters == heads.keys()
    assert all("lora_" in name for name in adapters)
    changed = [bool(tensor.any()) for name, tensor in medusa2.items() if "lora_B" in name]
    assert changed and all(changed), "adapters are initialised with zeros"  # noqa: PT018
