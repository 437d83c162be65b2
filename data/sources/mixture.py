"""Several corpora as one stream, each row as often as its corpus's weight says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..conversations import Conversation


@dataclass(frozen=True, slots=True)
class Part:
    """A corpus of a mixture: `open_pass(n)` reads it from its beginning, for the n-th time in an epoch.

    `weight` is how often each row is used in an epoch: 2 is twice; 0.25 a quarter of the rows, always the same,
    chosen by a hash of their ids; 1.5 all of them once and half of them again.
    """

    weight: float
    open_pass: Callable[[int], Iterator[Conversation]]


def mixture(parts: Sequence[Part], seed: int) -> Iterator[Conversation]:
    """The rows of all parts, mixed in proportion to the weights until a part is used up, by a generator of `seed`."""
    streams = [_passes(part, seed) for part in parts]
    weights = [part.weight for part in parts]
    rng = np.random.default_rng(seed)
    while streams:
        chosen = 0
        if len(streams) > 1:
            chosen = int(np.searchsorted(np.cumsum(weights), rng.random() * sum(weights), side="right"))
            chosen = min(chosen, len(streams) - 1)  # the sum is rounded
        try:
            yield next(streams[chosen])
        except StopIteration:
            del streams[chosen], weights[chosen]


def hashed_share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _passes(part: Part, seed: int) -> Iterator[Conversation]:
    whole, rest = divmod(part.weight, 1)
    for number, share in enumerate([1.0] * int(whole) + [rest] * (rest > 0)):
        for row in part.open_pass(number):
            if share == 1 or hashed_share(f"{seed} {row.id}") < share:
                yield row
