"""Continuous batching for autoregressive decoding: a finished row immediately receives the next prompt.

If the cache of a free row contains a prefix of the prompt, such as earlier turns of a conversation, it is reused.
Encoder-decoders are not supported.

Shape letters: B active rows, C rows with the same sampling parameters, V vocabulary, D hidden.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .engine import Limits, check_prompts
from .models.base import LanguageModel
from .models.finite import Watch
from .models.kv_cache import KVCache
from .rng import Rng, categorical
from .warpers import Sampling, warp

_FIRST_CAPACITY = 512  # slots per row, at least doubled if a prompt needs more
_PREFILL = 512  # prompt tokens per forward


@dataclass(slots=True)
class _Row:
    """Sequence in a row of the cache, which contains the keys and values of all `ids` except the last."""

    ids: list[int]
    sampling: Sampling
    ticket: int | None = None
    """Ticket of the prompt in this row. None if the row is free."""
    rng: Rng | None = None
    left: int = 0
    """Number of tokens that may still be generated."""
    prompt: int = 0
    """Number of prompt tokens in `ids`."""


class Pool:
    """Decoder for queued prompts, `rows` at a time. Each output equals that of `generate` with `Rng([seed])`."""

    def __init__(self, target: LanguageModel, rows: int, limits: Limits, sampling: Sampling) -> None:
        if rows < 1:
            raise ValueError(f"a pool must have at least 1 row, got {rows}")
        self._target, self._limits, self._sampling = target, limits, sampling
        self._stop_ids = frozenset(limits.stop_ids)
        self._rows = [_Row([], sampling) for _ in range(rows)]
        self._cache = target.new_cache(rows, _FIRST_CAPACITY)
        self._waiting: deque[tuple[int, list[int], int, Sampling]] = deque()
        self._tickets = 0
        self._watch = Watch()

    def add(self, prompt: Sequence[int], seed: int, sampling: Sampling | None = None) -> int:
        """Queue a prompt, and return the ticket that identifies its output. `sampling` overrides the default.

        Raises:
            ValueError: The prompt is empty or contains a token outside the vocabulary.
        """
        check_prompts(self._target, [prompt])
        self._tickets += 1
        self._waiting.append((self._tickets, list(prompt), seed, sampling or self._sampling))
        return self._tickets

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(row.ticket is not None for row in self._rows)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, list[int]]]:
        """Generate one token in each row, and return the ticket and the new tokens of each sequence that ended.

        Raises:
            ValueError: Logits are NaN or infinite.
        """
        self._admit()
        count = self._compact_rows()
        rows = self._rows[:count]
        cache = self._cache.rows(0, count, [len(row.ids) - 1 for row in rows])
        roots_B1 = torch.tensor([row.ids[-1:] for row in rows]).to(self._target.device)
        logits_BV = self._target.logits(self._target.extend(cache, roots_B1)[:, 0])
        self._watch("the target's", logits_BV.amax(-1, True), 0)
        self._watch.end_step(self._watch.numbers().tolist(), [False] * count, [len(row.ids) for row in rows])
        finished = []
        for row, token in zip(rows, self._draw(logits_BV, rows), strict=True):
            row.ids.append(token)
            row.left -= 1
            if not row.left or token in self._stop_ids:
                assert row.ticket is not None
                finished.append((row.ticket, row.ids[row.prompt :]))
                row.ticket = None
        return finished

    def _draw(self, logits_BV: torch.Tensor, rows: Sequence[_Row]) -> list[int]:
        token_B = logits_BV.argmax(-1)
        for sampling in {row.sampling for row in rows if not row.sampling.greedy}:
            indices = [index for index, row in enumerate(rows) if row.sampling == sampling]
            uniform_C = torch.cat([rng.uniform() for index in indices if (rng := rows[index].rng)])
            token_B[indices] = categorical(warp(logits_BV[indices], sampling), uniform_C)
        return token_B.tolist()

    def _admit(self) -> None:
        """Assign waiting prompts to free rows, preferring the row with the longest common prefix."""
        free = [index for index, row in enumerate(self._rows) if row.ticket is None]
        while free and self._waiting:
            ticket, prompt, seed, sampling = self._waiting.popleft()
            shared = {index: common_prefix(self._rows[index].ids, prompt) - 1 for index in free}
            index = max(free, key=lambda index: (shared[index], -len(self._rows[index].ids)))
            free.remove(index)
            self._read(index, prompt, max(shared[index], 0))
            new = self._limits.max_new_tokens
            self._rows[index] = _Row(prompt, sampling, ticket, Rng([seed], self._target.device), new, len(prompt))

    def _read(self, index: int, prompt: list[int], start: int) -> None:
        """Prefill a row of the cache with `prompt[start:-1]`. Earlier tokens are already cached."""
        needed = len(prompt) + self._limits.max_new_tokens
        if needed > self._cache.capacity:
            self._cache = self._cache.grown(max(needed, 2 * self._cache.capacity))
        for first in range(start, len(prompt) - 1, _PREFILL):
            part = prompt[first : min(first + _PREFILL, len(prompt) - 1)]
            cache: KVCache = self._cache.rows(index, index + 1, [first])
            self._target.extend(cache, torch.tensor([part]).to(self._target.device))

    def _compact_rows(self) -> int:
        """Move rows in use before free rows, and return the number of rows in use."""
        running = [index for index, row in enumerate(self._rows) if row.ticket is not None]
        for free in range(len(running)):
            if self._rows[free].ticket is None:
                last = running.pop()
                self._cache.swap_rows(free, last)
                self._rows[free], self._rows[last] = self._rows[last], self._rows[free]
        return sum(row.ticket is not None for row in self._rows)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
