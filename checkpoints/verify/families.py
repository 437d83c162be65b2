"""Detection of what model families do not support from their configurations, before weights are loaded."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

ENCODER_DECODERS = ("t5", "mt5", "umt5")
"""Model types of the supported encoder-decoders, whose outputs were compared with transformers."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def family_fault(config: Any) -> str | None:
    """Return the reason why a model configuration is not supported; None if it is supported."""
    if not config.is_encoder_decoder or config.model_type in ENCODER_DECODERS:
        return None
    return f"encoder-decoders of type {config.model_type!r} are not supported, only {', '.join(ENCODER_DECODERS)}"


def tree_fault(config: Any) -> str | None:
    """Return the reason why a decoder cannot score token trees, because its cache does not allow it; None if it can.

    Chains are still possible, since a row's cache can be cropped or copied.
    """
    kind = f"models of type {config.model_type!r}"
    text = config.get_text_config(decoder=True)
    if is_stateful(config) or is_stateful(text):
        return f"{kind} have a recurrent state, which cannot hold the branches of a tree"
    if other := sorted({*(getattr(text, "layer_types", None) or ())} - _ATTENTION):
        return f"{kind} have layers of type {', '.join(other)}, whose state cannot hold the branches of a tree"
    try:
        _, compressed = getattr(text, "head_dim", None), getattr(text, "kv_lora_rank", None)
    except RuntimeError:  # raised by transformers if a field differs between layers
        return f"sizes of keys and values differ between the layers of {kind}"
    if compressed:
        return f"{kind} use multi-head latent attention"
    if text.model_type == "bloom" or getattr(text, "alibi", None):
        return f"{kind} use ALiBi, which takes positions from cache slots, which differ for trees"
    if "local" in getattr(text, "attention_layers", ()):
        return f"{kind} use local attention over cache slots"
    missing = [name for name in ("num_attention_heads", "num_hidden_layers") if not getattr(text, name, None)]
    return f"the configuration of {kind} has no {missing[0]}" if missing else None


def check_family(config: Any) -> None:
    """Raise ValueError if a model configuration is not supported (see `family_fault`)."""
    if fault := family_fault(config):
        raise ValueError(fault)


def is_stateful(config: Any) -> bool:
    """Check if transformers marks the model class of a configuration as stateful (recurrent)."""
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False))
