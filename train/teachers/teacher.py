"""Teachers: the target itself, or caches on disk of its most probable tokens or hidden states.

The files of a hidden-state cache (`cache.RowCache`) have `hidden` [rows, D] in bfloat16, float16 or float32. Those of a
top-k cache have `ids` (uint16 if the vocabulary allows, else int32) and `log_probs` (float16), both [rows, K] in
descending order, and `log_rest` float16 [rows], the log-probability of all other tokens. Rounding to float16 changes p
by at most 2⁻¹¹ · p · |log p| ≤ 2⁻¹¹ / e = 1.8e-4, and the sum of a row by at most 2⁻¹¹ times its entropy in nats, which
may exceed a small rest. Therefore, rows are scaled to sum to 1 − rest when they are read.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, C rows of a chunk, K stored tokens, D hidden
of the target (of several layers concatenated), E hidden of the target, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.artifact.model_ref import resolve_model
from ...data.blocks.packing import Batch
from ...data.blocks.prepared import token_dtype
from ...decode.models.final_norm import parse_layers
from ...decode.models.loading import load_model
from ..forward.packed import PackedForward, make_forward
from ..losses.chunks import DenseTeacher, SparseTeacher
from .cache import Column, MakeRows, RowCache, Source, look_up

REACH = 16
"""Value of `Source.reach` for Medusa heads. Head k (from 0) predicts k + 2 tokens ahead, so 15 heads are possible."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class HiddenSource(Source):
    """Description of a cache of hidden states with dtype `dtype` and type `states` (see `PackedForward`).

    `target_dtype` is the dtype of the target. Auxiliary hidden states are stored for every token, since EAGLE-3 heads
    attend to all of them.
    """

    states: str = "after-norm"
    dtype: str = "bfloat16"
    target_dtype: str = "auto"

    manifest: ClassVar[str] = "hidden.json"
    size_name: ClassVar[str] = "hidden_size"
    size_advice: ClassVar[str] = "set `hidden.dtype: bfloat16`, or `hidden.cache: null` to compute states per step"

    def __str__(self) -> str:
        return f"the hidden states of {self.target} ({self.states}, {self.dtype})"

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        """Load the target. Return the function that computes the rows of the cache, and the target's hidden size."""
        rows = HiddenRows(load_model(self.target, dtype=self.target_dtype, device=str(device)), self.states, self.dtype)
        return rows, rows.hidden_size

    @property
    def reach(self) -> int:  # type: ignore[override]
        return 0 if parse_layers(self.states) else REACH

    def columns(self, size: int) -> dict[str, Column]:
        """Return the only column of the cache, `hidden`, with `size` values per row."""
        return {"hidden": Column((size,), DTYPES[self.dtype])}


_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits per chunk
_SUMMED_ROWS = 1 << 20


@dataclass(frozen=True)
class CacheSource(Source):
    """Description of a cache of the `top_k` most probable tokens at each position. `dtype` is the target's dtype."""

    top_k: int
    dtype: str = "auto"

    manifest: ClassVar[str] = "teacher.json"
    size_name: ClassVar[str] = "vocab_size"
    reach: ClassVar[int] = 1
    size_advice: ClassVar[str] = "choose a smaller `teacher.top_k`"

    def __str__(self) -> str:
        return f"the top {self.top_k} tokens of {self.target}"

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        """Load the target. Return the function that computes the rows of the cache, and the vocabulary size."""
        teacher = load_teacher(self.target, self.dtype, device)
        return partial(top_rows, teacher, self.top_k), teacher.vocab_size

    def columns(self, size: int) -> dict[str, Column]:
        """Return the columns of the cache for a vocabulary size. Raises ValueError if `top_k` exceeds it."""
        if not 1 <= self.top_k <= size:
            raise ValueError(f"top_k must be between 1 and {size}, the target's vocabulary size, got {self.top_k}")
        ids = Column((self.top_k,), torch.uint16 if token_dtype(size).itemsize == 2 else torch.int32)
        return {"ids": ids, "log_probs": Column((self.top_k,), torch.float16), "log_rest": Column((), torch.float16)}


class CachedHidden:
    """Reader of cached hidden states of a target. `caches` must contain the documents of all batches."""

    def __init__(self, *caches: RowCache) -> None:
        self._caches = caches
        source = caches[0].source
        self.states, self.hidden_size = source.states, caches[0].size
        self.settings: dict[str, Any] = {
            "target": source.sha256,
            "target_dtype": source.target_dtype,
            "states": self.states,
            "cached_states": source.dtype,
        }
        """Settings that must not change when a run resumes (JSON values)."""

    def hidden(self, batch: Batch) -> Tensor:
        """Return cached hidden states [B, T, D] in the stored dtype, with zeros at positions that are not cached.

        Raises ValueError if no cache covers the batch's documents, or a file is damaged.
        """
        cache, positions_R, rows_R = look_up(self._caches, batch)
        device = batch.tokens_BT.device
        # pinned memory allows an asynchronous copy to the GPU; torch frees it afterwards
        rows_RD = cache.gather(rows_R, ["hidden"], pin=device.type == "cuda")["hidden"]
        hidden_XD = torch.zeros(batch.tokens_BT.numel(), self.hidden_size, dtype=rows_RD.dtype, device=device)
        hidden_XD[torch.from_numpy(positions_R).to(device)] = rows_RD.to(device, non_blocking=True)
        return hidden_XD.view(*batch.tokens_BT.shape, -1)


class HiddenRows:
    """Callable that computes the target's hidden states for a cache, with dtype `dtype`; see `cache.MakeRows`."""

    def __init__(self, model: Any, states: str = "after-norm", dtype: str = "bfloat16") -> None:
        self._forward = PackedForward(model.requires_grad_(False).eval(), states)
        self._dtype = DTYPES[dtype]
        self.hidden_size = self._forward.width

    @torch.no_grad()
    def __call__(self, batch: Batch, positions_R: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield the hidden states at `positions_R` as one chunk. Raises ValueError if a value is not finite."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            hidden_RD = self._forward.hidden(batch).flatten(0, 1)[positions_R]
        stored_RD = hidden_RD.to(self._dtype)
        if not bool(stored_RD.isfinite().all()):
            row = int((~stored_RD.isfinite()).any(1).nonzero()[0])
            document = int(batch.documents_BT.flatten()[positions_R[row]])
            raise ValueError(
                f"a hidden state of document {document} is not finite in {self._dtype}: set "
                "`target_dtype` and `hidden.dtype` to bfloat16"
            )
        yield {"hidden": stored_RD}


def mean_mass(cache: RowCache) -> float:
    """Return the total probability of the stored tokens of a top-k cache, averaged over the rows."""
    rest = 0.0
    for start in range(0, cache.rows, _SUMMED_ROWS):
        rows_R = np.arange(start, min(start + _SUMMED_ROWS, cache.rows))
        rest += float(cache.gather(rows_R, ["log_rest"])["log_rest"].double().exp().sum())
    return 1.0 - rest / max(1, cache.rows)


def top_rows(
    run: Callable[[Batch], DenseTeacher], top_k: int, batch: Batch, positions_R: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Compute the rows of a top-k cache for a batch, and yield them in chunks; see `cache.MakeRows`."""
    for ids_CK, log_probs_CK in top_log_probs(run(batch), positions_R, top_k):
        rest_C = (1 - log_probs_CK.double().exp().sum(1)).clamp(min=0)
        yield {"ids": ids_CK, "log_probs": log_probs_CK.half(), "log_rest": rest_C.log().half()}


@torch.no_grad()
def top_log_probs(teacher: DenseTeacher, positions_R: Tensor, top_k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids (int64) and log-probabilities (float32) of the `top_k` most probable tokens, both [C, K], in chunks.

    Log-probabilities are over the whole vocabulary at temperature 1. Raises ValueError if logits are not finite.
    """
    weight_VE = teacher.weight_VE
    vocab = teacher.hidden_XE.shape[1] if weight_VE is None else len(weight_VE)
    elements = _CHUNK_ELEMENTS.get(positions_R.device.type, 1 << 23)
    for positions_C in positions_R.split(max(16, elements // vocab)):
        hidden_CE = teacher.hidden_XE[positions_C]
        logits_CV = (hidden_CE if weight_VE is None else hidden_CE @ weight_VE.T).float()
        top_CK, ids_CK = logits_CV.topk(top_k)
        total_C1 = logits_CV.logsumexp(1, keepdim=True)
        if not bool(total_C1.isfinite().all()):
            raise ValueError("the target's logits are not finite: set `teacher.dtype` to a wider dtype")
        yield ids_CK, top_CK - total_C1


class ModelTeacher:
    """Teacher that runs the frozen target in this process. Raises ValueError if the model is not supported."""

    def __init__(self, model: Any, sha256: str | None = None) -> None:
        self.model = model.requires_grad_(False).eval()
        self.settings: dict[str, Any] = {"target": sha256, "dtype": str(model.dtype)}
        """Settings that must not change when a run resumes (JSON values)."""
        self._forward = make_forward(model)
        self.vocab_size = self._forward.vocab_size

    def move_to(self, device: torch.device | str) -> None:
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> DenseTeacher:
        """Return next-token distributions, as states [X, E] and projection [V, E] or as logits [X, V] and None."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            return DenseTeacher(self._forward(batch).flatten(0, 1), self._forward.weight_VD())


class CachedTeacher:
    """Teacher that reads the cached top-k tokens of a target. `caches` must contain the documents of all batches."""

    def __init__(self, *caches: RowCache) -> None:
        self._caches = caches
        first = caches[0].source
        self.top_k = first.top_k
        self.vocab_size = caches[0].size
        self.settings: dict[str, Any] = {"target": first.sha256, "dtype": first.dtype, "cached_top_k": first.top_k}

    def move_to(self, device: torch.device | str) -> None:
        """Do nothing: rows are read from disk and moved to the device of each batch."""

    def __call__(self, batch: Batch) -> SparseTeacher:
        """Return the ids (int64) and log-probabilities (float32) of the cached tokens, both [X, K] in descending order.

        Raises ValueError if no cache covers the batch's documents, or a file is damaged.
        """
        cache, positions_R, rows_R = look_up(self._caches, batch)
        ids_RK, log_probs_RK = self._read(cache, rows_R)
        device = batch.tokens_BT.device
        positions = torch.from_numpy(positions_R).to(device)
        ids_XK = torch.arange(self.top_k, device=device).repeat(batch.tokens_BT.numel(), 1)
        log_probs_XK = torch.zeros(ids_XK.shape, device=device)
        ids_XK[positions] = ids_RK.to(device)
        log_probs_XK[positions] = log_probs_RK.to(device)
        return SparseTeacher(ids_XK, log_probs_XK)

    def _read(self, cache: RowCache, rows_R: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return ids (int64) and log-probabilities (float32), both [R, K], scaled to the stored total probability."""
        rows = cache.gather(rows_R, cache.columns)
        log_probs_RK = rows["log_probs"].float().numpy()
        sum_R = np.exp(log_probs_RK).sum(1, dtype=np.float64)
        mass_R = 1 - np.exp(rows["log_rest"].float().numpy(), dtype=np.float64)
        log_probs_RK += np.log(mass_R / sum_R)[:, None].astype(np.float32)
        return rows["ids"].long(), torch.from_numpy(log_probs_RK)


Teacher = ModelTeacher | CachedTeacher


def load_teacher(source: str, dtype: str = "auto", device: torch.device | str = "cpu") -> ModelTeacher:
    """Load a model from a directory or hub id, and return it as a teacher on `device`."""
    ref = resolve_model(source)
    return ModelTeacher(load_model(ref.path, dtype=dtype, device=str(device)), ref.sha256)
