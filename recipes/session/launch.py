"""Support for commands that torchrun or `accelerate launch` starts in several processes."""

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
"""Environment variables that torchrun and `accelerate launch` (even with one process) set for their children."""
_SECONDS_BETWEEN_LOOKS = 0.5


def launched() -> int:
    """Return the number of processes that torchrun or `accelerate launch` started, or 1 without a launcher."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def end_with_launcher() -> None:
    """Start a thread that sends SIGTERM to this process after its launcher (torchrun, accelerate) has ended."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    if any(name in os.environ for name in _BY_LAUNCHERS):
        threading.Thread(target=watch, daemon=True).start()


def run_launched(options: str, *arguments: str) -> None:
    """Run `accelerate launch OPTIONS -m draftsmith ARGUMENTS`. Raise ValueError if the command fails."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(options)]
    command = [*launcher, "-m", "draftsmith", *arguments]
    with subprocess.Popen(command, stdout=sys.stderr, preexec_fn=end_with_parent) as process:
        status = process.wait()
    if status:
        raise ValueError(f"`{shlex.join(arguments)}`, launched with {options!r}, failed with exit status {status}")


def end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def is_first() -> bool:
    """Return whether this process is the first or the only one that was launched; only this one prints output."""
    return launched() == 1 or os.environ["RANK"] == "0"


def refuse_several(command: str) -> None:
    """Raise ValueError in every process if several processes were launched for a single-process command."""
    if launched() > 1:
        raise ValueError(
            f"`draftsmith {command}` runs in one process, but {launched()} processes were launched: run it without a "
            "launcher, and unset RANK and WORLD_SIZE (only `train` and `prepare --teacher` support several processes)"
        )


def destroy_process_group() -> None:
    """Destroy the distributed process group, if there is one, before the process exits.

    Otherwise, gloo threads may free tensors while Python exits, which aborts the process. With gloo, the processes wait
    for each other first, because other processes may still use their connections. With NCCL, a failed process does not
    destroy the group, because this would wait for the other processes.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return
    ended = sys.exc_info()[1]
    done = ended is None or (isinstance(ended, SystemExit) and not ended.code)
    if distributed.get_backend() == "gloo":
        with suppress(RuntimeError):  # another process has ended or does not respond
            distributed.monitored_barrier(timeout=_LAST_WAIT if done else _LAST_WAIT_FAILED)
        distributed.destroy_process_group()
    elif done:
        distributed.destroy_process_group()
