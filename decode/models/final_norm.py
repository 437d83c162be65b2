"""Access to the residual stream of a decoder: the inputs of its layers and of its final norm."""

import threading
from collections.abc import Iterator, Sequence
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
def module_inputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Return a context manager that yields a list of the modules' inputs in their latest calls in this thread.

    Modules must be listed in the order of their calls.
    """
    thread, inputs = threading.get_ident(), list[Tensor]()

    def record(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            inputs[modules.index(module) :] = [args[0] if args else options["hidden_states"]]

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
