"""Selection of the number of OpenMP threads from the number of idle cores, before torch is imported."""

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
_SECONDS = 0.1
_COMPUTING = {"quickstart", "forge", "regenerate", "train", "evaluate", "certify", "tune", "doctor"}
_IDLE = 3, 4  # columns of the idle and iowait times


def choose_threads() -> str:
    """Set `OMP_NUM_THREADS` to the number of idle cores for compute-intensive commands, unless the user has set it.

    OpenMP threads synchronise after every operation, so another process on one core slows down all threads
    (`tests/bench/contention.py`). Returns a message to log, or an empty string if nothing was set.
    """
    if "OMP_NUM_THREADS" in os.environ or not _STAT.is_file() or not _COMPUTING & {*sys.argv[1:2]}:
        return ""
    cores = os.sched_getaffinity(0)
    before = _STAT.read_text()
    time.sleep(_SECONDS)
    threads = max(1, round(count_idle(before, _STAT.read_text(), cores)))
    if threads >= len(cores):
        return ""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return f"{threads} of {len(cores)} cores are idle: using OMP_NUM_THREADS={threads}"


def count_idle(before: str, after: str, cores: Collection[int]) -> float:
    """Return the mean number of idle cores among `cores` between two readings of `/proc/stat`."""
    idle = 0.0
    for old, new in zip(before.splitlines(), after.splitlines(), strict=False):
        name, *ticks = new.split()
        if name[3:].isdigit() and int(name[3:]) in cores and old.startswith(f"{name} "):
            spent = [int(b) - int(a) for a, b in zip(old.split()[1:9], ticks[:8], strict=True)]
            idle += sum(spent[column] for column in _IDLE) / sum(spent) if sum(spent) else 1.0
    return idle
