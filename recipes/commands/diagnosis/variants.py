"""Acceptance length of EAGLE-3 heads or a block drafter on given prompts, with their config and with variants of it.

Shape letters: P prompts.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import save_file

from ....checkpoints.heads.auxiliary import AuxiliaryHeads, input_embeddings
from ....checkpoints.heads.dflash import DFlashHeads
from ....checkpoints.heads.published import read_auxiliary
from ....checkpoints.pairs.sides import Finding, ModelInfo
from ....checkpoints.pairs.variants import Config, correct, describe_changes, list_variants
from ....checkpoints.storage.names import CONFIG_FILE, WHOLE_FILES
from ....decode.evaluation.bootstrap import Floats, percentile_interval, resampled_ratios
from ....decode.evaluation.trace import trace
from ....decode.methods import Parts, build_method
from ....decode.models.dflash import block_drafter
from ....decode.models.eagle import EagleDrafter
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import Case, entries_of, open_case
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...session.stopping import Stoppable
from ..artifacts.imports import save_auxiliary

_ROUNDS, _DRAFTS = 3, 8
"""Maximum number of settings that are changed together, and of draft tokens per step."""


class Variant(NamedTuple):
    """Config of a drafter, and its acceptance with this config."""

    config: Config
    changes: list[str]
    """Changes of the stored config."""
    steps_P: Floats
    """Verification steps for each prompt; empty if the drafter cannot be loaded."""
    tokens_P: Floats
    reason: str = ""
    """Reason why the drafter cannot be loaded."""

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length; 0 if the drafter cannot be loaded."""
        return float(self.tokens_P.sum() / self.steps_P.sum()) if len(self.steps_P) else 0.0

    def is_longer_than(self, other: "Variant") -> bool:
        """Return True if acceptance is longer than with another config, at a level of 99 % over prompts."""
        if not len(other.steps_P) or not len(self.steps_P):
            return len(self.steps_P) > 0
        ratio_R1 = resampled_ratios((other.steps_P / other.tokens_P)[:, None], (self.steps_P / self.tokens_P)[:, None])
        interval = percentile_interval(ratio_R1, 0.99)
        return interval is not None and interval[0] > 1

    def as_json(self) -> dict[str, Any]:
        """Return the change and the acceptance length (null with a reason) as a JSON-serialisable dictionary."""
        change = "; ".join(self.changes) or "as stored"
        return {"change": change, "acceptance_length": self.acceptance_length or None, "reason": self.reason}


class ConfigFit:
    """Corrected config of a drafter and, if `measure` was called, the variant with the longest acceptance."""

    def __init__(self, target: ModelInfo, folder: Path) -> None:
        self.target, self.folder = target, folder
        self._stored, self.config, self._weights, self._notes = correct(folder, target)
        self.variants: list[Variant] = []
        """Measured variants, the stored config first."""

    @property
    def changes(self) -> list[str]:
        """Descriptions of the changes of the stored config and tensors."""
        return self._notes + describe_changes(self._stored, self.config)

    def measure(self, recipe: EvaluateRecipe) -> None:
        """Measure the stored config, the corrected config, and variants of it; choose the best one."""
        plain = recipe.model_copy(update={"drafter": None, "methods": [MethodSection(method="autoregressive")]})
        with Stoppable("doctor", "") as signals, signals.bar("measuring configs", "configs") as advance:
            case, number = open_case(plain), 2 + len([*list_variants(self.config, self.target)])

            def add(config: Config | None) -> Variant:
                self.variants.append(self._measure(case, config))
                advance(min(len(self.variants), number), number)
                return self.variants[-1]

            self.best = add(None)
            if self.changes:
                self.best = add(self.config)
            for _ in range(_ROUNDS):
                tried = [add(each) for each in list_variants(self.config, self.target)]
                longest = max(tried, key=lambda each: (each.acceptance_length, -len(each.changes)))
                if not longest.is_longer_than(self.best):
                    break
                self.best, self.config = longest, longest.config

    def _measure(self, case: Case, config: Config | None) -> Variant:
        """Measure a config with the corrected tensors, or the stored files."""
        (entry,) = entries_of(case.recipe)
        changes = [] if config is None else self._notes + describe_changes(self._stored, config)
        try:
            heads = self._load(config)
        except ValueError as error:
            return Variant(config or {}, changes, np.array([]), np.array([]), str(error))
        model = case.pair.model
        target = wrap_model(model, fast=False, graphs=False, aux_layers=heads.layers)
        heads = heads.to(target.device, target.weights_dtype).requires_grad_(False)
        heads.attach(input_embeddings(model), model.get_output_embeddings().weight)
        drafter = block_drafter(heads) if isinstance(heads, DFlashHeads) else EagleDrafter(heads)  # type: ignore[arg-type]
        count = min(heads.num_heads, _DRAFTS) if isinstance(heads, DFlashHeads) else _DRAFTS
        method = build_method("speculative", Parts(drafter), entry.sampling, gamma=count)
        traced = [
            trace(target, method, prompt, case.limits, entry.sampling, case.recipe.seed + number)
            for number, prompt in enumerate(case.prompts)
        ]
        tokens = [sum(len(step.accepted) + (step.next_id is not None) for step in steps) for steps in traced]
        steps_P = np.array([float(len(steps)) for steps in traced])
        return Variant(config or {}, changes, steps_P, np.array(tokens, float))

    def _load(self, config: Config | None) -> AuxiliaryHeads:
        if config is None:
            return read_auxiliary(self.folder, self.target.config)
        with TemporaryDirectory(prefix="draftsmith-") as temporary:
            (Path(temporary) / CONFIG_FILE).write_text(json.dumps(config))
            save_file(self._weights, Path(temporary) / WHOLE_FILES[0])
            return read_auxiliary(Path(temporary), self.target.config)

    def findings(self) -> list[Finding]:
        """Return a finding if another config has a longer acceptance than the stored one."""
        stored = self.variants[0]
        if self.best is stored or not self.best.is_longer_than(stored):
            return []
        before = f"{stored.acceptance_length:.2f}" if len(stored.steps_P) else f"none ({stored.reason})"
        lengths = f"{self.best.acceptance_length:.2f} instead of {before}"
        problem = f"the acceptance length is {lengths} with {'; '.join(self.changes)}"
        return [Finding("config", problem, advice="write a corrected drafter with --fix", is_fault=True)]

    def write(self, out: Path, source: str) -> None:
        """Write the drafter with the chosen config to a new folder as an artifact. `source` is recorded in it."""
        training = {"repaired_from": source, "repairs": self.changes}
        save_auxiliary(self._load(self.config), out, self.target.source, training)
