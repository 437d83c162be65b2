"""Draftsmith: train draft models for speculative decoding, benchmark them end to end and export them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recipes.commands.api import evaluate, export, generate, load_pair, methods

__version__ = "0.1.0"
__all__ = ["evaluate", "export", "generate", "load_pair", "methods"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported at the first use, which keeps `import draftsmith` fast
        from .recipes.commands import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
