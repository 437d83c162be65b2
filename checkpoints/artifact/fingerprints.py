"""Short names for what a model and a tokenizer are, to tell whether two of them are the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from ..storage.atomic import read_consistent
from ..storage.messages import first_line
from ..storage.names import ADAPTER_CONFIG, PREFIX
from ..storage.safe_read import UNREADABLE, open_file, read_json, shards_of

if TYPE_CHECKING:  # looking at manifests takes neither, and they take seconds
    import torch
    from torch import nn

_CONFIG_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NO_PARAMETER = re.compile(r"(?:^|\.)(?:rotary_emb\.inv_freq|(?:attn|attention)\.masked_bias)$")
_MASK = re.compile(r"(?:^|\.)(?:attn|attention)\.bias$")
"""What older transformers stored beside the parameters: tables of positions, and causal masks [1, 1, T, T]."""
_ROWS = 4
_COLUMNS = 64

Sample = tuple[tuple[int, ...], str]
"""A tensor's shape, and the hash of a sample of it."""


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
    and the values at up to 4 evenly spaced rows and 64 evenly spaced places in each. Names do not count, and tied
    weights count once. A change of a few single values may go unseen. Raises ValueError: a folder without `config.json`
    or without safetensors weights, an adapter, damaged files."""
    config: Any
    if not isinstance(model_or_dir, (Path, str)):
        config = model_or_dir.config
        tensors: Iterable[Sample] = (
            (tuple(tensor.shape), _digest(list(tensor.shape), tensor.dtype, tensor.detach()))
            for tensor in model_or_dir.parameters()
        )
    else:
        directory = Path(model_or_dir)
        config, tensors = read_consistent(directory, lambda: (_config(directory), list(_file_samples(directory))))
    text_config = config.get_text_config(decoder=True)
    settings = {key: getattr(text_config, key, None) for key in _CONFIG_KEYS}
    samples, embeddings = list[str](), set[str]()
    for shape, digest in tensors:
        tied = settings["tie_word_embeddings"] and len(shape) == 2 and shape[0] == settings["vocab_size"]
        if not tied or digest not in embeddings:
            samples.append(digest)
        if tied:
            embeddings.add(digest)
    text = json.dumps({"config": settings, "tensors": sorted(samples)}, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _config(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        if (directory / ADAPTER_CONFIG).is_file():
            raise ValueError(f"{directory} holds an adapter and no model: merge it, or name the model that it changes")
        raise ValueError(f"there is no model at {directory}: it has no config.json")
    from transformers import AutoConfig

    try:
        read_json(directory / "config.json")
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / 'config.json'} cannot be read: {first_line(error)}") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers would load. Raises ValueError: none; an index that names a lost one."""
    if (directory / _WHOLE).is_file():
        return [directory / _WHOLE]
    if (directory / _INDEX).is_file():
        shards = sorted(set(shards_of(directory / _INDEX).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise ValueError(f"{directory / _INDEX} names {shard!r}, which is not beside it")
        return [directory / shard for shard in shards]
    if files := sorted(directory.glob("model*.safetensors")):
        return files
    raise ValueError(f"there are no safetensors weights at {directory}: it has no model*.safetensors")


def _file_samples(directory: Path) -> Iterator[Sample]:
    for path in weight_files(directory):
        try:
            os.close(open_file(path))
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    if not is_parameter(name, shape):
                        continue
                    rows = part if shape else opened.get_tensor(name)
                    yield tuple(shape), _digest(shape, (part[:1] if shape else rows).dtype, rows)
        except (*UNREADABLE, ValueError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error


def is_parameter(name: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor is its model's own: no buffer of older transformers, none of prediction heads."""
    buffer = _NO_PARAMETER.search(name) or (_MASK.search(name) and len(shape) == 4)
    return not buffer and not name.startswith(PREFIX)


def _digest(shape: list[int], dtype: torch.dtype, rows: Any) -> str:
    """Hash of a tensor, or of something else that gives rows when it is sliced."""
    import torch

    digest = hashlib.sha256(json.dumps([shape, str(dtype)]).encode())
    count = shape[0] if shape else 1
    for row in sorted({i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)} if count else set()):
        values = (rows[row : row + 1] if shape else rows).reshape(-1)
        if len(values):
            columns = torch.linspace(0, len(values) - 1, min(_COLUMNS, len(values)), dtype=torch.float64).long()
            sample = values[columns.to(values.device)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
