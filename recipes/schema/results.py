"""`results.json`: what an evaluation leaves. It is written here, and read and checked here.

The file is one JSON object of schema 2. Numbers are finite, times are seconds unless the key says otherwise, and what
does not apply or could not be measured is null. Keys that are not listed are passed on as they are. Files of schema 1
are read: what they lack is null or empty, `by_category`, which had no times, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.safe_read import read_document
from .errors import checked

SCHEMA = 2
KIND = "evaluation"

Count = Annotated[int, Field(ge=0)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Metrics(_Checked):
    """What is known of a method, over all prompts or over those of a category."""

    tokens_per_step: float | None
    """Tokens kept a target forward."""
    tokens_per_step_interval: Pair | None
    """95 %, by prompts."""
    acceptance_rate: float | None
    """Draft tokens accepted of those examined."""
    acceptance_at_k: float | None
    """The same by level."""
    acceptance_by_depth: list[float]
    """Of the steps that reached depth i, the share that accepted there."""
    nodes_per_step: float | None
    """Tokens that a target forward scored."""
    tokens: Count
    """Of all prompts."""
    seconds: float
    """Of all prompts, the median of each prompt's runs."""
    tokens_per_second: float
    """tokens / seconds."""
    speedup: float
    """tokens_per_second over autoregressive decoding's."""
    speedup_interval: Pair | None
    """95 %, by prompts."""
    speedup_over_transformers: float | None
    """The same over transformers.generate; null unless greedy."""
    identical_to_greedy: Pair | None
    """[prompts, of how many] with greedy decoding's very tokens; null unless greedy."""
    ideal: float
    """The papers' bound: the speedup if a step were its drafting and one one-token forward of the target."""
    bound: float
    """The speedup if steps took no longer than their forwards of target, drafter and heads did."""
    efficiency: float
    """speedup / bound: the share of the time that reading the prompts and these forwards took; 1 at most."""
    flops_per_token: dict[str, float]
    """verification, drafting, total: by shapes; checked: the same of the forwards that were timed over what torch's
    counter saw, left out where there is nothing to compare."""
    perplexity: float | None
    """Of the text under the unwarped target."""
    rouge_l: float | None
    """F-measure against references, mean of those prompts that have one."""
    self_consistency: float | None
    """Mean share of the greedy text before the first difference."""


class CategoryRow(Metrics):
    """A method over the prompts of a category."""

    prompts: Count


class PromptRow(_Checked):
    """A method on one prompt."""

    prompt: str
    """Its name."""
    category: str
    tokens: Count
    steps: Count
    accepted: Count
    examined: Count
    seconds: float
    tokens_per_step: float | None
    acceptance_rate: float | None
    speedup: float
    perplexity: float | None
    rouge_l: float | None
    self_consistency: float | None


class MethodRow(Metrics):
    """A method over all prompts."""

    label: str
    """Unique."""
    method: str
    options: dict[str, Any]
    temperature: float
    lossless: bool
    """Whether the method promises the target's own distribution."""
    near_ties: Count | None
    """Prompts that differ where the target is all but undecided; null if not lossless."""
    cost_ratio: float | None
    """A drafter's forward over a one-token forward of the target, both in isolation."""
    runs: Count | None
    """Timed runs of each prompt: the recipe's `repeats`, and those that unsteady times took."""
    slowdown: float | None
    """How much longer the steps took than undisturbed ones, by the spread of the runs; null for too few of them."""
    steady: bool | None
    """false: the slowdown of the row or of its baseline is above 1.25, so that its times and speedups are not to be
    relied on; null: not known."""
    phases_us: dict[str, float] | None
    """Median microseconds of a step by phase: draft, score, verify, commit, host, step."""
    joules_per_token: float | None
    """null where nothing counts energy."""
    energy_source: str | None
    """"nvml", "nvml-power" or "rapl"."""
    energy: dict[str, Any] | None
    """How joules were counted: source, joules (with idle power) and error (standard), above_idle (or null), watts,
    idle_watts, seconds, trials."""
    prediction: dict[str, Any] | None
    """What a recording says it should be: {"tokens_per_step": …}."""
    by_category: dict[str, CategoryRow]
    by_prompt: list[PromptRow]
    """In the order of decoding."""


class Results(_Checked):
    """The whole file. Newer files also have `created` (UTC, ISO 8601) and `artifacts`: of target, drafter, heads and
    table, as far as there are, what was loaded (`ModelRef.record`)."""

    kind: Literal["evaluation"]
    schema_: int = Field(alias="schema")
    machine: dict[str, Any]
    """device, name, cores, threads, python, versions."""
    recipe: dict[str, Any]
    """The resolved recipe."""
    prompts: Count
    """How many were decoded."""
    prompts_sha256: str | None
    """Of their token ids: equal where two evaluations asked the same."""
    passed_over: dict[str, Any]
    """Prompts read and not asked: `counts` by reason, and the names of the first `too_long`."""
    categories: dict[str, Count]
    """Prompts by category."""
    resumed: Count
    """Runs taken over from a process that was interrupted: its times stand beside this one's."""
    greedy_equals_transformers: Pair | None
    """[prompts, of how many] that transformers.generate decodes to the same tokens."""
    methods: list[MethodRow]
    errors: list[str]
    """What went wrong: measurements that cannot be true, broken promises of losslessness."""

    @model_validator(mode="after")
    def _labels(self) -> Results:
        labels = [row.label for row in self.methods]
        double = [label for label in labels if labels.count(label) > 1]
        if double:
            raise ValueError(f"two rows of `methods` have the label {double[0]!r}")
        return self


def beside(results: Path, name: str) -> Path:
    """Where what belongs to results lies: `certificate.json` beside `results.json`, else `NAME.certificate.json`."""
    return results.with_name(f"{name}.json" if results.stem == "results" else f"{results.stem}.{name}.json")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results, whole or not at all. Raises ValueError: they are not as they should be."""
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    checked(Results, json.loads(text))
    atomic_text(path, text)


def load_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The results in a file, checked, Raises ValueError: not there, damaged, other results or another schema, naming
    the file and the key."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there are no results at {path}")
    found = read_document(path, SCHEMA, "draftsmith evaluate")
    try:
        checked(Results, found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found
