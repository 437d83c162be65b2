"""What vLLM and SGLang draft with: drafters, which they take only with a target of the same vocabulary, and EAGLE-3
heads, whose config each reads in its own way (`pairs/eagle.py`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..heads.eagle import EagleHeads, load_eagle, save_eagle
from ..heads.layouts import is_eagle
from ..pairs.eagle import READERS, examine_eagle
from ..pairs.sides import REFUSED, open_side
from ..pairs.speculation import SPECULATIVE_TOKENS
from ..storage.draft_vocabulary import mask_token
from ..storage.names import DRAFT_VOCABULARY, WHOLE_FILES
from ..verify.model_files import load_config
from .base import ExportOptions, Source, check_same_tensors, format_of
from .drafter import compare_whole, drafter_config, stored_types, write_whole
from .target import check_pair, needed_target
from .tokenizer import has_tokenizer, load_tokenizer

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
    config = drafter_config(source)
    mixes = len(set(getattr(config, "layer_types", None) or ())) > 1
    return {"mixes_attention": mixes, "parallel": mask_token(config) is not None}


DRAFT_MODEL = format_of("vllm-sglang", write=_write, compare=_compare, values=_values)


def eagle_of(source: Source) -> EagleHeads:
    """An artifact's EAGLE-3 heads. Raises ValueError: it holds other heads, or not all that an engine needs."""
    if not is_eagle(source.folder):
        raise ValueError(f"{source.folder} holds heads side by side, no EAGLE-3 layer: export them as medusa")
    heads = load_eagle(source.folder)
    if heads.proposed is not None and heads.own_head is None:
        raise ValueError(f"{source.folder} has offsets of proposed tokens, and no output rows of theirs")
    return heads


def steps_of(source: Source, options: ExportOptions) -> int:
    """Tokens a step that EAGLE-3 heads draft: as many as they were trained for, unless the user says otherwise."""
    return options.speculative_tokens or int(source.manifest.shapes.get("num_heads", SPECULATIVE_TOKENS))


def _write_heads(source: Source, folder: Path, options: ExportOptions) -> None:
    save_eagle(eagle_of(source), folder)


def check_eagle(source: Source, options: ExportOptions, readers: Collection[str]) -> list[str]:
    """How some engines read EAGLE-3 heads beside their target, a line each. Raises ValueError: one of them refuses."""
    target = needed_target(source, options, "engines count its layers")
    diagnosis = examine_eagle(open_side(target, load_tokenizer), str(source.folder), source.folder)
    lines = []
    for name in readers:
        verdict = diagnosis.verdicts[name]
        reasons = "; ".join(verdict.reasons)
        if verdict.outcome == REFUSED:
            raise ValueError(f"{source.folder} is no pair with the target {target} for {name}: {reasons}")
        why = f" ({reasons})" if reasons else ""
        lines.append(f"layers, norms and vocabulary as {diagnosis.consumers[name]} reads them: {verdict.outcome}{why}")
    return lines


def _compare_heads(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    expected, found = load_file(source.folder / WHOLE_FILES[0]), load_file(folder / WHOLE_FILES[0])
    check_same_tensors(found, expected, folder)
    lines = [f"all {len(found)} tensors, bit by bit, with the artifact's"]
    return [*lines, *check_eagle(source, options, [name for name in READERS if name != "llama.cpp"])]


def _values_of_heads(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    return {"layers": ", ".join(map(str, load_eagle(folder).layers)), "tokens": steps_of(source, options)}


EAGLE_FORMAT = format_of("eagle3", write=_write_heads, compare=_compare_heads, values=_values_of_heads)
"""EAGLE-3 heads for vLLM and SGLang."""
