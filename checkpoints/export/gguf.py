"""Drafters as GGUF files for llama.cpp, written by its own converter and read back here."""

from __future__ import annotations

import copy
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

from ..artifact.markdown import shell
from ..pairs.sides import find_folder
from ..pairs.speculation import SPECULATIVE_TOKENS
from ..storage.names import MANIFEST_FILE
from ..storage.places import here
from ..storage.safe_read import read_json
from . import gguf_convert
from .base import FOLDER, ExportOptions, Format, Source
from .drafter import is_adapter, load_config, load_drafter, random_logits, stored_types, write_whole
from .gguf_file import GgufFile, read_gguf
from .target import check_pair, target_name

GGUF_FILE = "model.gguf"
CONVERTER = "convert_hf_to_gguf.py"

_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_TAIL = 12
_UNKNOWN = "pre-tokenizer was not recognized"
_GPT2_SPLIT = {"add_prefix_space": False, "use_regex": True}
_NOT_OF_GPT2 = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
"""Settings of a BPE; in GPT-2's they are empty."""
_UNFINISHED = ".model"
_PIECES = "tokenizer.model"
_ASKED: dict[str, Callable[[Any], dict[str, Any]]] = {
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
_DERIVED = ("rope_freqs.weight",)
"""Tensors of a GGUF file that are worked out from settings."""


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    converter, target = _converter(options), _known_target(source, options)
    model = _for_converter(source, folder / _UNFINISHED)
    if target is not None:
        check_pair(source, model, target, ("llama.cpp",))
        _add_pieces(model, (find_folder(target, [_PIECES]) / _PIECES).resolve())
    found = stored_types(model)
    if len(found) != 1 or not found <= set(_TYPES):
        raise ValueError(f"{source.folder}: its tensors are of {' and '.join(sorted(found))}, expected one of {_TYPES}")
    other, config = _unlike_gpt2(model), load_config(model)
    asked = _ASKED[config.model_type](config) if config.model_type in _ASKED else {}
    command = [sys.executable, "-P", "-m", gguf_convert.__name__, str(converter)]
    command += ["" if other else "gpt-2", json.dumps(asked)]
    command += [str(model), "--outfile", str(folder / GGUF_FILE), "--outtype", _TYPES[found.pop()]]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode or not (folder / GGUF_FILE).is_file():
        said = done.stdout + done.stderr
        if _UNKNOWN in said and other:
            raise ValueError(
                f"{converter} does not know the tokenizer of {source.folder}: it knows those of published models, and "
                f"byte-level BPE that splits text as GPT-2 does is given it as such; here {other}"
            )
        tail = "\n".join(said.strip().splitlines()[-_TAIL:])
        what = f"failed with exit code {done.returncode}" if done.returncode else f"left no {GGUF_FILE}"
        raise ValueError(f"{converter} {what}; the end of what it said:\n{tail}")
    shutil.rmtree(folder / _UNFINISHED)


def _for_converter(source: Source, place: Path) -> Path:
    """The model, with its adapter merged, in a folder of the artifact's name, which the converter calls it by."""
    model = place / source.folder.resolve().name
    model.mkdir(parents=True)
    if is_adapter(source.folder):
        write_whole(source, model)
    else:
        for path in source.folder.resolve().iterdir():
            if path.name != MANIFEST_FILE:
                (model / path.name).symlink_to(path)
    return model


def _add_pieces(model: Path, target: Path) -> None:
    """The target's model of sentencepiece where the drafter has none: transformers does not save it with a tokenizer.

    Without one the converter refuses some families, and gives all tokens of others the same score.
    """
    if target.is_file() and not (model / _PIECES).exists():
        (model / _PIECES).symlink_to(target)


def _converter(options: ExportOptions) -> Path:
    if options.llama_cpp is None:
        raise ValueError(f"gguf is written by llama.cpp's {CONVERTER}: say with --llama-cpp where your checkout lies")
    found = options.llama_cpp.expanduser() / CONVERTER
    if not found.is_file():
        raise ValueError(f"there is no {found}: --llama-cpp names a checkout of llama.cpp, which holds {CONVERTER}")
    return found.resolve()


def _unlike_gpt2(model: Path) -> str:
    """What keeps llama.cpp's `gpt-2` from splitting text as a model's tokenizer does; empty where nothing does."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return "there is no tokenizer.json"
    try:
        told = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    parts = ("model", "normalizer", "pre_tokenizer")
    bpe, normalizer, split = (part if isinstance(part := told.get(name), dict) else {} for name in parts)
    if bpe.get("type") != "BPE":
        return f"its model is {bpe.get('type')}"
    if normalizer:
        return f"it has a normalizer, {normalizer.get('type')}"
    if split.get("type") != "ByteLevel":
        return f"its pre-tokenizer is {split.get('type')}"
    split = {"use_regex": True} | split  # older files do not say it
    otherwise = [name for name, value in _GPT2_SPLIT.items() if split.get(name) is not value]
    otherwise += [name for name in _NOT_OF_GPT2 if bpe.get(name)]
    return f"it is set otherwise: {', '.join(otherwise)}" if otherwise else ""


def _known_target(source: Source, options: ExportOptions) -> str | None:
    """The target, where the user names one or it lies here."""
    named = target_name(source, options)
    return named if named is not None and (options.target or Path(named).is_dir()) else None


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    made = read_gguf(folder / GGUF_FILE)
    model = _reference(source, folder)
    config = model.config
    tokens = made.lengths.get("tokenizer.ggml.tokens")
    if tokens != config.vocab_size:
        raise ValueError(f"{folder / GGUF_FILE} has {tokens} tokens, the artifact's vocabulary {config.vocab_size}")
    lines = [f"GGUF of version {made.version}: {tokens:,} tokens, {len(made.tensors)} tensors"]
    if config.model_type in _DECODERS:
        lines += _compare_decoder(model, made)
    else:
        _check_equal("token_embd.weight", [made.load("token_embd.weight")], model.get_input_embeddings().weight, made)
        lines.append(f"the token embedding (others are not compared in models of type {config.model_type})")
    target = _known_target(source, options)
    return [*lines, f"tokens with those of {target}" if target else "not compared: tokens with the target's, not here"]


def _reference(source: Source, folder: Path) -> Any:
    if not is_adapter(source.folder):
        return load_drafter(source.folder)
    merged = folder / _UNFINISHED
    merged.mkdir()
    write_whole(source, merged)
    model = load_drafter(merged)
    shutil.rmtree(merged)
    return model


def _compare_decoder(model: Any, made: GgufFile) -> list[str]:
    """Every tensor, and the logits of a model that is filled with those of the file."""
    expected = {name: weight.detach() for name, weight in model.named_parameters()}
    names = {name: _own_name(name) for name in made.tensors if name not in _DERIVED}
    if other := sorted(set(names.values()) ^ set(expected)):
        raise ValueError(f"{made.path} and the artifact differ in their tensors: {', '.join(other[:3])}")
    found = {}
    for name, own in names.items():
        tensor = made.load(name)
        ways = [tensor]
        if name.partition(".attn_")[2].startswith(("q.", "k.")):  # llama.cpp's order of rotary pairs
            heads = model.config.num_attention_heads if ".attn_q." in name else model.config.num_key_value_heads
            ways.append(_unpaired(tensor, heads))
        found[own] = _check_equal(name, ways, expected[own], made)
    again = copy.deepcopy(model)
    for weight in again.parameters():
        weight.data.fill_(torch.nan)
    again.load_state_dict(found, strict=False)
    if not torch.equal(random_logits(model), random_logits(again)):
        raise ValueError(f"logits of a model with the tensors of {made.path} differ from the artifact's")
    return [
        f"all {len(found)} tensors, bit by bit",
        "logits of random tokens, by a model with these tensors, bit by bit",
    ]


def _own_name(name: str) -> str:
    """The name in transformers of a tensor of GGUF."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        return name
    return (f"model.layers.{found[1]}." if found[1] else "") + f"{_NAMES[found[2]]}.{found[3]}"


def _unpaired(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in transformers' order: in each head, first halves of all pairs."""
    if tensor.shape[0] % (2 * heads):
        return tensor
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _check_equal(name: str, ways: list[Tensor], expected: Tensor, made: GgufFile) -> Tensor:
    for tensor in ways:
        if tensor.shape == expected.shape and torch.equal(tensor.float(), expected.detach().float()):
            return tensor.to(expected.dtype)
    raise ValueError(f"{name} in {made.path} differs from the artifact's")


def _serve(source: Source, options: ExportOptions) -> str:
    tokens = options.speculative_tokens or SPECULATIVE_TOKENS
    target = target_name(source, options)
    convert, served = "", "target.gguf"
    if target and (Path(target) / MANIFEST_FILE).is_file():
        convert = f"draftsmith export {shell(target)} --to gguf --out target-gguf --llama-cpp LLAMA_CPP\n"
        served = f"target-gguf/{GGUF_FILE}"
    elif target:
        place = target
        if here(target) is None and not Path(target).is_absolute():  # the converter takes folders alone
            convert, place = f"hf download {shell(target)} --local-dir model\n", "model"
        convert += f"python {CONVERTER} {shell(place)} --outfile target.gguf\n"
    return f"""
```bash
{convert}llama-server -m {served} -md {FOLDER}/{GGUF_FILE} --spec-type draft-simple --spec-draft-n-max {tokens}
```

Versions before `--spec-type` had drafters (first half of 2026 and earlier) call the number of tokens `--draft-max`:

```bash
llama-server -m {served} -md {FOLDER}/{GGUF_FILE} --draft-max {tokens}
```

`llama-speculative` takes the same options and a prompt (`-p`). Text is split by the target's tokenizer alone; of the
drafter's, llama.cpp compares the tokens. The file has the type of the artifact's weights;
`llama-quantize` makes it smaller.
"""


GGUF = Format(
    name="gguf",
    kind="drafter",
    summary="GGUF file, by llama.cpp's own converter",
    readers="llama.cpp of the version of the converter, and later (run with commit 0c1e57098)",
    write=_write,
    compare=_compare,
    serving=_serve,
    options=("target", "speculative_tokens", "llama_cpp"),
)
