"""Time of a step by phase, time of a proposal's forwards in isolation, and FLOPs of forwards and steps.

Shape letters: B batch, N nodes, M new tokens, S slots that they attend to, D hidden, H heads, E head width,
V vocabulary.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...checkpoints.heads.files import PredictionHeads
from ..methods import Method
from ..models.base import LanguageModel
from ..models.products.native import library_products

_RUNS = 6  # of each forward in isolation, all in turn; medians are taken
PHASES = ("draft", "score", "verify", "commit", "host")


class FirstStep:
    """Profile that records when the first step begins, after the prompt has been read."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before, self.at = before, math.inf

    def start(self) -> None:
        """Begin a step."""
        if self.at == math.inf:
            self._before()
            self.at = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End a phase of the step."""


class StepProfile:
    """Profile of the seconds of each phase of each step.

    On CUDA the phases up to the verdict are timed with events; the commit ends in the step's one synchronisation.
    `host` is the time between two steps and, on CUDA, the part of a step in which the device was idle.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.steps: list[float] = []
        self.shares: list[float] = []
        """Share of each step's time in forwards of the parts given to `timing_forwards`."""
        self._ended: float | None = None
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._forwards: list[tuple[Any, Any]] | None = None  # while a step runs: when each began and ended

    def start(self) -> None:
        """Begin a step."""
        self._started = self._last = time.perf_counter()
        self._between = self._started - self._ended if self._ended is not None else 0.0
        self._forwards = []
        if self._cuda:
            self._marks = [("start", self._event())]

    def mark(self, phase: str) -> None:
        """End a phase of the step."""
        now = time.perf_counter()
        if self._cuda:
            self._marks.append((phase, self._event()))
        else:
            self.seconds[phase].append(now - self._last)
        self._last = now
        if phase == "commit":
            self._finish(now)

    @contextmanager
    def timing_forwards(self, *parts: Any) -> Iterator[None]:
        """Time every forward of these models and heads within a step too: see `shares`."""
        with ExitStack() as changes:
            for part in {id(part): part for part in parts}.values():
                for name in ("extend", "logits") if isinstance(part, LanguageModel) else ("forward",):
                    if (call := getattr(part, name, None)) is not None:
                        changes.enter_context(_replaced(part, name, self._timed(call)))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = call(*args, **kwargs)
            if self._forwards is not None:
                self._forwards.append((start, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        return self._event() if self._cuda else time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish(self, now: float) -> None:
        self._ended = now
        self.steps.append(now - self._started + self._between)
        idle = self._between
        if self._cuda:
            self._marks[-1][1].synchronize()
            busy = 0.0
            for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
                seconds = before.elapsed_time(after) / 1e3
                self.seconds[phase].append(seconds)
                busy += seconds
            idle += max(0.0, now - self._started - busy)
        self.seconds["host"].append(idle)
        spans, self._forwards = self._forwards or [], None
        forwards = sum(start.elapsed_time(end) / 1e3 if self._cuda else end - start for start, end in spans)
        self.shares.append(forwards / self.steps[-1] if self.steps[-1] else 1.0)

    def add(self, other: StepProfile) -> None:
        """Append the steps of another profile."""
        self.steps += other.steps
        self.shares += other.shares
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    def summary(self) -> dict[str, float]:
        """Return median microseconds of a step by phase and of the whole step (`step`)."""
        medians = {phase: 1e6 * statistics.median(series) for phase, series in self.seconds.items() if series}
        return medians | ({"step": 1e6 * statistics.median(self.steps)} if self.steps else {})


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of the object itself."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


def time_call(model: LanguageModel, call: Callable[[], object]) -> float:
    """Return the seconds of a call on a model's device."""
    synchronise(model)
    start = time.perf_counter()
    call()
    synchronise(model)
    return time.perf_counter() - start


def synchronise(model: LanguageModel) -> None:
    """Wait for a model's device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@torch.inference_mode()
def drafting_cost(target: LanguageModel, method: Method, nodes: float, context: int) -> tuple[float, int]:
    """Return the time of a proposal's forwards over that of a one-token forward of the target, and their number.

    Forwards run in isolation after `context` committed tokens; the target scores `nodes` per iteration.
    """
    drafts = Counter[tuple[Any, int]]((model or target, count) for model, count in method.proposer.forwards(nodes))
    calls = {each: isolated_forward(target, *each, context) for each in ((target, 1), *drafts)}
    seconds: dict[Any, list[float]] = {each: [] for each in calls}
    for _ in range(_RUNS):
        for each, call in calls.items():
            call()  # Warms up after other forwards.
            seconds[each].append(time_call(target, call))
    median = {each: statistics.median(series) for each, series in seconds.items()}
    drafting = sum(times * median[each] for each, times in drafts.items())
    return drafting / median[target, 1], drafts.total()


def isolated_forward(target: LanguageModel, part: Any, width: int, context: int) -> Callable[[], Any]:
    """Return a forward of a model after `context` tokens, or of heads on one state, to be timed."""
    if isinstance(part, LanguageModel):
        return raw_forward(part, width, context)
    return partial(part, torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device))


def raw_forward(model: LanguageModel, nodes: int, context: int) -> Callable[[], Tensor]:
    """Return a forward of `nodes` tokens after `context` committed ones, to be timed.

    Tokens differ, since equal ones would use the same experts of a mixture.
    """
    ids = torch.randint(model.vocab_size, (1, context + nodes), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _, cache = model.begin(ids[:, :context].tolist(), context + nodes)
    cache.set_lengths([context])
    tokens_BN = ids[:, context:].to(model.device)
    return lambda: model.logits(model.extend(cache, tokens_BN))


# --- FLOPs of forwards by their shapes --------------------------------------------------------------------------------
#
# A multiplication and an addition are two FLOPs, as in torch's counter. Matrix products with weights are counted, and
# those of attention, of each new token with every slot, masked or not.

_GATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3")
FAMILIES = (*_GATED, "opt", "gpt_neox", "gpt2", "t5", "mt5", "umt5")
"""Model types whose FLOPs follow from their configuration."""


class Flops(NamedTuple):
    """FLOPs of a forward."""

    layers: float
    """FLOPs of attention and feed-forward layers; of prediction heads all."""
    head: float = 0.0
    """FLOPs of the vocabulary projection."""

    @property
    def total(self) -> float:
        return self.layers + self.head


def forward_flops(
    config: Any, new_tokens: float, context_tokens: float, *, rows: int = 1, source_tokens: float = 0
) -> Flops:
    """Return FLOPs of a decoder's forward of new tokens after cached ones, for a configuration of one of `FAMILIES`.

    In an encoder-decoder each new token attends to `source_tokens`; the encoder's forward is not counted.
    """
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    hidden, heads = text.hidden_size, text.num_attention_heads
    layers = text.num_decoder_layers if text.is_encoder_decoder else text.num_hidden_layers
    width = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    widths = (getattr(text, name, None) for name in ("intermediate_size", "ffn_dim", "d_ff", "n_inner"))
    inner = next(filter(None, widths), 4 * hidden)
    gated = text.model_type in _GATED or str(getattr(text, "feed_forward_proj", "")).startswith("gated")
    embedded = getattr(text, "word_embed_proj_dim", hidden)
    tokens = rows * new_tokens
    pairs = tokens * (context_tokens + new_tokens)
    mixed = 2 * heads + 2 * kv_heads
    if text.is_encoder_decoder:  # each layer also attends to the source, whose keys and values are computed once
        pairs += tokens * source_tokens
        mixed += 2 * heads
    projections = layers * tokens * hidden * width * mixed
    if embedded != hidden:  # into the layers' width, and back
        projections += 2 * tokens * embedded * hidden
    attention, mlp = 2 * layers * pairs * heads * width, layers * tokens * hidden * inner * (3 if gated else 2)
    return Flops(2 * (attention + mlp + projections), 2 * tokens * embedded * text.vocab_size)


def heads_flops(heads: PredictionHeads, rows: float = 1) -> float:
    """Return FLOPs of the residual blocks and projections of prediction heads on `rows` hidden states."""
    width, blocks = heads.hidden_size, heads.num_heads * heads.num_layers * heads.hidden_size**2
    tokens = heads.vocab_size if heads.proposed is None else len(heads.proposed)
    each = heads.rank * (width + tokens) if heads.projection_kind == "low-rank" else width * tokens
    return 2 * rows * blocks + 2 * rows * heads.num_heads * each


def part_flops(part: Any, new_tokens: float, context_tokens: float, *, rows: int = 1) -> Flops | None:
    """Return FLOPs of a forward of a scorer or of prediction heads; None if they do not follow from shapes.

    The source and the decoded tokens of an encoder-decoder both count as `context_tokens` long.
    """
    if isinstance(part, PredictionHeads):
        return Flops(heads_flops(part, rows))
    if not isinstance(part, LanguageModel) or part.config is None or part.config.model_type not in FAMILIES:
        return None
    source = context_tokens if part.config.is_encoder_decoder else 0
    found = forward_flops(part.config, new_tokens, context_tokens, rows=rows, source_tokens=source)
    head = found.head if part.head_weights is None else 2 * rows * new_tokens * part.head_weights
    return Flops(found.layers, head)


class StepFlops(NamedTuple):
    """FLOPs of one step for one row."""

    verification: float
    """FLOPs of the target's forward."""
    drafting: float
    """FLOPs of the proposal's forwards."""
    checked: float | None = None
    """FLOPs by shapes over those of torch's counter; None if not compared."""

    def per_token(self, kept: float) -> dict[str, float]:
        """Return FLOPs per token for steps that keep `kept` tokens; `checked` is absent if FLOPs are the counter's."""
        found = {"verification": self.verification / kept, "drafting": self.drafting / kept}
        found["total"] = (self.verification + self.drafting) / kept
        return found if self.checked is None else found | {"checked": self.checked}


@torch.inference_mode()
def measured_flops(target: LanguageModel, method: Method, nodes: float, context: int) -> StepFlops:
    """Return `step_flops` checked by torch's counter, or the counter's own if they do not follow from shapes."""
    scored = (target, max(1, round(nodes)))
    forwards = Counter([scored, *((model or target, count) for model, count in method.proposer.forwards(nodes))])
    counted = {each: count_flops(isolated_forward(target, *each, context)) for each in forwards}
    total = sum(times * counted[each] for each, times in forwards.items())
    known = step_flops(target, method, nodes, context)
    if known is None:
        return StepFlops(counted[scored], total - counted[scored])
    by_shapes = [(times, part_flops(*each, context)) for each, times in forwards.items()]
    shaped = sum(times * part.total for times, part in by_shapes if part is not None)
    return known._replace(checked=shaped / total if total else None)


def step_flops(target: LanguageModel, method: Method, nodes: float, context: int) -> StepFlops | None:
    """Return FLOPs of the target's and the proposal's forwards of a step; None if they do not follow from shapes."""
    proposer, drafting, before = method.proposer, 0.0, Counter[int]()
    scored = part_flops(target, nodes, context)
    if scored is None:
        return None
    verification, tree = scored.total, getattr(proposer, "tree", None)
    if getattr(proposer, "by_path", False) and tree is not None and not tree.is_chain:
        # Each path is a row of its own; the vocabulary projection is done once a node.
        leaves = int((tree.depth_BN[0] == tree.max_depth).sum())
        paths = part_flops(target, tree.max_depth + 1, context, rows=leaves)
        assert paths is not None
        verification = paths.layers + scored.head
    for model, count in proposer.forwards(nodes):
        drafted = part_flops(model or target, count, context + before[id(model)])
        if drafted is None:
            return None
        drafting += drafted.total
        before[id(model)] += count
    return StepFlops(verification, drafting)


def count_flops(call: Callable[[], Any]) -> int:
    """Return FLOPs of a call by torch's counter, with fused attention on the CPU and packed weights."""
    unknown = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_products,
        torch.ops.mkldnn._linear_pointwise: _packed_products,
    }
    with library_products(), FlopCounterMode(display=False, custom_mapping=unknown) as counter:
        call()
    return int(counter.get_total_flops())


def _attention_products(
    query_BHME: Sequence[int], key_BHSE: Sequence[int], value_BHSE: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return FLOPs of queries with keys and of weights with values."""
    batch, heads, new, width = query_BHME
    return 2 * batch * heads * new * key_BHSE[2] * (width + value_BHSE[3])


def _packed_products(x_XI: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    """Return FLOPs of a product with a packed weight, which has no shape."""
    return 2 * math.prod(out_shape) * x_XI[-1]
