"""Drafters as draft models of vLLM and SGLang, which take them only with a target of the same vocabulary."""

from __future__ import annotations

from pathlib import Path

from ..artifact.markdown import shell
from ..pairs.speculation import SPECULATIVE_TOKENS
from .base import FOLDER, FOLDER_IN_JSON, ExportOptions, Format, Source
from .drafter import base_of, compare_whole, has_tokenizer, is_adapter, load_config, stored_types, write_whole
from .target import check_pair, needed_target

ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "GPT2LMHeadModel", "GemmaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"),
)
"""Of small decoders, those that vLLM and SGLang both run: with modules of their own, but for GPT-NeoX in SGLang, which
takes that of transformers."""
DTYPES = ("F32", "F16", "BF16")

_ALSO = ("context length", "tokenizer")
"""Checks of which the engines refuse nothing, or not all, and that an export is to pass all the same."""
_NEEDS = "vLLM and SGLang take a draft model only with a target of the same vocabulary"


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    target = needed_target(source, options, _NEEDS)
    write_whole(source, folder)
    if problems := _problems(folder):
        raise ValueError(f"{source.folder} is no draft model for vLLM and SGLang: {'; '.join(problems)}")
    check_pair(source, folder, target, ("vllm", "sglang"), also=_ALSO)


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
        found.append(f"its tensors are of {' and '.join(sorted(dtypes))}, expected one type of {', '.join(DTYPES)}")
    if not has_tokenizer(folder):
        found.append("it has no tokenizer, and SGLang compares it with the target's")
    return found


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    target = needed_target(source, options, _NEEDS)
    check_pair(source, folder, target, ("vllm", "sglang"), also=_ALSO)
    return [*compare_whole(source, folder), f"vocabulary size, every token and the positions with those of {target}"]


def named_otherwise(what: str) -> str:
    """What to know of a folder's name: vLLM (0.24 to 0.33 at least) heeds it more than the method that is asked for."""
    return f"""The path of the folder may have no `eagle-`, `eagle3`, `dflash` or `dspark` in it: vLLM takes {what} for
one of those then, whatever `method` says, and fails."""


def _serve(source: Source, options: ExportOptions) -> str:
    target = shell(needed_target(source, options, _NEEDS))
    tokens = options.speculative_tokens or SPECULATIVE_TOKENS
    config = load_config(base_of(source.folder) if is_adapter(source.folder) else source.folder)
    # of a drafter vLLM takes one kind of cache; without this flag each kind of attention gets its own
    flag = " --disable-hybrid-kv-cache-manager" if len(set(getattr(config, "layer_types", None) or ())) > 1 else ""
    return f"""
vLLM (0.10 to 0.14 have no draft models):

```bash
vllm serve {target}{flag} \\
    --speculative-config '{{"method": "draft_model", "model": "{FOLDER_IN_JSON}", "num_speculative_tokens": {tokens}}}'
```

SGLang:

```bash
python -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {FOLDER} \\
    --speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}
```

vLLM takes a drafter of the target's `vocab_size` alone, SGLang one with the same tokens under the same ids. Of a
shorter context than the target's, vLLM drafts as far as that goes or cuts the target's to it, and SGLang refuses to
start. All of that was checked.

{named_otherwise("the drafter")}
"""


DRAFT_MODEL = Format(
    name="vllm-sglang",
    kind="drafter",
    summary="Draft model, checked against its target",
    readers="vLLM 0.27 to 0.33 (draft_model), SGLang since April 2026 (STANDALONE)",
    write=_write,
    compare=_compare,
    serving=_serve,
    options=("target", "speculative_tokens"),
    native=True,
)
