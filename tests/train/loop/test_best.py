"""`keep_best` keeps the weights with the best metric, also in resumed runs."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import FitResult, fit
from draftsmith.train.tasks.drafter import DrafterTask

SCORES = [1.0, 1.5, 1.9, 1.7, 1.8]  # before training, and after 2, 4, 6 and 8 steps


class Scored:
    """Task with predefined scores, which records the weights of each evaluation."""

    def __init__(self, worker: ModuleType, scores: list[float] = SCORES) -> None:
        self.task = DrafterTask(worker.make_model(), None, evaluate_fn=self.measure)
        self.scores, self.seen = dict(zip(range(0, 99, 2), scores, strict=False)), {}
        self.task.begin = self.begin  # type: ignore[method-assign]
        self.step, self.stop_at = 0, 99

    def begin(self, step: int, steps: int) -> None:
        self.step = step + 1
        if self.step == self.stop_at:
            raise KeyboardInterrupt

    def measure(self, model: Any) -> dict[str, float]:
        self.seen[self.step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return {"score": self.scores[self.step]}


def run(worker: ModuleType, scored: Scored, folder: Path, **overrides: Any) -> FitResult:
    settings = {"steps": 8, "evaluate_every": 2, "save_every": 2, "keep_checkpoints": 1, "keep_best": "score"}
    return fit(scored.task, worker.make_data(), worker.make_config(**(settings | overrides)), folder)


def same(model: Any, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("save_every", [2, 3, 0])
def test_the_best_weights_are_kept(worker: ModuleType, tmp_path: Path, capfd: Any, save_every: int):
    scored = Scored(worker)
    result = run(worker, scored, tmp_path, save_every=save_every)
    assert (result.kept_step, result.steps) == (4, 8)
    assert result.metrics == {"score": 1.9}
    assert same(scored.task.module.model, scored.seen[4])
    assert not same(scored.task.module.model, scored.seen[8])
    assert "score 1.9 after step 4, 1.8 after the last step: the weights of step 4 are kept" in capfd.readouterr().err
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-000004", "step-000008"], "the best and the newest checkpoint are kept"
    again = Scored(worker)
    assert run(worker, again, tmp_path, save_every=save_every).kept_step == 4
    assert same(again.task.module.model, scored.seen[4])
    assert not again.seen, "a finished run was evaluated again"


@pytest.mark.parametrize("stop_at", [4, 5, 6, 8])
def test_a_resumed_run_keeps_the_same_weights(worker: ModuleType, tmp_path: Path, stop_at: int):
    whole, first, second = Scored(worker), Scored(worker), Scored(worker)
    expected = run(worker, whole, tmp_path / "whole")
    first.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        run(worker, first, tmp_path / "pieces")
    result = run(worker, second, tmp_path / "pieces")
    assert result.resumed_from == 2 * ((stop_at - 1) // 2)
    assert (result.kept_step, result.metrics) == (expected.kept_step, expected.metrics)
    assert same(second.task.module.model, whole.seen[4])


@pytest.mark.parametrize(
    ("scores", "keep_best", "step", "message"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.3], "score", 8, ""),  # the later one of equal scores
        (SCORES, None, 8, ""),
        ([2.0, 1.5, 1.4, 1.3, 1.2], "score", 0, "did not improve score over the initial weights"),
        ([1.0, 2.0, float("nan"), 1.5, 1.6], "score", 2, ""),
    ],
)
def test_the_weights_with_the_largest_metric_are_kept(
    worker: ModuleType, tmp_path: Path, capfd: Any, scores: list[float], keep_best: str | None, step: int, message: str
):
    scored = Scored(worker, scores)
    result = run(worker, scored, tmp_path, keep_best=keep_best)
    assert (result.kept_step, result.metrics) == (step, {"score": scores[step // 2]})
    assert same(scored.task.module.model, scored.seen[step])
    assert message in capfd.readouterr().err
