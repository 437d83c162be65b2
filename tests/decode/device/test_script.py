"""The script that asks a GPU, on the processor with tiny shapes: an hour with a GPU must not fail for a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


@pytest.mark.slow
def test_every_part_of_it_runs(tmp_path: Path) -> None:
    known = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", str(SCRIPT), "all", "--pretend"], env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("versions", "7b", "13b", "8b", "heads"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["machine"]


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    known = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(SCRIPT), "8d"], env=known, capture_output=True, text=True)
    assert done.returncode == 1
    assert "8d" in done.stderr
