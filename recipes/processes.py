"""Work of several processes that succeeds in all of them or ends all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..train.interrupts import Interrupted, TrainingError

Found = TypeVar("Found")


class StoppedError(TrainingError):
    """A process ended its work because another one had to; that one tells why."""


def together(accelerator: Any, work: Callable[[], Found]) -> Found:
    """Do something in all processes. Where one of them fails all end, and the main process alone tells why: the others
    leave with its exit code.

    Raises:
        ValueError, TrainingError, Interrupted: what the first process raised that failed, of those that were not
            stopped by another (an OSError is told as a TrainingError, but by a single process, which raises it as it
            is).
    """
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import gather_object

    found, failed, follows = None, None, False
    try:
        found = work()
    except Interrupted as error:
        failed = (128 + error.signal_number, str(error))
    except ValueError as error:
        failed = (1 if isinstance(error, TrainingError) else 2, str(error))
        follows = isinstance(error, StoppedError)
    except OSError as error:
        failed = (1, f"process {accelerator.process_index}: {error}")
    try:
        failures = [entry for entry in gather_object([(follows, failed)]) if entry[1] is not None]
    except RuntimeError:
        if failed is None or not (failed[0] > 128 or follows):
            raise
        failures = [(follows, failed)]  # the launcher has ended another process already, which answers no more
    if not failures:
        return found  # type: ignore[return-value]
    _, (code, text) = min(failures, key=lambda entry: entry[0])
    if code > 128:
        raise Interrupted(code - 128, text)
    if not accelerator.is_main_process:
        raise SystemExit(code)
    raise TrainingError(text) if code == 1 else ValueError(text)


def part() -> None:
    """Leave the process group, if there is one: the last thing a launched process does, done or failed.

    Without it gloo's threads may still let go of the last message's tensors while Python ends, which aborts the process
    (one exit in some hundreds, more on a busy machine). A process that failed leaves NCCL's group as it is: NCCL would
    wait there for the others.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ended = sys.exc_info()[1]
    done = ended is None or (isinstance(ended, SystemExit) and not ended.code)
    if done or distributed.get_backend() == "gloo":
        distributed.destroy_process_group()
