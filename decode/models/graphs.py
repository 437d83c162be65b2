"""CUDA graphs for forwards of few tokens. A graph is captured once per shape and replayed with a single launch.

A graph repeats exactly what was captured: the same addresses, shapes and host values. Therefore:

- Tokens, positions and the mask are read from buffers with fixed addresses (`_Shape`).
- Keys and values are written to slots given by a tensor (`IndexedCache`), in caches whose memory is reused.
- Attention reads a number of slots that grows in strides, and slots after a row's last token are masked. If the
  attention kernel finds the end of a row itself, one graph works for all lengths.

Shape letters: B batch, M new tokens, W columns of the bias, S cache slots, D hidden.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..tree import Tree
from .base import LanguageModel
from .kv_cache import IndexedCache, KVCache

Result = TypeVar("Result")

_MOST_FREE_CACHES = 4
_MANY = 1024
_MOST_READ = 64
"""Maximum number of tokens in a replayed chain. Each number of tokens requires its own graph."""
STRIDE = 256
"""Minimum increment of the number of cache slots that attention reads."""
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN plans per shape


class Capture(Protocol):
    """Interface for capturing and replaying functions on tensors with fixed addresses."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Run the function eagerly once, before it is captured."""

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Capture the function without running it, and return a callable that replays it.

        Every replay returns the same tensors with new content.
        """


class CudaGraphs:
    """Capture of CUDA graphs on a separate stream. Graphs share memory, so a replay overwrites earlier outputs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this empty graph keeps the memory pool alive
            self._first = self._captured(lambda: None)

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Run the function eagerly on the capture stream, since libraries must be initialised before a capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = run()
        current.wait_stream(self._stream)
        return output

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        outputs: list[Result] = []
        graph = self._captured(lambda: outputs.append(run()))

        def replay() -> Result:
            graph.replay()
            return outputs[0]

        return replay

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # Other threads, such as data loaders, may continue to use the device.
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph


class _Replayed:
    """Base class for functions that run eagerly in the first call and as a captured graph in later calls."""

    def __init__(self) -> None:
        self._warm = False
        self._replay: Callable[[], Any] | None = None

    def __call__(self, capture: Capture) -> Any:
        """Run or replay the function. Later calls overwrite the result."""
        if self._replay is None and self._warm:
            self._replay = capture.capture(self.run)
        self._warm = True
        return self._replay() if self._replay else capture.warm_up(self.run)

    def run(self) -> Any:
        raise NotImplementedError


class _Shape(_Replayed):
    """Forward pass of a fixed shape with buffers for its inputs.

    The attention bias has W columns: columns 1 to W - 2 are for the last W - 2 slots up to the last new token, column 0
    is for all earlier slots, which contain committed tokens, and column W - 1 is for all later slots.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, count: int, tree_width: int, end: int) -> None:
        """Create the buffers. The number W of bias columns is `tree_width`, or `count` + 2 if it is 0 (for a chain)."""
        super().__init__()
        self._model, self._cache, self._end = model, cache, end
        width = tree_width or count + 2
        batch, device = len(cache.lengths), cache.device
        self.tokens_BM = torch.zeros(batch, count, dtype=torch.int64, device=device)
        self.first_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.offset_BM = torch.arange(count, device=device).repeat(batch, 1)
        self.above_BMD: Tensor | None = None
        """Hidden states that an EAGLE drafter combines with the tokens."""
        if model.required_aux_layers is not None:
            self.above_BMD = torch.zeros(batch, count, model.hidden_size, dtype=model.dtype, device=device)
        self.bias_BMW = torch.zeros(batch, count, width, dtype=model.dtype, device=device)
        self.bias_BMW[:, :, -1] = -torch.inf
        if not tree_width:
            later_MM = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
            self.bias_BMW[:, :, 1:-1].masked_fill_(later_MM, -torch.inf)
        self._rows_B1 = torch.arange(batch, device=device)[:, None]
        self._place_M = torch.arange(count, device=device)
        self._column_S = torch.arange(end, device=device) + width - 2

    def set_tree(self, tree: Tree, start: int, stop: int) -> None:
        """Copy the depths and attention bias of the tree nodes start to stop - 1 to the buffers."""
        self.offset_BM.copy_(tree.depth_BN[:, start:stop] - start)
        root = self.bias_BMW.shape[2] - 1 - stop
        self.bias_BMW[:, :, :root] = 0
        self.bias_BMW[:, :, root:-1] = tree.bias(start, stop)

    def run(self) -> Tensor:
        """Run the forward pass on the buffers, and return the hidden states [B, M, D]."""
        first_B1 = self.first_B[:, None]
        slots_BM = first_B1 + self._place_M
        column_BS = (self._column_S - slots_BM[:, -1:]).clamp(0, self.bias_BMW.shape[2] - 1)
        mask_BMS = self.bias_BMW.gather(2, column_BS[:, None].expand(-1, len(self._place_M), -1))
        cache = IndexedCache(self._cache, slots_BM, self._rows_B1)
        positions_BM = first_B1 + self.offset_BM
        if self.above_BMD is not None:
            self._model.set_aux_input(self.above_BMD)
        with sdpa_kernel(_KERNELS):
            return self._model._forward(cache, self.tokens_BM, positions_BM, mask_BMS[:, None], 0, self._end)


class _Whole(_Replayed):
    """Function that runs several forwards, such as a whole draft, and is captured as one graph."""

    def __init__(self, cache: KVCache, tree: Tree, inputs: tuple[Tensor, ...], end: int) -> None:
        super().__init__()
        self.end = end
        self.first_B = torch.zeros(len(cache.lengths), dtype=torch.int64, device=cache.device)
        self.inputs = tuple(torch.empty_like(each) for each in inputs)
        self.work: Callable[[], Any] | None = None
        """Function to run. It is reset after each run, since it may refer to a cache that will be reused."""
        self.kept: list[Any] = [tree]
        """Objects that own memory used by the graph."""

    def run(self) -> Any:
        assert self.work is not None
        return self.work()


@dataclass(eq=False, slots=True)
class _Slab:
    """Reusable memory of a cache, with its captured graphs in order of last use."""

    cache: KVCache
    shapes: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)


class GraphedModel(LanguageModel):
    """Wrapper that replays forward passes of few tokens on one CUDA device as CUDA graphs.

    The first forward of each shape (batch, new tokens, tree width, number of slots) runs eagerly, and the second is
    captured. The same applies to whole drafts. Prompts, inputs of more than `max_tokens` new tokens, and calls inside a
    `TorchDispatchMode` always run eagerly. Weights may change in place but must not move. A model must not be used by
    several threads or streams concurrently. The memory of a cache is reused with its graphs, of which at most
    `max_graphs` are kept. Attention reads a number of slots that grows by at least `stride`, a power of two.
    """

    def __init__(
        self,
        model: LanguageModel,
        capture: Capture | None = None,
        *,
        max_tokens: int = 256,
        max_graphs: int = 64,
        stride: int = STRIDE,
    ) -> None:
        self.model, self.config, self._capture = model, model.config, capture or CudaGraphs(model.device)
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.max_positions, self.layers, self.states = model.max_positions, model.layers, model.states
        self.aux_layers, self.supports_any_length = model.aux_layers, model.supports_any_length
        self.device, self.dtype = model.device, model.dtype
        self.kv_heads, self.key_width, self.value_width = model.kv_heads, model.key_width, model.value_width
        self._max_tokens, self._max_graphs, self._stride = max_tokens, max_graphs, stride
        self.required_aux_layers = model.required_aux_layers
        self._above_BMD: Tensor | None = None
        self._inside: _Whole | None = None  # draft that is being run or captured
        self._free: list[_Slab] = []
        self._slabs: weakref.WeakKeyDictionary[KVCache, _Slab] = weakref.WeakKeyDictionary()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache that reuses the memory and graphs of a released cache if possible."""
        fitting = [slab for slab in self._free if len(slab.cache.lengths) == batch and slab.cache.capacity >= capacity]
        if fitting:
            slab = min(fitting, key=lambda slab: slab.cache.capacity)
            self._free.remove(slab)
        else:
            del self._free[: 1 - _MOST_FREE_CACHES]
            with torch.inference_mode(False):  # prompts may be processed outside inference mode
                slab = _Slab(self.model.new_cache(batch, self._slots(capacity)))
        cache = slab.cache.emptied()
        self._slabs[cache] = slab
        weakref.finalize(cache, self._free.append, slab).atexit = False
        return cache

    def _slots(self, capacity: int) -> int:
        """Return the number of slots for a new cache, with spare slots if one graph works for all lengths."""
        least = round_up(capacity, self._stride)
        if not self.supports_any_length:
            return least
        most = round_up(self.max_positions, self._stride)
        return max(least, min(most, max(_MANY, 1 << (capacity - 1).bit_length())))

    def extend(
        self, cache: KVCache, tokens_BM: Tensor, tree: Tree | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Run `LanguageModel.extend` as a CUDA graph if possible."""
        count, slab = tokens_BM.shape[1], self._slabs.get(cache)
        prompt = tree is None and not any(cache.lengths)
        above_BMD, self._above_BMD = self._above_BMD, None
        whole = self._inside
        most = self._max_tokens if tree is not None else min(self._max_tokens, _MOST_READ)
        if slab is None or prompt or count > most or (is_in_torch_dispatch_mode() and whole is None):
            if above_BMD is not None:
                self.model.set_aux_input(above_BMD)
            return self.model.extend(cache, tokens_BM, tree, start, stop)
        stop = start + count if stop is None else stop
        assert stop - start == count
        cache.check_capacity(stop)
        if tree is not None and tree.is_chain:
            tree = None
        # The width is a power of two, so that the levels of a tree share a shape.
        width = 0 if tree is None else max(16, 1 << (stop + 1).bit_length())
        with torch.inference_mode():  # buffers from inference mode can only be written in that mode
            shape = self._shape(slab, count, width, self._end(cache, stop) if whole is None else whole.end)
            shape.tokens_BM.copy_(tokens_BM)
            if above_BMD is not None and shape.above_BMD is not None:
                shape.above_BMD.copy_(above_BMD)
            if tree is not None:
                shape.set_tree(tree, start, stop)
            if whole is not None:
                whole.kept.append(shape)
                torch.add(whole.first_B, start, out=shape.first_B)
                return shape.run()
            _set_first(shape.first_B, cache, start)
            hidden_BMD: Tensor = shape(self._capture)
            return hidden_BMD.clone()

    def set_aux_input(self, above_BMD: Tensor) -> None:
        self._above_BMD = above_BMD

    def fuse_aux(self, aux_BMG: Tensor) -> Tensor:
        return self.model.fuse_aux(aux_BMG)

    def run_captured(
        self, cache: KVCache, tree: Tree, key: Hashable, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run `LanguageModel.run_captured` as one CUDA graph if possible."""
        slab = self._slabs.get(cache)
        if slab is None or tree.nodes > self._max_tokens or is_in_torch_dispatch_mode():
            return run(*inputs)
        with torch.inference_mode():
            end, sizes = self._end(cache, tree.nodes), tuple((each.shape, each.dtype) for each in inputs)
            name = key, tree.nodes, sizes, end
            whole: _Whole = self._kept(slab, name, lambda: _Whole(slab.cache, tree, inputs, end))
            for buffer, value in zip(whole.inputs, inputs, strict=True):
                buffer.copy_(value)
            _set_first(whole.first_B, cache, 0)
            self._inside, whole.work = whole, lambda: run(*whole.inputs)
            try:
                return tuple(output.clone() for output in whole(self._capture))
            finally:
                self._inside = whole.work = None

    def _end(self, cache: KVCache, nodes: int) -> int:
        """Return the number of cache slots that attention reads."""
        return cache.capacity if self.supports_any_length else round_up(max(cache.lengths) + nodes, self._stride)

    def _shape(self, slab: _Slab, count: int, width: int, end: int) -> _Shape:
        shape: _Shape = self._kept(slab, (count, width, end), lambda: _Shape(self.model, slab.cache, count, width, end))
        return shape

    def _kept(self, slab: _Slab, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the slab's graph for `key`, or create it with `make`. The least recently used graphs are evicted."""
        if key in slab.shapes:
            slab.shapes.move_to_end(key)
        else:
            while len(slab.shapes) >= self._max_graphs:
                slab.shapes.popitem(last=False)
            slab.shapes[key] = make()
        return slab.shapes[key]

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        return self.model._forward(cache, tokens_BM, positions_BM, mask_B1MS, start, end)

    @property
    def is_async(self) -> bool:
        return True  # replays do not read values on the host

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Return logits [..., V] without a graph, which would not speed up a single matrix product."""
        return self.model.logits(hidden_XD)

    @property
    def draft_vocab_size(self) -> int:
        return self.model.draft_vocab_size

    def draft_logits(self, hidden_XD: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.model.draft_logits(hidden_XD)


def _set_first(first_B: Tensor, cache: KVCache, start: int) -> None:
    """Write the cache slot of each row's tree node `start` to `first_B`."""
    if cache.uniform:
        first_B.fill_(cache.lengths[0] + start)
    else:
        torch.add(cache.lengths_B, start, out=first_B)


def round_up(slots: int, stride: int) -> int:
    """Round a number of slots up to a multiple of `stride`, or of a larger step for many slots.

    The larger step is a quarter of the largest power of two that is at most `slots`. It is used if it exceeds `stride`.
    """
    stride = max(stride, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // stride) * stride
