"""Sliding windows of attention, as a model's configuration tells them."""

from __future__ import annotations

from typing import Any

_SLIDING = frozenset(
    {"mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
)
_LEAST = 128  # the tokens of a tree, which is never so deep, see each other


def sliding_window(config: Any) -> int | None:
    """How many tokens, itself among them, a token sees in layers with sliding attention; None where none has it."""
    slides = getattr(config, "use_sliding_window", True)
    return (getattr(config, "sliding_window", None) or None) if slides else None


def windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's window; None: it sees all tokens, or all that there can be, by `position_limit`."""
    window = sliding_window(config)
    if window is None or not _slides(config):
        return (None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def position_limit(config: Any) -> int | None:
    """How many positions this engine has for a model; None: no limit. Windows that it does not keep end texts."""
    window = None if _slides(config) else sliding_window(config)
    return min((limit for limit in (getattr(config, "max_position_embeddings", None), window) if limit), default=None)


def _slides(config: Any) -> bool:
    return config.model_type in _SLIDING and (sliding_window(config) or 0) >= _LEAST
