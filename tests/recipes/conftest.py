"""A tiny corpus, tokenizer and recipes on disk, and the command line as a real process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from draftsmith.data.tokenizers import train_bpe

WORDS = ["the", "tree", "token", "draft", "target", "head", "table", "keeps", "drops", "reads", "fast", "slow", "exact"]
TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.json (ShareGPT form) and tokenizer/."""
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


@pytest.fixture
def drafter_recipe(corpus: Path, tmp_path: Path) -> Path:
    """A recipe of kind drafter: 12 steps of a two-layer Llama."""
    recipe = {
        "kind": "drafter",
        "out": str(tmp_path / "drafter"),
        "tokenizer": str(corpus / "tokenizer"),
        "model": {"config": TINY},
        "data": {
            "source": str(corpus / "rows.json"),
            "template": "chatml",
            "block_tokens": 64,
            "heldout_share": 0.2,
            "cache": str(tmp_path / "prepared"),
        },
        "train": {
            "steps": 12,
            "global_batch": 4,
            "micro_batch": 2,
            "learning_rate": 1e-3,
            "save_every": 3,
            "log_every": 1,
            "evaluate_every": 0,
        },
    }
    path = tmp_path / "drafter.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def environment(**extra: str) -> dict[str, str]:
    """For child processes: no GPU, one thread, no hub."""
    return os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def draftsmith(*arguments: str, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "draftsmith", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(), cwd=cwd, check=False
    )


@pytest.fixture
def cli() -> object:
    return draftsmith
