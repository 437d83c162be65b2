"""Drafters as assistants of transformers, with LoRA merged or apart; and what all forms of drafters share.

Letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from ..artifact.compat import patch_model, patch_tokenizer
from ..artifact.fingerprints import tokenizer_fingerprint
from ..artifact.locate import at_revision
from ..artifact.markdown import python, span
from ..pairs.speculation import SPECULATIVE_TOKENS, save_speculation, speculation
from ..storage.names import MANIFEST_FILE
from ..verify.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    UNLOADABLE,
    base_of,
    is_adapter,
    load_config,
    load_whole,
    model_class,
    only_safetensors,
    reason,
)
from .base import FOLDER_IN_PYTHON, ExportOptions, Format, Source
from .target import check_vocabulary, target_name

_OURS = (MANIFEST_FILE, "README.md", "recipe.yaml")
"""Files of an artifact that its export has its own of, or none."""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_PROBES = (
    "The quick brown fox",
    "  indented\n\ttabs\n\n",
    "naïve Größe 東京 🙂",
    "1234567890 3.14 x_1 = [a, b];",
    "",
    " ",
)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of logits, as a share of the largest: what merging an adapter into weights of a type may change by rounding."""
_TARGET_BYTES = 4 << 30
"""Most bytes of a target that is loaded to decode with."""
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 3, 8, 16


def load_drafter(source: str | Path, dtype: torch.dtype | str = "auto") -> Any:
    """A model from a folder, in evaluation mode; never with remote code, nothing pickled but where that is allowed.

    Raises:
        ValueError: no model, or one that cannot be loaded.
    """
    source = at_revision(str(source))
    config = load_config(source)
    kind = model_class(config)
    safe = only_safetensors(source, config)
    try:
        return load_whole(kind, source, dtype=dtype, use_safetensors=safe, trust_remote_code=False).eval()
    except UNLOADABLE as error:
        raise ValueError(f"no language model could be loaded from {source}: {reason(str(source), error)}") from error


def with_adapter(folder: Path, *, merged: bool) -> Any:
    """An adapter's model with the adapter beside its weights or, `merged`, in them.

    Raises:
        ValueError: peft is not installed; a model that cannot be loaded, or that the adapter does not fit.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"{folder} holds a LoRA adapter, which needs peft: pip install draftsmith[train]") from error
    base = base_of(folder)
    try:
        model = PeftModel.from_pretrained(load_drafter(base), str(folder))
    except UNLOADABLE as error:
        why = reason(str(folder), error)
        raise ValueError(f"the adapter in {folder} cannot be put on its model {base}: {why}") from error
    return (model.merge_and_unload() if merged else model).eval()


def stored_types(folder: Path) -> set[str]:
    """Types of a model's tensors as safetensors names them: F32, F16, BF16 …"""
    found = set[str]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (no dictionary)
    return found


def _own_files(source: Source) -> list[str]:
    """The artifact's files that are its model's. Raises ValueError for code, and for weights but safetensors."""
    for name in source.manifest.files:
        if Path(name).suffix == ".py":
            raise ValueError(f"{source.folder / name} is code of the model's own, which is not exported")
        if Path(name).suffix in _OTHER_WEIGHTS:
            raise ValueError(
                f"{source.folder / name}: weights lie beside the safetensors, of which one set is exported"
            )
    return [name for name in source.manifest.files if name not in _OURS]


def _copy(source: Source, folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, folder / name)
    patch_tokenizer(folder)
    patch_model(folder)


def write_whole(source: Source, folder: Path) -> None:
    """The model as one: with its adapter merged, if it is one.

    Raises:
        ValueError: code of the model's own, weights that are not safetensors, or what `with_adapter` raises.
    """
    names = _own_files(source)
    if is_adapter(source.folder):
        with_adapter(source.folder, merged=True).save_pretrained(folder)
        names = [name for name in names if name not in (ADAPTER_CONFIG, ADAPTER_FILE) and not (folder / name).exists()]
    _copy(source, folder, names)


def _random_ids(vocab_size: int, rows: int, length: int) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def random_logits(model: Any) -> Tensor:
    """[B, T, V] in float32, for random ids."""
    ids_BT = _random_ids(model.config.get_text_config(decoder=True).vocab_size, 2, 16)
    more = {"decoder_input_ids": ids_BT} if model.config.is_encoder_decoder else {}
    logits_BTV: Tensor = model(input_ids=ids_BT, **more).logits
    return logits_BTV.float()


def compare_whole(source: Source, folder: Path) -> list[str]:
    """Compare the model read back with the artifact's: tensors, logits, tokenizer."""
    made = load_drafter(folder)
    adapter = is_adapter(source.folder)
    mine = with_adapter(source.folder, merged=True) if adapter else load_drafter(source.folder)
    expected, found = mine.state_dict(), made.state_dict()
    if set(expected) != set(found):
        raise ValueError(f"{folder} and {source.folder} differ in their tensors: {set(expected) ^ set(found)}")
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise ValueError(f"{name}, read back from {folder}, differs from the artifact's")
    lines = [f"all {len(expected)} tensors, bit by bit" + (", with the adapter merged" if adapter else "")]
    apart = with_adapter(source.folder, merged=False) if adapter else mine
    lines.append(_compare_logits(apart, made, f"{folder}"))
    return [*lines, *compare_tokenizers(source.folder, folder)]


def _compare_logits(mine: Any, made: Any, what: str) -> str:
    """ValueError for logits that differ, of a merged model by more than rounding."""
    mine_BTV, made_BTV = random_logits(mine), random_logits(made)
    if torch.equal(mine_BTV, made_BTV):
        return f"logits of {mine_BTV.shape[0] * mine_BTV.shape[1]} random tokens, bit by bit"
    difference = ((mine_BTV - made_BTV).abs().max() / mine_BTV.abs().max()).item()
    apart = type(mine) is not type(made)
    if not (apart and difference <= _TOLERANCE[made.dtype]):
        raise ValueError(f"logits of {what} differ from the artifact's by {difference:.1e} of the largest")
    return (
        f"logits of {mine_BTV.shape[0] * mine_BTV.shape[1]} random tokens with those of the model with the adapter "
        f"beside it, to within {difference:.1e} of the largest"
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def compare_tokenizers(artifact: Path, folder: Path) -> list[str]:
    """What is equal of two folders' tokenizers, a line each; ValueError where they differ."""
    if not has_tokenizer(artifact):
        return []
    mine, made = (AutoTokenizer.from_pretrained(place, trust_remote_code=False) for place in (artifact, folder))
    if tokenizer_fingerprint(mine) != tokenizer_fingerprint(made) or mine.chat_template != made.chat_template:
        raise ValueError(f"the tokenizer read back from {folder} differs from the artifact's")
    for text in (*_PROBES, *mine.all_special_tokens):
        if mine(text)["input_ids"] != made(text)["input_ids"]:
            raise ValueError(f"the tokenizer read back from {folder} encodes {text!r} otherwise than the artifact's")
    return [
        f"the tokenizer: its vocabulary, special tokens and chat template, and the ids of {len(_PROBES)} texts and "
        "every special token"
    ]


def _check_merge(source: Source, options: ExportOptions) -> None:
    if options.merge is not None and not is_adapter(source.folder):
        flag = "--merge" if options.merge else "--no-merge"
        raise ValueError(f"{flag} is for LoRA adapters, and {source.folder} holds a whole model")


def _write_assistant(source: Source, folder: Path, options: ExportOptions) -> None:
    _check_merge(source, options)
    target = target_name(source, options)
    if target is not None and (options.target or Path(target).is_dir()):
        check_vocabulary(source, target)
    if options.merge is False:
        _copy(source, folder, _own_files(source))
    else:
        write_whole(source, folder)
    model = base_of(folder) if is_adapter(folder) else None
    save_speculation(folder, options.speculative_tokens or SPECULATIVE_TOKENS, model)


def _compare_assistant(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    apart = options.merge is False
    lines = _compare_adapter(source, folder) if apart else compare_whole(source, folder)
    settings = GenerationConfig.from_pretrained(folder)
    expected = speculation(options.speculative_tokens or SPECULATIVE_TOKENS)
    found = {name: getattr(settings, name) for name in expected}
    if found != expected:
        raise ValueError(f"{folder / 'generation_config.json'} says {found}")
    lines.append("generation_config.json: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    return [*lines, _compare_decoding(source, folder, options)]


def _compare_adapter(source: Source, folder: Path) -> list[str]:
    expected, found = load_file(source.folder / ADAPTER_FILE), load_file(folder / ADAPTER_FILE)
    if set(expected) != set(found) or any(not torch.equal(found[name], one) for name, one in expected.items()):
        raise ValueError(f"the adapter read back from {folder} differs from the artifact's")
    mine, made = (with_adapter(place, merged=False) for place in (source.folder, folder))
    lines = [f"all {len(found)} tensors of the adapter, bit by bit", _compare_logits(mine, made, f"{folder}")]
    return [*lines, *compare_tokenizers(source.folder, folder)]


@torch.no_grad()
def _compare_decoding(source: Source, folder: Path, options: ExportOptions) -> str:
    """Greedy decoding with the assistant must give what the target alone gives; in float32, so that ties are rare."""
    target = target_name(source, options)
    if target is None or not Path(target).is_dir():
        where = "no target is named" if target is None else f"the target {target} is no folder here"
        return f"not compared: greedy decoding with the target, as {where}"
    size = sum(path.stat().st_size for path in Path(target).glob("*.safetensors"))
    if size > _TARGET_BYTES:
        return f"not compared: greedy decoding with the target {target}, which has {size / 1e9:.1f} GB"
    model = load_drafter(target, torch.float32)
    drafter = with_adapter(folder, merged=True) if is_adapter(folder) else load_drafter(folder, torch.float32)
    drafter = drafter.to(torch.float32)
    drafter.generation_config = GenerationConfig.from_pretrained(folder)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NEW_TOKENS}
    settings["pad_token_id"] = model.generation_config.pad_token_id or 0
    for ids_T in _random_ids(source.manifest.vocab_size, _PROMPTS, _PROMPT_TOKENS):
        both = {"input_ids": ids_T[None], "attention_mask": torch.ones_like(ids_T[None])}
        alone, assisted = (
            model.generate(**both, **settings),
            model.generate(**both, **settings, assistant_model=drafter),
        )
        if not torch.equal(alone, assisted):
            raise ValueError(
                f"the target {target} decodes otherwise with {folder} as its assistant: {assisted[0].tolist()} "
                f"instead of {alone[0].tolist()}"
            )
    return f"greedy decoding of the target {target} with and without it: {_PROMPTS} times {_NEW_TOKENS} tokens"


def _serve_assistant(source: Source, options: ExportOptions) -> str:
    target = python(target_name(source, options) or "TARGET")
    tokens = options.speculative_tokens or SPECULATIVE_TOKENS
    place = base_of(source.folder) if is_adapter(source.folder) else source.folder
    kind = "AutoModelForSeq2SeqLM" if load_config(place).is_encoder_decoder else "AutoModelForCausalLM"
    lines = ["```python", f"from transformers import {kind}, AutoTokenizer, GenerationConfig", ""]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({target})"]
    lines += [f"target = {kind}.from_pretrained({target})", f'drafter = {kind}.from_pretrained("{FOLDER_IN_PYTHON}")']
    if options.merge is False:
        lines += [f'drafter.generation_config = GenerationConfig.from_pretrained("{FOLDER_IN_PYTHON}")']
    else:
        lines[1] = f"from transformers import {kind}, AutoTokenizer"
    lines += ['inputs = tokenizer("Question", return_tensors="pt")']
    lines += ["answer = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)"]
    lines += ["print(tokenizer.decode(answer[0]))", "```", ""]
    lines += [
        f"It drafts {tokens} tokens a step, as `generation_config.json` says: transformers takes the settings from the",
        "drafter's, never from the target's. The count is constant; the confidence below which drafting stops is 0, so",
        "that it never does (transformers' own defaults are 20 tokens, and 0.4).",
    ]
    if options.merge is False:
        base = base_of(source.folder)
        lines += [
            "",
            f"This folder holds a LoRA adapter for {span(base)}, which must be there, and needs peft. transformers",
        ]
        lines += ["takes generation settings from that model, hence the line that reads them from here."]
    return "\n".join(lines)


ASSISTANT = Format(
    name="transformers",
    kind="drafter",
    summary="Assistant for assisted generation, with its settings in generation_config.json",
    readers="transformers ≥ 5",
    write=_write_assistant,
    compare=_compare_assistant,
    serving=_serve_assistant,
    options=("target", "speculative_tokens", "merge"),
    native=True,
)
