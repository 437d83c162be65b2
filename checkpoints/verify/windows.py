"""Sliding attention windows and position limits in a model's configuration."""

from typing import Any

_SLIDING = frozenset(
    {"mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
)
_LEAST = 128  # exceeds the depth of any tree, whose tokens must attend to each other


def sliding_window(config: Any) -> int | None:
    """Return the size of the sliding attention window, including the token itself; None if there is none."""
    slides = getattr(config, "use_sliding_window", True)
    return (getattr(config, "sliding_window", None) or None) if slides else None


def windows(config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer; None if a layer attends to all tokens up to `position_limit`."""
    window = sliding_window(config)
    if window is None or not _has_sliding_window(config):
        return (None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def position_limit(config: Any) -> int | None:
    """Return the maximum number of positions that draftsmith supports; None if there is no limit.

    Unsupported sliding windows and attention chunks limit it. LongRoPE also limits it, because keys that are cached
    before its switch to long factors would have to be recomputed.
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
