"""Commands in several launched processes: which of them may run in so many, and how they begin and end."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

_LAST_WAIT, _LAST_WAIT_FAILED = timedelta(seconds=60), timedelta(seconds=3)
_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")
"""What torchrun, and `accelerate launch` of one process too, set for their children, and nobody by hand."""
_SECONDS_BETWEEN_LOOKS = 0.5


def launched() -> int:
    """Processes that a launcher (torchrun, `accelerate launch`) has started, this one included."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def end_with_launcher() -> None:
    """Have this process get SIGTERM once its launcher is gone, whose other children would otherwise work on."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    if any(name in os.environ for name in _BY_LAUNCHERS):
        threading.Thread(target=watch, daemon=True).start()


def run_launched(options: str, *words: str) -> None:
    """`draftsmith WORDS` in processes that `accelerate launch` starts with these options. Raises ValueError: it fails,
    and has said why."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(options), "-m", "draftsmith", *words]
    with subprocess.Popen(command, stdout=sys.stderr, preexec_fn=end_with_parent) as process:
        status = process.wait()
    if status:
        raise ValueError(f"{shlex.join(words)}, launched with {options!r}, ended with status {status}")


def end_with_parent() -> None:
    """Have Linux end this process with SIGTERM once its parent is gone, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def is_first() -> bool:
    """Whether this process is the one that reports, of those that were launched."""
    return launched() == 1 or os.environ["RANK"] == "0"


def refuse_several(command: str) -> None:
    """Raise ValueError where several processes were launched for the work of one. Each of them raises it: a launcher
    kills the others as soon as one has failed, and that may be any."""
    if launched() > 1:
        raise ValueError(
            f"`draftsmith {command}` runs in one process, and {launched()} were launched: start it without a launcher, "
            "and without its variables RANK and WORLD_SIZE (`train` and `prepare --teacher` share their work among "
            "several)"
        )


def destroy_process_group() -> None:
    """Leave the process group, if there is one: the last thing a launched process does, done or failed.

    Without it gloo's threads may still free the last message's tensors while Python ends, which aborts the process.
    Those of gloo wait for each other first: one that closes its connections while another still reads the last message
    would break that off. A process that failed leaves NCCL's group as it is: NCCL would wait there for the others.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return
    ended = sys.exc_info()[1]
    done = ended is None or (isinstance(ended, SystemExit) and not ended.code)
    if distributed.get_backend() == "gloo":
        with suppress(RuntimeError):  # one that has ended already, or never comes: nothing is lost by going
            distributed.monitored_barrier(timeout=_LAST_WAIT if done else _LAST_WAIT_FAILED)
        distributed.destroy_process_group()
    elif done:
        distributed.destroy_process_group()
