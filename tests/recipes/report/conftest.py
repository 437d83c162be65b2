"""Fixture that evaluates two random models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def evaluated(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that evaluates two random models and returns the results file."""
    folder = tmp_path_factory.mktemp("evaluated")
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    for seed, (name, layers) in enumerate((("target", 2), ("drafter", 1))):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=2)).eval()
        model.save_pretrained(folder / name)
        load_tokenizer(str(corpus / "tokenizer")).save_pretrained(folder / name)

    def run(name: str, **changes: Any) -> Path:
        values = {"target": str(folder / "target"), "drafter": str(folder / "drafter")} | changes
        values |= {"kind": "evaluate", "out": str(folder / name / "results.json"), "prompts": str(corpus / "rows.json")}
        values = {"template": "chatml", "limit": 5, "max_new_tokens": 12, "device": "cpu"} | values
        torch.set_num_threads(1)
        run_evaluate(EvaluateRecipe(**values))
        return folder / name / "results.json"

    return run
