"""Published chat templates compared with the rendering of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_published_templates_give_the_ids_of_transformers() -> None:
    bench = Path(__file__).parents[2] / "bench" / "templates.py"
    done = subprocess.run([sys.executable, str(bench)], capture_output=True, text=True, check=False)
    if "pip" in done.stderr and done.returncode:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (counts["templates"], counts["prompts"], counts["training"]) == (77, 77, 75), done.stdout
