"""Blocks that are rendered during training; only a position is stored.

A window of conversations is packed, and its blocks are shuffled. It depends on seed, epoch and position only, so that a
resumed run and any number of processes see the same blocks. Letters: B batch (blocks), T tokens.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np
import torch

from ..conversations import Conversation
from ..rendering.render import Renderer
from ..rendering.templates import Template
from .packing import Batch, Document, make_batch, pack

OpenEpoch = Callable[[int], Iterator[Conversation]]


@dataclass(frozen=True, slots=True)
class _Window:
    """Blocks of the conversations from number `start` of an epoch; `last`: the epoch ends with them."""

    epoch: int
    start: int
    size: int
    last: bool
    blocks: list[list[Document]]


class _Windows(torch.utils.data.IterableDataset[_Window]):
    """Endless windows of a stream from a position; each worker process renders its share of them."""

    def __init__(self, stream: StreamedData, position: tuple[int, int]) -> None:
        self._open_epoch, self._make_renderer, self._size = stream.open_epoch, stream.make_renderer, stream.size
        self._block_tokens, self._packing, self._seed = stream.block_tokens, stream.packing, stream.seed
        self._position = position

    def __iter__(self) -> Iterator[_Window]:
        worker = torch.utils.data.get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None:
            # a fork lacks the threads of its parent's tokenizer, and would wait for them
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            for stop in (signal.SIGINT, signal.SIGTERM):  # the training process ends its workers, after saving
                signal.signal(stop, signal.SIG_IGN)
        render = self._make_renderer()
        for number, (epoch, start, chats, last) in enumerate(self._chunks()):
            if number % workers == index:  # a loader asks its workers in turn
                documents = [Document(one.ids, one.trainable(), i) for i, one in enumerate(render(chats))]
                yield _Window(epoch, start, len(chats), last, self._blocks(documents, epoch, start))

    def _chunks(self) -> Iterator[tuple[int, int, list[Conversation], bool]]:
        first_epoch, start = self._position
        for epoch in count(first_epoch):
            remaining = islice(self._open_epoch(epoch), start, None)
            chunk = list(islice(remaining, self._size))
            if not chunk and start == 0:
                raise ValueError("the stream holds no conversation to train on")
            while chunk:
                following = list(islice(remaining, self._size))
                yield epoch, start, chunk, not following
                start += len(chunk)
                chunk = following
            start = 0

    def _blocks(self, documents: list[Document], epoch: int, start: int) -> list[list[Document]]:
        """Pack documents into shuffled blocks."""
        if not documents:
            return []
        lengths = np.array([len(document.ids) for document in documents])
        order, sizes = pack(lengths, self._block_tokens, self._packing)
        borders = np.concatenate([[0], np.cumsum(sizes)])
        shuffled = np.random.default_rng([self._seed, epoch, start]).permutation(len(sizes))
        return [[documents[d] for d in order[borders[b] : borders[b + 1]].tolist()] for b in shuffled.tolist()]


class StreamedData:
    """Blocks of a stream of conversations, with the interface of `PreparedData` for training.

    `open_epoch(epoch)` opens the corpus from its beginning, always in the same order. `size` conversations make a
    window, and `workers` processes render ahead. `identity` describes the data.
    """

    blocks = 0  # unknown
    beginning: ClassVar[dict[str, int]] = {"epoch": 0, "conversation": 0, "blocks_used": 0}

    def __init__(
        self,
        open_epoch: OpenEpoch,
        tokenizer: Any,
        template: Template,
        block_tokens: int,
        *,
        packing: str = "best-fit",
        last_turn_only: bool = False,
        size: int = 2048,
        workers: int = 0,
        seed: int = 0,
        padding_id: int = 0,
        identity: dict[str, Any],
    ) -> None:
        self.open_epoch, self.block_tokens, self.packing = open_epoch, block_tokens, packing
        self.size, self.seed, self.manifest = size, seed, identity
        self.make_renderer = partial(Renderer, template, tokenizer, block_tokens, last_turn_only=last_turn_only)
        self._workers, self._padding_id = workers, padding_id
        self._position = (0, 0)
        self._used = 0  # blocks of the window at the position
        self._without_blocks = 0  # conversations since the last block
        self._windows: Iterator[_Window] | None = None
        self._window: _Window | None = None

    def step_batch(self, step: int, batch_blocks: int, seed: int) -> tuple[np.ndarray, Batch]:
        """Return the next blocks, numbered within their window, and as a batch [B, T]. Steps must be in order."""
        chosen: list[list[Document]] = []
        numbers = []
        while len(chosen) < batch_blocks:
            window = self._current()
            if self._used >= len(window.blocks):
                self._without_blocks = 0 if window.blocks else self._without_blocks + window.size
                if window.last and self._without_blocks >= window.start + window.size:
                    raise ValueError(
                        f"nothing to train on: {self._without_blocks} conversations of the stream gave no document"
                    )
                self._advance(window)
                continue
            chosen.append(window.blocks[self._used])
            numbers.append(self._used)
            self._used += 1
        length = self.block_tokens
        if self.packing == "pad":
            length = max(len(document.ids) for block in chosen for document in block)
        return np.array(numbers), make_batch(chosen, length, self._padding_id)

    def state(self) -> dict[str, int]:
        """Return the position after the last batch, as JSON values."""
        return {"epoch": self._position[0], "conversation": self._position[1], "blocks_used": self._used}

    def restore(self, state: dict[str, int]) -> None:
        """Resume from a state; conversations before the position are read again, but not rendered."""
        self._position = (state["epoch"], state["conversation"])
        self._used = state["blocks_used"]
        self._windows = self._window = None

    def _current(self) -> _Window:
        if self._windows is None:
            own = torch.Generator()  # a loader draws a seed, which must not change the generator of the training
            windows = _Windows(self, self._position)
            self._windows = iter(
                torch.utils.data.DataLoader(windows, batch_size=None, num_workers=self._workers, generator=own)
            )
            atexit.register(_end_workers, weakref.ref(self))
        if self._window is None:
            self._window = next(self._windows)
        return self._window

    def _advance(self, window: _Window) -> None:
        self._position = (window.epoch + 1, 0) if window.last else (window.epoch, window.start + window.size)
        self._used = 0
        self._window = None


def _end_workers(stream: weakref.ref[StreamedData]) -> None:
    """End the workers before multiprocessing waits for them at exit; they ignore its signals."""
    found = stream()
    if found is not None:
        found._windows = None
