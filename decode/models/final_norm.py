"""Hidden states before a decoder's final norm, the residual stream itself: where that norm is, and what goes into it.

Shape letters: B batch, M tokens, D hidden, X anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...checkpoints.heads.module import STATES

_TOLERANCE = 1e-2  # of a norm's largest output, between inputs of which one is a multiple of the other

# By name, not by module: a value that leads to its key would keep the key for ever.
_FOUND: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_states(states: str) -> None:
    """Raises ValueError where `states` is neither "after-norm" nor "before-norm"."""
    if states not in STATES:
        raise ValueError(f"states is {states!r}, expected one of {', '.join(STATES)}")


def final_norm(decoder: nn.Module) -> nn.Module:
    """The norm whose output is a decoder's last hidden states; looked for once, in a forward of three tokens.

    Args:
        decoder: the part of a causal LM that ends in its last hidden states; see also `base.masked_attention`.

    Raises:
        ValueError: there is none, as in decoders that end in a projection, or whose layers end in norms of their own.
    """
    name = _FOUND.get(decoder)
    if name is None:
        name = _find(decoder)
        if name is None:
            kind = getattr(getattr(decoder, "config", None), "model_type", type(decoder).__name__)
            raise ValueError(f"models of type {kind!r} have no norm behind all layers: use states 'after-norm'")
        _FOUND[decoder] = name
    return decoder.get_submodule(name)


@torch.no_grad()
def _find(decoder: Any) -> str | None:
    """The name of the final norm in its decoder."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and all(isinstance(x, Tensor) and x.is_floating_point() for x in (args[0], output)):
            calls.append((name, module, args[0], output))

    device = decoder.get_input_embeddings().weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: hooks bring the weights
    tokens_1M = torch.arange(1, 4, device=device)[None] % decoder.get_input_embeddings().num_embeddings
    handles = [module.register_forward_hook(partial(note, name)) for name, module in _outside_layers(decoder, "")]
    try:
        last_1MD = decoder(tokens_1M, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    for name, module, input_XD, output_XD in reversed(calls):
        fits = input_XD.shape == output_XD.shape and output_XD.numel() == last_1MD.numel()
        if not fits or not torch.equal(output_XD.to(last_1MD.device).reshape(last_1MD.shape), last_1MD):
            continue
        if _normalises(module, input_XD):
            return name
    return None


def _outside_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside `module` with their names, but nothing of its layers: these may end in norms of their own."""
    for name, child in module.named_children():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield prefix + name, child
            yield from _outside_layers(child, f"{prefix}{name}.")


def _normalises(module: nn.Module, input_XD: Tensor) -> bool:
    """Whether a module gives the same for an input and its multiple, as norms do; projections and dropout do not."""
    largest = input_XD.abs().amax()
    if not largest > 0:
        return False
    once_XD, fourfold_XD = (module(input_XD / largest * factor).float() for factor in (16, 64))
    return bool((once_XD - fourfold_XD).abs().max() <= _TOLERANCE * once_XD.abs().max())


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
