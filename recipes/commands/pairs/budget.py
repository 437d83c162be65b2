"""What a forge may spend, and what it has spent: on measuring, on training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.safe_read import load_json

BESIDE = 1.5
"""What an evaluation takes, over the tokens that it decodes: prompts, rows that were disturbed, profiles of steps."""
FEWEST = 4
"""Batches that a row is measured on at least."""


class Ledger:
    """Seconds by stage, over all processes of a forge: those of a killed one since its last stage are not known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = load_json(path, "seconds")["seconds"] if path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Whatever ends it, the time is kept."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            atomic_text(self._path, json.dumps({"seconds": self.seconds}, indent=1) + "\n")

    @property
    def spent(self) -> float:
        return sum(self.seconds.values())


def race_rows(rows: Sequence[int], rounds: int, places: int) -> int:
    """Rows of all evaluations of a race and its end, baselines included, if the dearest are left: `rows` of each
    candidate; after a round half go on, or the first of each place."""
    dearest = sorted((each + 1 for each in rows), reverse=True)
    left, total = len(dearest), 0
    for number in range(rounds + 1):
        total += sum(dearest[:left])
        left = min(left, max(-(-left // 2), places) if number < rounds - 1 else places)
    return total


def measured_groups(share: float, rows: int, seconds_each: float, most: int) -> int:
    """Batches that each of so many rows can be measured on in a share of the budget, as far as there are."""
    return min(most, max(FEWEST, int(share / (BESIDE * rows * seconds_each))))
