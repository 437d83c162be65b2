"""Detection of unsupported model families from their configurations, before weights are loaded."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

ENCODER_DECODERS = ("t5", "mt5", "umt5")
"""Model types of the supported encoder-decoders, whose outputs were compared with transformers."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def family_fault(config: Any) -> str | None:
    """Return the reason why a model configuration is not supported; None if it is supported."""
    kind = f"models of type {config.model_type!r}"
    if config.is_encoder_decoder:
        unknown = (
            f"encoder-decoders of type {config.model_type!r} are not supported, only {', '.join(ENCODER_DECODERS)}"
        )
        return None if config.model_type in ENCODER_DECODERS else unknown
    text = config.get_text_config(decoder=True)
    if is_stateful(config) or is_stateful(text):
        return f"{kind} are not supported: their recurrent state cannot be rolled back after a rejected draft token"
    if other := sorted({*(getattr(text, "layer_types", None) or ())} - _ATTENTION):
        return f"{kind} are not supported: the state of layers of type {', '.join(other)} cannot be rolled back"
    try:
        _, compressed = getattr(text, "head_dim", None), getattr(text, "kv_lora_rank", None)
    except RuntimeError:  # raised by transformers if a field differs between layers
        return f"{kind} are not supported: sizes of keys and values differ between layers"
    if compressed:
        return f"{kind} are not supported: they use multi-head latent attention"
    if text.model_type == "bloom" or getattr(text, "alibi", None):
        return f"{kind} are not supported: ALiBi takes positions from cache slots, which differ for draft trees"
    if "local" in getattr(text, "attention_layers", ()):
        return f"{kind} are not supported: they use local attention over cache slots"
    missing = [name for name in ("num_attention_heads", "num_hidden_layers") if not getattr(text, name, None)]
    return f"{kind} are not supported: the configuration has no {missing[0]}" if missing else None


def check_family(config: Any) -> None:
    """Raise ValueError if a model configuration is not supported (see `family_fault`)."""
    if fault := family_fault(config):
        raise ValueError(fault)


def is_stateful(config: Any) -> bool:
    """Check if transformers marks the model class of a configuration as stateful (recurrent)."""
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False))
