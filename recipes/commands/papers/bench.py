"""What the experiments with models share: parts that they need, tables that they count, ratios of sums as metrics.

Shape letters: T positions of all texts one after another, P prompts, X anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....checkpoints.artifact.model_ref import source_hash
from ....decode.evaluation.replay.recording import Recording
from ...schema.loading import parse_recipe
from ...schema.papers import PaperEvaluation
from ...schema.training import TableRecipe
from ..training.train import run_train

Row = dict[str, Any]
Numbers = Sequence[float] | NDArray[Any]


def check_parts(evaluation: PaperEvaluation, *parts: str) -> None:
    """Raises ValueError for the first part that an experiment needs and the evaluation does not name."""
    for part in parts:
        if getattr(evaluation, part) is None:
            raise ValueError(f"the experiment needs `evaluate.{part}`, and the recipe names none")


def counted_table(evaluation: PaperEvaluation, source: str, folder: Path, limit: int | None = None) -> Path:
    """The folder of the table of a corpus, or of its first `limit` rows, counted as the evaluation's target and
    template read it into `folder/counted-…` unless it is there. The name goes with what is counted: a corpus that has
    changed is counted again."""
    states = [source, source_hash(source), evaluation.target, source_hash(evaluation.target), evaluation.template]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:12]
    out = folder / (f"counted-{digest}" if limit is None else f"counted-{digest}-{limit}")
    data = {"source": source, "limit": limit, "template": evaluation.template, "cache": str(folder / "prepared")}
    values = {"kind": "table", "out": str(out), "tokenizer": evaluation.target, "data": data}
    recipe = parse_recipe(values, "the table that the experiment counts")
    assert isinstance(recipe, TableRecipe)
    return run_train(recipe)


def ratio_row(label: str, columns: Mapping[str, tuple[Numbers, Numbers]], **more: Any) -> Row:
    """A row of metrics Σ over / Σ under by prompt, None where nothing stands under one."""
    pairs = {name: {"over": [float(n) for n in over], "under": [float(n) for n in under]}
             for name, (over, under) in columns.items()}  # fmt: skip
    metrics = {name: sum(each["over"]) / sum(each["under"]) if sum(each["under"]) else None
               for name, each in pairs.items()}  # fmt: skip
    return {"label": label, **metrics, "pairs": pairs, **more}


def summed_by_text(values_TX: NDArray[Any], recording: Recording) -> NDArray[Any]:
    """[P, X] sums over the positions of each recorded text."""
    starts = np.cumsum(recording.lengths) - recording.lengths
    sums_PX: NDArray[Any] = np.add.reduceat(values_TX, starts, axis=0)
    return sums_PX
