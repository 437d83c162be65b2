"""Schema of `results.json`, which `draftsmith evaluate` and `draftsmith bench` write.

The file is one JSON object. Numbers are finite, times are in seconds unless the key says otherwise, and values that do
not apply or could not be measured are null. Keys that are not listed here are passed on unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.safe_read import load_json
from .errors import checked

EVALUATION = "evaluation"
BENCH = "bench"

Count = Annotated[int, Field(ge=0)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Metrics(_Checked):
    """Metrics of a row, over all prompts or over those of a category."""

    tokens_per_step: float | None
    """Mean acceptance length: tokens kept per target forward."""
    tokens_per_step_interval: Pair | None
    """95 % interval over prompts."""
    acceptance_rate: float | None
    """Draft tokens accepted ÷ draft tokens examined (of a server: drafted)."""
    acceptance_by_depth: list[float]
    """Of the steps that reached depth i, the share that accepted a token there."""
    tokens: Count
    """Tokens of all prompts."""
    seconds: float
    """Seconds of all prompts, the median of each prompt's runs; of a server the wall-clock time."""
    tokens_per_second: float | None
    """tokens / seconds."""
    speedup: float | None
    """tokens_per_second over autoregressive decoding's. Of a server: the baseline's time per token after the first,
    over the server's, on the same prompts; null without a baseline."""
    speedup_interval: Pair | None
    """95 % interval over prompts."""
    identical_to_greedy: Pair | None
    """[prompts, of how many] whose tokens are those of greedy decoding; null unless greedy."""


class EngineMetrics(Metrics):
    """Metrics that decoding with this engine adds."""

    acceptance_at_k: float | None
    """Levels where one of the k candidates was accepted ÷ levels examined."""
    nodes_per_step: float | None
    """Tokens that a target forward scored."""
    speedup_over_transformers: float | None
    """Speedup over transformers.generate; null unless greedy."""
    ideal: float
    """Upper bound of the papers: the speedup if a step were its drafting and one one-token forward of the target."""
    bound: float
    """Speedup if steps took no longer than their forwards of target, drafter and heads did."""
    efficiency: float
    """speedup / bound: share of the time that prefill and these forwards took; at most 1."""
    flops_per_token: dict[str, float]
    """verification, drafting, total: FLOPs by torch's counter, for forwards in isolation."""
    perplexity: float | None
    """Perplexity of the text under the unwarped target."""
    rouge_l: float | None
    """F-measure against references, mean over the prompts that have one."""
    self_consistency: float | None
    """Mean share of the greedy text before the first difference."""


class CategoryRow(EngineMetrics):
    """Metrics of a method over the prompts of a category."""

    prompts: Count


class PromptRow(_Checked):
    """Metrics of a method on one prompt."""

    prompt: str
    """Name of the prompt."""
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


class _Row(Metrics):
    label: str
    """Unique name of the row."""
    method: str
    """Method; of a server "server", of its baseline "autoregressive"."""
    options: dict[str, Any]
    temperature: float


class MethodRow(_Row, EngineMetrics):
    """Metrics of a method of this engine over all prompts."""

    lossless: bool
    """Whether the method guarantees the target's distribution."""
    near_ties: Count | None
    """Prompts that differ where the target's logits are nearly equal; null if not lossless."""
    cost_ratio: float | None
    """Time of a drafter's forward over a one-token forward of the target, both in isolation."""
    runs: Count | None
    """Timed runs of each prompt: the recipe's `repeats`."""
    slowdown: float | None
    """Time of the steps over that of undisturbed steps, by the spread of the runs; null for too few of them."""
    steady: bool | None
    """false: the slowdown of the row or of its baseline exceeds 1.25, so that times and speedups are unreliable; null:
    unknown."""
    phases_us: dict[str, float] | None
    """Median microseconds of a step by phase: draft, score, verify, commit, host, step."""
    joules_per_token: float | None
    """null where no energy counter is available."""
    energy_source: str | None
    """"nvml" or "rapl"."""
    energy: dict[str, Any] | None
    """How joules were counted: source, joules (with idle power) and error (standard), above_idle (or null), watts,
    idle_watts, seconds, trials."""
    by_category: dict[str, CategoryRow]
    by_prompt: list[PromptRow]
    """Prompts in the order of decoding."""


class LoadRow(_Row):
    """Metrics of a server, or of its baseline, under one load. Times are the client's."""

    concurrency: Count
    """Requests in flight."""
    requests: Count
    failed: Count
    failures: list[str]
    """The first reasons of failed requests."""
    cut: Count
    """Answers that the token limit ended."""
    ms_to_first: dict[str, float] | None
    """Time to first token: median, p90, p99."""
    ms_per_token: float | None
    """Time per output token after the first."""
    ms_per_token_interval: Pair | None
    drafted: float | None
    """Draft tokens; null where neither the server's metrics nor its answers count them."""
    accepted: float | None
    drafted_per_step: float | None
    prompt_tokens: dict[str, Count]
    """Prompt lengths as the server counts them."""
    by_category: dict[str, dict[str, Any]]
    """prompts, speedup, speedup_interval, identical_to_greedy of each category."""


class Results(_Checked):
    """Common part of both files."""

    kind: str
    created: str
    """UTC, ISO 8601."""
    machine: dict[str, Any]
    """device, name, cores, threads, python, versions."""
    recipe: dict[str, Any]
    """Resolved recipe."""
    prompts: Count
    """Number of prompts that were decoded."""
    categories: dict[str, Count]
    """Prompts by category."""
    methods: list[Any]
    errors: list[str]
    """Measurements that cannot be true, broken guarantees of losslessness, and warnings about a server."""

    @model_validator(mode="after")
    def _labels(self) -> Results:
        labels = [row.label for row in self.methods]
        double = [label for label in labels if labels.count(label) > 1]
        if double:
            raise ValueError(f"two rows of `methods` have the label {double[0]!r}")
        return self


class EvaluationResults(Results):
    """File that `draftsmith evaluate` writes."""

    kind: Literal["evaluation"]
    artifacts: dict[str, Any]
    """Target, drafter, heads and table as they were loaded (`ModelRef.record`)."""
    prompts_sha256: str
    """Hash of the prompts' token ids: equal where two evaluations decoded the same."""
    passed_over: dict[str, Any]
    """Prompts that were skipped: `counts` by reason, and the names of the first `too_long`."""
    resumed: Count
    """Runs of an interrupted process that were reused: times come from both."""
    greedy_equals_transformers: Pair | None
    """[prompts, of how many] that transformers.generate decodes to the same tokens."""
    methods: list[MethodRow]
    energy_by_batch: dict[str, Any] | None = None
    """Joules and seconds of the target's forward by batch size (`evaluate --energy`)."""


class BenchResults(Results):
    """File that `draftsmith bench` writes."""

    kind: Literal["bench"]
    models: list[str]
    """Names of the models on the server and its baseline."""
    methods: list[LoadRow]


_MODELS: dict[str, type[Results]] = {EVALUATION: EvaluationResults, BENCH: BenchResults}


def beside(results: Path, name: str) -> Path:
    """Return the path of a file that belongs to results: `certificate.json` for `results.json`, otherwise
    `NAME.certificate.json`."""
    return results.with_name(f"{name}.json" if results.stem == "results" else f"{results.stem}.{name}.json")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Check results and write them atomically. Raises ValueError: they do not fit the schema."""
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    checked(_MODELS[results["kind"]], json.loads(text))
    atomic_text(path, text)


def load_results(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, Any]:
    """Read and check results, of this `kind` if one is given. Raises ValueError, with the file and the key: no such
    file, damaged, or other contents."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there are no results at {path}")
    found = load_json(path)
    if found.get("kind") not in ([kind] if kind else _MODELS):
        expected = f"results of kind {kind!r}" if kind else "results of `draftsmith evaluate` or `draftsmith bench`"
        raise ValueError(f"{path} holds no {expected}: its kind is {found.get('kind')!r}")
    try:
        checked(_MODELS[found["kind"]], found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found
