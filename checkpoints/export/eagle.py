"""Export of EAGLE-3 heads for serving engines. See `pairs/eagle.py` for how each engine interprets their config."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..heads.eagle import EagleHeads, load_eagle, save_eagle
from ..heads.layouts import drafts_blocks, is_eagle
from ..pairs.eagle import NORM_VERSIONS, READERS, examine_eagle
from ..pairs.sides import REFUSED, Diagnosis, read_model_info
from ..pairs.speculation import SPECULATIVE_TOKENS
from ..storage.names import WHOLE_FILES
from .base import ExportOptions, Format, Source, check_same_tensors, needed_target
from .target import load_tokenizer


def eagle_of(source: Source) -> EagleHeads:
    """Load an artifact's EAGLE-3 heads. Raises ValueError if the heads are incomplete or of a different type."""
    if drafts_blocks(source.folder):
        raise ValueError(
            f"{source.folder} contains a block drafter, not EAGLE-3 heads: export it with --to dflash or dspark"
        )
    if not is_eagle(source.folder):
        raise ValueError(f"{source.folder} contains Medusa heads, not EAGLE-3 heads: export them with --to medusa")
    heads = load_eagle(source.folder)
    if heads.proposed is not None and heads.own_head is None:
        raise ValueError(f"{source.folder} has a draft vocabulary (d2t) but no output layer for it")
    return heads


def steps_of(source: Source, options: ExportOptions) -> int:
    """Return the number of draft tokens per step (default: the number of drafting steps in training)."""
    return options.speculative_tokens or int(source.manifest.shapes.get("num_heads", SPECULATIVE_TOKENS))


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    save_eagle(eagle_of(source), folder)


def check_eagle(source: Source, options: ExportOptions, readers: Collection[str]) -> list[str]:
    """Check if all engines in `readers` support EAGLE-3 heads with their target, and return one line per engine.

    Raises ValueError if an engine does not support the heads.
    """
    target = needed_target(source, options, "the number of its layers is required")
    diagnosis = examine_eagle(read_model_info(target, load_tokenizer), str(source.folder), source.folder)
    return verdict_lines(diagnosis, readers, readers)


def verdict_lines(diagnosis: Diagnosis, readers: Collection[str], required: Collection[str]) -> list[str]:
    """Return one line per engine in `readers`. Raises ValueError if an engine in `required` refuses the drafter."""
    lines = []
    for name in readers:
        verdict = diagnosis.verdicts[name]
        reasons = "; ".join(verdict.reasons)
        if verdict.outcome == REFUSED and name in required:
            raise ValueError(
                f"{diagnosis.drafter} does not work with the target {diagnosis.target} in {name}: {reasons}"
            )
        suffix = f" ({reasons})" if reasons else ""
        lines.append(f"layers, norms and vocabulary in {diagnosis.consumers[name]}: {verdict.outcome}{suffix}")
    return lines


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    expected, written = load_file(source.folder / WHOLE_FILES[0]), load_file(folder / WHOLE_FILES[0])
    check_same_tensors(written, expected, folder)
    verdicts = check_eagle(source, options, [name for name in READERS if name != "llama.cpp"])
    return [f"all {len(written)} tensors are identical", *verdicts]


def _values(source: Source, folder: Path, options: ExportOptions) -> dict[str, Any]:
    heads = load_eagle(folder)
    values = {"layers": ", ".join(map(str, heads.layers)), "tokens": steps_of(source, options)}
    return values | {"norms": " and ".join(f"`{name}`" for name in heads.norms), "norm_versions": NORM_VERSIONS}


EAGLE_FORMAT = Format(
    "eagle3",
    "heads",
    "EAGLE-3 heads, with a config from which each engine reads the same layers",
    "vLLM 0.33 (eagle3), SGLang 0.5.23 (EAGLE3)",
    _write,
    _compare,
    _values,
    ("target", "speculative_tokens"),
    native=True,
)
