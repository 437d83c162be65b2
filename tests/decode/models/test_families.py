"""All decoder families of transformers for which a tiny model can be built (`tests/bench/families.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_families_equal_generate_or_are_refused() -> None:
    bench = Path(__file__).parents[2] / "bench" / "families.py"
    process = subprocess.run([sys.executable, str(bench)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    assert counts["families"] >= 179, process.stdout
    assert (counts["trains"], counts["trees"], counts["exports"]) >= (91, 92, 93), process.stdout
    assert counts["chains"] == counts["loads"] >= 93, "a loaded family does not decode the same tokens as generate"
