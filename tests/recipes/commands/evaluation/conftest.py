"""Fixtures with a target and a drafter on disk, and an evaluation of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.tokenizers import load_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def save_llama(corpus: Path) -> Callable[..., LlamaForCausalLM]:
    """Return a function that saves a random model with the tokenizer of the corpus."""

    def save(folder: Path, seed: int = 0, positions: int = 256) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **ATTENTION, max_position_embeddings=positions)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.25)
        model.save_pretrained(folder)
        load_tokenizer(str(corpus / "tokenizer")).save_pretrained(folder)
        return model

    return save


@pytest.fixture
def evaluation(corpus: Path, tmp_path: Path, save_llama: Callable[..., LlamaForCausalLM]) -> dict[str, Any]:
    """Return an evaluation recipe for two random models, without methods."""
    values: dict[str, Any] = {"kind": "evaluate", "out": str(tmp_path / "results.json"), "template": "chatml"}
    values |= {"prompts": str(corpus / "rows.json"), "limit": 4, "max_new_tokens": 24, "device": "cpu"}
    for seed, name in enumerate(("target", "drafter")):
        save_llama(tmp_path / name, seed)
        values[name] = str(tmp_path / name)
    return values
