"""FLOPs of forwards by their shapes: of a model, of prediction heads, of a whole step of a method.

A multiplication and an addition are two FLOPs, as in torch's counter. Counted are matrix products: those with weights,
and in attention each new token's with the keys and values of every slot, masked or not. Norms, activations and
rotations are left out, and so are slots that a CUDA graph reads beyond the last token.

Letters: M new tokens, S slots that they attend to, D hidden, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.storage.messages import did_you_mean
from ..methods import Method
from ..models.base import LanguageModel

PARTS = ("attention", "mlp", "projections", "head")
"""Of a forward: products of queries, keys and values; the feed-forward layers; what makes queries, keys and values and
mixes the heads; and the vocabulary projection."""


@dataclass(frozen=True)
class _Sizes:
    """What the FLOPs of a decoder depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Of a head."""
    inner: int
    """Width of the feed-forward layers."""
    vocab: int
    gated: bool = False
    """The feed-forward layers have three matrices, not two."""
    embedded: int = 0
    """Width of the embeddings, where it is not that of the layers."""
    crossed: bool = False
    """Each layer also attends to a source, whose keys and values are computed once."""


def _with_gate(config: Any) -> _Sizes:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = (config.num_hidden_layers, config.hidden_size, heads, kv_heads, width)
    return _Sizes(*sizes, config.intermediate_size, config.vocab_size, gated=True)


def _plain(config: Any, inner: int, embedded: int = 0) -> _Sizes:
    heads, hidden = config.num_attention_heads, config.hidden_size
    sizes = (config.num_hidden_layers, hidden, heads, heads, hidden // heads)
    return _Sizes(*sizes, inner, config.vocab_size, embedded=embedded)


def _opt(config: Any) -> _Sizes:
    embedded = config.word_embed_proj_dim
    return _plain(config, config.ffn_dim, 0 if embedded == config.hidden_size else embedded)


def _t5(config: Any) -> _Sizes:
    sizes = (config.num_decoder_layers, config.d_model, config.num_heads, config.num_heads, config.d_kv)
    gated = config.feed_forward_proj.startswith("gated")
    return _Sizes(*sizes, config.d_ff, config.vocab_size, gated=gated, crossed=True)


_GATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "granite", "olmo2")
FAMILIES: dict[str, Callable[[Any], _Sizes]] = dict.fromkeys(_GATED, _with_gate) | {
    "opt": _opt,
    "gpt_neox": lambda config: _plain(config, config.intermediate_size),
    "gpt2": lambda config: _plain(config, config.n_inner or 4 * config.hidden_size),
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
}
"""Model types whose FLOPs follow from their configuration."""


def forward_flops(
    config: Any, new_tokens: float, context_tokens: float, *, rows: int = 1, source_tokens: float = 0
) -> dict[str, float]:
    """FLOPs of a decoder's forward of new tokens on top of cached ones, each projected to the vocabulary.

    Args:
        config: a transformers configuration of one of `FAMILIES`.
        new_tokens: M of a row; a mean over steps may be given.
        context_tokens: cached tokens of a row, so that S is M more.
        rows: of the batch.
        source_tokens: of an encoder-decoder, what each new token attends to in the source; the encoder's forward is not
            counted.

    Returns:
        By part (see `PARTS`), and their `total`.

    Raises:
        ValueError: an unknown type of model, with the nearest known one; fewer tokens than there can be.
    """
    if not new_tokens > 0 or context_tokens < 0 or rows < 1 or source_tokens < 0:
        raise ValueError(
            f"a forward needs new tokens and a row, and no count below 0: got {new_tokens:g} new tokens, "
            f"{context_tokens:g} cached ones, {rows} rows and {source_tokens:g} tokens of a source"
        )
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        hint = did_you_mean(text.model_type, FAMILIES)
        raise ValueError(
            f"FLOPs of models of type {text.model_type!r} do not follow from their configuration here.{hint} "
            f"Known: {', '.join(FAMILIES)}"
        )
    sizes = FAMILIES[text.model_type](text)
    tokens, heads_width = rows * new_tokens, sizes.heads * sizes.width
    pairs = tokens * (context_tokens + new_tokens)
    mixed = 2 * sizes.heads + 2 * sizes.kv_heads
    if sizes.crossed:
        pairs += tokens * source_tokens
        mixed += 2 * sizes.heads
    projections = sizes.layers * tokens * sizes.hidden * sizes.width * mixed
    if sizes.embedded:  # into the layers' width, and back
        projections += 2 * tokens * sizes.embedded * sizes.hidden
    return _parts(
        attention=2 * sizes.layers * pairs * heads_width,
        mlp=sizes.layers * tokens * sizes.hidden * sizes.inner * (3 if sizes.gated else 2),
        projections=projections,
        head=tokens * (sizes.embedded or sizes.hidden) * sizes.vocab,
    )


def heads_flops(heads: PredictionHeads, rows: float = 1) -> dict[str, float]:
    """FLOPs of prediction heads on `rows` hidden states: of their residual blocks, their projections, and both."""
    width, blocks = heads.hidden_size, heads.num_heads * heads.num_layers * heads.hidden_size**2
    each = heads.rank * (width + heads.vocab_size) if heads.projection_kind == "low-rank" else width * heads.vocab_size
    found = {"blocks": 2 * rows * blocks, "projection": 2 * rows * heads.num_heads * each}
    return found | {"total": sum(found.values())}


def part_flops(part: Any, new_tokens: float, context_tokens: float, *, rows: int = 1) -> dict[str, float] | None:
    """FLOPs of a forward of a scorer or of prediction heads; None where they do not follow from shapes.

    Of an encoder-decoder's prompt, source and decoded tokens are both taken to be `context_tokens` long.
    """
    if isinstance(part, PredictionHeads):
        return heads_flops(part, rows)
    if not isinstance(part, LanguageModel) or part.config is None or part.config.model_type not in FAMILIES:
        return None
    model: Any = part
    while isinstance(model, LanguageModel):  # the thin forward of Llama-type decoders has no model behind it
        model = getattr(model, "model", None)
    if isinstance(model, nn.Module) and any(hasattr(module, "base_layer") for module in model.modules()):
        return None  # adapters
    source = context_tokens if part.config.is_encoder_decoder else 0
    return forward_flops(part.config, new_tokens, context_tokens, rows=rows, source_tokens=source)


class StepFlops(NamedTuple):
    """Of one step for one row."""

    verification: float
    drafting: float


def step_flops(target: LanguageModel, method: Method, nodes: float, context: int) -> StepFlops | None:
    """FLOPs of a step: the target's forward of its nodes, and every forward of the proposal at its width.

    Args:
        nodes: that the target scores, on average.
        context: committed tokens.

    Returns:
        None where those of a model do not follow from shapes.
    """
    proposer, found = method.proposer, list[float | None]()
    tree = getattr(proposer, "tree", None)
    if getattr(proposer, "by_path", False) and tree is not None and not tree.is_chain:
        # Each path is a row of its own; the vocabulary projection is done once a node.
        leaves = int((tree.depth_BN[0] == tree.max_depth).sum())
        scored = part_flops(target, tree.max_depth + 1, context, rows=leaves)
        once = part_flops(target, nodes, context)
        found.append(None if scored is None or once is None else scored["total"] - scored["head"] + once["head"])
    else:
        scored = part_flops(target, nodes, context)
        found.append(None if scored is None else scored["total"])
    before: Counter[int] = Counter()
    for model, count in proposer.forwards(nodes):
        drafted = part_flops(model or target, count, context + before[id(model)])
        found.append(None if drafted is None else drafted["total"])
        before[id(model)] += count
    known = [each for each in found if each is not None]
    return StepFlops(known[0], sum(known[1:])) if len(known) == len(found) else None


def count_flops(call: Callable[[], Any]) -> int:
    """FLOPs of a call as torch's counter sees them, with those inside the CPU's fused attention, which it passes over
    by itself."""
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_products}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return int(counter.get_total_flops())


def _attention_products(
    query_BHME: Sequence[int], key_BHSE: Sequence[int], value_BHSE: Sequence[int], *_: Any, **__: Any
) -> int:
    """From shapes: queries with keys, and weights with values."""
    batch, heads, new, width = query_BHME
    return 2 * batch * heads * new * key_BHSE[2] * (width + value_BHSE[3])


def _parts(**products: float) -> dict[str, float]:
    """Multiplications by part to FLOPs, in the order of `PARTS`, with their total."""
    found = {part: 2 * products[part] for part in PARTS}
    return found | {"total": sum(found.values())}
