"""What a training run needs of memory, reckoned from shapes alone: nothing is loaded.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), who count what the backward pass of a layer
keeps: for s tokens, b rows, hidden size h and a heads in 16 bits s·b·h·(34 + 5·a·s/h) bytes, of which 5·a·s/h are the
attention scores that fused kernels do not keep, and with checkpointing 2·s·b·h a layer and one whole layer. Their 34 is
a GPT's; here it is counted from the layers that a model has (`layer_elements`). States of the optimizer after
Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054, section 3). All sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..losses.chunks import BLOCK_ELEMENTS, CHUNK_ELEMENTS, CHUNK_POSITIONS

if TYPE_CHECKING:
    from ...checkpoints.heads.files import PredictionHeads

Place = Literal["device", "host"]
Phase = Literal["always", "training", "saving", "loading"]

_ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's default
_ZERO_LIVE = 1_000_000_000  # weights that ZeRO-3 keeps gathered: DeepSpeed's default
_TEMPORARIES = 6  # tensors of a block's size, float32, that scoring a block of logits takes at once
_ENDS = 8  # hidden states that embeddings, the last norm and the loss keep
_BATCH_BYTES = 32  # a token of a batch: four int64
_UNFUSED = 3  # score tensors that attention without a fused kernel keeps
_COMPOSED = ("gelu_new", "gelu_fast", "quick_gelu", "gelu_accurate")  # activations made of several operations …
_COMPOSED_KEEP = 4  # … which keep so many tensors more
_HEAP_TENSOR = 32 << 20  # smaller tensors lie in the C library's heap, whose holes are not given back
_HEAP_HOLES = 2.5  # times the size of the weights that lie there: measured
_LIBRARIES = 32 << 20  # buffers that libraries make when they are first used


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose in one process. Parts of a `phase` other than "always" are never held together with those
    of another phase."""

    name: str
    size: int
    phase: Phase = "always"
    place: Place = "device"


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
    projection_trained: bool
    whole_logits: bool
    """The head is no plain matrix, so that logits of a whole micro batch exist."""
    layers: int
    layer_wide: int
    """Numbers a token that the linear maps of a layer keep for the backward pass (a mean over the layers)."""
    layer_narrow: int
    """Numbers a token that norms and residuals of a layer keep."""
    unfused_heads: int
    """Heads whose attention scores are kept: those without a fused kernel."""
    in_heap: int
    """Bytes of trained weights in tensors that are small enough for the C library's heap."""
    copied: int
    """Bytes of weights that decoding keeps a second time."""
    stored: int
    """Parameters that a checkpoint holds."""
    projection: int
    """Elements of what makes logits (of a head's, where there are heads)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes, and what they share out."""

    device: str = "cpu"
    processes: int = 1
    local_processes: int = 1
    """On this machine."""
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False
    bucket: int = _ZERO_BUCKET
    """Elements of DeepSpeed's buffer for gradients."""


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
    """Bytes of a model of which only a part is kept."""
    launch: Launch = Launch()
    soft: bool = False
    """Whether the loss looks at the target's whole distributions."""

    @property
    def tokens(self) -> int:
        """Of a micro batch."""
        return self.micro_batch * self.block_tokens

    @property
    def micro_steps(self) -> int:
        """Backward passes of a process in a step."""
        return self.global_batch // (self.micro_batch * self.launch.processes)


def model_size(model: Any, *, eight_bit: bool = False, decodes_on: str | None = None) -> ModelSize:
    """The sizes of a causal LM or encoder-decoder, also of one on the meta device.

    Args:
        eight_bit: its matrices but the output projection are held in 8 bits (LLM.int8).
        decodes_on: type of the device where it decodes for measurements with weights prepared for that
            (`decode.lean`); None: it does not.
    """
    parameters = list(model.parameters())
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    linears = [(name, part) for name, part in model.named_modules() if _is_linear(part) and part is not head]
    quantised = {id(part.weight) for _, part in linears} if eight_bit else set()
    trained = [p for p in parameters if p.requires_grad]
    layers = max(1, config.num_hidden_layers) + (getattr(config, "num_decoder_layers", None) or 0)
    wide, narrow = layer_elements(linears, layers, config.hidden_size)
    if _activation(config) in _COMPOSED:
        wide += _COMPOSED_KEEP * max((_shape(part)[0] for _, part in linears), default=0)
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        weights=sum(p.numel() * (1 if id(p) in quantised else p.element_size()) for p in parameters),
        trained_weights=sum(p.numel() * p.element_size() for p in trained),
        item=head.weight.element_size(),
        vocab_size=head.weight.shape[0],
        hidden_size=config.hidden_size,
        projection_trained=head.weight.requires_grad,
        whole_logits=not _is_plain(head, config),
        layers=layers,
        layer_wide=wide,
        layer_narrow=narrow,
        unfused_heads=0 if _is_fused(model, config) else config.num_attention_heads,
        in_heap=_in_heap(trained),
        copied=_copied(model, decodes_on),
        stored=sum(p.numel() for p in parameters),
        projection=head.weight.numel(),
    )


def heads_size(heads: PredictionHeads, target: ModelSize, base: ModelSize | None = None) -> ModelSize:
    """The sizes of prediction heads on a target; a layer is all heads together. `base` is the target, where it is
    trained with them: then those of both."""
    parameters = list(heads.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    own = heads.projection_kind != "target"
    projection = target.vocab_size * (heads.rank or target.hidden_size)
    if base is not None:
        return replace(
            base,
            parameters=base.parameters + count,
            trained=base.trained + count,
            weights=base.weights + weights,
            trained_weights=base.trained_weights + weights,
            projection_trained=own,
            in_heap=base.in_heap + _in_heap(parameters),
            stored=base.trained + count,
            projection=projection,
        )
    return ModelSize(
        parameters=count,
        trained=count,
        weights=weights,
        trained_weights=weights,
        item=parameters[0].element_size(),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        projection_trained=own,
        whole_logits=False,
        layers=heads.num_layers,
        layer_wide=2 * heads.num_heads * target.hidden_size,
        layer_narrow=heads.num_heads * target.hidden_size,
        unfused_heads=0,
        in_heap=_in_heap(parameters),
        copied=0,
        stored=count,
        projection=projection,
    )


def layer_elements(linears: list[tuple[str, Any]], layers: int, hidden: int) -> tuple[int, int]:
    """Numbers a token that one of `layers` layers keeps for its backward pass, from all its linear maps by name.

    Kept are each map's result (what follows it needs it), its input once for maps that read the same, the product of a
    gated pair, and attention's result twice; of narrow numbers each norm's input and normalised input. For a GPT that
    makes 23 h, where Korthikanti et al. count 17 h (34 bytes of 16 bits); for a Llama 8 h + 4 times its MLP's width.

    Returns:
        Those of linear maps, in the type that products run in, and those of norms and residuals, in the weights' type.
    """
    outputs = inputs = gated = 0
    read: set[tuple[str, int]] = set()
    shapes: Counter[tuple[str, int, int]] = Counter()
    for name, part in linears:
        rows, columns = _shape(part)
        parent = name.rpartition(".")[0]
        outputs += rows
        inputs += 0 if (parent, columns) in read else columns
        read.add((parent, columns))
        shapes[parent, rows, columns] += 1
    for (_, rows, columns), count in shapes.items():
        gated += rows if count == 2 and rows > columns else 0
    return (outputs + inputs + gated) // layers + 2 * hidden, 4 * hidden


def plan_memory(demand: Demand) -> tuple[Part, ...]:
    """The memory of one process, part by part: an estimate, rather from above.

    What Llamas, GPT-NeoX, OPT and GPT-2 of 1 to 70 million parameters took on a processor in float32 was between 0.75
    and 1.1 of it.
    """
    parts = [*_states(demand), *_teacher(demand)]
    activations, working = _activations(demand)
    parts += [
        Part("activations of a micro batch", activations, "training"),
        Part("activations of one layer, in use", working, "training"),
        Part("chunks of the loss", _loss(demand), "training"),
        Part("batches", _BATCH_BYTES * demand.block_tokens * 2 * demand.global_batch, "always", "host"),
    ]
    if demand.launch.device == "cpu":
        holes = int(_HEAP_HOLES * demand.model.in_heap) + _LIBRARIES
        parts.append(Part("buffers, and holes in the heap", holes, "training"))
    if demand.loading:
        parts.append(Part("the model that layers are cut from", demand.loading, "loading", "host"))
    if demand.launch.device != "cpu":
        largest = max(demand.model.weights, 0 if demand.target is None else demand.target.weights)
        parts.append(Part("weights on their way to the device", largest, "loading", "host"))
    return tuple(part for part in parts if part.size)


def peak(parts: tuple[Part, ...], device: str, place: Place = "device") -> int:
    """Bytes that one process holds at most; on a processor device and host are one."""
    mine = [part for part in parts if device == "cpu" or part.place == place]
    phases = {part.phase for part in mine}
    held = sum(part.size for part in mine if part.phase == "always")
    return held + max((sum(p.size for p in mine if p.phase == phase) for phase in phases - {"always"}), default=0)


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
            Part("weights while they are written", model.weights, "saving", "host"),
        ]
    stage, share = launch.zero_stage, launch.processes
    item = 4 if demand.precision == "no" else 2
    optimizer: Place = "host" if launch.offload_optimizer else "device"
    bucket = launch.bucket if launch.device != "cpu" else min(launch.bucket, model.trained)
    live = min(model.parameters, _ZERO_LIVE) * item if stage == 3 and share > 1 else 0
    held = model.parameters * item // (share if stage == 3 else 1)
    return [
        Part("weights", held, place="host" if stage == 3 and launch.offload_weights else "device"),
        Part("weights gathered for use", live, "training"),
        Part("gradients", model.trained * item // (share if stage >= 2 else 1), place=optimizer),
        Part("gradients on their way between processes", bucket * 4),
        Part("AdamW's two moments", 8 * model.trained // share, place=optimizer),
        Part("weights in float32", 4 * model.trained // share, place=optimizer),
        Part("checkpoint while it is gathered", 4 * model.stored + 8 * model.trained, "saving", "host"),
    ]


def _teacher(demand: Demand) -> list[Part]:
    target = demand.target
    if target is None:
        return []
    parts = [Part("target", target.weights), Part("target, prepared for decoding", target.copied)]
    if demand.taught:
        layer = target.layer_wide + target.layer_narrow + 2 * target.hidden_size
        running = demand.tokens * layer * target.item + _scores(target, demand)
        parts.append(Part("target while it runs", running, "training"))
    return parts


def _activations(demand: Demand) -> tuple[int, int]:
    """What all layers keep, and what the one that is worked on takes on top."""
    model, tokens = demand.model, demand.tokens
    item = 2 if demand.precision != "no" else model.item
    layer = tokens * (model.layer_wide * item + model.layer_narrow * model.item) + _scores(model, demand)
    ends = _ENDS * tokens * model.hidden_size * model.item * max(1, demand.heads)
    cast = 0
    if demand.precision != "no" and not demand.launch.zero_stage and model.item > 2:
        cast = 2 * model.parameters  # autocast keeps a copy of each weight that it has cast
    if demand.checkpointing:
        return model.layers * tokens * model.hidden_size * model.item + ends + cast, 2 * layer
    return model.layers * layer + ends + cast, layer


def _scores(model: ModelSize, demand: Demand) -> int:
    return _UNFUSED * model.unfused_heads * demand.tokens * demand.block_tokens * model.item


def _loss(demand: Demand) -> int:
    """Logits of a chunk, what scoring takes, and the projection's gradient until it is added to the others."""
    model = demand.model
    item = 2 if demand.precision != "no" else model.item
    chunk, block = _chunk_rows(model.vocab_size, demand.launch.device)
    sides = 2 if demand.soft else 1
    size = sides * (min(chunk, demand.tokens) * item + _TEMPORARIES * min(block, demand.tokens) * 4) * model.vocab_size
    if model.projection_trained and (demand.micro_steps > 1 or model.item != 4 or not demand.heads):
        size += 4 * model.projection * max(1, demand.heads)
    if demand.precision != "no":  # one at a time is held in the type that products run in
        size += 2 * model.projection
    elif not model.projection_trained and demand.target is not None and demand.target.item < model.item:
        size += model.item * model.projection
    return size + (3 * demand.tokens * model.vocab_size * item if model.whole_logits else 0)


def _chunk_rows(vocab_size: int, device: str) -> tuple[int, int]:
    """Rows of a chunk and of a block, by the rule of `chunks.DrafterLogits`."""
    kind = "cuda" if device == "cuda" else "cpu"
    chunk = max(16, min(CHUNK_POSITIONS[kind], CHUNK_ELEMENTS[kind] // vocab_size))
    return chunk, max(1, BLOCK_ELEMENTS * torch.get_num_threads() // vocab_size) if kind == "cpu" else chunk


def _copied(model: Any, device: str | None) -> int:
    """Bytes of weights that `decode.lean` fuses, and on processors also transposes."""
    from ...decode.models.lean import LeanLlama

    if device is None or not LeanLlama.covers(model):
        return 0
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    named = model.named_parameters()
    weights = [p.numel() * p.element_size() for name, p in named if name.removesuffix(".weight").endswith(fused)]
    head = model.get_output_embeddings().weight
    return sum(weights) if device != "cpu" else 2 * sum(weights) + head.numel() * head.element_size()


def _is_linear(part: nn.Module) -> bool:
    weight = getattr(part, "weight", None)
    return (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D") and weight is not None


def _shape(part: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear map; GPT-2's is stored the other way round."""
    rows, columns = part.weight.shape
    return (rows, columns) if isinstance(part, nn.Linear) else (columns, rows)


def _is_plain(head: Any, config: Any) -> bool:
    scales = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in scales)
    return isinstance(head, nn.Linear) and head.bias is None and not scaled


def _is_fused(model: Any, config: Any) -> bool:
    """Whether attention keeps no scores. With dropout, processors have no such kernel."""
    kernel = getattr(config, "_attn_implementation", None) or "eager"
    dropout = max(getattr(config, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop", "dropout_rate"))
    return kernel != "eager" and not model.config.is_encoder_decoder and not dropout


def _activation(config: Any) -> str:
    names = ("activation_function", "hidden_act", "hidden_activation")
    return next((str(getattr(config, name)) for name in names if getattr(config, name, None)), "")


def _in_heap(parameters: list[Any]) -> int:
    sizes = (p.numel() * p.element_size() for p in parameters)
    return sum(size for size in sizes if size < _HEAP_TENSOR)
