"""Key-value cache in preallocated memory.

Shape letters: L layers, B batch, H key/value heads, S cache slots, M new tokens, K depth, E head width.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device. Copies to a GPU are asynchronous and use pinned memory."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def to_host(*tensors: Tensor | None) -> list[Any]:
    """Convert integer, bool and float32 tensors to lists, with a single device synchronisation. None stays None."""
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].device.type == "cpu":
        return [None if tensor is None else tensor.tolist() for tensor in tensors]
    bits = [tensor.view(torch.int32) if tensor.is_floating_point() else tensor for tensor in present]
    packed = torch.cat([tensor.flatten() for tensor in bits]).cpu().split([tensor.numel() for tensor in present])
    parts = (
        (part.int().view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape).tolist()
        for part, tensor in zip(packed, present, strict=True)
    )
    return [None if tensor is None else next(parts) for tensor in tensors]


class KVCache:
    """Key-value cache. Slots 0 to length - 1 of a row contain committed tokens, and later slots draft tokens.

    Rows may have different lengths. Accepted draft tokens are moved to the front, and rejected ones are overwritten.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        """Create an empty cache. `layer_devices` gives the device of each layer if they differ."""
        # One stack per group of layers on a device, so that one operation moves accepted nodes in all its layers.
        self._stacks: list[tuple[Tensor, Tensor]] = []
        for layer_device, group in itertools.groupby(layer_devices or [device] * layers):
            shape = (len(list(group)), batch, heads, capacity)
            # Slots are initialised with zeros, because masked slots have attention weight 0, and 0 x NaN is NaN.
            keys_LBHSE = torch.zeros(*shape, key_width, dtype=dtype, device=layer_device)
            self._stacks.append((keys_LBHSE, torch.zeros(*shape, value_width, dtype=dtype, device=layer_device)))
        self._list_layers()
        self.capacity = capacity
        self.device = device
        self._set([0] * batch)

    def _list_layers(self) -> None:
        # Indexing a list of per-layer views costs less than slicing the stacked tensor in every layer.
        self.keys = [key_BHSE for keys_LBHSE, _ in self._stacks for key_BHSE in keys_LBHSE]
        self.values = [value_BHSE for _, values_LBHSE in self._stacks for value_BHSE in values_LBHSE]

    def emptied(self) -> "KVCache":
        """Set the memory of this cache to zero, and return an empty cache that uses the same memory."""
        for content_LBHSE in itertools.chain.from_iterable(self._stacks):
            content_LBHSE.zero_()
        again = copy.copy(self)
        again._set([0] * len(self.lengths))
        return again

    def rows(self, start: int, stop: int, lengths: list[int]) -> "KVCache":
        """Return a cache for the rows start to stop - 1, which shares memory but has its own lengths."""
        part = copy.copy(self)
        part._stacks = [(keys[:, start:stop], values[:, start:stop]) for keys, values in self._stacks]
        part._list_layers()
        part._set(lengths)
        return part

    def grown(self, capacity: int) -> "KVCache":
        """Return a larger copy with `capacity` slots."""
        more = copy.copy(self)
        missing = (0, 0, 0, capacity - self.capacity)
        more._stacks = [(F.pad(keys, missing), F.pad(values, missing)) for keys, values in self._stacks]
        more.capacity = capacity
        more._list_layers()
        return more

    def swap_rows(self, first: int, second: int) -> None:
        for content_LBHSE in itertools.chain.from_iterable(self._stacks):
            content_LBHSE[:, [first, second]] = content_LBHSE[:, [second, first]]

    @property
    def uniform(self) -> bool:
        """Return whether all rows have the same length, so that slices can be used instead of indices."""
        return len(self.lengths) == 1 or len(set(self.lengths)) == 1

    def set_lengths(self, lengths: list[int]) -> None:
        """Set the number of committed tokens of each row."""
        if lengths != self.lengths:
            self._set(list(lengths))

    def _set(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._lengths_B: Tensor | None = None
        self._slots_by_key: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def lengths_B(self) -> Tensor:
        """Return the lengths as an int64 tensor on the cache's device. The tensor is created on first use."""
        if self._lengths_B is None:
            self._lengths_B = to_device(torch.tensor(self.lengths, dtype=torch.int64), self.device)
        return self._lengths_B

    def _slots(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return row indices [B, 1] and slot indices [B, count] from `length + start` on, shared by all layers."""
        key = (start, count, device)
        if key not in self._slots_by_key:
            rows_B1 = torch.arange(len(self.lengths), device=device)[:, None]
            slots_BM = self.lengths_B.to(device)[:, None] + torch.arange(start, start + count, device=device)
            self._slots_by_key[key] = rows_B1, slots_BM
        return self._slots_by_key[key]

    def write(self, layer: int, key_BHME: Tensor, value_BHME: Tensor, start: int) -> None:
        """Write the keys and values of M new tokens per row to the slots from `length + start` on."""
        count = key_BHME.shape[2]
        if self.uniform:
            first = self.lengths[0] + start
            self.keys[layer][:, :, first : first + count] = key_BHME
            self.values[layer][:, :, first : first + count] = value_BHME
        else:
            rows_B1, slots_BM = self._slots(start, count, key_BHME.device)
            self.keys[layer][rows_B1, :, slots_BM] = key_BHME.transpose(1, 2)
            self.values[layer][rows_B1, :, slots_BM] = value_BHME.transpose(1, 2)

    def view(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values in the first `end` slots, [B, H, end, E]."""
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def check_capacity(self, nodes: int) -> None:
        """Raise ValueError if `nodes` more tokens do not fit into the longest row."""
        if max(self.lengths) + nodes > self.capacity:
            raise ValueError(
                f"the key/value cache has {self.capacity} slots, but {max(self.lengths) + nodes} are needed"
            )

    def move_to_front(self, path_BK: Tensor) -> None:
        """Move the keys and values of each row's accepted path to the slots after its root.

        Node `path_BK[b, i]` moves to the slot of node i + 1. It must be at least i + 1, and exactly i + 1 after the
        end of the accepted path.
        """
        depth = path_BK.shape[1]
        for keys_LBHSE, values_LBHSE in self._stacks:
            nodes_BK = path_BK.to(keys_LBHSE.device)
            if len(self.lengths) == 1:
                first = self.lengths[0]
                source_K = nodes_BK[0] + first
                keys_LBHSE[:, :, :, first + 1 : first + 1 + depth] = keys_LBHSE.index_select(3, source_K)
                values_LBHSE[:, :, :, first + 1 : first + 1 + depth] = values_LBHSE.index_select(3, source_K)
            else:
                rows_B1, slots_BK = self._slots(1, depth, nodes_BK.device)
                source_BK = nodes_BK + self.lengths_B.to(nodes_BK.device)[:, None]
                keys_LBHSE[:, rows_B1, :, slots_BK] = keys_LBHSE[:, rows_B1, :, source_BK]
                values_LBHSE[:, rows_B1, :, slots_BK] = values_LBHSE[:, rows_B1, :, source_BK]


class IndexedCache(KVCache):
    """Cache whose write positions are a tensor, so that a captured forward does not depend on host values."""

    def __init__(self, cache: KVCache, slots_BM: Tensor, rows_B1: Tensor) -> None:
        """Share the memory of `cache`. New tokens of row `rows_B1[b]` are written to the slots `slots_BM[b]`."""
        self.__dict__.update(vars(cache))
        self._rows_B1, self.slots_BM = rows_B1, slots_BM

    def write(self, layer: int, key_BHME: Tensor, value_BHME: Tensor, start: int) -> None:
        self.keys[layer][self._rows_B1, :, self.slots_BM] = key_BHME.transpose(1, 2)
        self.values[layer][self._rows_B1, :, self.slots_BM] = value_BHME.transpose(1, 2)


class SlotCache(Cache):
    """Adapter that lets the attention layers of transformers read and write a `KVCache`."""

    def __init__(self, cache: KVCache, start: int, end: int) -> None:
        super().__init__(layers=[])
        self._cache, self._start, self._end = cache, start, end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._cache.write(layer_idx, key_states, value_states, self._start)
        return self._cache.view(layer_idx, self._end)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._cache.lengths) + self._start


_REPLAYED = 32
"""Number of tokens after a snapshot above which a new snapshot is taken."""
_SNAPSHOTS = 2
"""Number of snapshots per row. A drafter may read tokens of its last two steps again, if rows differ in length."""


class RowState:
    """Cache of transformers for one row, which can return to any earlier number of tokens.

    Layers that hold recurrent states or sliding windows cannot be cropped. They are copied before a draft, and the
    tokens after the copy are run again when draft tokens have been rejected.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._ids = config, list[int]()
        self._cache: Any = DynamicCache(config=config)
        self._snapshots: list[tuple[int, Any]] = []

    def run(self, ids: list[int], start: int, length: int, forward: Callable[[list[int], Any, int], Tensor]) -> Tensor:
        """Run tokens after the first `start` tokens, of which `length` are committed, and return their states [M, D].

        `forward(ids, cache, count)` returns the states of tokens after the `count` tokens of a cache, and adds them.
        """
        assert start <= len(self._ids), "tokens before the first new one were not run"
        first = self._go_back(start)
        del self._ids[start:]
        if start - first > _REPLAYED and start == length:
            forward(self._ids[first:], self._cache, first)
            first = start
        if first == start == length and not self._croppable:
            self._snapshots = [*self._snapshots, (start, _copy(self._cache))][-_SNAPSHOTS:]
        states_MD = forward([*self._ids[first:], *ids], self._cache, first)[start - first :]
        self._ids += ids
        return states_MD

    def _go_back(self, start: int) -> int:
        """Set the cache to the first `start` tokens or fewer, and return their number."""
        if (read := len(self._ids)) <= start:
            return read
        if self._croppable:
            self._cache.crop(start - read)
            return start
        self._snapshots = [each for each in self._snapshots if each[0] <= start]
        first, saved = self._snapshots[-1] if self._snapshots else (0, DynamicCache(config=self._config))
        self._cache = _copy(saved)
        return first

    @property
    def _croppable(self) -> bool:
        croppable = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer")
        return all(type(layer).__name__ in croppable for layer in self._cache.layers)


def _copy(cache: Any) -> Any:
    """Copy a cache of transformers. Keys and values are shared, since layers replace these tensors."""
    shared = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in shared if tensor is not None})


class RowCache(KVCache):
    """Cache that holds a `RowState` for each row, for models whose keys and values do not fit into common slots."""

    def __init__(self, batch: int, capacity: int, device: torch.device, config: Any) -> None:
        super().__init__(0, batch, 0, capacity, 0, 0, torch.float32, device)
        self.states = [RowState(config) for _ in range(batch)]

    def rows(self, start: int, stop: int, lengths: list[int]) -> "RowCache":
        part: RowCache = super().rows(start, stop, lengths)  # type: ignore[assignment]
        part.states = self.states[start:stop]
        return part

    def swap_rows(self, first: int, second: int) -> None:
        self.states[first], self.states[second] = self.states[second], self.states[first]
