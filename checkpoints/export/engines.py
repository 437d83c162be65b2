"""Drafters as draft models of vLLM and SGLang, which take them only with a target of the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..storage.names import DRAFT_VOCABULARY
from ..verify.model_files import load_config
from .base import ExportOptions, Source, format_of
from .drafter import compare_whole, drafter_config, stored_types, write_whole
from .target import check_pair, needed_target
from .tokenizer import has_tokenizer

ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "GPT2LMHeadModel", "GemmaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"),
)
"""Of small decoders, those that vLLM and SGLang both run: with modules of their own, but for GPT-NeoX in SGLang, which
takes that of transformers."""
DTYPES = ("F32", "F16", "BF16")


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    write_whole(source, folder)
    if problems := _problems(folder):
        raise ValueError(f"{source.folder} is no draft model for vLLM and SGLang: {'; '.join(problems)}")
    (folder / DRAFT_VOCABULARY).unlink(missing_ok=True)  # vLLM takes what is in any safetensors file for weights


def _problems(folder: Path) -> list[str]:
    """What the engines mind in the drafter alone."""
    config, found = load_config(folder), []
    named = config.architectures
    architecture = named[0] if isinstance(named, list) and named else "not given"
    if architecture not in ARCHITECTURES:
        found.append(f"its architecture is {architecture}, and those that both have are {', '.join(ARCHITECTURES)}")
    if getattr(config, "auto_map", None):
        found.append("its config asks for code of its own (auto_map)")
    dtypes = stored_types(folder)
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        found.append(
            f"its tensors are of {' and '.join(sorted(dtypes))}, expected one type of {', '.join(sorted(DTYPES))}"
        )
    if architecture.startswith("Gemma") and (folder / DRAFT_VOCABULARY).is_file():
        found.append("its embedding is its output layer to them: what it does not propose cannot be kept out of that")
    if not has_tokenizer(folder):
        found.append("it has no tokenizer, and SGLang compares it with the target's")
    return found


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    why = "vLLM and SGLang take a draft model only with a target of the same vocabulary"
    target = needed_target(source, options, why)
    check_pair(source, folder, target, ("vllm", "sglang"), also=("context length", "tokenizer"))
    return [*compare_whole(source, folder), f"vocabulary size, every token and the positions with those of {target}"]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    return {"mixes_attention": len(set(getattr(drafter_config(source), "layer_types", None) or ())) > 1}


DRAFT_MODEL = format_of("vllm-sglang", write=_write, compare=_compare, values=_values)
