"""A target's most likely tokens at every trained position, on disk: a `row_cache`.

Its files hold `ids` (uint16 where the vocabulary allows, else int32) and `log_probs` (float16), both [rows, K], the
most likely first, and `log_rest` float16 [rows], the logarithm of what all other tokens have together; `teacher.json`
describes them. There is a row for every position whose next token is trained on.

Float16 changes p by at most 2⁻¹¹ · p · |log p| ≤ 2⁻¹¹ / e = 1.8e-4, and the sum of a row by at most 2⁻¹¹ times its
entropy in nats, which would drown a small rest: a row that is read is scaled to sum to 1 − rest.

Letters: X flattened positions of a batch, R rows, C rows of a chunk, K tokens kept, E hidden of the target,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...data.blocks.packing import Batch
from ...data.blocks.prepared import token_dtype
from ..losses.chunks import DenseTeacher
from .row_cache import Column, RowCache, Source

_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits at a time
_SUMMED_ROWS = 1 << 20


@dataclass(frozen=True)
class CacheSource(Source):
    """The `top_k` most likely tokens of a target whose weights are of `dtype`; see `Source`."""

    top_k: int
    dtype: str = "auto"
    load_in_8bit: bool = False

    manifest: ClassVar[str] = "teacher.json"
    size_name: ClassVar[str] = "vocab_size"
    reach: ClassVar[int] = 1

    def columns(self, size: int) -> dict[str, Column]:
        """`ids`, `log_probs` and `log_rest` for a vocabulary of `size` tokens; ValueError: more are to be kept."""
        if not 1 <= self.top_k <= size:
            raise ValueError(f"top_k is {self.top_k}, expected 1 … {size}, the size of the target's vocabulary")
        ids = Column((self.top_k,), torch.uint16 if token_dtype(size).itemsize == 2 else torch.int32)
        return {"ids": ids, "log_probs": Column((self.top_k,), torch.float16), "log_rest": Column((), torch.float16)}


class TeacherCache(RowCache):
    """A target's most likely tokens, opened for reading."""

    source_type = CacheSource
    source: CacheSource

    def mean_mass(self) -> float:
        """How much of the target's probability the tokens that were kept hold, on average over the positions."""
        rest = 0.0
        for start in range(0, self.rows, _SUMMED_ROWS):
            rows_R = np.arange(start, min(start + _SUMMED_ROWS, self.rows))
            rest += float(self.gather(rows_R, ["log_rest"])["log_rest"].double().exp().sum())
        return 1.0 - rest / max(1, self.rows)

    def read(self, rows_R: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids int64 and float32 log-probabilities of these rows, both [R, K]; raises what `gather` raises."""
        rows = self.gather(rows_R, self.columns)
        log_probs_RK = rows["log_probs"].float().numpy()
        sum_R = np.exp(log_probs_RK).sum(1, dtype=np.float64)
        kept_R = 1 - np.exp(rows["log_rest"].float().numpy(), dtype=np.float64)
        log_probs_RK += np.log(kept_R / sum_R)[:, None].astype(np.float32)
        return rows["ids"].long(), torch.from_numpy(log_probs_RK)


def top_rows(
    run: Callable[[Batch], DenseTeacher], top_k: int, batch: Batch, positions_R: Tensor
) -> Iterator[dict[str, Tensor]]:
    """A cache's rows of what a teacher says, chunk by chunk; see `row_writer.MakeRows` and `top_log_probs`."""
    for ids_CK, log_probs_CK in top_log_probs(run(batch), positions_R, top_k):
        rest_C = (1 - log_probs_CK.double().exp().sum(1)).clamp(min=0)
        yield {"ids": ids_CK, "log_probs": log_probs_CK.half(), "log_rest": rest_C.log().half()}


@torch.no_grad()
def top_log_probs(teacher: DenseTeacher, positions_R: Tensor, top_k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids int64 [C, K] and log-probabilities float32 [C, K] (over the whole vocabulary, at temperature 1) of the most
    likely tokens, chunk by chunk of positions; ValueError: logits that are not finite."""
    weight_VE = teacher.weight_VE
    vocab = teacher.hidden_XE.shape[1] if weight_VE is None else len(weight_VE)
    elements = _CHUNK_ELEMENTS.get(positions_R.device.type, 1 << 23)
    for positions_C in positions_R.split(max(16, elements // vocab)):
        hidden_CE = teacher.hidden_XE[positions_C]
        logits_CV = (hidden_CE if weight_VE is None else hidden_CE @ weight_VE.T).float()
        top_CK, ids_CK = logits_CV.topk(top_k)
        total_C1 = logits_CV.logsumexp(1, keepdim=True)
        if not bool(total_C1.isfinite().all()):
            raise ValueError("the target's logits are not finite: load it with a wider `teacher.dtype`")
        yield ids_CK, top_CK - total_C1
