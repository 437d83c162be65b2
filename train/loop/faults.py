"""What can go wrong in a step, said with the step and the blocks it happened in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..parallel.interrupts import TrainingError

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_SHOWN_BLOCKS = 16


@contextmanager
def dead_worker_named(step: Callable[[], int], folder: Path) -> Iterator[None]:
    """Raises TrainingError where a worker process of the data has died, after `step()` steps."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TrainingError(
            f"a worker process of the data died after step {step()} ({_one_line(error)}); the last checkpoint in "
            f"{folder} is untouched, run the same again to resume"
        ) from error


@contextmanager
def lack_of_memory_named(what: str, blocks: list[int], less: str, folder: Path) -> Iterator[None]:
    """Raises TrainingError where memory runs out: what was done with which blocks, and what would need `less`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text = _one_line(error)
        where = f", blocks {shown(blocks)}" if blocks else ""
        raise TrainingError(
            f"out of memory in {what}{where} ({text or type(error).__name__}). The last checkpoint in {folder} is "
            f"untouched: resume from it with {less}",
            blocks,
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def shown(blocks: list[int]) -> str:
    """Blocks by number, the first of many."""
    if len(blocks) <= _SHOWN_BLOCKS:
        return str(blocks)
    return f"{blocks[:_SHOWN_BLOCKS]} and {len(blocks) - _SHOWN_BLOCKS} more"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
