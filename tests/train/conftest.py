"""Fixtures of the training tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def worker(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """Return the module `worker.py`, which also runs as a separate process."""
    return load_script(Path(__file__).with_name("worker.py"))


@pytest.fixture
def logged() -> Callable[..., list[Any]]:
    """Return a function that reads the values of a key from the log of a run."""

    def read(state_dir: Path, key: str = "loss") -> list[Any]:
        lines = [json.loads(line) for line in (state_dir / "log.jsonl").read_text().splitlines()]
        return [line[key] for line in lines if key in line]

    return read


def run_under_zero(folder: Path, stage: int, jobs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run jobs in two processes with a ZeRO stage, and return the reports of the main process."""
    folder.mkdir(parents=True, exist_ok=True)
    # by default, ZeRO-3 does not shard parameters of fewer than 100,000 elements
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    settings = folder / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 0.123, "train_batch_size": 5}))
    paths_by_job = [
        {
            "state_dir": str(folder / job.get("folder", job["name"])),
            "weights": str(folder / f"{job['name']}.safetensors"),
        }
        for job in jobs
    ]
    worker = str(Path(__file__).with_name("zero_worker.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker]
    environment = os.environ | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(settings),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, json.dumps([job | paths for job, paths in zip(jobs, paths_by_job, strict=True)])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line.removeprefix("said ")) for line in done.stdout.splitlines() if line.startswith("said ")]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="session")
def launch_zero() -> Callable[..., dict[str, dict[str, Any]]]:
    """Return the function `run_under_zero`."""
    return run_under_zero
