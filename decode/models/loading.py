"""Models of transformers loaded, and wrapped by the fastest scorer that covers them; each is checked first.

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
    """A scorer over a transformers model.

    Args:
        model: any causal LM, or an encoder-decoder of the T5 family, also in peft's wrapper; put into evaluation mode.
        fast: use the thin forward of `lean.py` where it covers the model (Llama-type decoders). It copies some
            weights: after further training, wrap the model again.
        graphs: replay forwards of few tokens as CUDA graphs on a CUDA device; of models that the thin forward does not
            cover only where replays give what the model gives (with `check`).
        check: compare the forward of a small branching tree with the model's own forwards of its paths.
        states: the hidden states that the scorer gives and projects: "after-norm", or "before-norm", what goes into the
            final norm.
        aux_layers: what it gives beside them, see `LanguageModel`; layers of a decoder that there are.

    Raises ValueError: logits that are NaN or infinite; a tree forward that differs from the plain ones (ALiBi); an
    encoder-decoder of another family, or one with states before the norm; states that there are not.
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
    """A model of transformers' own forward with graphs where they give what it gives, else as it is."""
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
    """ValueError where a tree of two branches differs from plain forwards of both, or cannot be run."""
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
    """A causal LM or an encoder-decoder from a folder or a hub id (`user/name`, `user/name@revision`), in evaluation
    mode; never with remote code. A folder with a LoRA adapter gives the model that it was made for, merged with it.

    Args:
        dtype: of the weights; "int8": matrices are rounded to eight bits a weight, and held as `held_as` says.
        device_map: spread it over several devices instead, as accelerate does: auto, balanced, sequential …
        attention: transformers' name of an attention kernel; None: its own choice, SDPA where the model has it.
        settings: more of transformers' `from_pretrained`.

    Raises ValueError: no such folder or model on the hub; an attention kernel that is not there; an adapter without
    peft; weights that its files lack; pickled ones, unless `DRAFTSMITH_UNPICKLE=1`.
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
    """The type in which weights of a recipe's `dtype` are held: those of int8 in float32 on a CPU, which then reads
    eight bits of each (`products/product.py`), elsewhere in bfloat16."""
    return dtype if dtype != "int8" else "float32" if device == "cpu" else "bfloat16"


def _load(source: str, *, device: str, device_map: Any, attention: str | None, **settings: Any) -> PreTrainedModel:
    model = load_language_model(source, device_map=device_map, attn_implementation=attention, **settings)
    model = model if device_map else model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":  # mapped: what is written to the file would change the model
            tensor.data = tensor.data.clone()
    return model
