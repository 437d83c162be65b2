"""Work of several processes that succeeds in all of them or ends all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ...checkpoints.storage.messages import words
from .interrupts import Interrupted, TrainingError

Found = TypeVar("Found")

_OF_THE_USER = (FileNotFoundError, ModuleNotFoundError)
"""Besides plain ValueErrors, what the command line reports as wrong input."""


class StoppedError(TrainingError):
    """A process ended its work because another one had to; that one reports why. `code`: the exit code of both."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def together(accelerator: Any, work: Callable[[], Found]) -> Found:
    """Do something in all processes, which does not wait for the others. Where one fails all end with its exit code,
    and the main process alone reports why: by what the first process that failed by itself raised (ValueError,
    TrainingError, Interrupted). Raises StoppedError where this is another one, but for signals."""
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import gather_object

    process, is_main = accelerator.process_index, accelerator.is_main_process  # `work` may make another accelerator
    found, error = None, None
    try:
        found = work()
    except (Interrupted, ValueError, OSError, ModuleNotFoundError) as raised:
        error = raised
    mine = None if error is None else _described(error, process)
    try:
        failures = [failure for failure in gather_object([mine]) if failure is not None]
    except RuntimeError:
        # another process, which answers no more, has ended already
        if error is None or mine is None:
            raise
        if not mine[0]:
            raise error from None
        failures = [mine]
    if not failures:
        return found  # type: ignore[return-value]
    first = min(failures, key=lambda failure: failure[0])
    if is_main and error is not None and first == mine:
        raise error
    _, code, text = first
    if code > 128:
        raise Interrupted(code - 128, text)
    if not is_main:
        raise StoppedError(text, code)
    raise TrainingError(text) if code == 1 else ValueError(text)


def _described(error: BaseException, process: int) -> tuple[bool, int, str]:
    """Of a failure: whether it only follows from another, the exit code, and its message."""
    if isinstance(error, Interrupted):
        return False, 128 + error.signal_number, str(error)
    if isinstance(error, _OF_THE_USER):
        return False, 2, words(error)
    if isinstance(error, StoppedError):
        return True, error.code, str(error)
    if isinstance(error, ValueError):
        return False, 1 if isinstance(error, TrainingError) else 2, str(error)
    return False, 1, f"process {process}: {words(error)}"


def on_main(accelerator: Any, work: Callable[[], object]) -> None:
    """Do something in the main process, while the others wait; where it fails all end, see `together`."""
    together(accelerator, lambda: work() if accelerator.is_main_process else None)


def from_main(accelerator: Any, work: Callable[[], Found]) -> Found:
    """What the main process finds out, in all of them; see `on_main`."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None]

    def find() -> None:
        found[0] = work()

    on_main(accelerator, find)
    return broadcast_object_list(found)[0]


def lost_another(error: BaseException) -> bool:
    """Whether it is what a process meets that talks to another one which has ended."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)
