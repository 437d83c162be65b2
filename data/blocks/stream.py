"""Blocks rendered while they are trained on, for corpora that are larger than the disk: nothing is stored but a place.

A window is so many conversations of the corpus, in its order; its documents are packed together and its blocks
shuffled. What a window holds depends on seed, epoch and place alone, so that a resumed run and any number of processes
see the same blocks. Letters: B batch (blocks), T tokens.
"""

from __future__ import annotations

import os
import signal
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
    """Blocks of conversations number `start` and following of an epoch; with `last`, the epoch ends there."""

    epoch: int
    start: int
    size: int
    last: bool
    blocks: list[list[Document]]


class _Windows(torch.utils.data.IterableDataset[_Window]):
    """Windows from a place on, for ever. Of several worker processes each renders its share of them."""

    def __init__(
        self,
        open_epoch: OpenEpoch,
        make_renderer: Callable[[], Renderer],
        block_tokens: int,
        packing: str,
        size: int,
        seed: int,
        place: tuple[int, int],
    ) -> None:
        self._open_epoch, self._make_renderer = open_epoch, make_renderer
        self._block_tokens, self._packing, self._size = block_tokens, packing, size
        self._seed, self._place = seed, place

    def __iter__(self) -> Iterator[_Window]:
        worker = torch.utils.data.get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None:
            # a fork has none of the threads that its parent's tokenizer may have started, and would wait for them
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            for stop in (signal.SIGINT, signal.SIGTERM):  # the training process says when to end: it saves first
                signal.signal(stop, signal.SIG_IGN)
        renderer = self._make_renderer()
        for number, (epoch, start, chats, last) in enumerate(self._chunks()):
            if number % workers == index:  # a loader asks its workers in turn
                yield _Window(epoch, start, len(chats), last, self._blocks(renderer, chats, epoch, start))

    def _chunks(self) -> Iterator[tuple[int, int, list[Conversation], bool]]:
        first_epoch, start = self._place
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

    def _blocks(self, renderer: Renderer, chats: list[Conversation], epoch: int, start: int) -> list[list[Document]]:
        documents = [
            Document(document.ids, document.trainable(), number) for number, document in enumerate(renderer(chats))
        ]
        if not documents:
            return []
        lengths = np.array([len(document.ids) for document in documents])
        order, sizes = pack(lengths, self._block_tokens, self._packing)
        borders = np.concatenate([[0], np.cumsum(sizes)])
        shuffled = np.random.default_rng([self._seed, epoch, start]).permutation(len(sizes))
        return [[documents[d] for d in order[borders[b] : borders[b + 1]].tolist()] for b in shuffled.tolist()]


class StreamedData:
    """Blocks of a stream of conversations, in place of `PreparedData` for training; every process reads it all.

    `open_epoch(epoch)` opens the corpus from its beginning: always the same conversations in the same order. `size`
    conversations make a window. `workers` processes render ahead; 0 renders in this one. `identity` says what the data
    is, for checkpoints and manifests.

    Raises:
        ValueError: when a batch is asked for, and the stream holds nothing to train on.
    """

    blocks = 0  # nobody knows how many
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
        self.block_tokens = block_tokens
        self.manifest = identity
        self._open_epoch, self._packing, self._size = open_epoch, packing, size
        self._make_renderer = partial(Renderer, template, tokenizer, block_tokens, last_turn_only=last_turn_only)
        self._workers, self._seed, self._padding_id = workers, seed, padding_id
        self._place = (0, 0)
        self._used = 0  # blocks of the window at the place
        self._fruitless = 0  # conversations since the last block
        self._windows: Iterator[_Window] | None = None
        self._window: _Window | None = None

    def step_batch(self, step: int, batch_blocks: int, seed: int) -> tuple[np.ndarray, Batch]:
        """The next blocks of the stream, numbered within their window, and as a batch [B, T]. Steps come in order;
        `seed` is that of the stream."""
        chosen: list[list[Document]] = []
        numbers = []
        while len(chosen) < batch_blocks:
            window = self._current()
            if self._used >= len(window.blocks):
                self._fruitless = 0 if window.blocks else self._fruitless + window.size
                if window.last and self._fruitless >= window.start + window.size:
                    raise ValueError(
                        f"nothing to train on: {self._fruitless} conversations of the stream gave no document"
                    )
                self._advance(window)
                continue
            chosen.append(window.blocks[self._used])
            numbers.append(self._used)
            self._used += 1
        length = self.block_tokens
        if self._packing == "pad":
            length = max(len(document.ids) for block in chosen for document in block)
        return np.array(numbers), make_batch(chosen, length, self._padding_id)

    def state(self) -> dict[str, int]:
        """The place after the last batch; JSON values."""
        return {"epoch": self._place[0], "conversation": self._place[1], "blocks_used": self._used}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from what `state` returned. Conversations before the place are read again, not rendered."""
        self._place = (state["epoch"], state["conversation"])
        self._used = state["blocks_used"]
        self._windows = self._window = None

    def iter_documents(self) -> Iterator[np.ndarray]:
        """Token ids int32 [T] of every document of one epoch."""
        for document in self._make_renderer()(self._open_epoch(0)):
            yield document.ids

    def _current(self) -> _Window:
        if self._window is None:
            if self._windows is None:
                windows = _Windows(
                    self._open_epoch,
                    self._make_renderer,
                    self.block_tokens,
                    self._packing,
                    self._size,
                    self._seed,
                    self._place,
                )
                own = torch.Generator()  # a loader draws a seed: not from the numbers of the training
                self._windows = iter(
                    torch.utils.data.DataLoader(windows, batch_size=None, num_workers=self._workers, generator=own)
                )
            self._window = next(self._windows)
        return self._window

    def _advance(self, window: _Window) -> None:
        self._place = (window.epoch + 1, 0) if window.last else (window.epoch, window.start + window.size)
        self._used = 0
        self._window = None
