"""Access to the hidden states before a decoder's final norm (the residual stream)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...checkpoints.heads.module import STATES

_NAMES = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f", "decoder.final_layer_norm")
"""Attribute names of the final norm in decoders of transformers."""


def parse_layers(states: str) -> tuple[int, ...]:
    """Return the layers in a `states` setting such as "layers-2-15-27", or an empty tuple for other settings.

    With such a setting, the hidden states are the inputs of these layers, followed by the last hidden states.
    """
    name, *layers = states.split("-")
    return tuple(map(int, layers)) if name == "layers" else ()


def check_states(states: str) -> None:
    """Raise ValueError unless `states` is "after-norm" or "before-norm"."""
    if states not in STATES:
        raise ValueError(f"states is {states!r}, expected one of {', '.join(STATES)}")


def final_norm(decoder: nn.Module) -> nn.Module:
    """Return a decoder's final norm, whose output is the last hidden states.

    Raises:
        ValueError: The decoder has no final norm with a known name, or a projection follows it (OPT).
    """
    projected = getattr(getattr(decoder, "decoder", decoder), "project_out", None) is not None
    for name in () if projected else _NAMES:
        module: Any = decoder
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.Module):
            return module
    kind = getattr(getattr(decoder, "config", None), "model_type", type(decoder).__name__)
    raise ValueError(f"models of type {kind!r} have no norm after the last layer: use states 'after-norm'")


@contextmanager
def norm_input(norm: nn.Module) -> Iterator[list[Tensor]]:
    """Return a context manager that yields a list with the input of the norm's latest call in this thread."""
    thread, inputs = threading.get_ident(), list[Tensor]()

    def record(_: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            inputs[:] = args[:1]

    handle = norm.register_forward_pre_hook(record)
    try:
        yield inputs
    finally:
        handle.remove()
