"""Hidden states before a decoder's final norm, the residual stream: where that norm is, and what goes into it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...checkpoints.heads.module import STATES

_NAMES = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f", "decoder.final_layer_norm")
"""Of the final norm in its decoder, as transformers has them."""


def layers_in(states: str) -> tuple[int, ...]:
    """The inner layers in "layers-2-15-27", which stands for what goes into each of these, and the last hidden states
    behind it; none in the names of other states."""
    name, *layers = states.split("-")
    return tuple(map(int, layers)) if name == "layers" else ()


def check_states(states: str) -> None:
    """Raises ValueError where `states` is neither "after-norm" nor "before-norm"."""
    if states not in STATES:
        raise ValueError(f"states is {states!r}, expected one of {', '.join(STATES)}")


def final_norm(decoder: nn.Module) -> nn.Module:
    """The norm whose output is a decoder's last hidden states. Raises ValueError: there is none, or none of a usual
    name, as in decoders whose layers end in norms of their own, or a projection behind it, as in OPT's with narrow
    embeddings."""
    projected = getattr(getattr(decoder, "decoder", decoder), "project_out", None) is not None
    for name in () if projected else _NAMES:
        module: Any = decoder
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.Module):
            return module
    kind = getattr(getattr(decoder, "config", None), "model_type", type(decoder).__name__)
    raise ValueError(f"models of type {kind!r} have no norm behind all layers: use states 'after-norm'")


@contextmanager
def norm_input(norm: nn.Module) -> Iterator[list[Tensor]]:
    """Meanwhile what this thread passes to a norm, the last time that it does, is the list's one element."""
    thread, seen = threading.get_ident(), list[Tensor]()

    def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            seen[:] = args[:1]

    handle = norm.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()
