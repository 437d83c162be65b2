"""Two processes give the same results as one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import fit
from safetensors.torch import load_file


def launch(options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    settings = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launcher, *settings, str(Path(__file__).parents[1] / "worker.py"), json.dumps(options)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_two_processes_stopped_and_resumed_equal_one(
    worker: ModuleType, tmp_path: Path, logged: Callable[..., list[Any]]
):
    two, one = tmp_path / "two", tmp_path / "one"
    options = {"state_dir": str(two), "weights": str(tmp_path / "two.safetensors"), "dropout": 0.0}
    options |= {"config": {"micro_batch": 2}}

    # a signal to one process stops both after the same step
    stopped = launch(options | {"kill_at": 3, "signal": int(signal.SIGTERM), "kill_rank": 1})
    assert stopped.returncode != 0
    assert "Interrupted: stopped by SIGTERM after step 3 of 6" in stopped.stderr
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["step-000002", "step-000003"]

    done = launch(options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"processes": 2, "distributed_type": "MULTI_CPU"}
    assert "2 processes (MULTI_CPU)" in done.stderr
    task = worker.SignallingTask(worker.make_model(attention_dropout=0.0), worker.make_data(4, seed=1))
    result = fit(task, worker.make_data(), worker.make_config(), one)
    assert logged(two, "step") == logged(one, "step")
    assert logged(two) == pytest.approx(logged(one), abs=2e-6)
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    assert logged(two, "evaluation")[-1] == pytest.approx(result.metrics, rel=1e-5)
    for name, tensor in load_file(tmp_path / "two.safetensors").items():
        torch.testing.assert_close(tensor, task.module.state_dict()[name], rtol=1e-3, atol=1e-5)

    # one process loads the checkpoint of two
    again = worker.SignallingTask(worker.make_model(seed=3, attention_dropout=0.0), None)
    assert fit(again, worker.make_data(), worker.make_config(), two).resumed_from == 6
    for name, tensor in load_file(tmp_path / "two.safetensors").items():
        assert torch.equal(tensor, again.module.state_dict()[name])
