"""The commands of the page "Getting started", run with less text and smaller models."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "getting-started.md"


@pytest.mark.slow
def test_the_first_commands_make_and_export_a_pair(load_script: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    script = load_script(Path(__file__).with_name("test_documents.py")).script_of(PAGE.read_text(encoding="utf-8"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "quickstart"

    exported = verify_artifact(folder / "drafter-transformers", "drafter").export
    assert exported is not None
    assert exported["format"] == "transformers"
    for results in ("results.json", "evaluation.json"):
        plain, speculative = json.loads((folder / results).read_text())["methods"]
        assert (plain["method"], speculative["method"]) == ("autoregressive", "speculative")
        assert speculative["identical_to_greedy"] == [2, 2]
        assert speculative["speedup"] > 0

    settings = (folder / "tokenizer" / "tokenizer_config.json").read_text()
    assert '"PreTrainedTokenizerFast"' in settings, "as older readers take it"
    message = ast.literal_eval(done.stdout.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    messages = re.search(r'\[\{"role".*?\}\]', script)
    assert messages is not None
    inputs = tokenizer.apply_chat_template(
        json.loads(messages[0]), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(0)
    text = target.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(text) > 1
    assert message == {"role": "assistant", "content": tokenizer.decode(text, skip_special_tokens=True)}
