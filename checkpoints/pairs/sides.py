"""Model descriptions, findings of pair checks, and the effects of findings on each inference engine.

Only configurations, tokenizers and safetensors headers are read. Pickles and remote code are never loaded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from ..artifact.artifact import load_manifest
from ..artifact.locate import find_folder
from ..artifact.manifest import Manifest
from ..artifact.model_ref import weight_files
from ..storage.messages import first_line
from ..storage.names import DRAFT_VOCABULARY, MANIFEST_FILE, TOKENIZER_FILES
from ..storage.places import find_local
from ..verify.inspect import header_shapes
from ..verify.model_files import UNLOADABLE, base_of, is_adapter, meta_model, names_of_embeddings, weights_fault
from ..verify.windows import position_limit, sliding_window

CONSUMERS = {
    "transformers": "transformers 5.23, generate(assistant_model=…)",
    "vllm": "vLLM 0.27 and later, method draft_model",
    "sglang": "SGLang since April 2026 (pull request 23838), STANDALONE",
    "llama.cpp": "llama.cpp of August 2026 (b10576), draft-simple, after its converter",
    "draftsmith": "draftsmith",
}
"""Inference engines, and the versions whose rules are checked."""
WORKS, BUT, REFUSED = "works", "works but", "refused"
WEIGHTS = "model*.safetensors"
_FILES = (
    *("config.json", "generation_config.json", MANIFEST_FILE, "adapter_config.json", "model.safetensors.index.json"),
    *(*TOKENIZER_FILES, DRAFT_VOCABULARY),
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names of output projections in old checkpoint files."""


@dataclass(frozen=True)
class Effect:
    """Effect of a finding on an engine."""

    outcome: str
    """Either `works but` or `refused`."""
    reason: str


def refuse(reason: str, *consumers: str) -> dict[str, Effect]:
    """Map each engine (default: all) to the effect `refused`: the engine does not support the pair."""
    return dict.fromkeys(consumers or CONSUMERS, Effect(REFUSED, reason))


def degrade(reason: str, *consumers: str) -> dict[str, Effect]:
    """Map each engine (default: all) to the effect `works but`: the engine supports the pair with a limitation."""
    return dict.fromkeys(consumers or CONSUMERS, Effect(BUT, reason))


@dataclass(frozen=True)
class Finding:
    """Problem found by a static or measured check of a target/drafter pair."""

    check: str
    """Short, stable name of the check."""
    what: str
    target: str = ""
    drafter: str = ""
    effects: Mapping[str, Effect] = field(default_factory=dict)
    """Mapping from affected engine to effect."""
    advice: str = ""
    is_fault: bool = False
    """True if a measured finding is an error of training, files or settings."""
    lost: float | None = None
    """Decrease of the acceptance rate or of the agreement with the target, if measured."""
    interval: list[float] | None = None
    """99 % confidence interval of `lost`."""

    @property
    def severity(self) -> str:
        """Severity: `fault` if the finding is an error or an engine does not support the pair, otherwise `weakness`."""
        is_refused = REFUSED in {effect.outcome for effect in self.effects.values()}
        return "fault" if self.is_fault or is_refused else "weakness"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON-serialisable dictionary."""
        return asdict(self) | {"severity": self.severity}

    def __str__(self) -> str:
        return f"{self.check}: {self.what} (target: {self.target or '–'}; drafter: {self.drafter or '–'})"


@dataclass(frozen=True)
class Verdict:
    """Worst outcome of all findings for an engine, with the reasons."""

    outcome: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a target/drafter pair."""

    target: str
    drafter: str
    findings: tuple[Finding, ...]
    consumers: Mapping[str, str] = field(default_factory=lambda: CONSUMERS)
    """Mapping from engine to version, for the engines that receive a verdict."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Mapping from engine to verdict."""
        verdicts = {}
        for name in self.consumers:
            effects = [finding.effects[name] for finding in self.findings if name in finding.effects]
            outcomes = {effect.outcome for effect in effects}
            worst = REFUSED if REFUSED in outcomes else BUT if outcomes else WORKS
            reasons = dict.fromkeys(effect.reason for effect in effects if effect.outcome == worst)
            verdicts[name] = Verdict(worst, tuple(reasons))
        return verdicts

    def as_json(self) -> dict[str, Any]:
        """Return findings and verdicts as a JSON-serialisable dictionary."""
        verdicts = {name: {"reader": self.consumers[name]} | asdict(one) for name, one in self.verdicts.items()}
        findings = [finding.as_json() for finding in self.findings]
        return {"target": self.target, "drafter": self.drafter, "findings": findings, "verdicts": verdicts}


def diagnose(target: "ModelInfo", source: str, findings: Iterable[Finding], consumers: Mapping[str, str]) -> Diagnosis:
    """Create a diagnosis of the findings that affect one of the given engines, and of their effects on these."""
    pairs = [(each, {name: each.effects[name] for name in consumers if name in each.effects}) for each in findings]
    limited = tuple(replace(each, effects=effects) for each, effects in pairs if effects)
    return Diagnosis(target.source, source, limited, consumers)


def check_sizes(target: "ModelInfo", sizes: Mapping[str, Any], consumers: Iterable[str]) -> Iterator[Finding]:
    """Report a hidden or vocabulary size of heads that differs from the target's."""
    for name in ("hidden_size", "vocab_size"):
        of_target, own = getattr(target.config, name), sizes.get(name)
        if of_target != own:
            reason = "the drafter was trained for a different target"
            yield Finding(name, reason, str(of_target), str(own), refuse(reason, *consumers))


@dataclass(frozen=True)
class ModelInfo:
    """Description of a target or drafter, read from its files."""

    source: str
    """Folder or hub id, as passed by the caller."""
    folder: Path
    config: Any
    """Configuration of the decoder."""
    generation: GenerationConfig
    tokenizer: Any
    """Tokenizer; None if the files contain none."""
    rows: int | None
    """Number of rows of the token embedding in the weights; None if the weights are not available locally."""
    head_rows: int | None
    """Number of rows of the output projection in the weights; None if unknown."""
    manifest: Manifest | None
    weights_fault: str = ""
    """Reason why draftsmith cannot load the weights; empty if it can."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size in the configuration."""
        return int(self.config.vocab_size)

    @property
    def vocab(self) -> dict[str, int]:
        """Mapping from token text to id; empty if there is no tokenizer."""
        return {} if self.tokenizer is None else {str(text): int(i) for text, i in self.tokenizer.get_vocab().items()}

    @property
    def positions(self) -> int | None:
        """Maximum number of positions; None if there is no limit."""
        return getattr(self.config, "max_position_embeddings", None) or None

    @property
    def window(self) -> int | None:
        """Size of the sliding attention window; None if there is none."""
        return sliding_window(self.config)

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens that draftsmith supports; None if there is no limit."""
        return position_limit(self.config)


def read_model_info(source: str, load_tokenizer: Callable[[str], Any]) -> ModelInfo:
    """Read the description of a target or drafter from its files. `load_tokenizer` loads the tokenizer of a folder.

    `source` is the folder of a model or a LoRA adapter, or `user/name[@revision]` on the hub, whose small files are
    downloaded. Raises ValueError if there is no language model that can be loaded without remote code.
    """
    folder = find_folder(source, _FILES)
    manifest = load_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES if name.startswith(("tok", "voc", "spi")))
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    if is_adapter(folder):
        base = read_model_info(base_of(folder), load_tokenizer)
        return replace(base, source=source, folder=folder, manifest=manifest, tokenizer=tokenizer or base.tokenizer)
    if manifest is not None and manifest.kind not in ("drafter", "target"):
        raise ValueError(f"{source} is of kind {manifest.kind!r}, expected a draft or target model")
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
        has_settings = (folder / "generation_config.json").is_file()
        from_files = GenerationConfig.from_pretrained(folder) if has_settings else None
        generation = from_files or GenerationConfig.from_model_config(whole)
    except UNLOADABLE as error:
        raise ValueError(f"{source}: the configuration cannot be read: {first_line(error)}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ValueError(f"{source}: the configuration of type {config.model_type!r} has no vocab_size")
    shapes = header_shapes(weight_files(folder)) if any(folder.glob(WEIGHTS)) else {}
    try:
        rows, head_rows = _rows(whole, shapes)
    except UNLOADABLE as error:
        raise ValueError(f"{source}: no model can be built from the configuration: {first_line(error)}") from error
    fault = "" if find_local(source) is None else weights_fault(folder)
    return ModelInfo(source, folder, config, generation, tokenizer, rows, head_rows, manifest, fault)


def _rows(config: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[int | None, int | None]:
    """Return the row counts of the stored token embedding and output projection; None if unknown."""
    try:
        model = meta_model(config)
    except (ValueError, ImportError):  # transformers does not know the model type, or a kernel is missing
        return None, None
    embedding, head, _ = names_of_embeddings(model)
    names = (embedding, embedding.removeprefix(f"{model.base_model_prefix}."))
    rows = next((shapes[name][0] for name in names if name in shapes), None)
    head_names = names if head == embedding else (head, *_HEADS)
    return rows, next((shapes[name][0] for name in head_names if name in shapes), None)
