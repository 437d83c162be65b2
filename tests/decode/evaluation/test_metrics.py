"""Bootstrap intervals of metrics, and checks for impossible measurements."""

import math
import re
from typing import Any

import numpy as np
import pytest
from draftsmith.decode.evaluation.metrics import Tally, find_impossible_value, tokens_per_step_interval

SOUND: dict[str, Any] = {
    "method": "speculative",
    "options": {"epsilon": -1.0},
    "tokens_per_step": 2.0,
    "acceptance_rate": 0.5,
    "acceptance_by_depth": [0.5, 1.0],
    "speedup": 1.5,
    "speedup_interval": (1.4, 1.6),
    "perplexity": 3.0,
    "rouge_l": None,
    "by_category": {"math": {"tokens_per_step": 2.0, "speedup": 1.5, "speedup_interval": [1.4, 1.6]}},
    "by_prompt": [{"prompt": "a", "seconds": 0.1}],
}


FAST: dict[str, Any] = {"tokens_per_step": 2.0, "speedup": 2.4, "speedup_interval": None}


def test_intervals_of_tokens_per_step_cover_the_truth() -> None:
    """The tokens per step differ between prompts, which the interval must reflect."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):
        tallies = []
        for _ in range(40):
            easy = rng.random() < 0.5
            tokens = rng.choice([3, 4] if easy else [1, 2], size=10).sum()
            tallies.append(Tally(tokens=int(tokens), steps=10))
        interval = tokens_per_step_interval(tallies)
        assert interval is not None
        covered += interval[0] <= 2.5 <= interval[1]
    assert 50 <= covered <= 60
    assert tokens_per_step_interval(tallies[:2]) is None


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"method": "autoregressive", "tokens_per_step": 1.0},
        {"by_category": {"math": FAST | {"speedup_interval": [2.1, 2.5]}}},  # one category exceeds the bound by chance
        # fewer than three prompts have no interval, and a single disturbance can distort them
        {"by_category": {"math": FAST}},
        FAST,
    ],
)
def test_possible_measurements_pass(change: dict[str, Any]) -> None:
    assert find_impossible_value(SOUND | change) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speedup": math.nan}, "speedup is nan, not a finite number"),
        ({"by_prompt": [{"prompt": "a", "seconds": -0.1}]}, r"by_prompt\[0\].seconds is -0.1, below 0"),
        ({"acceptance_by_depth": [0.5, 1.5]}, "acceptance_by_depth is 1.500, outside"),
        ({"perplexity": 0.7}, "perplexity is 0.700, below 1"),
        ({"speedup_interval": (2.1, 2.5), "speedup": 2.3}, "speedup is at least 2.10, above tokens_per_step of 2.00"),
        ({"by_category": {"math": {"acceptance_rate": 1.1}}}, "category 'math': acceptance_rate is 1.100, outside"),
        ({"by_category": {"math": FAST | {"speedup_interval": [2.3, 2.5]}}}, "'math': speedup is at least 2.30"),
    ],
)
def test_impossible_measurements_are_named(change: dict[str, Any], message: str) -> None:
    assert re.search(message, find_impossible_value(SOUND | change) or "possible")
