"""Speculative decoding methods and their evaluation. `method` returns a `custom_generate` callable for transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .custom_generate.method import CustomGenerate, method

__all__ = ["CustomGenerate", "method"]


def __getattr__(name: str) -> Any:
    # Importing this package must not import transformers, which train/losses/drafter.py and others do not need.
    if name in __all__:
        from .custom_generate import method as drop_in

        return getattr(drop_in, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
