"""Fixtures with a tiny corpus, tokenizer and recipes on disk, and the command line as a process."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import tokenizer_fingerprint
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.recipes.schema.loading import find_recipe
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = ["the", "tree", "token", "draft", "target", "head", "table", "keeps", "drops", "reads", "fast", "slow", "exact"]
VOCAB = 320
COMMON = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = COMMON | {
    "model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 256
}  # fmt: skip
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
FAMILIES = {"opt-": "opt", "pythia": "neox", "t5": "t5", "TinyLlama": "deep-llama", "Mistral": "mistral"}
"""Model family by a part of the model name; all other models are Llamas."""


@dataclass(frozen=True)
class StandIns:
    """Tiny models with tokenizers, for all model families in shipped recipes, and a corpus."""

    folder: Path
    rows: Path
    """File of conversations in ShareGPT format."""
    few: tuple[str, ...]
    """Overrides with which a training recipe takes three small steps."""

    def _of(self, role: str, source: str) -> Path:
        return self.folder / role / next((family for part, family in FAMILIES.items() if part in source), "llama")

    def target(self, source: str) -> Path:
        return self._of("target", source)

    def drafter(self, source: str) -> Path:
        return self._of("drafter", source)


@pytest.fixture(scope="session")
def stand_ins(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    """Save a target and a drafter with different weights for each model family."""
    folder = tmp_path_factory.mktemp("models")
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
    few = (
        "train.steps=3", "train.global_batch=4", "train.micro_batch=2", "train.log_every=1", "data.block_tokens=320",
        "data.heldout_share=0.2", "measure.prompts=2", "measure.new_tokens=6", "measure.blocks=4",
    )  # fmt: skip
    return StandIns(folder, corpus / "rows.json", few)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with rows.json (ShareGPT format) and tokenizer/."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    rows, texts = [], []
    for number in range(80):
        turns = []
        for _ in range(rng.randint(1, 3)):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(2))
            turns += [{"from": "human", "value": question + "?"}, {"from": "gpt", "value": answer + "."}]
            texts += [question, answer]
        rows.append({"id": f"row{number}", "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))
    varied = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(200)]
    train_bpe(texts + varied, 320, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")).save_pretrained(
        folder / "tokenizer"
    )
    return folder


@pytest.fixture(scope="session")
def tiny_pair(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the quickstart: a random target, noisy drafters, heads, a table and text."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, num_key_value_heads=2)).eval()
    weights = {
        name: 0.3 * torch.randn_like(weight) for name, weight in target.state_dict().items() if weight.dim() == 2
    }
    target.load_state_dict(target.state_dict() | weights)
    about = {name: {} for name in ("target", "shapes", "recipe", "data", "training")} | {"vocab_size": VOCAB}
    about["tokenizer_fingerprint"] = tokenizer_fingerprint(tokenizer)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name, noise in (("drafter", 0.05), ("drafter-stage1", 0.1)):
        near = {key: weight + noise * torch.randn_like(weight) for key, weight in weights.items()}
        drafter = AutoModelForCausalLM.from_config(target.config)
        drafter.load_state_dict(target.state_dict() | near)
        save_artifact(folder / name, kind="drafter", write=drafter.save_pretrained, **about)
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), 4, 1)
    sizes = about | {"shapes": {"num_heads": heads.num_heads}}
    save_artifact(folder / "heads", kind="heads", write=lambda out: save_heads(heads, out, "target"), **sizes)
    documents = np.random.default_rng(0).integers(0, VOCAB, (20, 60)).tolist()
    save_artifact(folder / "table", kind="table", write=BigramTable.from_documents(documents, VOCAB).save, **about)
    rows = [
        {"messages": [{"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
                      for turn in row["conversations"]]}
        for row in json.loads((corpus / "rows.json").read_text())
    ]  # fmt: skip
    (folder / "corpus").mkdir()
    for name in ("corpus/heldout.jsonl", "corpus/train.jsonl", "answers.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(find_recipe("quickstart"), folder / "quickstart.yaml")
    return folder


@pytest.fixture(scope="session")
def tiny_drafter(corpus: Path) -> Callable[[Path], dict[str, Any]]:
    """Return a function that builds a drafter recipe with 12 steps of a two-layer Llama."""

    def build(folder: Path) -> dict[str, Any]:
        data = {"source": str(corpus / "rows.json"), "template": "chatml", "block_tokens": 64, "heldout_share": 0.2}
        train = {"steps": 12, "global_batch": 4, "micro_batch": 2, "learning_rate": 1e-3, "save_every": 3}
        return {
            "kind": "drafter",
            "out": str(folder / "drafter"),
            "tokenizer": str(corpus / "tokenizer"),
            "model": {"config": TINY},
            "data": data | {"cache": str(folder / "prepared")},
            "train": train | {"log_every": 1, "evaluate_every": 0},
        }

    return build


@pytest.fixture
def drafter_recipe(tiny_drafter: Callable[[Path], dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "drafter.yaml"
    path.write_text(yaml.safe_dump(tiny_drafter(tmp_path)))
    return path


@pytest.fixture(scope="session")
def logged() -> Callable[..., list[Any]]:
    """Return a function that reads values from the training log of an artifact."""

    def read(out: Path | str, key: str = "loss") -> list[Any]:
        lines = (Path(f"{out}.state") / "log.jsonl").read_text().splitlines()
        return [line[key] for line in map(json.loads, lines) if key in line]

    return read


@pytest.fixture
def cli(launcher: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command and returns the completed process."""
    return lambda *arguments, cwd=None: launcher.start(*arguments, cwd=cwd).completed()


@pytest.fixture(scope="session")
def launcher(load_script: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a launcher that starts commands without repeating slow imports."""
    script = load_script(Path(__file__).with_name("forked_cli.py"))
    started = script.Launcher(tmp_path_factory.mktemp("said"))
    yield started
    started.close()
