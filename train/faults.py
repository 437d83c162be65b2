"""What can go wrong in a step, said with the step and the blocks it happened in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .interrupts import TrainingError

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_SHOWN_BLOCKS = 16


@contextmanager
def dead_worker_named(step: Callable[[], int], folder: Path) -> Iterator[None]:
    """Raises TrainingError where a worker process of the data has died while `step()` steps were done: torch raises its
    own error as soon as the signal comes, wherever the training stands."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TrainingError(
            f"a worker process of the data died after step {step()} ({_one_line(error)}); the last checkpoint in "
            f"{folder} is untouched, run the same again to go on"
        ) from error


@contextmanager
def lack_of_memory_named(
    step: int, blocks: Sequence[int] | np.ndarray, micro_batch: int, block_tokens: int, folder: Path
) -> Iterator[None]:
    """Raises TrainingError, with what would need less, where memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = _one_line(error)
        if not isinstance(error, MemoryError) and not any(words in text.lower() for words in _NO_MEMORY):
            raise
        less = f"micro_batch {micro_batch // 2}" if micro_batch > 1 else "gradient_checkpointing or shorter blocks"
        raise TrainingError(
            f"out of memory in step {step + 1}, blocks {shown(blocks)}, with micro_batch {micro_batch} of "
            f"{block_tokens} tokens ({text or type(error).__name__}). The last checkpoint in {folder} is untouched: go "
            f"on from it with {less}",
            [int(block) for block in blocks],
        ) from error


def shown(blocks: Sequence[int] | np.ndarray) -> str:
    """Blocks by number, the first of many."""
    numbers = [int(block) for block in blocks]
    if len(numbers) <= _SHOWN_BLOCKS:
        return str(numbers)
    return f"{numbers[:_SHOWN_BLOCKS]} and {len(numbers) - _SHOWN_BLOCKS} more"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
