"""A target's hidden states on disk, for heads to learn from: a `row_cache`.

Its files hold `hidden` [rows, D] in bfloat16, float16 or float32; `hidden.json` describes them.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, D hidden of the target, of several layers
side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...data.blocks.packing import Batch
from ...decode.models.final_norm import layers_in
from ..forward.packed import PackedForward
from .row_cache import Column, RowCache, Source, look_up

REACH = 16
"""Head k, counted from 0, learns the token k + 2 places ahead: there are rows for up to 15 heads."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class HiddenSource(Source):
    """Hidden states as `PackedForward` names them, kept in `dtype`, of a target whose weights are of `target_dtype`;
    see `Source`. Those of inner layers, to which attention goes back, are kept of every token."""

    states: str = "after-norm"
    dtype: str = "bfloat16"
    target_dtype: str = "auto"

    manifest: ClassVar[str] = "hidden.json"
    size_name: ClassVar[str] = "hidden_size"

    @property
    def reach(self) -> int:  # type: ignore[override]
        return 0 if layers_in(self.states) else REACH

    def columns(self, size: int) -> dict[str, Column]:
        """`hidden`, of `size` dimensions."""
        return {"hidden": Column((size,), DTYPES[self.dtype])}


class HiddenCache(RowCache):
    """A target's hidden states, opened for reading."""

    source_type = HiddenSource
    source: HiddenSource


class CachedHidden:
    """A target's hidden states from disk: `caches`, of one target, are of all the data that batches may come from. Of
    caches that hold inner layers too, "after-norm" `states` are the last part."""

    def __init__(self, *caches: HiddenCache, states: str | None = None) -> None:
        self._caches = caches
        source = caches[0].source
        self.states = source.states if states is None else states
        inner = 0 if layers_in(self.states) else len(layers_in(source.states))
        self.hidden_size = caches[0].size // (1 + inner)
        self.settings: dict[str, Any] = {
            "target": source.sha256,
            "target_dtype": source.target_dtype,
            "states": self.states,
            "cached_states": source.dtype,
        }
        """What a resumed run must find unchanged, as JSON."""

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [B, T, D] in the type that they are kept in, where the batch is; positions without a row are 0.
        Raises ValueError: a batch with documents that no cache was made from; a damaged file."""
        cache, positions_R, rows_R = look_up(self._caches, batch)
        device = batch.tokens_BT.device
        # pinned memory is copied to a GPU while the processor works on; torch keeps it until that is done
        rows_RD = cache.gather(rows_R, ["hidden"], pin=device.type == "cuda")["hidden"][:, -self.hidden_size :]
        hidden_XD = torch.zeros(batch.tokens_BT.numel(), self.hidden_size, dtype=rows_RD.dtype, device=device)
        hidden_XD[torch.from_numpy(positions_R).to(device)] = rows_RD.to(device, non_blocking=True)
        return hidden_XD.view(*batch.tokens_BT.shape, -1)


class HiddenRows:
    """Makes a cache's rows, kept in `dtype`, of a target's hidden states; see `row_writer.MakeRows`. Raises ValueError:
    a model that packed blocks are refused for, or whose states before the final norm cannot be had
    (`forward.PackedForward`)."""

    def __init__(self, model: Any, states: str = "after-norm", dtype: str = "bfloat16") -> None:
        self._forward = PackedForward(model.requires_grad_(False).eval(), states)
        self._dtype = DTYPES[dtype]
        self.hidden_size = self._forward.width

    @torch.no_grad()
    def __call__(self, batch: Batch, positions_R: Tensor) -> Iterator[dict[str, Tensor]]:
        """The batch's states, in one piece; ValueError: one that is not finite, in the target or as it is kept."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            hidden_RD = self._forward.hidden(batch).flatten(0, 1)[positions_R]
        kept_RD = hidden_RD.to(self._dtype)
        if not bool(kept_RD.isfinite().all()):
            row = int((~kept_RD.isfinite()).any(1).nonzero()[0])
            document = int(batch.documents_BT.flatten()[positions_R[row]])
            raise ValueError(
                f"a hidden state of document {document} is not finite, or too large for {self._dtype}: set "
                "`target_dtype` and `hidden.dtype` to bfloat16"
            )
        yield {"hidden": kept_RD}
