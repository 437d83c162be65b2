"""What a training run needs of memory, estimated from shapes alone: nothing is loaded.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), counted from a layer's matrices; with
checkpointing one hidden state a layer and one whole layer. States of the optimizer after Rajbhandari et al. 2020 (ZeRO,
arXiv 1910.02054, section 3). All sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from ...checkpoints.heads.module import PredictionHeads
from ...decode.models.draft_vocabulary import kept_tokens
from ..losses.chunks import chunk_positions

if TYPE_CHECKING:
    from ...checkpoints.heads.eagle import EagleHeads

Memory = Literal["device", "host"]
Phase = Literal["always", "training", "saving", "loading"]

_ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's default
_ZERO_LIVE = 1_000_000_000  # weights that ZeRO-3 keeps gathered: DeepSpeed's default


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose in one process. Parts of a `phase` other than "always" are never held together with those
    of another phase."""

    name: str
    size: int
    phase: Phase = "always"
    place: Memory = "device"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model as far as memory is concerned."""

    parameters: int
    trained: int
    """Of the parameters."""
    weights: int
    """Bytes of the parameters, tied ones once."""
    trained_weights: int
    """Bytes of those trained."""
    item: int
    """Bytes of a number that it computes with."""
    vocab_size: int
    hidden_size: int
    layers: int
    layer_elements: int
    """Numbers a token that a layer keeps for its backward pass (a mean over the layers)."""
    stored: int
    """Parameters that a checkpoint holds."""
    projection: int
    """Elements that the loss holds beside what makes logits: its gradient, and copied rows."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes, and what they share out."""

    device: str = "cpu"
    processes: int = 1
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """A training run as far as memory is concerned."""

    model: ModelSize
    """What is trained; with `heads` the heads alone."""
    target: ModelSize | None
    """What else lies in memory: the teacher, the model to be measured with, or the one that heads sit on."""
    taught: bool
    """Whether the target runs in every micro batch."""
    heads: int
    """How many are trained on the last hidden state; 0: a language model is trained."""
    block_tokens: int
    micro_batch: int
    global_batch: int
    checkpointing: bool = False
    precision: str = "no"
    loading: int = 0
    """Bytes of a model of which only layers or embeddings are kept."""
    launch: Launch = Launch()
    decodes: bool = False
    """Whether evaluations decode with a copy of the target's weights that is laid out for that."""


def model_size(model: Any, *, eight_bit: bool = False) -> ModelSize:
    """The sizes of a causal LM or encoder-decoder, also of one on the meta device; with `eight_bit` its matrices but
    the output projection are held in 8 bits (LLM.int8)."""
    parameters = list(model.parameters())
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    linears = [part for part in model.modules() if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"]
    matrices = {id(part.weight): part.weight.numel() for part in linears if part not in set(head.modules())}
    quantised = matrices if eight_bit else {}
    trained = [p for p in parameters if p.requires_grad]
    rows = len(head.weight if (ids_R := kept_tokens(model)) is None else ids_R)
    copied = 0 if ids_R is None else 2 * rows * head.weight.shape[1]  # these rows, and their gradient
    layers = max(1, config.num_hidden_layers) + (getattr(config, "num_decoder_layers", None) or 0)
    count = sum(p.numel() for p in parameters)
    return ModelSize(
        parameters=count,
        trained=sum(p.numel() for p in trained),
        weights=sum(p.numel() * (1 if id(p) in quantised else p.element_size()) for p in parameters),
        trained_weights=sum(p.numel() * p.element_size() for p in trained),
        item=head.weight.element_size(),
        vocab_size=rows,
        hidden_size=config.hidden_size,
        layers=layers,
        # each map's result or input, and what maps read in common, norms and residuals: for a GPT 21 h (paper: 17 h)
        layer_elements=sum(matrices.values()) // (layers * config.hidden_size) + 9 * config.hidden_size,
        stored=count,
        projection=copied + (head.weight.numel() if head.weight.requires_grad else 0),
    )


def heads_size(
    heads: PredictionHeads | EagleHeads, target: ModelSize, block_tokens: int, base: ModelSize | None = None
) -> ModelSize:
    """The sizes of prediction heads on a target; a layer is all heads together, or a step of EAGLE-3's, which keeps its
    scores of a block. `base` is the target, where it is trained with them: then those of both."""
    count = sum(p.numel() for p in heads.parameters())
    weights = sum(p.numel() * p.element_size() for p in heads.parameters())
    item, vocab = next(heads.parameters()).element_size(), len(heads.proposed) if heads.proposed is not None else 0
    alone = ModelSize(0, 0, 0, 0, item, vocab or target.vocab_size, target.hidden_size, 0, 0, 0, 0)
    projection = 0
    if isinstance(heads, PredictionHeads):
        own = heads.projection_kind != "target"
        projection = heads.num_heads * target.vocab_size * (heads.rank or target.hidden_size) if own else 0
        alone = replace(alone, layers=heads.num_layers, layer_elements=3 * heads.num_heads * target.hidden_size)
    else:
        sizes = heads.config
        scores = 2 * sizes.num_attention_heads * block_tokens
        step = 12 * sizes.hidden_size + 4 * sizes.intermediate_size + scores
        alone = replace(alone, layers=heads.num_heads, layer_elements=step)
    size = base or alone
    return replace(
        size,
        parameters=size.parameters + count,
        trained=size.trained + count,
        weights=size.weights + weights,
        trained_weights=size.trained_weights + weights,
        stored=size.trained + count,
        projection=projection,
    )


def plan_memory(demand: Demand) -> tuple[Part, ...]:
    """The memory of one process, part by part."""
    model, target, tokens = demand.model, demand.target, demand.micro_batch * demand.block_tokens
    rows = min(chunk_positions(model.vocab_size, torch.device(demand.launch.device)), tokens)
    logits = (2 if demand.taught else 1) * rows * model.vocab_size  # of a chunk, of the teacher's too
    item = 2 if demand.precision != "no" else model.item
    layer, state = tokens * model.layer_elements * item, tokens * model.hidden_size * model.item
    kept, working = (model.layers * state, 2 * layer) if demand.checkpointing else (model.layers * layer, layer)
    if item < model.item and not demand.launch.zero_stage:
        kept += item * model.parameters  # autocast keeps a copy of each weight that it has cast
    parts = [
        *_states(demand),
        Part("activations of a micro batch", kept + 8 * state * max(1, demand.heads), "training"),
        Part("activations of one layer, in use", working, "training"),
        Part("chunks of the loss", 4 * (logits + model.projection), "training"),
        Part("a model that is read and not kept", demand.loading, "loading", "host"),
    ]
    if target is not None:
        parts.append(Part("target", target.weights))
        # on a processor weights lie packed too, in two ways; elsewhere those of two bytes are held once
        copies = 3.0 if demand.launch.device == "cpu" else float(target.item == 4)
        parts.append(Part("target, prepared for decoding", round(copies * target.weights) if demand.decodes else 0))
        running = tokens * (target.layer_elements + 2 * target.hidden_size) * target.item
        parts.append(Part("target while it runs", running if demand.taught else 0, "training"))
    return tuple(part for part in parts if part.size)


def peak(parts: tuple[Part, ...], device: str) -> int:
    """Bytes of the device that one process holds at most; on a processor device and host are one."""
    mine = [part for part in parts if device == "cpu" or part.place == "device"]
    held = {phase: sum(part.size for part in mine if part.phase == phase) for phase in get_args(Phase)}
    return held.pop("always") + max(held.values())


def checkpoint_bytes(model: ModelSize, stored_weights: int, launch: Launch) -> int:
    """Files of a checkpoint: weights (`stored_weights` bytes without DeepSpeed) and AdamW's two moments."""
    if launch.zero_stage:  # float32, whatever it was trained in
        return 4 * model.stored + 8 * model.trained
    return stored_weights + 2 * model.trained_weights


def _states(demand: Demand) -> list[Part]:
    """Weights, gradients and AdamW's state (ZeRO, section 3.1: 2 + 2 + 12 bytes a parameter in 16 bits)."""
    model, launch = demand.model, demand.launch
    if not launch.zero_stage:
        buckets = model.trained_weights if launch.processes > 1 else 0
        return [
            Part("weights", model.weights),
            Part("gradients", model.trained_weights, "training"),
            Part("gradients on their way between processes", buckets),
            Part("AdamW's two moments", 2 * model.trained_weights),
        ]
    stage, share = launch.zero_stage, launch.processes
    item = 4 if demand.precision == "no" else 2
    optimizer: Memory = "host" if launch.offload_optimizer else "device"
    live = min(model.parameters, _ZERO_LIVE) * item if stage == 3 and share > 1 else 0
    held = model.parameters * item // (share if stage == 3 else 1)
    return [
        Part("weights", held, place="host" if stage == 3 and launch.offload_weights else "device"),
        Part("weights gathered for use", live, "training"),
        Part("gradients", model.trained * item // (share if stage >= 2 else 1), place=optimizer),
        Part("gradients on their way between processes", 4 * min(_ZERO_BUCKET, model.trained)),
        Part("AdamW's two moments", 8 * model.trained // share, place=optimizer),
        Part("weights in float32", 4 * model.trained // share, place=optimizer),
        Part("checkpoint while it is gathered", 4 * model.stored + 8 * model.trained, "saving", "host"),
    ]
