"""Compilation of the C functions on the machine that runs them, and selection of Triton kernels for its GPU.

PyTorch's functions are used if there is no C compiler or Triton, if DRAFTSMITH_NATIVE=0, or in `library_products`.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / name for name in ("attention.c", "few_rows.c", "layers.c", "packing.c")]
_OPTIONS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_SECONDS = 300  # compilation timeout, for a busy machine
_in_use = True


def in_use() -> bool:
    """Return whether compiled functions are currently enabled."""
    return _in_use


@contextmanager
def library_products() -> Iterator[None]:
    """Return a context manager that disables compiled functions, for example to count FLOPs with PyTorch."""
    global _in_use
    _in_use = False
    try:
        yield
    finally:
        _in_use = True


@cache
def compiled() -> Any:
    """Return the library of C functions, which is compiled on first use, or None if it is not available."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if os.environ.get("DRAFTSMITH_NATIVE") == "0" or compiler is None:
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    path = folder / f"products-{_key(compiler)}.so"
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "products.so"
                command = [compiler, *_OPTIONS, *map(str, _SOURCES), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
                made.replace(path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, long, small = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    of_product: list[Any] = [*[pointer] * 3, long, pointer, *[long] * 2, *[small] * 3, pointer, ctypes.c_float, small]
    library.few_rows.argtypes = of_product
    library.attend.argtypes = [*[pointer] * 7, *[long] * 4, *[small] * 8, ctypes.c_float]
    library.layers.argtypes = [*[pointer] * 6, *[long] * 5, *[small] * 14, *[ctypes.c_float] * 3]
    library.pack.argtypes = [pointer, small, pointer, long, long, small, small]
    library.unpack.argtypes = [pointer, pointer, long, pointer, long, small, small]
    for asked in (library.multiplies_pairs, library.multiplies_fours):
        asked.argtypes, asked.restype = [], small
    for function in (library.few_rows, library.attend, library.layers, library.pack, library.unpack):
        function.restype = None
    return library


@cache
def fused_kernels() -> Any:
    """Return the module `fused`, or None if its kernels cannot run. They require an Ampere or later GPU."""
    from . import fused

    known = torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)
    return fused if known and fused.triton is not None and os.environ.get("DRAFTSMITH_NATIVE") != "0" else None


def _key(compiler: str) -> str:
    """Return a hash of all inputs of the compilation, since different machines may share the cache directory."""
    processor = Path("/proc/cpuinfo")
    about = processor.read_text().split("\n\n")[0] if processor.is_file() else platform.processor()
    flags = sorted(line for line in about.splitlines() if line.startswith(("model name", "flags", "Features")))
    texts = [path.read_text() for path in [*_SOURCES, _FOLDER / "vectors.h"]]
    parts = [*texts, *_OPTIONS, compiler, platform.machine(), *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
