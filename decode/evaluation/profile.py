"""Profiling of decoding steps: time of each phase, time of isolated drafting forwards, and FLOPs.

Shape letters: B batch, N nodes, T tokens, M new tokens, S cache slots, H heads, E head width.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..methods import Method
from ..models.base import LanguageModel, extend_by_path
from ..models.kv_cache import RowCache
from ..models.products.native import library_products
from ..proposers.draft_tree import DraftTree
from ..tree import Tree

_RUNS = 6  # runs of each forward in isolation; the median is used
PHASES = ("draft", "score", "verify", "commit", "host")


class FirstStep:
    """Profiler that records the time at which the first step starts, after the prefill."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before, self.at = before, math.inf

    def start(self) -> None:
        if self.at == math.inf:
            self._before()
            self.at = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Ignore the end of a phase."""


class StepProfile:
    """Profiler that records the seconds of each phase of each step.

    On CUDA, phases are timed with events, and the commit ends with the step's only synchronisation. `host` is the time
    between two steps plus, on CUDA, the time within a step during which the device was idle.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.steps: list[float] = []
        self.shares: list[float] = []
        """Share of each step's time spent in forwards of the models passed to `timing_forwards`."""
        self._ended: float | None = None
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._forwards: list[tuple[Any, Any]] | None = None  # start and end of each forward of the current step

    def start(self) -> None:
        self._started = self._last = time.perf_counter()
        self._between = self._started - self._ended if self._ended is not None else 0.0
        self._forwards = []
        if self._cuda:
            self._marks = [("start", self._event())]

    def mark(self, phase: str) -> None:
        """Record the end of a phase of the step."""
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
        """Return a context manager that also times the forwards of these models and heads (see `shares`)."""
        with ExitStack() as changes:
            for part in {id(part): part for part in parts}.values():
                for name in ("extend", "logits") if isinstance(part, LanguageModel) else ("forward",):
                    if (call := getattr(part, name, None)) is not None:
                        changes.enter_context(patch.object(part, name, self._timed(call)))
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

    def add(self, other: "StepProfile") -> None:
        self.steps += other.steps
        self.shares += other.shares
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    def summary(self) -> dict[str, float]:
        """Return the median microseconds of each phase and of the whole step (`step`)."""
        medians = {phase: 1e6 * statistics.median(series) for phase, series in self.seconds.items() if series}
        return medians | ({"step": 1e6 * statistics.median(self.steps)} if self.steps else {})


def time_in_turns(model: LanguageModel, calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Measure the seconds of each call in each round. Calls alternate, so that slow changes affect all equally.

    Each call runs once before it is timed, because other calls have replaced the contents of the processor's caches.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, series in zip(calls, seconds, strict=True):
            call()
            synchronise(model)
            start = time.perf_counter()
            call()
            synchronise(model)
            series.append(time.perf_counter() - start)
    return seconds


def synchronise(model: LanguageModel) -> None:
    """Wait until a model's device has finished all work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@torch.inference_mode()
def drafting_cost(target: LanguageModel, method: Method, nodes: float, context: int) -> tuple[float, int]:
    """Return the time of a step's drafting forwards relative to a one-token target forward, and their count.

    Forwards run in isolation after `context` committed tokens. `nodes` is the number of tree nodes in a step.
    """
    drafts = Counter[tuple[Any, int]]((model or target, count) for model, count in method.proposer.forwards(nodes))
    calls = {key: isolated_forward(target, *key, context) for key in ((target, 1), *drafts)}
    seconds = time_in_turns(target, list(calls.values()), _RUNS)
    median = {key: statistics.median(series) for key, series in zip(calls, seconds, strict=True)}
    drafting = sum(times * median[key] for key, times in drafts.items())
    return drafting / median[target, 1], drafts.total()


def isolated_forward(target: LanguageModel, part: Any, width: int, context: int) -> Callable[[], Any]:
    """Return a callable that runs a forward of a model after `context` tokens, or of heads on one hidden state."""
    if isinstance(part, LanguageModel):
        return raw_forward(part, width, context)
    return partial(part, torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device))


def raw_forward(
    model: LanguageModel, nodes: int, context: int, *, batch: int = 1, seed: int = 0, fill_cache: bool = False,
    tree: Tree | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Return a callable that runs a forward of `nodes` tokens after `context` committed tokens.

    Tokens are random, because equal tokens would select the same experts of a mixture-of-experts model. `fill_cache`
    runs the context first, because energy depends on the cached values, and a `RowCache` requires it. The paths of
    `tree` run as separate rows.
    """
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(model.vocab_size, (batch, context + nodes), generator=generator)
    with torch.inference_mode():
        _, cache = model.begin(ids_BT[:, :context].tolist(), context + nodes)
        ids_BT = ids_BT.to(model.device)
        if (fill_cache or isinstance(cache, RowCache)) and context:
            model.extend(cache, ids_BT[:, :context])
    cache.set_lengths([context] * batch)
    tokens_BN = ids_BT[:, context:]
    extend = partial(model.extend, cache) if tree is None else partial(extend_by_path, model, cache, tree=tree)
    return lambda: model.logits(extend(tokens_BN))


class StepFlops(NamedTuple):
    """FLOPs of one step for one row. A multiply-add counts as two FLOPs."""

    verification: float
    """FLOPs of the target's forward."""
    drafting: float
    """FLOPs of the drafting forwards."""

    def per_token(self, tokens: float) -> dict[str, float]:
        """Return FLOPs per token for steps that yield `tokens` tokens."""
        total = self.verification + self.drafting
        return {"verification": self.verification / tokens, "drafting": self.drafting / tokens, "total": total / tokens}


@torch.inference_mode()
def measured_flops(target: LanguageModel, method: Method, nodes: float, context: int) -> StepFlops:
    """Count the FLOPs of a step after `context` tokens with a tree of `nodes` nodes on average."""
    proposer = method.proposer
    tree = proposer.tree if isinstance(proposer, DraftTree) and proposer.by_path else None
    if tree is not None:
        verification = float(count_flops(raw_forward(target, tree.nodes, context, tree=tree)))
    else:
        low = max(1, math.floor(nodes))
        counts = [count_flops(raw_forward(target, count, context)) for count in (low, low + 1)]
        verification = counts[0] + max(0.0, nodes - low) * (counts[1] - counts[0])
    contexts: dict[tuple[Any, int], list[int]] = {}
    tokens_read = Counter[int]()
    for model, width in proposer.forwards(nodes):
        contexts.setdefault((model or target, width), []).append(context + tokens_read[id(model)])
        tokens_read[id(model)] += width
    drafting = 0
    for (model, width), lengths in contexts.items():  # FLOPs grow linearly with the context
        drafting += len(lengths) * count_flops(isolated_forward(target, model, width, round(statistics.mean(lengths))))
    return StepFlops(verification, drafting)


def count_flops(call: Callable[[], Any]) -> int:
    """Count the FLOPs of a call with PyTorch's counter, which is extended to fused CPU attention and packed weights."""
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
    """Return the FLOPs of the two matrix products of attention."""
    batch, heads, new, width = query_BHME
    return 2 * batch * heads * new * key_BHSE[2] * (width + value_BHSE[3])


def _packed_products(x_XI: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    """Return the FLOPs of a matrix product with a packed weight, whose shape is not available."""
    return 2 * math.prod(out_shape) * x_XI[-1]
