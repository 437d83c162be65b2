"""Schema of `results.json` of `draftsmith evaluate` and `draftsmith bench`; `docs/reference/results.md` lists its keys.

Additional keys are allowed.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

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


class Row(_Checked):
    """Row of `methods` with the keys that results of `evaluate` and `bench` have in common."""

    label: str
    method: str
    options: dict[str, Any]
    temperature: float
    tokens_per_step: float | None
    tokens_per_step_interval: Pair | None
    acceptance_rate: float | None
    acceptance_by_depth: list[float]
    tokens: Count
    seconds: float
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: Pair | None
    identical_to_greedy: Pair | None
    by_category: dict[str, dict[str, Any]]


class MethodRow(Row):
    """Row of `methods` in the results of `draftsmith evaluate`."""

    lossless: bool
    steady: bool | None
    by_prompt: list[dict[str, Any]]


class LoadRow(Row):
    """Row of `methods` in the results of `draftsmith bench`."""

    concurrency: Count
    requests: Count
    failed: Count
    ms_per_token: float | None
    prompt_tokens: dict[str, Count]


class Results(_Checked):
    """Base schema of the results files of `draftsmith evaluate` and `draftsmith bench`."""

    kind: str
    created: str
    machine: dict[str, Any]
    recipe: dict[str, Any]
    prompts: Count
    categories: dict[str, Count]
    methods: list[Any]
    errors: list[str]

    @model_validator(mode="after")
    def _labels(self) -> "Results":
        labels = [row.label for row in self.methods]
        double = [label for label in labels if labels.count(label) > 1]
        if double:
            raise ValueError(f"labels of `methods` must be distinct, got {double[0]!r} twice")
        return self


class EvaluationResults(Results):
    """Results file of `draftsmith evaluate`."""

    artifacts: dict[str, Any]
    prompts_sha256: str
    passed_over: dict[str, Any]
    resumed: Count
    greedy_equals_transformers: Pair | None
    methods: list[MethodRow]


class BenchResults(Results):
    """Results file of `draftsmith bench`."""

    models: list[str]
    methods: list[LoadRow]


_MODELS: dict[str, type[Results]] = {EVALUATION: EvaluationResults, BENCH: BenchResults}


def derive_path(results: Path, name: str) -> Path:
    """Return the path of `name.json` next to `results.json`, or of `STEM.name.json` next to `STEM.json`."""
    return results.with_name(f"{name}.json" if results.stem == "results" else f"{results.stem}.{name}.json")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Validate results and write them to a file atomically. Raise ValueError if they do not match the schema."""
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    checked(_MODELS[results["kind"]], json.loads(text))
    atomic_text(path, text)


def load_results(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, Any]:
    """Load and validate a results file. Raise ValueError if it is invalid or not of the given `kind`."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"results file {path} does not exist")
    results = load_json(path)
    if results.get("kind") not in ([kind] if kind else _MODELS):
        expected = f"results of kind {kind!r}" if kind else "results of `draftsmith evaluate` or `draftsmith bench`"
        raise ValueError(f"{path} does not contain {expected}: its kind is {results.get('kind')!r}")
    try:
        checked(_MODELS[results["kind"]], results)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return results
