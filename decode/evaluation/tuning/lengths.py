"""Draft lengths of a serving engine under load.

The engine is measured with one draft token and with the maximum. Between the two, the time of a step relative to the
baseline is taken to grow linearly. Tokens per step follow from the acceptance rates by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from .tuner import Measurement


class DraftLengths:
    """Backend of `tune` whose settings are numbers of draft tokens; 0 is the engine without drafts.

    Args:
        most: maximum number of draft tokens.
        run: measures the engine with so many draft tokens next to a baseline; returns the row of `bench` for
            each load, with the baseline's time per token as `plain_ms`.
    """

    def __init__(self, most: int, run: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        self._most, self._run = most, run
        self.rows: dict[int, Sequence[Mapping[str, Any]]] = {}
        self.loads: dict[int, dict[str, Any]] = {}

    def first_settings(self) -> list[int]:
        """List the two ends."""
        return list(dict.fromkeys((1, self._most)))

    def measure(self, settings: Sequence[int]) -> dict[int, dict[int, Measurement]]:
        """Run the engine with each number of draft tokens."""
        found: dict[int, dict[int, Measurement]] = {}
        for tokens in settings:
            self.rows[tokens] = self._run(tokens)
            for row in self.rows[tokens]:
                known = found.setdefault(row["concurrency"], {0: Measurement("", "0", 1.0, 1.0, (1, 1))})
                speedup = row["speedup"]
                if speedup is not None:
                    interval = tuple(row["speedup_interval"] or (speedup, speedup))
                    rate = row["tokens_per_step"]
                    known[tokens] = Measurement("", str(tokens), rate, speedup, interval)
        return found

    def predict(self, workload: int) -> dict[int, float]:
        """Predict the speedup of each number of draft tokens."""
        if workload not in self.loads:
            for rows in zip(self.rows[1], self.rows[self._most], strict=True):
                self.loads[rows[0]["concurrency"]] = predict_lengths(*rows, self._most)
        return {0: 1.0} | {each["tokens"]: each["speedup"] for each in self.loads[workload]["lengths"]}


def predict_lengths(short: Mapping[str, Any], long: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Predict the speedup of each draft length under a load from measurements with one token and with `most`.

    Raises:
        ValueError: The engine reports no acceptance by position, or answered nothing.
    """
    rates = long["acceptance_by_depth"]
    plain = [row["plain_ms"] for row in (short, long)]
    if not rates or None in plain:
        raise ValueError(f"{long['label']}: the engine reports no acceptance by position, or answered no prompt")
    plain_ms = sum(plain) / 2
    # Each relative to the baseline of its own run: the speed of a machine drifts between two runs.
    first, last = (_step_ms(side) / alone for side, alone in zip((short, long), plain, strict=True))
    reached = accumulate([*rates, *[0.0] * (most - len(rates))], mul)
    lengths = []
    for tokens, accepted in enumerate(accumulate(reached), 1):
        steps = first if most == 1 else first + (last - first) * (tokens - 1) / (most - 1)
        about = {"tokens": tokens, "tokens_per_step": 1 + accepted, "step_ms": steps * plain_ms}
        lengths.append(about | {"speedup": (1 + accepted) / steps})
    return {key: long[key] for key in ("label", "concurrency")} | {"plain_ms": plain_ms, "lengths": lengths}


def _step_ms(side: Mapping[str, Any]) -> float:
    return float(side["ms_per_token"] * side["tokens_per_step"])
