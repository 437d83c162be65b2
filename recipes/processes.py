"""Work of several processes that succeeds in all of them or ends all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..train.interrupts import Interrupted, TrainingError

Found = TypeVar("Found")


def together(accelerator: Any, work: Callable[[], Found]) -> Found:
    """Do something in all processes. Where one of them fails all end, and the main process alone tells why: the others
    leave with its exit code.

    Raises:
        ValueError, TrainingError, Interrupted: what the first process raised that failed (an OSError is told as a
            TrainingError, but by a single process, which raises it as it is).
    """
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import gather_object

    found, failed = None, None
    try:
        found = work()
    except Interrupted as error:
        failed = (128 + error.signal_number, str(error))
    except ValueError as error:
        failed = (1 if isinstance(error, TrainingError) else 2, str(error))
    except OSError as error:
        failed = (1, f"process {accelerator.process_index}: {error}")
    try:
        failures = [failure for failure in gather_object([failed]) if failure is not None]
    except RuntimeError:
        if failed is None or failed[0] < 128:
            raise
        failures = [failed]  # the launcher has ended another process already, which answers no more
    if not failures:
        return found  # type: ignore[return-value]
    code, text = failures[0]
    if code > 128:
        raise Interrupted(code - 128, text)
    if not accelerator.is_main_process:
        raise SystemExit(code)
    raise TrainingError(text) if code == 1 else ValueError(text)
