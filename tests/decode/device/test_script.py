"""The script of the GPU benchmarks, run on a CPU with tiny shapes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS / "bench" / "gpu.sh"
SMALL = [
    "answers.max_new_tokens=8", "corpus.heldout_share=0.2", "drafter.model.layers=[0,1]",
    *(f"{name}.vocabulary.tokens=200" for name in ("drafter.model", "heads", "eagle")),
    *(f"{name}.train.steps=2" for name in ("eagle", "drafter", "heads")),
    *(f"{name}.data.block_tokens=256" for name in ("eagle", "drafter", "heads")),
    "evaluate.limit=2", "evaluate.max_new_tokens=8",
]  # fmt: skip


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    variables = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(["bash", str(SCRIPT), "all", "--pretend"], env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    for name in ("7b", "13b", "8b", "heads"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["machine"]


@pytest.mark.slow
def test_the_real_pair_is_trained_and_measured(tmp_path: Path, load_script: Callable[[Path], ModuleType]) -> None:
    load_script(TESTS / "checkpoints" / "storage" / "test_gguf.py").write_gguf(tmp_path / "tiny.gguf", "smollm")
    questions = [{"messages": [{"role": "user", "content": f"Count to {number}."}]} for number in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    settings = {"OUT": tmp_path / "out", "PAIR": tmp_path / "pair", "MODEL": tmp_path / "tiny.gguf"}
    settings |= {"QUESTIONS": tmp_path / "mine.jsonl", "SETTINGS": " ".join(SMALL), "PYTHON": sys.executable}
    settings["BENCH"] = f"--prompts {tmp_path / 'mine.jsonl'} --limit 2 --temperatures 0 --rows medusa *eagle"
    variables = os.environ | {name: str(value) for name, value in settings.items()} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(["bash", str(SCRIPT), "real"], env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    for name in ("real", "real-bfloat16"):
        rows = json.loads((tmp_path / "out" / f"{name}.json").read_text())["methods"]
        assert all(len(result["rows"]) > 10 for result in rows.values())


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    variables = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    process = subprocess.run(["bash", str(SCRIPT), "8d"], env=variables, capture_output=True, text=True)
    assert process.returncode == 1
    assert "8d" in process.stderr
