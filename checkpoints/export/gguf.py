"""Drafters as GGUF files for llama.cpp, written by its own converter and read back here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.compat import read_config
from ..pairs.sides import find_folder
from ..storage.gguf import read_gguf
from ..storage.names import DRAFT_VOCABULARY, MANIFEST_FILE
from ..storage.places import here
from ..verify.model_files import is_adapter, load_config
from . import gguf_convert
from .base import ExportOptions, Source, format_of, target_name
from .drafter import load_merged, proposed_tokens, stored_types, write_whole
from .target import check_pair

GGUF_FILE = "model.gguf"
CONVERTER = "convert_hf_to_gguf.py"

_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_UNKNOWN = "pre-tokenizer was not recognized"
_GPT2_SPLIT = {"add_prefix_space": False, "use_regex": True}
_NOT_OF_GPT2 = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("byte_fallback", "ignore_merges"),
)
"""Settings of a BPE; in GPT-2's they are empty."""
_UNFINISHED = ".model"
_PIECES = "tokenizer.model"
_RENAMED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpt2": lambda config: {"n_ctx": config.n_positions},
    "gpt_neox": lambda config: {"rotary_pct": config.rope_parameters["partial_rotary_factor"]},
}
"""Settings of some types of models that the converter asks for, and transformers 5 writes under another name."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose tensors have these names."""
_EMBEDDING = "token_embd.weight"
_DERIVED = ("rope_freqs.weight",)
"""Tensors of a GGUF file that are computed from settings."""


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    converter, target = _converter(options), _known_target(source, options)
    model = _for_converter(source, folder / _UNFINISHED)
    if target is not None:
        check_pair(source, model, target, ("llama.cpp",))
        # without one the converter refuses some families, and transformers does not save it with a tokenizer
        pieces = (find_folder(target, [_PIECES]) / _PIECES).resolve()
        if pieces.is_file() and not (model / _PIECES).exists():
            (model / _PIECES).symlink_to(pieces)
    found = stored_types(model)
    if len(found) != 1 or not found <= set(_TYPES):
        raise ValueError(f"{source.folder}: its tensors are of {' and '.join(sorted(found))}, expected one of {_TYPES}")
    is_gpt2, config = _splits_as_gpt2(model), load_config(model)
    if config.model_type.startswith("gemma") and proposed_tokens(source) is not None:
        raise ValueError(f"{source.folder}: llama.cpp has Gemma propose any token, {DRAFT_VOCABULARY} only some")
    renamed = _RENAMED[config.model_type](config) if config.model_type in _RENAMED else {}
    command = [sys.executable, "-P", "-m", gguf_convert.__name__, str(converter)]
    command += ["gpt-2" if is_gpt2 else "", json.dumps(renamed)]
    command += [str(model), "--outfile", str(folder / GGUF_FILE), "--outtype", _TYPES[found.pop()]]
    settings: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, **settings)
    if done.returncode or not (folder / GGUF_FILE).is_file():
        output = done.stdout + done.stderr
        if _UNKNOWN in output and not is_gpt2:
            raise ValueError(f"{converter} does not know {source.folder}'s tokenizer, and GPT-2's differs")
        tail = "\n".join(output.strip().splitlines()[-12:])
        what = f"failed with exit code {done.returncode}" if done.returncode else f"left no {GGUF_FILE}"
        raise ValueError(f"{converter} {what}; the end of its output:\n{tail}")
    shutil.rmtree(folder / _UNFINISHED)


def _for_converter(source: Source, folder: Path) -> Path:
    """The model, with its adapter merged, in a folder of the artifact's name, which the converter calls it by."""
    model = folder / source.folder.resolve().name
    model.mkdir(parents=True)
    if is_adapter(source.folder) or proposed_tokens(source) is not None:
        write_whole(source, model)
    else:
        for path in source.folder.resolve().iterdir():
            if path.name != MANIFEST_FILE:
                (model / path.name).symlink_to(path)
    return model


def _converter(options: ExportOptions) -> Path:
    if options.llama_cpp is None:
        raise ValueError(f"gguf is written by llama.cpp's {CONVERTER}: say with --llama-cpp where your checkout lies")
    found = options.llama_cpp.expanduser() / CONVERTER
    if not found.is_file():
        raise ValueError(f"there is no {found}: --llama-cpp names a checkout of llama.cpp, which holds {CONVERTER}")
    return found.resolve()


def _splits_as_gpt2(model: Path) -> bool:
    """Whether llama.cpp's `gpt-2` splits text as a model's tokenizer does."""
    path = model / "tokenizer.json"
    state = read_config(path) if path.is_file() else {}
    parts = ("model", "normalizer", "pre_tokenizer")
    bpe, normalizer, split = (part if isinstance(part := state.get(name), dict) else {} for name in parts)
    if bpe.get("type") != "BPE" or normalizer or split.get("type") != "ByteLevel":
        return False
    split = {"use_regex": True} | split  # older files do not say it
    is_set = any(bpe.get(name) for name in _NOT_OF_GPT2)
    return not is_set and all(split.get(name) is value for name, value in _GPT2_SPLIT.items())


def _known_target(source: Source, options: ExportOptions) -> str | None:
    """The target, where the user names one or it lies here."""
    named = target_name(source, options)
    return named if named is not None and (options.target or Path(named).is_dir()) else None


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    path = folder / GGUF_FILE
    made = read_gguf(path)
    model = load_merged(source)
    config = model.config
    field, version = made.get_field("tokenizer.ggml.tokens"), made.get_field("GGUF.version").contents()
    tokens = 0 if field is None else len(field.data)
    if tokens != config.vocab_size:
        raise ValueError(f"{path} has {tokens} tokens, the artifact's vocabulary {config.vocab_size}")
    tensors = {tensor.name: tensor for tensor in made.tensors}
    lines = [f"GGUF of version {version}: {tokens:,} tokens, {len(tensors)} tensors"]
    if config.model_type in _DECODERS:
        lines.append(f"all {_check_decoder(model, tensors, path)} tensors, bit by bit")
    elif _EMBEDDING not in tensors:
        raise ValueError(f"{path} lacks {_EMBEDDING}")
    else:
        _check_equal(tensors[_EMBEDDING], model.get_input_embeddings().weight, path)
        lines.append(f"the token embedding (others are not compared in models of type {config.model_type})")
    target = _known_target(source, options)
    return [*lines, f"tokens with those of {target}" if target else "not compared: tokens with the target's, not here"]


def _check_decoder(model: Any, tensors: dict[str, Any], path: Path) -> int:
    """How many tensors there are; ValueError where one is not as in the model."""
    expected = dict(model.named_parameters())
    names = {name: _own_name(name) for name in tensors if name not in _DERIVED}
    if other := sorted(set(names.values()) ^ set(expected)):
        raise ValueError(f"{path} and the artifact differ in their tensors: {', '.join(other[:3])}")
    for name, own in names.items():
        heads = None
        if name.partition(".attn_")[2].startswith(("q.", "k.")):
            heads = model.config.num_attention_heads if ".attn_q." in name else model.config.num_key_value_heads
        _check_equal(tensors[name], expected[own], path, heads)
    return len(names)


def _own_name(name: str) -> str:
    """The name in transformers of a tensor of GGUF."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        return name
    return (f"model.layers.{found[1]}." if found[1] else "") + f"{_NAMES[found[2]]}.{found[3]}"


def _check_equal(made: Any, expected: Tensor, path: Path, heads: int | None = None) -> None:
    """ValueError where a tensor differs, or is quantised; with `heads`, it may be a query or key projection in
    llama.cpp's order of rows: in each head, the two of a rotary pair beside each other."""
    if made.tensor_type.name not in _TYPES:
        raise ValueError(f"{path}: {made.name} is of type {made.tensor_type.name}, expected one of {', '.join(_TYPES)}")
    tensor = torch.from_numpy(made.data.copy())
    tensor = tensor.view(torch.bfloat16) if made.tensor_type.name == "BF16" else tensor  # numpy has bytes
    ways = [tensor]
    if heads is not None and tensor.shape[0] % (2 * heads) == 0:
        ways.append(tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape))
    if not any(way.shape == expected.shape and torch.equal(way.float(), expected.detach().float()) for way in ways):
        raise ValueError(f"{made.name} in {path} differs from the artifact's")


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    target = target_name(source, options)
    if target is None:
        return {"is_artifact": False, "is_here": False}
    is_here = here(target) is not None or Path(target).is_absolute()
    return {"is_artifact": (Path(target) / MANIFEST_FILE).is_file(), "is_here": is_here}


GGUF = format_of("gguf", write=_write, compare=_compare, values=_values)
