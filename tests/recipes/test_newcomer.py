"""README's first commands, run with less text and smaller models."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from transformers import AutoModelForCausalLM, AutoTokenizer

README = Path(__file__).resolve().parents[2] / "README.md"
HEADING = "## From training to serving\n"
MODEL = (
    "{}.model.config.vocab_size=400", "{}.model.config.hidden_size=32", "{}.model.config.intermediate_size=64",
    "{}.model.config.num_attention_heads=2", "{}.model.config.num_key_value_heads=2",
)  # fmt: skip
TWO = "methods=[{method: autoregressive}, {method: speculative}]"
SMALLER = {
    "draftsmith quickstart": [
        "minutes=0.2", "corpus.packages=[typer]", "corpus.megabytes=0.2", "corpus.vocab_size=400",
        "corpus.heldout_share=0.1", "target.model.config.num_hidden_layers=2", "answers.max_new_tokens=8",
        "evaluate.limit=2", "evaluate.max_new_tokens=8", f"evaluate.{TWO}",
        "drafter.measure.prompts=1", "distilled.measure.prompts=1", "heads.measure.prompts=1",
        *(change.format(name) for name in ("target", "drafter") for change in MODEL),
    ],
    "draftsmith evaluate": ["limit=2", "max_new_tokens=8", TWO],
}  # fmt: skip
"""What is added to the lines that begin so."""


def block() -> str:
    """Return the commands of README."""
    section = README.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    (found,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return str(found)


def smaller(text: str) -> str:
    """Return the commands with smaller sizes."""
    lines = text.splitlines()
    for start, changes in SMALLER.items():
        (number,) = [number for number, line in enumerate(lines) if line.startswith(start)]
        command, mark, comment = lines[number].partition("  #")
        lines[number] = " ".join([command.rstrip(), *(f"'{change}'" for change in changes), mark + comment])
    return "\n".join(lines) + "\n"


def test_the_first_commands_of_readme(tmp_path: Path) -> None:
    assert len(block().splitlines()) < 10
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", smaller(block())],
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
    asked = re.search(r'\[\{"role".*?\}\]', block())
    assert asked is not None
    inputs = tokenizer.apply_chat_template(
        json.loads(asked[0]), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(0)
    text = target.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(text) > 1
    assert message == {"role": "assistant", "content": tokenizer.decode(text, skip_special_tokens=True)}
