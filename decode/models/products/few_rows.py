"""Products of few rows on a CPU, by a small C function that is compiled on the machine it runs on.

The library's products cost more with each row, although reading the weights is most of the work of one row as of ten.
Without a C compiler, with DRAFTSMITH_NATIVE=0, or within `library_products`, the library's are used.

Letters: X rows, I and O inputs and outputs, P panels of 16 outputs.
"""

from __future__ import annotations

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
from torch import Tensor

MOST_ROWS = 16
_WIDTH = 16
_SOURCE = Path(__file__).with_suffix(".c")
_OPTIONS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_SECONDS = 60
_in_use = True


class FewRows:
    """x Wᵀ for 1 to `MOST_ROWS` rows of float32, with weights of float32 or bfloat16; a copy of W [O, I] is kept. See
    `fits`."""

    def __init__(self, weight_OI: Tensor) -> None:
        outputs, self._inputs = weight_OI.shape
        self._outputs, self._narrow = outputs, weight_OI.dtype == torch.bfloat16
        self._weight_PIW = weight_OI.view(-1, _WIDTH, self._inputs).transpose(1, 2).contiguous()
        self._call = compiled()

    def takes(self, rows: int) -> bool:
        """Whether it is for so many rows, now."""
        return _in_use and 0 < rows <= MOST_ROWS

    def __call__(self, x_XI: Tensor, add_XO: Tensor | None = None) -> Tensor:
        """x Wᵀ, [X, O], float32; plus `add_XO`."""
        rows = len(x_XI)
        x_XI = x_XI.contiguous()
        add = None if add_XO is None else add_XO.contiguous()
        assert x_XI.dtype == torch.float32
        assert 1 <= rows <= MOST_ROWS
        assert x_XI.shape[1] == self._inputs
        assert add is None or (add.shape == (rows, self._outputs) and add.dtype == torch.float32)
        out_XO = x_XI.new_empty(rows, self._outputs)
        pointers = (self._weight_PIW.data_ptr(), x_XI.data_ptr(), None if add is None else add.data_ptr())
        sizes = (self._inputs, self._outputs, rows, self._narrow, torch.get_num_threads())
        self._call(*pointers, out_XO.data_ptr(), *sizes)
        return out_XO


def fits(weight_OI: Tensor) -> bool:
    """Whether there is such a product for these weights here."""
    right = weight_OI.device.type == "cpu" and weight_OI.dtype in (torch.float32, torch.bfloat16)
    return right and len(weight_OI) % _WIDTH == 0 and compiled() is not None


@contextmanager
def library_products() -> Iterator[None]:
    """Within it the library's products are used, as for torch's counter of FLOPs, which sees no others."""
    global _in_use
    _in_use = False
    try:
        yield
    finally:
        _in_use = True


@cache
def compiled() -> Any:
    """The C function, compiled with the first call on a machine; None where that cannot be."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if os.environ.get("DRAFTSMITH_NATIVE") == "0" or compiler is None:
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    path = folder / f"few_rows-{_key(compiler)}.so"
    try:
        if not _is_mine(path):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "few_rows.so"
                command = [compiler, *_OPTIONS, str(_SOURCE), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
                made.replace(path)
        function = ctypes.CDLL(str(path)).few_rows
    except (OSError, subprocess.SubprocessError):
        return None
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2 + [ctypes.c_int] * 3
    return function


def _is_mine(path: Path) -> bool:
    """Whether the library is there, and nobody else could have written it."""
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _key(compiler: str) -> str:
    """A digest of all that decides what is compiled: machines of one home folder may have other processors."""
    processor = Path("/proc/cpuinfo")
    about = processor.read_text().split("\n\n")[0] if processor.is_file() else platform.processor()
    flags = sorted(line for line in about.splitlines() if line.startswith(("model name", "flags", "Features")))
    parts = [_SOURCE.read_text(), *_OPTIONS, compiler, platform.machine(), *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
