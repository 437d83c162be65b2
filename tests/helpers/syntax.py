"""Syntax trees of source files."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parse_file(path: Path) -> ast.Module:
    """Parse a Python file without garbage collection.

    Python 3.11 fails with "AST constructor recursion depth mismatch" if a finalizer runs other Python code meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if enabled:
            gc.enable()
