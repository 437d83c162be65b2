"""Keys and values of committed tokens, in memory that is allocated once and never copied as a whole.

Shape letters: L layers, B batch, H key/value heads, S cache slots, M new tokens, K depth, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Slots 0..length-1 of a row hold its committed tokens; a proposal's nodes are written behind them.

    Rows have lengths of their own. A rejected node costs nothing: its slot is written again. An accepted node is moved
    to the front in place.
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
    ) -> None:
        # Zeros, not empty: a masked slot is multiplied by weight 0, and 0 x NaN would be NaN.
        self.keys_LBHSE = torch.zeros(layers, batch, heads, capacity, key_width, dtype=dtype, device=device)
        self.values_LBHSE = torch.zeros(layers, batch, heads, capacity, value_width, dtype=dtype, device=device)
        # Indexing a list of per-layer views costs less than slicing the stacked tensor in every layer.
        self.keys = list(self.keys_LBHSE)
        self.values = list(self.values_LBHSE)
        self.capacity = capacity
        self.device = device
        self.lengths = [0] * batch
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self._rows_B1 = torch.arange(batch, device=device)[:, None]

    @property
    def uniform(self) -> bool:
        """Whether all rows have one length, so that plain slices serve instead of indices."""
        return len(self.lengths) == 1 or len(set(self.lengths)) == 1

    def set_lengths(self, lengths: list[int]) -> None:
        if lengths != self.lengths:
            self.lengths = list(lengths)
            self.lengths_B = torch.tensor(lengths, dtype=torch.int64, device=self.device)

    def write(self, layer: int, key_BHME: Tensor, value_BHME: Tensor, start: int) -> None:
        """Store M new tokens of every row at slots `length + start` and on."""
        count = key_BHME.shape[2]
        if self.uniform:
            first = self.lengths[0] + start
            self.keys[layer][:, :, first : first + count] = key_BHME
            self.values[layer][:, :, first : first + count] = value_BHME
        else:
            slots_BM = self.lengths_B[:, None] + torch.arange(start, start + count, device=self.device)
            self.keys[layer][self._rows_B1, :, slots_BM] = key_BHME.transpose(1, 2)
            self.values[layer][self._rows_B1, :, slots_BM] = value_BHME.transpose(1, 2)

    def view(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` slots, [B, H, end, E], without a copy."""
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def check_room(self, nodes: int) -> None:
        """Raises ValueError where `nodes` more tokens do not fit behind the longest row."""
        if max(self.lengths) + nodes > self.capacity:
            raise ValueError(
                f"the key/value cache has {self.capacity} slots; {max(self.lengths)} are taken, {nodes} more are needed"
            )

    def move_to_front(self, path_BK: Tensor) -> None:
        """Put node `path[b, i]` of each row where node i + 1 stands, for all layers at once.

        Args:
            path_BK: [B, K] node indices, at least i + 1 in column i; a column that is not kept names itself (i + 1).
        """
        depth = path_BK.shape[1]
        if self.uniform and len(self.lengths) == 1:
            first = self.lengths[0]
            source_K = path_BK[0] + first
            self.keys_LBHSE[:, :, :, first + 1 : first + 1 + depth] = self.keys_LBHSE.index_select(3, source_K)
            self.values_LBHSE[:, :, :, first + 1 : first + 1 + depth] = self.values_LBHSE.index_select(3, source_K)
            return
        source_BK = path_BK + self.lengths_B[:, None]
        slots_BK = self.lengths_B[:, None] + torch.arange(1, depth + 1, device=self.device)
        self.keys_LBHSE[:, self._rows_B1, :, slots_BK] = self.keys_LBHSE[:, self._rows_B1, :, source_BK]
        self.values_LBHSE[:, self._rows_B1, :, slots_BK] = self.values_LBHSE[:, self._rows_B1, :, source_BK]
