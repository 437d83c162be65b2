"""Short names for what a model and a tokenizer are, to tell whether two of them are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

_CONFIG_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
_ROWS = 4
_COLUMNS = 64


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 (hex) of a tokenizer's vocabulary, sorted by id, and of its special tokens' ids.

    Two tokenizers with the same fingerprint give every id the same text. Padding that reuses another special token
    does not change it.
    """
    pairs = sorted((int(number), token) for token, number in tokenizer.get_vocab().items())
    special = sorted({int(number) for number in tokenizer.all_special_ids})
    ends = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    text = json.dumps({"vocab": pairs, "special": special, "ends": ends}, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def model_fingerprint(model_or_dir: nn.Module | Path | str) -> str:
    """SHA-256 (hex) of a causal LM, cheap enough to take at every save: it reads a sample, not the model.

    Hashed are the settings of `_CONFIG_KEYS` (null where a config lacks one), and of every parameter its shape, dtype
    and the values at up to 4 evenly spaced rows and 64 evenly spaced places in each of them. Names do not count, and
    tied weights count once. So a model and the folder that it was saved to have the same fingerprint in the same dtype;
    training changes it, as every step moves almost every value; a change of a few single values may go unseen.

    Raises:
        ValueError: a folder without `config.json` or without safetensors weights.
    """
    config: Any
    if isinstance(model_or_dir, nn.Module):
        config = model_or_dir.config
        samples = [_digest(list(tensor.shape), tensor.dtype, tensor.detach()) for tensor in model_or_dir.parameters()]
    else:
        directory = Path(model_or_dir)
        if not (directory / "config.json").is_file():
            raise ValueError(f"there is no model at {directory}: it has no config.json")
        config = AutoConfig.from_pretrained(directory)
        samples = list(_file_digests(directory))
    text_config = config.get_text_config(decoder=True)
    settings = {key: getattr(text_config, key, None) for key in _CONFIG_KEYS}
    text = json.dumps({"config": settings, "tensors": sorted(samples)}, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digests(directory: Path) -> Iterator[str]:
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"there are no safetensors weights at {directory}: it has no model*.safetensors")
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    if name.startswith("medusa_head."):  # prediction heads that were saved with their target
                        continue
                    part = opened.get_slice(name)
                    dtype = (part[:1] if part.get_shape() else opened.get_tensor(name)).dtype
                    yield _digest(part.get_shape(), dtype, part if part.get_shape() else opened.get_tensor(name))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _digest(shape: list[int], dtype: torch.dtype, rows: Any) -> str:
    """Hash of a tensor, or of something else that gives rows when it is sliced."""
    digest = hashlib.sha256(json.dumps([shape, str(dtype)]).encode())
    count = shape[0] if shape else 1
    for row in sorted({i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)} if count else set()):
        values = (rows[row : row + 1] if shape else rows).reshape(-1)
        if len(values):
            columns = torch.linspace(0, len(values) - 1, min(_COLUMNS, len(values)), dtype=torch.float64).long()
            sample = values[columns.to(values.device)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
