"""A measured acceptance in the form in which vLLM pretends one: what such drafts would bring there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any

from ....checkpoints.storage.messages import did_you_mean


def vllm_profile(results: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The `--speculative-config` with which vLLM keeps as many tokens a step as a row did, and by depth as it did; it
    scores a chain, where the row may have scored a tree. Raises ValueError: no such row; one that kept no draft."""
    rows = {row["label"]: row for row in results["methods"]}
    if label not in rows:
        raise ValueError(f"no row {label!r}.{did_you_mean(label, rows)} Known: {', '.join(rows)}")
    row = rows[label]
    rates = list(accumulate(row["acceptance_by_depth"], mul))  # of the steps that drafted, the share that came so far
    if not sum(rates):
        raise ValueError(f"{label} kept no draft token")
    drafted = (row["tokens_per_step"] - 1) / sum(rates)
    recipe = results["recipe"]
    sources = [recipe.get("drafter"), *(recipe.get("more_drafters") or [])]
    return {
        "model": sources[row["options"].get("drafter", 1) - 1] or "a model of the drafter's size",
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [min(1.0, round(drafted * rate, 4)) for rate in rates],
    }
