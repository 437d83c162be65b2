"""Targets and drafters as their files describe them, and the findings and verdicts of a pair.

Only configurations, tokenizers and headers of safetensors files are read; no pickles and no remote code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from ..artifact.artifact import inside, load_manifest
from ..artifact.locate import find_folder
from ..artifact.manifest import Manifest
from ..artifact.model_ref import weight_files
from ..storage.messages import first_line
from ..storage.names import DRAFT_VOCABULARY, MANIFEST_FILE, TOKENIZER_FILES
from ..storage.places import here, hub_place
from ..verify.inspect import header_shapes
from ..verify.model_files import UNLOADABLE, Fit, fit_to_model, meta_model, names_of_embeddings, weights_fault
from ..verify.windows import position_limit, sliding_window

CONSUMERS = {
    "transformers": "transformers 5.23, generate(assistant_model=…)",
    "vllm": "vLLM 0.27 and later, method draft_model",
    "sglang": "SGLang since April 2026 (pull request 23838), STANDALONE",
    "llama.cpp": "llama.cpp of August 2026 (b10576), draft-simple, after its converter",
    "draftsmith": "this engine",
}
"""Engines, and the versions that the rules were read of."""
WORKS, BUT, REFUSED = "works", "works but", "refused"
KEPT_FILES = ("LICENSE*", "NOTICE*", "README.md", "recipe.yaml", DRAFT_VOCABULARY)
"""Files of a drafter that its repaired copy keeps beside its weights."""
WEIGHTS = "model*.safetensors"
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names of output layers in files older than those of their classes in transformers."""
_SETTINGS = ("config.json", "generation_config.json", MANIFEST_FILE, "adapter_config.json")


@dataclass(frozen=True)
class Effect:
    """Meaning of a finding for an engine."""

    outcome: str
    """`works but` or `refused`."""
    reason: str


def refused(reason: str, *consumers: str) -> dict[str, Effect]:
    """Return the effects of a finding for which consumers (by default all) refuse the pair."""
    return dict.fromkeys(consumers or CONSUMERS, Effect(REFUSED, reason))


def works_but(reason: str, *consumers: str) -> dict[str, Effect]:
    """Return the effects of a finding with which consumers (by default all) decode less well."""
    return dict.fromkeys(consumers or CONSUMERS, Effect(BUT, reason))


@dataclass(frozen=True)
class Finding:
    """One difference between the two."""

    check: str
    """Stable short name."""
    what: str
    target: str
    drafter: str
    effects: dict[str, Effect]
    """Affected engines only."""

    @property
    def severity(self) -> str:
        """`fault` if an engine refuses the pair, otherwise `weakness`."""
        return "fault" if REFUSED in {effect.outcome for effect in self.effects.values()} else "weakness"


@dataclass(frozen=True)
class Verdict:
    """Worst outcome of all findings for an engine, with every reason."""

    outcome: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Facts and findings of a pair."""

    target: str
    drafter: str
    facts: tuple[tuple[str, str, str], ...]
    """Name, the target's value, the drafter's."""
    findings: tuple[Finding, ...]
    consumers: Mapping[str, str] = field(default_factory=lambda: CONSUMERS)
    """Engines that may decode with them."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Verdict of each engine."""
        found = {}
        for name in self.consumers:
            effects = [finding.effects[name] for finding in self.findings if name in finding.effects]
            outcomes = {effect.outcome for effect in effects}
            worst = REFUSED if REFUSED in outcomes else BUT if outcomes else WORKS
            reasons = dict.fromkeys(effect.reason for effect in effects if effect.outcome == worst)
            found[name] = Verdict(worst, tuple(reasons))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return facts, findings and verdicts as JSON."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "facts": [{"name": name, "target": mine, "drafter": theirs} for name, mine, theirs in self.facts],
            "findings": [asdict(finding) | {"severity": finding.severity} for finding in self.findings],
            "verdicts": {name: {"reader": self.consumers[name]} | asdict(one) for name, one in self.verdicts.items()},
        }


@dataclass(frozen=True)
class Side:
    """A target or a drafter."""

    source: str
    """Folder or hub id, as it was given."""
    folder: Path
    """Where its files lie."""
    config: Any
    """The configuration of its decoder."""
    generation: GenerationConfig
    """Its generation settings; those that follow from the configuration where it has no file of them."""
    tokenizer: Any | None
    """None where it brings no tokenizer."""
    rows: int | None
    """Of the token embedding in the weights; None where they could not be looked at."""
    head_rows: int | None
    """Of the output layer; those of the embedding where the two are one."""
    fit: Fit
    """How its tensors differ from those that its configuration declares, rows of the vocabulary aside."""
    manifest: Manifest | None
    """Of an artifact."""
    weights_fault: str = ""
    """Why this engine does not load its weights, whatever is in them."""

    @property
    def vocab_size(self) -> int:
        """What its configuration says."""
        return int(self.config.vocab_size)

    @property
    def vocab(self) -> dict[str, int]:
        """Token text to id; empty without a tokenizer."""
        return {} if self.tokenizer is None else {str(text): int(i) for text, i in self.tokenizer.get_vocab().items()}

    @property
    def positions(self) -> int | None:
        """How many it was made for; None where there is no limit."""
        return getattr(self.config, "max_position_embeddings", None) or None

    @property
    def window(self) -> int | None:
        """Tokens that a layer with sliding attention sees; None where none has it."""
        return sliding_window(self.config)

    @property
    def limit(self) -> int | None:
        """How many tokens this engine takes; None where there is no limit."""
        return position_limit(self.config)

    @property
    def rotary(self) -> str | None:
        """The type of its rotary positions (default, linear, yarn …); None where positions are something else."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        if not rope:
            return None
        kinds = {str(one.get("rope_type", "default")) for one in rope.values() if isinstance(one, dict)}
        return "/".join(sorted(kinds)) if kinds and "rope_type" not in rope else str(rope.get("rope_type", "default"))


def open_side(source: str, load_tokenizer: Callable[[str], Any]) -> Side:
    """Read what there is to know of a target or a drafter: a folder, or `user/name[@revision]` on the hub, of which the
    small files are fetched and the weights' headers are read. `load_tokenizer` gives the tokenizer of a folder.

    Raises ValueError: nothing there, or no language model that can be read without remote code; a LoRA adapter."""
    folder = find_folder(source, [*_SETTINGS, *TOKENIZER_FILES, "model.safetensors.index.json", *KEPT_FILES])
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{source} is a LoRA adapter and no model of its own: merge it into its model first")
    manifest = load_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
    if manifest is not None and manifest.kind not in ("drafter", "target"):
        raise ValueError(f"{source} is of kind {manifest.kind!r}: the doctor compares two models")
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
        has_settings = (folder / "generation_config.json").is_file()
        from_files = GenerationConfig.from_pretrained(folder) if has_settings else None
        generation = from_files or GenerationConfig.from_model_config(whole)
    except UNLOADABLE as error:
        hint = "" if (folder / "config.json").is_file() else inside(folder)
        raise ValueError(f"{source}: its configuration cannot be read: {first_line(error)}{hint}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ValueError(f"{source}: its configuration, of type {config.model_type!r}, has no vocab_size")
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES if name.startswith(("tok", "voc", "spi")))
    shapes = tensor_shapes(source, folder)
    try:
        rows, head_rows, fit = _rows(whole, shapes)
    except UNLOADABLE as error:
        raise ValueError(f"{source}: its configuration makes no model: {first_line(error)}") from error
    return Side(
        source=source,
        folder=folder,
        config=config,
        generation=generation,
        tokenizer=load_tokenizer(str(folder)) if has_tokenizer else None,
        rows=rows,
        head_rows=head_rows,
        fit=fit,
        manifest=manifest,
        weights_fault=weights_fault(folder, source),
    )


def tensor_shapes(source: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of a model's safetensors files; empty where it has none, or none within reach.
    ValueError for a file that is none of safetensors, or that an index names and is not there."""
    files = sorted(folder.glob(WEIGHTS))
    if files:
        return header_shapes(weight_files(folder) if here(source) is not None else files)
    if here(source) is None:
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import HTTPError, NotASafetensorsRepoError, SafetensorsParsingError

        try:
            repo, revision = hub_place(source)
            headers = get_safetensors_metadata(repo, revision=revision).files_metadata.values()
        except (OSError, ValueError, HTTPError, NotASafetensorsRepoError, SafetensorsParsingError):
            return {}
        return {name: tuple(one.shape) for header in headers for name, one in header.tensors.items()}
    return {}


def both(describe: Callable[[Any], str], target: Any, drafter: Any) -> tuple[str, str]:
    """A finding's two values."""
    return describe(target), describe(drafter)


def _rows(config: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[int | None, int | None, Fit]:
    """Rows of the embedding and of the output layer as they are stored; and how all else fits."""
    try:
        model = meta_model(config)
    except (ValueError, ImportError):  # no such model in this transformers, or a kernel that is not installed
        return None, None, Fit()
    embedding, head, bias = names_of_embeddings(model)
    found = fit_to_model(config, shapes) if shapes else Fit()
    other = {
        name: (mine, wanted)
        for name, (mine, wanted) in found.other.items()
        if name not in (embedding, head, bias) or mine[1:] != wanted[1:]
    }
    names = (embedding, embedding.removeprefix(f"{model.base_model_prefix}."))
    rows = next((shapes[name][0] for name in names if name in shapes), None)
    head_names = names if head == embedding else (head, *_HEADS)
    head_rows = next((shapes[name][0] for name in head_names if name in shapes), None)
    return rows, head_rows, replace(found, other=other)
