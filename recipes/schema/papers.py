"""Recipes of kind `paper`: a table or figure of a paper, what runs it again, and what the paper says comes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from .claims import parse_claim
from .data import Section
from .errors import checked
from .evaluation import EvaluateRecipe
from .experiments import SETTINGS, RunsSettings

PARTS = ("drafter", "heads", "table")
LONGEST_PROMPT = 512
"""Tokens: the quickstart's pair reads 1,024 with the answer."""


class Pair(NamedTuple):
    """A finished quickstart of any recipe, in place of a paper's models and prompts."""

    name: str
    """Of the results' folders."""
    folder: str
    prompts: str
    template: str
    first: str
    """The drafter before distillation; of a pair without a second stage its only one."""
    heads: int
    """How many."""


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
    out: Literal[""] = Field("", exclude=True)
    """Not to be given."""
    energy: Literal["auto", "off"] = "off"
    """As in an evaluation, but off unless the paper speaks of joules, which take time to count."""


class PaperRecipe(Section):
    """One table or figure of a paper, run again with the paper's settings."""

    kind: Literal["paper"]
    out: str
    """Folder of the results."""
    paper: Literal["multi-candidate", "mjsd", "slim", "slides", "theory"]
    """Which paper."""
    where: str
    """Its table or figure."""
    experiment: Literal["evaluate", "acceptance", "correlation", "saturation", "energy"]
    """What is done; `settings` are for it."""
    settings: dict[str, Any] = Field({})
    """Settings of the experiment, see `experiments`."""
    evaluate: PaperEvaluation
    """Models, prompts and methods."""
    small: dict[str, Any] = Field({})
    """Changes for a run on a pair: keys of `evaluate`, and `settings.KEY`. `{pair}` in a text stands for the pair's
    folder, `{pair}/drafter-stage1` for the drafter before distillation."""
    theirs: dict[str, dict[str, float]] = Field({})
    """The paper's numbers: metrics by label."""
    claims: list[ClaimSection] = Field([])
    """What the paper says of them."""
    not_rerun: str | None = None
    """What of it is not run again, and why."""

    def section(self) -> Section:
        """The settings of the experiment. Raises ValueError: settings that there are not."""
        return checked(SETTINGS[self.experiment], self.settings, "settings")

    def evaluations(self) -> dict[str, PaperEvaluation]:
        """The evaluations of the experiment `evaluate`, by the names of their runs; one without runs is called "".
        Raises ValueError: two runs of one folder."""
        settings = self.section()
        assert isinstance(settings, RunsSettings)
        base, runs = self.evaluate.model_dump(), settings.runs or {"": {}}
        if len({run_folder(name) for name in runs}) < len(runs):
            raise ValueError(f"`settings.runs`: two of {list(runs)} have the same name for a folder")
        return {
            name: checked(PaperEvaluation, base | changes, f"settings.runs.{name}") for name, changes in runs.items()
        }

    def sources(self) -> list[str]:
        """All files, folders and hub ids that it reads, those of corpora that an experiment counts too."""
        evaluations = self.evaluations().values() if self.experiment == "evaluate" else [self.evaluate]
        counted = [self.settings[key] for key in ("source", "counted") if self.settings.get(key)]
        return list(dict.fromkeys([*(source for each in evaluations for source in each.sources()), *counted]))

    def on_pair(self, pair: Pair) -> PaperRecipe:
        """This recipe with a pair in place of its models, tables and prompts, and at the size that `small` says. Runs
        are those of `small` alone, for the recipe's own name other models. Rows that ask for what the pair lacks are
        left out, and `not_rerun` says so."""
        small = filled(filled(self.small, "{pair}/drafter-stage1", pair.first), "{pair}", pair.folder)
        settings = {key: value for key, value in self.settings.items() if key != "runs"}
        settings |= {key.removeprefix("settings."): small.pop(key) for key in [*small] if key.startswith("settings.")}
        named = [self.evaluate.model_dump()]
        if self.experiment == "evaluate":
            named += [each.model_dump() for each in self.evaluations().values()]
        parts = [part for part in PARTS if any(each[part] for each in named)]
        evaluate = checked(PaperEvaluation, pair_values(self.evaluate, pair, parts) | small, "small")
        lacks = [self.not_rerun] if self.not_rerun else []
        if evaluate.drafter in evaluate.more_drafters:
            evaluate = evaluate.model_copy(update={"more_drafters": []})
            lacks.append("The pair has one drafter: rows of a second are left out.")
        rows = dict(zip(evaluate.labels(), evaluate.methods, strict=True))
        deep = [label for label, row in rows.items() if _depth(row.options) > pair.heads]
        if deep:
            evaluate = evaluate.model_copy(update={"methods": [rows[label] for label in rows if label not in deep]})
            lacks.append(f"The pair has {pair.heads} heads: {', '.join(deep)} ask for more and are left out.")
        about = {"settings": settings, "small": {}, "not_rerun": " ".join(lacks) or None}
        return self.model_copy(update=about | {"evaluate": evaluate})

    @model_validator(mode="after")
    def _whole(self) -> PaperRecipe:
        for recipe in (self, self.on_pair(_ANY_PAIR)):
            recipe.section()
            if self.experiment == "evaluate":
                recipe.evaluations()
        return self


_ANY_PAIR = Pair("", "PAIR", "PAIR/prompts", "plain", "PAIR/drafter-stage1", 4)


def _depth(options: dict[str, Any]) -> int:
    """How many heads a method's options ask for."""
    depth = options.get("max_depth")
    return max(depth if isinstance(depth, int) else 0, str(options.get("tree")).count("x") + 1)


def pair_values(evaluate: EvaluateRecipe, pair: Pair, parts: Sequence[str]) -> dict[str, Any]:
    """An evaluation's values with a pair's target, prompts and those parts in place of its own."""
    own: dict[str, Any] = {"target": f"{pair.folder}/target", "prompts": pair.prompts, "template": pair.template}
    own |= {part: f"{pair.folder}/{part}" if part in parts else None for part in PARTS}
    own |= {"more_drafters": [], "prompts_path": None, "groups": [], "device_map": None}
    own |= {"dtype": "auto", "max_prompt_tokens": min(evaluate.max_prompt_tokens, LONGEST_PROMPT)}
    return evaluate.model_dump() | own


def run_folder(run: str) -> str:
    """The folder of a run within that of its recipe."""
    return re.sub(r"\W+", "-", run.lower()).strip("-")


def filled(value: Any, mark: str, folder: str) -> Any:
    """A value with a folder in place of a mark in its texts."""
    if isinstance(value, str):
        return value.replace(mark, folder)
    if isinstance(value, dict):
        return {key: filled(item, mark, folder) for key, item in value.items()}
    return [filled(item, mark, folder) for item in value] if isinstance(value, list) else value
