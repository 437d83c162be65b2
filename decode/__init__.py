"""Artifacts in, tokens and measurements out. `method` is what transformers' `generate` takes as `custom_generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drop_in import method

__all__ = ["method"]


def __getattr__(name: str) -> Any:
    # Importing this package must not import transformers: train/losses.py and others do without.
    if name == "method":
        from .drop_in import method

        return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
