"""Training's modules import with little, and do nothing on import."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\nimport {module}"


def imports(module: str, *without: str) -> str:
    program = BLOCKED.format(names=without, module=module)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr


def test_losses_import_with_torch_alone_and_the_rest_without_extras():
    everything = ("accelerate", "transformers", "rich", "pydantic", "safetensors", "scipy", "datasets")
    assert imports("draftsmith.train.losses.drafter", *everything) == ""
    modules = ("loop.fit", "teachers.teacher", "teachers.hidden_cache", "teachers.row_writer")
    extras = ("accelerate", "rich", "pydantic", "datasets", "deepspeed", "bitsandbytes")
    assert imports(", ".join(f"draftsmith.train.{module}" for module in modules), *extras) == ""
