"""Families of models that cannot decode here, as their configurations tell before any weights are loaded."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

ENCODER_DECODERS = ("t5", "mt5", "umt5")
"""Types of encoder-decoders that were compared with transformers."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def family_fault(config: Any) -> str | None:
    """Return why models of a configuration cannot decode here, as a sentence; None if nothing in it says so."""
    kind = f"models of type {config.model_type!r}"
    if config.is_encoder_decoder:
        unknown = (
            f"encoder-decoders of type {config.model_type!r} are not supported; known: {', '.join(ENCODER_DECODERS)}"
        )
        return None if config.model_type in ENCODER_DECODERS else unknown
    text = config.get_text_config(decoder=True)
    if is_stateful(config) or is_stateful(text):
        return f"{kind} keep a recurrent state, which cannot be rolled back to before a rejected draft token"
    if other := sorted({*(getattr(text, "layer_types", None) or ())} - _ATTENTION):
        return f"{kind} have layers of type {', '.join(other)}, which keep more than keys and values to roll back"
    try:
        _, compressed = getattr(text, "head_dim", None), getattr(text, "kv_lora_rank", None)
    except RuntimeError:  # transformers' answer where a field differs between layers
        return f"{kind} have keys and values of different sizes in different layers, which is not supported"
    if compressed:
        return f"{kind} use multi-head latent attention, whose keys and values have widths of their own"
    if text.model_type == "bloom" or getattr(text, "alibi", None):
        return f"{kind} take positions from the cache's slots (ALiBi), and drafts have positions of their own"
    if "local" in getattr(text, "attention_layers", ()):
        return f"{kind} have local attention over the cache's slots, which is not supported"
    missing = [name for name in ("num_attention_heads", "num_hidden_layers") if not getattr(text, name, None)]
    return f"{kind} are not supported: the configuration has no {missing[0]}" if missing else None


def check_family(config: Any) -> None:
    """Raise ValueError for a configuration whose models cannot decode here (`family_fault`)."""
    if fault := family_fault(config):
        raise ValueError(fault)


def is_stateful(config: Any) -> bool:
    """Return whether a model keeps a recurrent state, as its class in transformers says."""
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False))
