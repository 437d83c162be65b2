"""Export of DFlash and DSpark drafters for serving engines, and of DFlash drafters for transformers.

See `pairs/dflash.py` for how each engine interprets their config.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..heads.auxiliary import HEAD
from ..heads.dflash import BLOCK, LAYER_IDS, MASK, SETTINGS, DFlashHeads, save_dflash
from ..heads.dspark import load_block_drafter
from ..heads.layouts import drafts_blocks, is_dspark
from ..heads.published import DFLASH_SIZES, ENCODER, TRANSFORMERS_DFLASH, read_published_dflash
from ..pairs.dflash import examine_dflash
from ..pairs.sides import REFUSED, Diagnosis, read_model_info
from ..storage.draft_vocabulary import TOKENS
from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .base import ExportOptions, Format, Source, check_same_tensors, needed_target
from .eagle import verdict_lines
from .target import load_tokenizer

_CONTEXT = 7  # tokens before the block that is compared


def _load(source: Source, kind: str) -> DFlashHeads:
    if not drafts_blocks(source.folder):
        raise ValueError(f"{source.folder} contains no block drafter: export it with --to eagle3 or --to medusa")
    actual = "DSpark" if is_dspark(source.folder) else "DFlash"
    if actual != kind:
        raise ValueError(f"{source.folder} contains a {actual} drafter: export it with --to {actual.lower()}")
    return load_block_drafter(source.folder)


def _diagnosis(source: Source, options: ExportOptions) -> Diagnosis:
    target = needed_target(source, options, "the number of its layers is required")
    return examine_dflash(read_model_info(target, load_tokenizer), str(source.folder), source.folder)


def _write(kind: str, source: Source, folder: Path, options: ExportOptions) -> None:
    heads, tokens = _load(source, kind), options.speculative_tokens
    if tokens is not None and tokens > (limit := heads.num_heads):
        raise ValueError(f"--speculative-tokens must be at most {limit}, the draft tokens of a block, got {tokens}")
    save_dflash(heads, folder)


def _compare(kind: str, source: Source, folder: Path, options: ExportOptions) -> list[str]:
    written = load_file(folder / WHOLE_FILES[0])
    check_same_tensors(written, load_file(source.folder / WHOLE_FILES[0]), folder)
    engines = ["vllm", "sglang"] if kind == "DSpark" else ["vllm", "sglang", "tensorrt-llm"]
    verdicts = verdict_lines(_diagnosis(source, options), engines, ["vllm"])
    same = f"all {len(written)} tensors are identical"
    return [same, _compare_block(_load(source, kind), load_block_drafter(folder), folder), *verdicts]


def _write_transformers(source: Source, folder: Path, options: ExportOptions) -> None:
    _load(source, "DFlash")
    stored, config = load_file(source.folder / WHOLE_FILES[0]), read_json(source.folder / CONFIG_FILE)
    for new, old in ENCODER.items():
        stored = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in stored.items()}
    body = {name: tensor for name, tensor in stored.items() if name not in (HEAD, TOKENS, "t2d")}
    save_file(body, folder / WHOLE_FILES[0], metadata={"format": "pt"})
    settings = {name: config[name] for name in (*DFLASH_SIZES, "layer_types", "dtype")} | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": TRANSFORMERS_DFLASH,
        **{name: config[SETTINGS][name] for name in (BLOCK, MASK, LAYER_IDS)},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # defaults are those of other vocabularies
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _compare_transformers(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    diagnosis = _diagnosis(source, options)
    verdicts = verdict_lines(diagnosis, ["transformers"], ["transformers"])
    target = read_model_info(diagnosis.target, load_tokenizer).config
    heads, exported = _load(source, "DFlash"), read_published_dflash(folder, target)
    check_same_tensors(exported.state_dict(), heads.state_dict(), folder)
    same = f"all {len(heads.state_dict())} tensors are identical, two under other names"
    return [same, _compare_block(heads, exported, folder), *verdicts]


@torch.no_grad()
def _compare_block(heads: DFlashHeads, exported: DFlashHeads, folder: Path) -> str:
    """Compare settings and the states of a block, computed with the sizes and positions of both configs.

    Raises ValueError if they differ.
    """
    both = [(each.layers, each.mask, each.block_size) for each in (heads, exported)]
    if both[0] != both[1]:
        raise ValueError(f"layers, mask token and block size in {folder} are {both[1]}, expected {both[0]}")
    slots, random = heads.block_size, torch.Generator().manual_seed(0)
    aux_1TG = torch.randn(1, _CONTEXT, heads.fc.in_features, generator=random, dtype=heads.fc.weight.dtype)
    block_1SD = torch.randn(1, slots, heads.hidden_size, generator=random, dtype=heads.fc.weight.dtype)
    places = torch.arange(_CONTEXT + slots)[None]
    states = [
        each.through_layers(block_1SD, each.context(aux_1TG), places[:, _CONTEXT:], places[:, :_CONTEXT], None)
        for each in (heads, exported)
    ]
    if not torch.equal(*states):
        raise ValueError(f"the states of a block computed from {folder} differ from the artifact's")
    return f"states of {slots} slots after {_CONTEXT} tokens, from which logits are computed, are identical"


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    heads, verdicts = load_block_drafter(source.folder), _diagnosis(source, options).verdicts
    return heads.facts | {
        "ids": ", ".join(str(layer - 1) for layer in heads.layers),
        "tokens": options.speculative_tokens or heads.num_heads,
        "drafts": heads.num_heads,
        "refused": {name: "; ".join(each.reasons) for name, each in verdicts.items() if each.outcome == REFUSED},
    }


def _for_engines(kind: str, readers: str) -> Format:
    return Format(
        kind.lower(),
        "heads",
        f"{kind} drafter, whose config has the keys of each engine",
        readers,
        partial(_write, kind),
        partial(_compare, kind),
        _values,
        ("target", "speculative_tokens"),
        native=True,
    )


DFLASH_FORMAT = _for_engines("DFlash", "vLLM 0.33 (dflash), SGLang 0.5.23 (DFLASH), TensorRT-LLM (not tested)")
DSPARK_FORMAT = _for_engines("DSpark", "vLLM 0.33 (dspark, on GPUs), SGLang 0.5.23 (DSPARK)")
DFLASH_TRANSFORMERS = Format(
    "dflash-transformers",
    "heads",
    "DFlash drafter for assisted generation in transformers",
    'transformers 5.24 (speculation_type="dflash")',
    _write_transformers,
    _compare_transformers,
    _values,
    ("target",),
)
