"""Training's modules import with little, and do nothing on import."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\nimport {module}"


def imports(module: str, *without: str) -> str:
    program = BLOCKED.format(names=without, module=module)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr


def test_the_loop_imports_without_accelerate_and_the_losses_with_torch_alone():
    everything = ("accelerate", "transformers", "rich", "pydantic", "safetensors", "scipy", "datasets")
    assert imports("draftsmith.train.losses.drafter", *everything) == ""
    assert imports("draftsmith.train.loop.fit", "accelerate", "rich", "pydantic", "datasets") == ""
