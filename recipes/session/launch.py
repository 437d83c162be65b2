"""Commands in several launched processes: which of them may run in so many, and how they begin and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from ...train.parallel.processes import together

Found = TypeVar("Found")

_LAST_WAIT = timedelta(seconds=3)


def launched() -> int:
    """Processes that a launcher (torchrun, `accelerate launch`) has started, this one included."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def is_first() -> bool:
    """Whether this process is the one that speaks, of those that were launched."""
    return launched() == 1 or os.environ["RANK"] == "0"


def refuse_several(command: str) -> None:
    """Keep several processes from doing a command's work, which is for one, over each other. Each of them tells why: a
    launcher kills the others as soon as one has failed, and that may be any.

    Raises:
        ValueError: several were launched.
    """
    if launched() > 1:
        raise ValueError(
            f"`draftsmith {command}` runs in one process, and {launched()} were launched: start it without a launcher, "
            "and without its variables RANK and WORLD_SIZE (`train` and `prepare --teacher` share their work among "
            "several)"
        )


def run_on_all(work: Callable[[], Found]) -> Found:
    """`together` before a recipe has said what its accelerator is to be like."""
    if launched() == 1:
        return work()
    from ...train.parallel.accelerate import make_accelerator

    return together(make_accelerator("no"), work)


def destroy_process_group() -> None:
    """Leave the process group, if there is one: the last thing a launched process does, done or failed.

    Without it gloo's threads may still let go of the last message's tensors while Python ends, which aborts the process
    (one exit in some hundreds, more on a busy machine). Those of gloo wait a little for each other first: one that
    closes its connections while another still reads the last message would end that one's reading. A process that
    failed leaves NCCL's group as it is: NCCL would wait there for the others.
    """
    if "torch" not in sys.modules:
        return
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ended = sys.exc_info()[1]
    done = ended is None or (isinstance(ended, SystemExit) and not ended.code)
    if distributed.get_backend() == "gloo":
        with suppress(RuntimeError):  # one that has ended already, or never comes: nothing is lost by going
            distributed.monitored_barrier(timeout=_LAST_WAIT)
        distributed.destroy_process_group()
    elif done:
        distributed.destroy_process_group()
