"""Recipes of kind `paper`: a table or figure of a paper, what runs it again, and what the paper says comes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from .claims import nearest, parse_claim
from .data import Section
from .errors import describe
from .evaluation import EvaluateRecipe
from .experiments import checked_settings
from .results import MethodRow

RUN = "{run}: {label}"
"""Name of a row where an evaluation has several runs."""
DERIVED = ("closed_form", "flops_per_step", "seconds_per_step")
"""Metrics of `evaluate` rows beside those of `results.json`: the tokens a step that follow from the acceptance rate
(slides, "Theoretical Analysis"), and FLOPs and time of a step."""
PARTS = ("drafter", "heads", "table")
LONGEST_PROMPT = 512
"""Tokens: the embedded pair reads 1,024 with the answer."""


class ClaimSection(Section):
    """An ordering that the paper states."""

    says: str
    """In a plain sentence."""
    where: str | None = None
    """Table, figure or section; by default the recipe's."""
    holds: str
    """`label.metric > label.metric`, see `claims`. A label that stands for several runs must hold in each."""
    tolerance: float = Field(0.03, gt=0, lt=1)
    """What `==~` takes for equal, as a share of the right side."""

    @model_validator(mode="after")
    def _readable(self) -> ClaimSection:
        parse_claim(self.holds)
        return self


class PaperEvaluation(EvaluateRecipe):
    """What is decoded: an evaluation whose results lie in the paper recipe's folder."""

    kind: Literal["evaluate"] = "evaluate"
    out: str = Field("", exclude=True)
    """Not to be given."""

    def sources(self) -> list[str]:
        """All files, folders and hub ids that it names."""
        named = [self.target, self.drafter, *self.more_drafters, self.heads, self.table]
        return [source for source in (*named, self.prompts, self.prompts_path) if source is not None]


class RunsSettings(Section):
    """Settings of the experiment `evaluate`."""

    runs: dict[str, dict[str, Any]] = Field({})
    """More than one evaluation: changes to `evaluate` by name, with rows called `name: label`. {}: `evaluate` as it
    stands."""
    pooled: bool = False
    """Also rows over the prompts of all runs together, under their labels alone."""
    categories: bool = False
    """Also rows of each category of the prompts, called `label [category]`."""


class PaperRecipe(Section):
    """One table or figure of a paper, run again with the paper's settings."""

    kind: Literal["paper"]
    out: str
    """Folder of the results."""
    paper: Literal["multi-candidate", "mjsd", "slim", "slides", "theory"]
    """Which paper."""
    where: str
    """Its table or figure."""
    experiment: Literal["evaluate", "acceptance", "correlation", "saturation", "simulation", "energy"]
    """What is done; `settings` are for it."""
    settings: dict[str, Any] = Field({})
    """Settings of the experiment, which checks them."""
    evaluate: PaperEvaluation | None = None
    """Models, prompts and methods; null: the experiment needs none."""
    small: dict[str, Any] = Field({})
    """Changes for a run on the embedded pair: keys of `evaluate`, and `settings.KEY`. `{pair}` in a text stands for the
    pair's folder."""
    theirs: dict[str, dict[str, float]] = Field({})
    """The paper's own numbers, by row and metric."""
    claims: list[ClaimSection] = Field([])
    """Orderings that the paper states."""
    not_rerun: str | None = None
    """What of it is not run again, and why."""

    def evaluations(self) -> dict[str, PaperEvaluation]:
        """The evaluations of the experiment `evaluate`, by the names of their runs; one without runs is called "".

        Raises:
            ValueError: changes of a run that do not fit, with its name.
        """
        assert self.evaluate is not None
        runs = RunsSettings.model_validate(self.settings).runs
        folders: dict[str, str] = {}
        for name in runs:
            other = folders.setdefault(run_folder(name), name)
            if not run_folder(name) or other != name:
                twin = f" as that of {other!r}" if other != name else ": it has neither a letter nor a digit"
                raise ValueError(f"run {name!r}: its folder would be called {run_folder(name)!r}{twin}")
        base, found = self.evaluate.model_dump(mode="python", exclude={"out"}), {}
        for name, changes in (runs or {"": {}}).items():
            try:
                found[name] = PaperEvaluation.model_validate(base | changes)
            except ValidationError as error:
                raise ValueError(f"run {name!r}: {_described(PaperEvaluation, error)}") from error
        counts = self.counts_joules()
        return {name: each if counts else each.model_copy(update={"energy": "off"}) for name, each in found.items()}

    def counts_joules(self) -> bool:
        """Whether the paper's numbers or claims have joules: otherwise an evaluation takes no time to count them."""
        claimed = [reference.metric for claim in self.claims for reference in parse_claim(claim.holds).references()]
        named = [*claimed, *(metric for numbers in self.theirs.values() for metric in numbers)]
        return any(metric.partition(".")[0] in ("joules_per_token", "energy") for metric in named)

    def sources(self) -> list[str]:
        """All files, folders and hub ids that it reads, those of corpora that an experiment counts too."""
        counted = [self.settings.get(key) for key in ("source", "counted")]
        evaluations: list[PaperEvaluation | None]
        evaluations = [*self.evaluations().values()] if self.experiment == "evaluate" else [self.evaluate]
        named = [source for evaluation in evaluations if evaluation is not None for source in evaluation.sources()]
        return list(dict.fromkeys([*named, *(source for source in counted if isinstance(source, str))]))

    def on_pair(self, folder: str) -> PaperRecipe:
        """This recipe with the embedded pair of a folder in place of its models, tables and prompts, and at the size
        that `small` says. Runs are those of `small` alone, for the recipe's own name other models.

        Raises:
            ValueError: a change of `small` that does not fit.
        """
        small = _filled(self.small, folder)
        settings = dict(self.settings)
        if self.experiment == "evaluate":
            settings.pop("runs", None)
        settings |= {key.removeprefix("settings."): small[key] for key in small if key.startswith("settings.")}
        evaluate = self.evaluate
        changes = {key: value for key, value in small.items() if not key.startswith("settings.")}
        if evaluate is None and changes:
            raise ValueError(f"`small` changes {next(iter(changes))!r} of `evaluate`, and there is no `evaluate`")
        if evaluate is not None:
            runs = self.settings.get("runs") if self.experiment == "evaluate" else None
            named = [evaluate.model_dump(), *(runs.values() if isinstance(runs, dict) else ())]
            parts = [part for part in PARTS if any(isinstance(each, dict) and each.get(part) for each in named)]
            swapped = pair_values(evaluate, folder, parts) | changes
            try:
                evaluate = PaperEvaluation.model_validate(swapped)
            except ValidationError as error:
                raise ValueError(f"`small`: {_described(PaperEvaluation, error)}") from error
        # a copy, which is not checked: the paper's own rows and claims may name runs that the pair has not
        return self.model_copy(update={"evaluate": evaluate, "settings": settings, "small": {}})

    def labels(self) -> list[str]:
        """Names of the rows of the experiment `evaluate`, those of categories aside."""
        runs = self.evaluations()
        named = [RUN.format(run=run, label=label) if run else label for run in runs for label in runs[run].labels()]
        shared = [label for evaluation in runs.values() for label in evaluation.labels()]
        return list(dict.fromkeys([*named, *shared]))

    @model_validator(mode="after")
    def _whole(self) -> PaperRecipe:
        if self.evaluate is not None and self.evaluate.out:
            raise ValueError("`evaluate.out` is not to be given: results lie in the folder `out`")
        if self.experiment == "evaluate" and self.evaluate is None:
            raise ValueError("the experiment `evaluate` needs the section `evaluate`")
        small = self.on_pair("PAIR")
        if self.experiment == "evaluate":
            self._check_names(small)
        else:
            for each in (self, small):
                checked_settings(each.experiment, each.settings)
        return self

    def _check_names(self, small: PaperRecipe) -> None:
        """Raises ValueError, with the nearest right name, for a row or a metric that neither recipe has."""
        try:
            settings = RunsSettings.model_validate(self.settings)
            labels = [*self.labels(), *small.labels()]
        except ValidationError as error:
            raise ValueError(_described(RunsSettings, error, "settings")) from error
        metrics = [*MethodRow.model_fields, *DERIVED]
        named = [(label, metric, "theirs") for label, found in self.theirs.items() for metric in found]
        for claim in self.claims:
            named += [(*each, f"the claim {claim.holds!r}") for each in parse_claim(claim.holds).references()]
        for label, metric, where in named:
            row = label.partition(" [")[0] if settings.categories and label.endswith("]") else label
            if row not in labels:
                raise ValueError(f"{where} names the row {label!r}, which there is not.{nearest(row, labels)}")
            if metric.partition(".")[0] not in metrics:
                raise ValueError(f"{where} names the metric {metric!r}, which there is not.{nearest(metric, metrics)}")


def pair_values(evaluate: EvaluateRecipe, folder: str, parts: Sequence[str]) -> dict[str, Any]:
    """An evaluation's values with the embedded pair's target, prompts and those parts in place of its own."""
    own: dict[str, Any] = {"target": f"{folder}/target", "prompts": f"{folder}/corpus/heldout.jsonl"}
    own |= {part: f"{folder}/{part}" if part in parts else None for part in PARTS}
    own |= {"template": "chatml", "more_drafters": [], "prompts_path": None, "groups": [], "device_map": None}
    own |= {"dtype": "auto", "max_prompt_tokens": min(evaluate.max_prompt_tokens, LONGEST_PROMPT)}
    return evaluate.model_dump() | own


def run_folder(run: str) -> str:
    """The folder of a run within that of its recipe."""
    return re.sub(r"\W+", "-", run.lower()).strip("-")


def _filled(value: Any, folder: str) -> Any:
    """A value with the pair's folder in its texts."""
    if isinstance(value, str):
        return value.replace("{pair}", folder)
    if isinstance(value, dict):
        return {key: _filled(item, folder) for key, item in value.items()}
    return [_filled(item, folder) for item in value] if isinstance(value, list) else value


def _described(model: type[Section], error: ValidationError, under: str = "") -> str:
    """What pydantic found, for people."""
    return "; ".join(describe(model, fault, under) for fault in error.errors())
