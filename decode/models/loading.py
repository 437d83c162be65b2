"""Load transformers models, wrap them with the fastest forward that supports them, and check its logits.

Shape letters: B batch, T tokens, N tree nodes, R draft vocabulary, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.heads.auxiliary import decoder_layers
from ...checkpoints.storage.messages import first_line
from ...checkpoints.verify.families import check_family, tree_fault
from ...checkpoints.verify.model_files import is_adapter, load_config, load_language_model, with_adapter
from ..tree import Tree
from .base import LanguageModel, RowwiseModel, TransformersModel, bare_model
from .draft_vocabulary import kept_tokens, load_vocabulary
from .final_norm import check_states
from .finite import check_close, relative_rms, tolerances_of
from .graphs import GraphedModel
from .lean import LeanDecoder
from .products.native import compiled
from .products.product import round_to_int8
from .products.shared import pack_layers
from .products.weights import FAMILIES
from .seq2seq import Seq2SeqModel, check_source_forward


@contextmanager
def _without_reuse() -> Iterator[None]:
    """Return freed buffers of 1 MB or more to the system at once, so that converted weights use memory only once.

    By default, glibc keeps freed buffers below 32 MB once it has freed a larger one. Its settings after the context are
    the largest that this adaptation reaches.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    mapped, trimmed = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    set_option(mapped, 1 << 20)
    try:
        yield
    finally:
        set_option(mapped, 32 << 20)
        set_option(trimmed, 64 << 20)


@_without_reuse()
def wrap_model(
    model: PreTrainedModel,
    *,
    fast: bool = True,
    graphs: bool = True,
    check: bool = True,
    states: str = "after-norm",
    aux_layers: Sequence[int] = (),
    share: bool = False,
) -> LanguageModel:
    """Wrap a transformers model as a `LanguageModel`.

    Args:
        model: Causal LM or T5-family encoder-decoder, optionally wrapped by peft. It is set to evaluation mode.
        fast: Use the optimised forward pass of `lean.py` if it supports the model. It copies weights, so wrap the model
            again after further training.
        graphs: On a CUDA device, replay forward passes of few tokens as CUDA graphs. Models without the optimised
            forward use graphs only if `check` is True and replays give the same logits.
        check: Compare the logits of short chains with the model's own forward, and those of a small tree with chains.
        states: Kind of hidden states to return, after or before the final norm: "after-norm" or "before-norm".
        aux_layers: Layers whose inputs are returned as auxiliary hidden states, in increasing order.
        share: Store weights only once on a CPU. The model's own layers then use the weights of the optimised forward
            and cannot be trained.

    Raises:
        ValueError: The logits are NaN or infinite or differ from those of the model's own forward, or the model type,
            `states` or `aux_layers` is not supported.
    """
    check_states(states)
    model.eval()
    model = bare_model(model)
    check_family(model.config)
    if model.config.is_encoder_decoder:
        if states != "after-norm" or aux_layers:
            what = "before-norm hidden" if states != "after-norm" else "auxiliary"
            raise ValueError(f"{what} states require a decoder, but {model.config.model_type!r} is an encoder-decoder")
        source_model = Seq2SeqModel(model)
        if check:
            check_source_forward(source_model, model)
        return source_model
    wrapped: LanguageModel
    if tree_fault(model.config) is not None:
        wrapped = RowwiseModel(model, states, aux_layers)
    elif fast and LeanDecoder.covers(model):
        wrapped = LeanDecoder(model, states, aux_layers, share)
    else:
        wrapped = TransformersModel(model, states, aux_layers)
    if [*aux_layers] != sorted({*aux_layers} & {*range(wrapped.layers)}):
        raise ValueError(f"aux_layers must be increasing, from 0 to {wrapped.layers - 1}, got {[*aux_layers]}")
    replays = graphs and wrapped.device.type == "cuda"
    if replays and isinstance(wrapped, LeanDecoder):
        wrapped = GraphedModel(wrapped)
    if check:
        wrapped = _checked(wrapped, model, states, aux_layers)
        if isinstance(wrapped, GraphedModel):  # only the second call of a shape uses a graph
            check_forward(wrapped, model)
        elif replays and wrapped.tree_fault is None:
            return _graphed(wrapped, model)
    return wrapped


def _checked(wrapped: LanguageModel, model: PreTrainedModel, states: str, aux_layers: Sequence[int]) -> LanguageModel:
    """Return the model if its check passes, or a form that runs rows or tokens one by one and passes it."""
    try:
        check_forward(wrapped, model)
    except ValueError as error:
        if isinstance(wrapped, RowwiseModel):  # some recurrent layers drop their state in longer forwards (Mamba)
            wrapped.one_by_one = True
        elif type(wrapped) is TransformersModel:
            wrapped = RowwiseModel(model, states, aux_layers)
            wrapped.tree_fault = first_line(error).replace(" are not supported", " do not support it")
        else:
            raise
        check_forward(wrapped, model)
    return wrapped


def _graphed(wrapped: LanguageModel, model: PreTrainedModel) -> LanguageModel:
    """Wrap a model with CUDA graphs if they give the same logits, otherwise return it unchanged."""
    if wrapped.layer_devices is not None:
        return wrapped
    graphed = GraphedModel(wrapped)
    try:
        for _ in range(2):
            check_forward(graphed, model)
    except ValueError:
        return wrapped
    return graphed


_PROMPTS, _BRANCHES = ([105, 101, 107], [99, 104]), ([102, 103], [106])
"""Token ids of ordinary words. Special tokens have low ids and can cause large rounding errors in bfloat16."""
_FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, LookupError)
_NOISY, _NOISIEST = 4.0, 10.0
"""Logits of trees may differ from those of chains by the noise of a model's dtype, at most `_NOISIEST` times their
tolerance. Logits of chains may differ from the model's own by `_NOISY` times the noise, at most twice that limit. These
limits are below the differences of models that are not causal."""


@torch.inference_mode()
def check_forward(wrapped: LanguageModel, model: PreTrainedModel) -> None:
    """Raise ValueError if a chain's logits differ from the model's own forward, or a tree's from a chain's.

    If only the tree differs and `wrapped` is a `TransformersModel`, set `wrapped.tree_fault` instead.
    """
    kind = f"models of type {model.config.model_type!r}"
    texts = [[*prompt, *branch] for branch in _BRANCHES for prompt in _PROMPTS]
    ids = [torch.tensor([text], device=wrapped.device) % wrapped.vocab_size for text in texts]
    try:
        chains_BV = torch.cat([_score(wrapped, [*branch, 0, 0][:3])[:, len(branch)] for branch in _BRANCHES])
        plain_BV = torch.stack([model(text_1T).logits[0, -1] for text_1T in ids]).to(chains_BV.device)
    except _FAILURES as error:
        raise ValueError(f"{kind} are not supported: the forward pass failed with {first_line(error)}") from error
    kept = slice(None) if (ids_R := kept_tokens(model)) is None else ids_R
    chains_BV, plain_BV = chains_BV[:, kept].float(), plain_BV[:, kept].float()
    chain, tree = tolerances_of(model)
    noise = cache(lambda: max(measure(model, text_1T) for text_1T in ids for measure in (_noise, _rounding)))
    what = f"{kind} are not supported: logits with a key-value cache differ from those without"
    check_close(chains_BV, plain_BV, model, what, chain, lambda: _NOISY * min(noise(), 2 * _NOISIEST * tree))
    if wrapped.tree_fault is not None:
        return
    try:
        left, right = _BRANCHES
        nodes_BNV = _score(wrapped, [left[0], right[0], left[1]], [-1, 0, 0, 1])
        branches_BV = torch.cat((nodes_BNV[:, 3], nodes_BNV[:, 2]))[:, kept].float()
        what = f"{kind} do not support tree attention: logits of a branch differ from those of a chain"
        check_close(branches_BV, chains_BV, model, what, tree, lambda: min(noise(), _NOISIEST * tree))
    except _FAILURES as error:
        if not isinstance(wrapped, TransformersModel):
            raise
        reason = first_line(error)
        wrapped.tree_fault = reason if reason.startswith(kind) else f"{kind} do not support tree attention: {reason}"


def _score(wrapped: LanguageModel, nodes: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
    """Return logits [B, N, V] of each prompt's last token and of a tree of tokens `nodes` after it (default: chain)."""
    lengths, device = [len(prompt) - 1 for prompt in _PROMPTS], wrapped.device
    prompts_BT = torch.tensor([[*prompt, 0][: max(lengths) + 1] for prompt in _PROMPTS], device=device)
    roots_B1 = prompts_BT.gather(1, torch.tensor(lengths, device=device)[:, None])
    nodes_BN = torch.tensor(nodes, device=device).expand(len(lengths), -1)
    held = wrapped.new_cache(len(lengths), max(lengths) + len(nodes) + 1)
    wrapped.extend(held, prompts_BT[:, :-1] % wrapped.vocab_size)
    held.set_lengths(lengths)
    tree = None if parents is None else Tree.from_parents(torch.tensor([parents], device=device), 2)
    return wrapped.logits(wrapped.extend(held, torch.cat((roots_B1, nodes_BN), 1) % wrapped.vocab_size, tree))


def _noise(model: PreTrainedModel, ids_1T: Tensor) -> float:
    """Return the `relative_rms` between a model's logits for a whole text and logits computed token by token."""
    past, steps = None, []
    try:
        for token_11 in ids_1T.split(1, 1):
            output = model(token_11, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits[0])
        return relative_rms(torch.cat(steps), model(ids_1T).logits[0])
    except _FAILURES:
        return 0.0


def _rounding(model: PreTrainedModel, ids_1T: Tensor) -> float:
    """Return the `relative_rms` between a model's last logits with and without perturbed layer outputs.

    Roundings inside the layers have a larger effect, which `_NOISY` accounts for.
    """
    exact_1V = model(ids_1T).logits[0, -1:]
    with _perturbed(model):
        return relative_rms(model(ids_1T).logits[0, -1:], exact_1V)


@contextmanager
def _perturbed(model: PreTrainedModel) -> Iterator[None]:
    """Change the outputs of all layers by up to one rounding step of the model's dtype while the context is active."""
    step, stream = torch.finfo(model.dtype).eps / 2, torch.Generator().manual_seed(0)

    def change(module: Any, inputs: Any, output: Any) -> Any:
        states, *rest = output if isinstance(output, tuple | list) else (output,)
        noise = 1 + step * (2 * torch.rand(states.shape, generator=stream) - 1).to(states.device)
        changed = (states.float() * noise).to(states.dtype)
        return (changed, *rest) if isinstance(output, tuple | list) else changed

    layers = decoder_layers(model, model.config.get_text_config(decoder=True).num_hidden_layers)
    hooks = [layer.register_forward_hook(change) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@_without_reuse()
def load_model(
    source: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    device_map: str | dict[str, str] | None = None,
    attention: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Load a causal LM or an encoder-decoder in evaluation mode. Remote code is never executed.

    Args:
        source: Directory or Hub id (`user/name`, `user/name@revision`). A LoRA adapter is merged with its base model.
        dtype: Dtype of the weights. "int8" quantises matrices to 8 bits per weight (see `storage_dtype`).
        device: Device of the model.
        device_map: Distribution over several devices, as in accelerate, such as "auto" or "balanced".
        attention: Attention implementation, such as "sdpa" (default: chosen by transformers).
        progress: Callback that receives the loaded percentage and the total, 100.
        settings: Additional arguments of `from_pretrained`.

    Raises:
        ValueError: The model or attention implementation does not exist, the model type is not supported, peft is not
            installed, weights are missing, or they are pickled and `DRAFTSMITH_UNPICKLE=1` is not set.
    """
    source = model_source(source)
    folder = Path(source)
    held = storage_dtype(dtype, "several" if device_map else device) if isinstance(dtype, str) else dtype
    options = {"device": device, "device_map": device_map, "attention": attention, "progress": progress} | settings
    is_packed = False
    if is_adapter(folder):
        model = with_adapter(folder, partial(load_model, dtype=held, **options))
    else:
        check_family(config := load_config(source))
        is_packed = (dtype, held) == ("int8", "float32") and config.model_type in FAMILIES and compiled() is not None
        settings |= {"dtype": "stored" if is_packed else held, "device_map": device_map, "progress": progress}
        model = load_language_model(source, attn_implementation=attention, **settings)
        model = model if device_map else model.to(device)
    if is_packed:
        _pack(model, progress)
    if dtype == "int8":
        round_to_int8(model)
    if folder.is_dir():
        load_vocabulary(model, folder)
    return model


def storage_dtype(dtype: str, device: str) -> str:
    """Return the dtype in which weights are loaded. For "int8", it is float32 on a CPU and bfloat16 elsewhere."""
    return dtype if dtype != "int8" else "float32" if device == "cpu" else "bfloat16"


def _pack(model: PreTrainedModel, progress: Callable[[int, int], None] | None) -> None:
    if LeanDecoder.covers(model):
        sizes = {module: sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules()}
        # Largest matrices first, since the mapped pages of a file use memory while a matrix is converted.
        pack_layers(sorted(sizes, key=lambda module: -sizes[module]), int8=True, progress=progress)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32, copy=True)
    for module in model.modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:  # was rounded to the dtype of the files
            module.embed_scale = torch.tensor(scale)
    model.config.dtype = torch.float32
