"""Starting this process over with numpy's AVX-512 switched off, where that sorts slowly.

numpy sorts with AVX-512 where it finds it. Some processors (AMD's Zen 4) run the instructions it uses for that five
times slower than AVX2's, and numpy reads the switch only when it is imported. Counting a table is mostly sorting.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module

import numpy as np

_AVX512 = ("AVX512F", "AVX512_SKX", "X86_V4")
"""What the AVX-512 that numpy sorts with is called in its versions."""
_SLOW_SECONDS = 15e-9
"""A key that takes longer to sort is taken as a sign of slow AVX-512; AVX2 takes 6 ns, scalar code 60."""
_SWITCH = "NPY_DISABLE_CPU_FEATURES"


def restart_where_sorting_is_slow() -> None:
    """Replace this process by one of the same arguments whose numpy sorts without AVX-512, if that is faster here.

    Not where the arguments are not those that the process was started with, as in a fork of another program.
    """
    given = sys.argv[1:]
    if sys.orig_argv[len(sys.orig_argv) - len(given) :] != given:
        return
    environment = without_avx512(os.environ)
    if environment is not None and sorting_seconds() > _SLOW_SECONDS:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def without_avx512(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The environment with numpy's AVX-512 switched off; None where numpy does not use it, or it is switched off.

    What numpy was built to require is not switched off: it would not start.
    """
    numpy_core = import_module("numpy._core._multiarray_umath")
    disabled = environment.get(_SWITCH, "").replace(",", " ").split()
    dispatched = [name for name in _AVX512 if name in numpy_core.__cpu_dispatch__ and name not in disabled]
    features = [name for name in dispatched if numpy_core.__cpu_features__[name]]
    if not features:
        return None
    # numpy takes only one of the two variables
    others = {name: value for name, value in environment.items() if name != "NPY_ENABLE_CPU_FEATURES"}
    return others | {_SWITCH: " ".join([*disabled, *features])}


def sorting_seconds() -> float:
    """Processor seconds to sort a key, in an array of 2¹⁶."""
    keys_T = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    seconds = []
    for _ in range(3):
        copy_T = keys_T.copy()
        start = time.thread_time()
        copy_T.sort()
        seconds.append(time.thread_time() - start)
    return min(seconds) / len(keys_T)
