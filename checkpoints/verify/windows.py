"""Sliding windows of attention and limits of positions in a model's configuration."""

from typing import Any

_SLIDING = frozenset(
    {"mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
)
_LEAST = 128  # exceeds the depth of any tree, whose tokens must attend to each other


def sliding_window(config: Any) -> int | None:
    """Return the number of tokens, including itself, that a token attends to in sliding layers; None without them."""
    slides = getattr(config, "use_sliding_window", True)
    return (getattr(config, "sliding_window", None) or None) if slides else None


def windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's window; None for layers that attend to all tokens, or all within `position_limit`."""
    window = sliding_window(config)
    if window is None or not _has_sliding_window(config):
        return (None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def position_limit(config: Any) -> int | None:
    """Return the maximum number of positions in this engine; None for no limit.

    Unsupported windows and chunks of attention limit it, and LongRoPE's change to its long factors: keys that were
    cached before have the short ones.
    """
    window = None if _has_sliding_window(config) else sliding_window(config)
    names = ["max_position_embeddings", "max_seq_len", "attention_chunk_size"]
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("rope_type") == "longrope"]
    names += ["original_max_position_embeddings"] * bool(ropes)
    limits = (window, *(each.get(names[-1]) for each in ropes), *(getattr(config, name, None) for name in names))
    return min((limit for limit in limits if limit), default=None)


def _has_sliding_window(config: Any) -> bool:
    return config.model_type in _SLIDING and (sliding_window(config) or 0) >= _LEAST
