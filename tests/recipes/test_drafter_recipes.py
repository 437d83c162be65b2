"""Every shipped drafter recipe takes a few steps with tiny models of the same families, and leaves what it promises."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact import load_manifest
from draftsmith.data.templates import CHATML_JINJA
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode.loading import load_model
from draftsmith.recipes.loading import load_recipe, shipped_recipes
from draftsmith.recipes.run import run_train
from draftsmith.recipes.training import DrafterRecipe
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

DRAFTERS = sorted(name for name in shipped_recipes() if name.startswith("drafter/"))
WORDS = ["the", "tree", "token", "draft", "target", "head", "table", "keeps", "drops", "reads", "fast", "slow", "exact"]
VOCAB = 320
COMMON = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = COMMON | {"intermediate_size": 32, "max_position_embeddings": 512}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "deep-llama": lambda: LlamaConfig(**(LLAMA | {"num_hidden_layers": 22})),
    "mistral": lambda: MistralConfig(**(LLAMA | {"num_key_value_heads": 1})),
    "opt": lambda: OPTConfig(**COMMON, ffn_dim=32, max_position_embeddings=512, word_embed_proj_dim=16),
    "neox": lambda: GPTNeoXConfig(**COMMON, intermediate_size=32, max_position_embeddings=512),
    "t5": lambda: T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    ),
}
STAND_INS = {
    "JackFram/llama-68m": "llama",
    "JackFram/llama-160m": "llama",
    "double7/vicuna-68m": "llama",
    "runs/vicuna-68m-from-7b": "llama",
    "lmsys/vicuna-7b-v1.3": "llama",
    "lmsys/vicuna-13b-v1.3": "llama",
    "lmsys/vicuna-33b-v1.3": "llama",
    "facebook/opt-125m": "opt",
    "facebook/opt-13b": "opt",
    "EleutherAI/pythia-70m-deduped": "neox",
    "EleutherAI/pythia-2.8b-deduped": "neox",
    "google-t5/t5-small": "t5",
    "google-t5/t5-3b": "t5",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "deep-llama",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral",
}
FEW = [
    "train.steps=3", "train.global_batch=4", "train.micro_batch=2", "train.log_every=1", "data.block_tokens=320",
    "data.heldout_share=0.2", "measure.prompts=2", "measure.new_tokens=6", "measure.blocks=4",
]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    rng = random.Random(0)
    found = []
    for number in range(60):
        turns = []
        for _ in range(rng.randint(1, 2)):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(3, 8))) for _ in range(2))
            turns += [{"from": "human", "value": question + "?"}, {"from": "gpt", "value": answer + "."}]
        found.append({"id": f"row{number}", "conversations": turns})
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.json, and for each family a tiny target and a tiny drafter with their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "rows.json").write_text(json.dumps(rows()))
    varied = ["".join(random.Random(i).choices("abcdefghij", k=6)) for i in range(200)]
    tokenizer = train_bpe([*WORDS, *varied], VOCAB, ("<pad>", "<s>", "<|im_start|>", "<|im_end|>", "</s>"))
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = CHATML_JINJA
    for seed, (name, config) in enumerate(CONFIGS.items()):
        for role in ("target", "drafter"):
            torch.manual_seed(2 * seed + (role == "target"))
            make = T5ForConditionalGeneration if name == "t5" else AutoModelForCausalLM.from_config
            make(config()).save_pretrained(folder / role / name)
            tokenizer.save_pretrained(folder / role / name)
    return folder


def stand_in(recipe: DrafterRecipe, models: Path) -> list[str]:
    """Changes that put tiny models in the place of a recipe's own."""
    changes = [f"data.source={models / 'rows.json'}"]
    if recipe.model.source is not None:
        role = "target" if recipe.model.layers else "drafter"
        changes.append(f"model.source={models / role / STAND_INS[recipe.model.source]}")
    else:
        changes += ["model.config.hidden_size=16", "model.config.intermediate_size=32"]
        changes += ["model.config.num_attention_heads=2"]
    assert recipe.target is not None
    return [*changes, f"target={models / 'target' / STAND_INS[recipe.target]}"]


def test_there_are_as_many_as_are_known() -> None:
    named = {"vicuna-68m", "vicuna-160m", "opt-125m-opt-13b", "pythia-70m-pythia-2.8b", "t5-small-t5", "lora-domain"}
    named |= {f"vicuna-{size}-from-{target}" for size in ("68m", "160m") for target in ("7b", "13b", "33b")}
    named |= {"from-scratch", "cut-from-target", "distillspec"}
    assert {name.removeprefix("drafter/") for name in DRAFTERS} == named
    assert len(DRAFTERS) == 15


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_trains_and_leaves_a_drafter_for_its_target(name: str, models: Path, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, DrafterRecipe)
    changes = [*stand_in(recipe, models), f"out={tmp_path / 'out'}", f"data.cache={tmp_path / 'prepared'}", *FEW]
    small = load_recipe(name, changes)
    assert isinstance(small, DrafterRecipe)
    out = run_train(small)
    manifest = load_manifest(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    assert 0 <= manifest.evaluation["overlap"] <= 1
    drafter = load_model(str(out))
    assert isinstance(drafter, PreTrainedModel)
    assert drafter.get_output_embeddings().weight.shape[0] == VOCAB
    expected_layers = len(recipe.model.layers) or 2
    assert drafter.config.num_hidden_layers == expected_layers
    if recipe.model.config is not None:
        assert drafter.config.max_position_embeddings == 512, "as many as the target has"
    if recipe.model.source is not None and not recipe.model.layers:
        start = load_model(str(models / "drafter" / STAND_INS[recipe.model.source]))
        pairs = zip(drafter.state_dict().values(), start.state_dict().values(), strict=True)
        changed = [not torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs]
        assert any(changed) or manifest.training["kept_step"] == 0


def test_the_head_of_each_recipe_gives_command_hardware_and_cost() -> None:
    for name in DRAFTERS:
        text = shipped_recipes()[name].read_text(encoding="utf-8")
        head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
        assert "draftsmith train " + name in head, name
        assert "GB" in head, name
        assert "estimated" in head or "measured on" in head, name
        assert max(map(len, text.splitlines())) <= 120, name
