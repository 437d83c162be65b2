"""How well a step uses the machine: its peak speed as measured, and the memory that was needed at most."""

from __future__ import annotations

import resource
import sys
import time

import torch

_SIZE = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.3  # of trying: a busy machine needs some to show its best


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that a large matrix product reaches on `device` in `dtype`: the fastest of some.

    What MFU is measured against. It is measured, not read from a data sheet: it takes part of a second, and holds for
    whatever clock, power limit and number of threads this process has.
    """
    size = _SIZE.get(device.type, 1024)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until or best == float("inf"):
        _synchronise(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that this process has held, of the device's memory or, on a processor, of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
