"""Export of draft models and EAGLE-3 heads to GGUF with llama.cpp's converter, and a round-trip check."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..artifact.locate import find_folder
from ..heads.eagle import load_eagle, save_eagle
from ..storage.gguf import read_gguf
from ..storage.messages import first_line
from ..storage.names import CONFIG_FILE, DRAFT_VOCABULARY, MANIFEST_FILE
from ..storage.places import find_local
from ..storage.safe_read import read_json
from ..verify.model_files import UNLOADABLE, is_adapter, load_config, load_whole
from . import gguf_convert
from .base import ExportOptions, Format, Source, check_same_tensors, known_target, needed_target, target_name
from .drafter import draft_tokens_of, load_merged, stored_dtypes, write_whole
from .eagle import check_eagle, eagle_of, steps_of
from .target import check_drafter

GGUF_FILE = "model.gguf"
CONVERTER = "convert_hf_to_gguf.py"

_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_UNKNOWN = "pre-tokenizer was not recognized"
_GPT2_SPLIT = {"add_prefix_space": False, "use_regex": True}
_UNSET_IN_GPT2 = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("byte_fallback", "ignore_merges"),
)
"""BPE options that must be unset for llama.cpp's `gpt-2` pre-tokenizer."""
_UNFINISHED = ".model"
_PIECES = "tokenizer.model"
_RENAMED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpt2": lambda config: {"n_ctx": config.n_positions},
    "gpt_neox": lambda config: {"rotary_pct": config.rope_parameters["partial_rotary_factor"]},
}
"""Functions by model type that return configuration keys that the converter expects but transformers 5 renamed."""
_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensors transformers loads from GGUF without modification."""
_EMBEDDING = "token_embd.weight"
_DERIVED = ("rope_freqs.weight",)
"""GGUF tensors that the converter computes from the configuration."""


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    converter, target = find_converter(options.llama_cpp), known_target(source, options)
    model = _prepare_model(source, folder / _UNFINISHED)
    if target is not None:
        check_drafter(source, model, target, ("llama.cpp",))
        # the converter needs tokenizer.model for some families, and transformers does not save it
        pieces = (find_folder(target, [_PIECES]) / _PIECES).resolve()
        if pieces.is_file() and not (model / _PIECES).exists():
            (model / _PIECES).symlink_to(pieces)
    config = load_config(model)
    if config.model_type.startswith("gemma") and draft_tokens_of(source) is not None:
        raise ValueError(f"llama.cpp does not support a draft vocabulary for Gemma: {source.folder / DRAFT_VOCABULARY}")
    renamed = _RENAMED[config.model_type](config) if config.model_type in _RENAMED else {}
    _convert(source, converter, model, folder / GGUF_FILE, split_by=model, renamed=renamed)
    shutil.rmtree(folder / _UNFINISHED)


def _convert(
    source: Source, converter: Path, model: Path, out: Path, split_by: Path, renamed: dict[str, Any], *more: str
) -> None:
    """Convert the folder `model` to the GGUF file `out` with llama.cpp's converter and its further options `more`.

    `split_by` contains the tokenizer, and `renamed` has additional configuration values for the converter.
    """
    dtypes = stored_dtypes(model) - {"I64", "BOOL"}  # dtypes of EAGLE-3's token maps
    if len(dtypes) != 1 or not dtypes <= set(_TYPES):
        raise ValueError(f"{source.folder} has dtypes {', '.join(sorted(dtypes))}, expected {', '.join(_TYPES)}")
    is_gpt2 = _splits_as_gpt2(split_by)
    command = [sys.executable, "-P", "-m", gguf_convert.__name__, str(converter)]
    command += ["gpt-2" if is_gpt2 else "", json.dumps(renamed)]
    command += [str(model), "--outfile", str(out), "--outtype", _TYPES[dtypes.pop()], *more]
    settings: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, **settings)
    if done.returncode or not out.is_file():
        output = done.stdout + done.stderr
        if _UNKNOWN in output and not is_gpt2:
            raise ValueError(f"{converter} does not support the tokenizer of {split_by}")
        tail = "\n".join(output.strip().splitlines()[-12:])
        failure = f"failed with exit code {done.returncode}" if done.returncode else f"did not write {out.name}"
        raise ValueError(f"{converter} {failure}; last lines of its output:\n{tail}")


def _prepare_model(source: Source, folder: Path) -> Path:
    """Write the merged model to a subfolder with the artifact's name, because the converter stores this name."""
    model = folder / source.folder.resolve().name
    model.mkdir(parents=True)
    if is_adapter(source.folder) or draft_tokens_of(source) is not None:
        write_whole(source, model)
    else:
        for path in source.folder.resolve().iterdir():
            if path.name != MANIFEST_FILE:
                (model / path.name).symlink_to(path)
    return model


def find_converter(checkout: Path | None) -> Path:
    """Return the path of the GGUF converter in a llama.cpp checkout. Raises ValueError if it is missing."""
    if checkout is None:
        raise ValueError(f"the export needs {CONVERTER} of llama.cpp: pass the path of a checkout with --llama-cpp")
    converter = checkout.expanduser() / CONVERTER
    if not converter.is_file():
        raise ValueError(f"{converter} does not exist: pass a checkout of llama.cpp with --llama-cpp")
    return converter.resolve()


def _splits_as_gpt2(model: Path) -> bool:
    """Check if llama.cpp's pre-tokenizer `gpt-2` matches the tokenizer in a model folder."""
    path = model / "tokenizer.json"
    state = read_json(path) if path.is_file() else {}
    parts = ("model", "normalizer", "pre_tokenizer")
    bpe, normalizer, split = (part if isinstance(part := state.get(name), dict) else {} for name in parts)
    if bpe.get("type") != "BPE" or normalizer or split.get("type") != "ByteLevel":
        return False
    split = {"use_regex": True} | split  # missing in older files
    is_set = any(bpe.get(name) for name in _UNSET_IN_GPT2)
    return not is_set and all(split.get(name) is value for name, value in _GPT2_SPLIT.items())


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    path = folder / GGUF_FILE
    written = read_gguf(path)
    from gguf.quants import dequantize  # optional dependency, whose presence `read_gguf` checks

    model = load_merged(source)
    config = model.config
    field, version = written.get_field("tokenizer.ggml.tokens"), written.get_field("GGUF.version").contents()
    tokens = 0 if field is None else len(field.data)
    if tokens != config.vocab_size:
        raise ValueError(f"{path} has {tokens} tokens, expected the artifact's {config.vocab_size}")
    tensors = {tensor.name: tensor for tensor in written.tensors}
    if other := {tensor.tensor_type.name for tensor in written.tensors} - set(_TYPES):
        raise ValueError(f"{path} contains tensors of type {', '.join(other)}, expected one of {', '.join(_TYPES)}")
    lines = [f"GGUF version {version}: {tokens:,} tokens, {len(tensors)} tensors"]
    if config.model_type in _DECODERS:
        try:
            # GGUF stores Mistral models as Llama, so the configuration in the file is used
            about = {} if config.model_type == "mistral" else {"config": config}
            read = load_whole(type(model), folder, gguf_file=GGUF_FILE, dtype=torch.float32, **about)
        except UNLOADABLE as error:
            raise ValueError(f"{path} cannot be loaded: {first_line(error)}") from error
        check_same_tensors(read.state_dict(), {name: one.float() for name, one in model.state_dict().items()}, folder)
        lines.append(f"all {len(tensors.keys() - set(_DERIVED))} tensors are identical")
    elif _EMBEDDING not in tensors:
        raise ValueError(f"{path} lacks {_EMBEDDING}")
    else:
        stored = dequantize(tensors[_EMBEDDING].data, tensors[_EMBEDDING].tensor_type)
        embedding = model.get_input_embeddings().weight.float()
        check_same_tensors({_EMBEDDING: torch.from_numpy(stored)}, {_EMBEDDING: embedding}, path)
        lines.append(f"the token embedding is identical (other tensors are not compared for {config.model_type})")
    target = known_target(source, options)
    return [*lines, f"all tokens equal those of {target}" if target else "tokens not compared with the target"]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    target = target_name(source, options)
    if target is None:
        return {"is_artifact": False, "is_here": False}
    is_here = find_local(target) is not None or Path(target).is_absolute()
    return {"is_artifact": (Path(target) / MANIFEST_FILE).is_file(), "is_here": is_here}


GGUF = Format(
    "gguf",
    "drafter",
    "GGUF file written by llama.cpp's converter",
    "llama.cpp, same version as the converter or later (tested with commit 0c1e57098)",
    _write,
    _compare,
    _values,
    ("target", "speculative_tokens", "llama_cpp"),
)


def _write_heads(source: Source, folder: Path, options: ExportOptions) -> None:
    converter, model = find_converter(options.llama_cpp), folder / _UNFINISHED
    target = find_folder(needed_target(source, options, "the file must contain the target's tokenizer"), [CONFIG_FILE])
    check_eagle(source, options, ["llama.cpp"])
    model.mkdir()
    save_eagle(eagle_of(source), model)
    _convert(source, converter, model, folder / GGUF_FILE, target, {}, "--target-model-dir", str(target))
    shutil.rmtree(model)


def _compare_heads(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    path, heads = folder / GGUF_FILE, load_eagle(source.folder)
    written, state = read_gguf(path), heads.state_dict()
    from gguf.quants import dequantize

    field = written.get_field("eagle3.target_layers")
    layers = None if field is None else [int(layer) for layer in field.contents()]
    if layers != list(heads.layers):
        raise ValueError(f"{path}: eagle3.target_layers must be {list(heads.layers)}, got {layers}")
    tensors = {tensor.name: tensor for tensor in written.tensors}
    lines = [f"the target layers are {', '.join(map(str, heads.layers))}"]
    if heads.proposed is not None:
        if "d2t" not in tensors or tensors["d2t"].data.tolist() != heads.proposed.tolist():
            raise ValueError(f"the draft vocabulary in {path} differs from the artifact's")
        lines.append(f"the draft vocabulary of {len(heads.proposed):,} tokens is identical")
    expected = {gguf_name: state[tensor_name] for gguf_name, tensor_name in _HEADS.items()}
    if heads.own_head is not None:
        expected["output.weight"] = heads.own_head
    stored = {
        name: torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type).copy())
        for name in expected
        if name in tensors
    }
    check_same_tensors(stored, {name: tensor.float() for name, tensor in expected.items()}, folder)
    lines.append(f"{len(expected)} of {len(tensors)} tensors are identical (llama.cpp permutes rows of the others)")
    return [*lines, *check_eagle(source, options, ["llama.cpp"])]


_HEADS = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
}
"""Mapping from GGUF names to EAGLE-3 names of the tensors that llama.cpp stores unchanged."""


EAGLE_GGUF = Format(
    "eagle3-gguf",
    "heads",
    "EAGLE-3 heads as a GGUF file written by llama.cpp's converter",
    "llama.cpp with --spec-type draft-eagle3 (tested with b11434)",
    _write_heads,
    _compare_heads,
    lambda source, folder, options: _values(source, folder, options) | {"tokens": steps_of(source, options)},
    ("target", "speculative_tokens", "llama_cpp"),
)
