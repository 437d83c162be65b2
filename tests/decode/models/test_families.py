"""All decoder families of transformers for which a tiny model can be built (`tests/bench/families.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_families_equal_generate_or_are_refused() -> None:
    bench = Path(__file__).parents[2] / "bench" / "families.py"
    done = subprocess.run([sys.executable, str(bench)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["families"] >= 179, done.stdout
    assert (found["trains"], found["trees"], found["exports"]) >= (91, 92, 93), done.stdout
    assert found["chains"] == found["loads"] >= 93, "a loaded family does not decode the same tokens as generate"
