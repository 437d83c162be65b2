"""Fixture with a small artifact to push."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from safetensors.torch import save_file


@pytest.fixture
def make_artifact() -> Callable[..., Path]:
    """Return a function that writes an artifact with two large files and small ones."""

    def make(folder: Path, seed: int = 0, **extra: bytes) -> Path:
        def write(unfinished: Path) -> None:
            generator = torch.Generator().manual_seed(seed)
            for name in ("first", "second"):
                weight = {"weight": torch.randn(32, 48, generator=generator)}
                save_file(weight, unfinished / f"{name}.safetensors")
            (unfinished / "deep").mkdir()
            (unfinished / "deep" / "few.json").write_text(f'{{"seed": {seed}}}')
            for name, content in extra.items():
                (unfinished / name).write_bytes(content)

        save_artifact(folder, kind="table", write=write, vocab_size=8, tokenizer_fingerprint=None, target=None)
        return folder

    return make
