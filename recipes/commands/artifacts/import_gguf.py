"""A GGUF file made a model folder that everything here, and transformers, can load."""

from __future__ import annotations

from pathlib import Path

from ....checkpoints.artifact.compat import patch_model, patch_tokenizer
from ....checkpoints.storage.atomic import atomic_dir
from ....checkpoints.storage.gguf import convert_gguf
from ...session.terminal import log
from .import_heads import check_new


def import_gguf(file: Path, out: Path, target: str | None = None) -> None:
    """Write the model of a GGUF file to a new folder, in float32. Raises ValueError: what `convert_gguf` raises; a
    `target`, which a whole model does not have."""
    if target is not None:
        raise ValueError(f"--target {target}: {file} becomes a plain model folder, which is for no other model")
    check_new(out)
    with atomic_dir(out) as folder:
        convert_gguf(file, folder)
        patch_model(folder)
        patch_tokenizer(folder)
    log(f"model: wrote {out}")
