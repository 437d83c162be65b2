"""Export of draft models for transformers (assisted generation), vLLM and SGLang. LoRA adapters are merged.

Shape letters: B batch, T tokens, V vocabulary, R draft vocabulary.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from ..artifact.compat import patch_model, patch_tokenizer
from ..pairs.repair import arrange_rows
from ..pairs.speculation import SPECULATIVE_TOKENS, save_speculation, speculation, write_settings
from ..storage.draft_vocabulary import mask_token, read_vocabulary
from ..storage.names import ADAPTER_CONFIG, ADAPTER_FILE, DRAFT_VOCABULARY, MANIFEST_FILE
from ..storage.safe_read import check_safetensors, read_json
from ..verify.model_files import base_of, is_adapter, load_config, load_language_model, with_adapter
from .base import ExportOptions, Format, Source, check_same_tensors, known_target, needed_target
from .target import check_drafter, check_vocabulary, compare_tokenizers, has_tokenizer

_ARTIFACT_FILES = (MANIFEST_FILE, "README.md", "recipe.yaml")
"""Files of an artifact that are not copied to its export."""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Maximum difference of logits after merging an adapter, relative to the largest logit, by dtype."""


def load_drafter(folder: Path, *, merged: bool = True) -> Any:
    """Load the model in a folder. A LoRA adapter is merged into its base model, unless `merged` is False."""
    load = partial(load_language_model, dtype="auto")
    return with_adapter(folder, load, merged=merged) if is_adapter(folder) else load(folder)


def load_merged(source: Source) -> Any:
    """Load an artifact's model for export, with a merged adapter and an output layer that covers all tokens."""
    model = load_drafter(source.folder)
    if (ids_R := draft_tokens_of(source)) is not None:
        _pad(model, ids_R)
    return model


def draft_tokens_of(source: Source) -> Tensor | None:
    """Return the token ids of an artifact's draft vocabulary, int64 [R]; None if there is none."""
    return read_vocabulary(source.folder, source.manifest.vocab_size)


def _pad(model: Any, ids_R: Tensor) -> None:
    """Untie the output layer, and change it so that no token outside `ids_R` (the draft vocabulary) is the argmax."""
    head, used = model.get_output_embeddings(), ids_R.tolist()
    rows: list[int | None] = [None] * len(head.weight)
    for number in used:
        rows[number] = number
    for name, values in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(arrange_rows(values.detach(), rows, used)))
    model.config.tie_word_embeddings = False


def drafter_config(source: Source) -> Any:
    """Return the configuration of an artifact's model, or of the base model if the artifact is an adapter."""
    return load_config(base_of(source.folder) if is_adapter(source.folder) else source.folder)


def stored_dtypes(folder: Path) -> set[str]:
    """Return the dtypes of a model's stored tensors, by their safetensors names such as F32."""
    types = set[str]()
    for path in set(folder.glob("*.safetensors")) - {folder / DRAFT_VOCABULARY}:
        types |= {dtype for dtype, _ in check_safetensors(path).values()}
    return types


def write_whole(source: Source, folder: Path) -> None:
    """Write the model with its adapter merged. Raises ValueError for custom code or unsupported weight files."""
    for name in source.manifest.files:
        if Path(name).suffix == ".py":
            raise ValueError(f"{source.folder / name} is custom model code, which cannot be exported")
        if Path(name).suffix in _OTHER_WEIGHTS:
            raise ValueError(f"{source.folder / name} contains weights that are not in safetensors format: remove it")
    names = [name for name in source.manifest.files if name not in _ARTIFACT_FILES]
    if is_adapter(source.folder):
        load_drafter(source.folder).save_pretrained(folder)
        names = [name for name in names if name not in (ADAPTER_CONFIG, ADAPTER_FILE) and not (folder / name).exists()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, folder / name)
    if draft_tokens_of(source) is not None:
        for path in folder.glob("model*.safetensors*"):
            path.unlink()
        save_file(load_merged(source).state_dict(), folder / "model.safetensors", {"format": "pt"})
        write_settings(folder / "config.json", read_json(folder / "config.json") | {"tie_word_embeddings": False})
    patch_tokenizer(folder)
    patch_model(folder)


@torch.no_grad()
def random_logits(model: Any) -> Tensor:
    """Compute float32 logits [B, T, V] for fixed pseudorandom token ids."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids_BT = torch.randint(vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids_BT} if model.config.is_encoder_decoder else {}
    logits_BTV: Tensor = model(input_ids=ids_BT, **more).logits
    return logits_BTV.float()


def compare_whole(source: Source, folder: Path) -> list[str]:
    """Compare tensors, logits and tokenizer of an export with the artifact, and return a line for each passed check."""
    written, expected = load_drafter(folder), load_merged(source).state_dict()
    check_same_tensors(written.state_dict(), expected, folder)
    merged = ", with the adapter merged" if is_adapter(source.folder) else ""
    return [
        f"all {len(expected)} tensors are identical{merged}",
        *_compare_logits(source, written, folder),
        *compare_tokenizers(source.folder, folder),
    ]


def _compare_logits(source: Source, written: Any, folder: Path) -> Iterator[str]:
    """Yield a line for each check of logits that passed. Raises ValueError if any check fails.

    Logits may differ by rounding errors only. The argmax of the exported model must be in the draft vocabulary.
    """
    original = load_drafter(source.folder, merged=False)
    original_BTV, written_BTV = random_logits(original), random_logits(written)
    tokens = f"logits of {original_BTV.shape[0] * original_BTV.shape[1]} random tokens"
    if (ids_R := draft_tokens_of(source)) is not None:
        if not torch.isin(written_BTV.argmax(-1), ids_R).all():
            raise ValueError(f"{folder} drafts tokens outside the artifact's draft vocabulary ({len(ids_R)} tokens)")
        yield f"the most probable token of {tokens} is always in the draft vocabulary of {len(ids_R):,} tokens"
        original_BTV, written_BTV = original_BTV[..., ids_R], written_BTV[..., ids_R]
    if torch.equal(original_BTV, written_BTV):
        yield f"{tokens} are identical"
        return
    difference = ((original_BTV - written_BTV).abs().max() / original_BTV.abs().max()).item()
    if type(original) is type(written) or not difference <= _TOLERANCE[written.dtype]:
        raise ValueError(f"logits of {folder} differ from the artifact's by up to {difference:.1e} (relative)")
    yield f"{tokens} differ from those before merging by at most {difference:.1e} (relative to the largest)"


def _write_assistant(source: Source, folder: Path, options: ExportOptions) -> None:
    if (target := known_target(source, options)) is not None:
        check_vocabulary(source, target)
    write_whole(source, folder)
    save_speculation(folder, options.speculative_tokens or SPECULATIVE_TOKENS)


def _compare_assistant(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    lines = compare_whole(source, folder)
    settings = GenerationConfig.from_pretrained(folder)
    expected = speculation(options.speculative_tokens or SPECULATIVE_TOKENS)
    stored = {name: getattr(settings, name) for name in expected}
    if stored != expected:
        raise ValueError(f"{folder / 'generation_config.json'} has {stored}, expected {expected}")
    lines.append("generation_config.json: " + ", ".join(f"{name} {value}" for name, value in stored.items()))
    return lines


ASSISTANT = Format(
    "transformers",
    "drafter",
    "Draft model for assisted generation, with settings in generation_config.json",
    "transformers ≥ 5",
    _write_assistant,
    _compare_assistant,
    lambda source, folder, options: {"is_encoder_decoder": drafter_config(source).is_encoder_decoder},
    ("target", "speculative_tokens"),
    native=True,
)


ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "GPT2LMHeadModel", "GemmaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"),
)
"""Architectures that vLLM and SGLang both support (GPT-NeoX not natively in SGLang)."""
DTYPES = ("F32", "F16", "BF16")


def _write_draft_model(source: Source, folder: Path, options: ExportOptions) -> None:
    write_whole(source, folder)
    if problems := _problems(folder):
        raise ValueError(f"{source.folder} cannot serve as a draft model in vLLM and SGLang: {'; '.join(problems)}")
    (folder / DRAFT_VOCABULARY).unlink(missing_ok=True)  # vLLM loads all safetensors files as weights


def _problems(folder: Path) -> list[str]:
    """Return the reasons why vLLM and SGLang do not support the drafter."""
    config, problems = load_config(folder), []
    named = config.architectures
    architecture = named[0] if isinstance(named, list) and named else "not given"
    if architecture not in ARCHITECTURES:
        problems.append(f"its architecture is {architecture}, expected one of {', '.join(ARCHITECTURES)}")
    if getattr(config, "auto_map", None):
        problems.append("its config requires custom code (auto_map)")
    dtypes = stored_dtypes(folder)
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        problems.append(f"its dtypes are {' and '.join(sorted(dtypes))}, expected one of {', '.join(sorted(DTYPES))}")
    if architecture.startswith("Gemma") and (folder / DRAFT_VOCABULARY).is_file():
        problems.append("the engines tie its output layer to its embeddings, so it cannot have a draft vocabulary")
    if not has_tokenizer(folder):
        problems.append("it has no tokenizer, which SGLang compares with the target's")
    return problems


def _compare_draft_model(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    reason = "vLLM and SGLang require draft model and target to share a vocabulary"
    target = needed_target(source, options, reason)
    check_drafter(source, folder, target, ("vllm", "sglang"), also=("context length", "tokenizer"))
    return [*compare_whole(source, folder), f"vocabulary, tokens and context length equal those of {target}"]


def _values_of_draft_model(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    config = drafter_config(source)
    mixes = len(set(getattr(config, "layer_types", None) or ())) > 1
    return {"mixes_attention": mixes, "parallel": mask_token(config) is not None}


DRAFT_MODEL = Format(
    "vllm-sglang",
    "drafter",
    "Draft model, checked against its target",
    "vLLM 0.27 to 0.33 (draft_model), SGLang since April 2026 (STANDALONE)",
    _write_draft_model,
    _compare_draft_model,
    _values_of_draft_model,
    ("target", "speculative_tokens"),
    native=True,
)
