"""Loading of transformers models, and wrapping with the fastest forward that supports them, after a check.

Shape letters: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.verify.model_files import is_adapter, load_language_model, with_adapter
from ..tree import Tree
from .base import LanguageModel, TransformersModel, bare_model
from .draft_vocabulary import kept_tokens, load_vocabulary
from .final_norm import check_states
from .finite import check_close
from .graphs import GraphedModel
from .lean import LeanDecoder
from .products.product import round_to_int8
from .seq2seq import Seq2SeqModel, check_source_forward


def wrap_model(
    model: PreTrainedModel,
    *,
    fast: bool = True,
    graphs: bool = True,
    check: bool = True,
    states: str = "after-norm",
    aux_layers: Sequence[int] = (),
) -> LanguageModel:
    """Return a transformers model as a `LanguageModel`.

    Args:
        model: Causal LM, or an encoder-decoder of the T5 family, also in peft's wrapper. It is set to evaluation mode.
        fast: Use the optimised forward of `lean.py` if it supports the model. It copies some weights, so wrap the model
            again after further training.
        graphs: Replay forwards of few tokens as CUDA graphs on a CUDA device. Models without the optimised forward use
            graphs only if replays give the same result (needs `check`).
        check: Compare the forward of a small tree with the model's own forwards of its paths.
        states: Hidden states that the model returns and projects: "after-norm" or "before-norm".
        aux_layers: Layers whose auxiliary hidden states are returned too (see `LanguageModel`).

    Raises:
        ValueError: Logits are NaN or infinite, the tree forward differs from plain forwards (ALiBi), or the model type,
            the states or the layers are not supported.
    """
    check_states(states)
    model.eval()
    model = bare_model(model)
    if model.config.is_encoder_decoder:
        if states != "after-norm" or aux_layers:
            what = "states before the norm" if states != "after-norm" else "states of inner layers"
            raise ValueError(f"only decoders give {what}; {model.config.model_type!r} is no decoder")
        source_model = Seq2SeqModel(model)
        if check:
            check_source_forward(source_model, model)
        return source_model
    wrapped: LanguageModel
    if fast and LeanDecoder.covers(model):
        wrapped = LeanDecoder(model, states, aux_layers)
    else:
        wrapped = TransformersModel(model, states, aux_layers)
    if [*aux_layers] != sorted({*aux_layers} & {*range(wrapped.layers)}):
        raise ValueError(f"aux_layers is {[*aux_layers]}: expected rising ones, from 0 to {wrapped.layers - 1}")
    replays = graphs and wrapped.device.type == "cuda"
    if replays and isinstance(wrapped, LeanDecoder):
        wrapped = GraphedModel(wrapped)
    if check:
        check_tree_forward(wrapped, model)
        if isinstance(wrapped, GraphedModel):  # the first call of a shape is not replayed, the second is
            check_tree_forward(wrapped, model)
        elif replays:
            return _graphed(wrapped, model)
    return wrapped


def _graphed(wrapped: LanguageModel, model: PreTrainedModel) -> LanguageModel:
    """Return the model with CUDA graphs if these give the same result, else unchanged."""
    if wrapped.layer_devices is not None:
        return wrapped
    graphed = GraphedModel(wrapped)
    try:
        for _ in range(2):
            check_tree_forward(graphed, model)
    except ValueError:
        return wrapped
    return graphed


@torch.inference_mode()
def check_tree_forward(wrapped: LanguageModel, model: PreTrainedModel) -> None:
    """Raise ValueError if a tree with two branches differs from plain forwards of both, or cannot be run."""
    device, vocab = wrapped.device, wrapped.vocab_size
    # Ids of words: after the special tokens that low ones are, bfloat16's rounding can be a fifth of the logits.
    paths = ([105, 101, 107], [102, 103], [106])
    prompt, left, right = (torch.tensor(ids, device=device) % vocab for ids in paths)
    try:
        cache = wrapped.new_cache(1, 8)
        wrapped.extend(cache, prompt[None, :-1])
        cache.set_lengths([2])
        tree = Tree.from_parents(torch.tensor([[-1, 0, 0, 1]], device=device), 2)  # root, left, right, left's child
        nodes = torch.cat((prompt[-1:], left[:1], right, left[1:]))
        tree_NV = wrapped.logits(wrapped.extend(cache, nodes[None], tree))[0].float()
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        kind = model.config.model_type
        raise ValueError(
            f"models of type {kind!r} cannot score token trees here: their forward failed with {error}"
        ) from error
    kept = slice(None) if (ids_R := kept_tokens(model)) is None else ids_R
    tree_NV = tree_NV[:, kept]
    left_V = model(torch.cat((prompt, left))[None]).logits[0, -1, kept].float()
    right_V = model(torch.cat((prompt, right))[None]).logits[0, -1, kept].float()
    wanted_2V = torch.stack((left_V, right_V))
    found_2V = tree_NV[[3, 2]]
    check_close(
        found_2V,
        wanted_2V,
        model,
        f"models of type {model.config.model_type!r} cannot score token trees (as where positions follow the cache's "
        "slots, with ALiBi): a branch scored in a tree differs from the same tokens scored alone",
    )


def load_model(
    source: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    device_map: str | dict[str, str] | None = None,
    attention: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Load a causal LM or an encoder-decoder in evaluation mode, never with remote code.

    Args:
        source: Folder or hub id (`user/name`, `user/name@revision`). A LoRA adapter is merged with its base model.
        dtype: Dtype of the weights. "int8" rounds matrices to 8 bits per weight (see `held_as`).
        device: Device of the model.
        device_map: Distribution over several devices, as in accelerate: auto, balanced, sequential …
        attention: Name of an attention kernel of transformers (default: its choice).
        settings: Further arguments of `from_pretrained`.

    Raises:
        ValueError: The model or attention kernel does not exist, peft is missing, weights are missing, or they are
            pickled without `DRAFTSMITH_UNPICKLE=1`.
    """
    source = model_source(source)
    folder = Path(source)
    held = held_as(dtype, "several" if device_map else device) if isinstance(dtype, str) else dtype
    options = {"dtype": held, "device": device, "device_map": device_map, "attention": attention} | settings
    model = with_adapter(folder, partial(load_model, **options)) if is_adapter(folder) else _load(source, **options)
    if folder.is_dir():
        load_vocabulary(model, folder)
    if dtype == "int8":
        round_to_int8(model)
    return model


def held_as(dtype: str, device: str) -> str:
    """Return the dtype in which weights are stored: for "int8" float32 on a CPU and bfloat16 elsewhere."""
    return dtype if dtype != "int8" else "float32" if device == "cpu" else "bfloat16"


def _load(source: str, *, device: str, device_map: Any, attention: str | None, **settings: Any) -> PreTrainedModel:
    model = load_language_model(source, device_map=device_map, attn_implementation=attention, **settings)
    model = model if device_map else model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":  # memory-mapped: writes to the file would change the model
            tensor.data = tensor.data.clone()
    return model
