"""Where a drafter's teacher comes from: the target itself, or a cache of its most likely tokens.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, K tokens kept, E hidden of the target, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig

from ...checkpoints.artifact.model_ref import resolve_model
from ...data.blocks.packing import Batch
from ...decode.models.loading import load_model
from ..forward.packed import make_forward
from ..losses.chunks import DenseTeacher, SparseTeacher
from .hidden_cache import CachedHidden
from .row_cache import look_up
from .top_k_cache import TeacherCache


class ModelTeacher:
    """The target in this process: frozen, in evaluation mode, no module that would be wrapped or stored. Raises
    ValueError: a model that packed blocks are refused for (`forward.make_forward`)."""

    def __init__(self, model: Any, sha256: str | None = None) -> None:
        self.model = model.requires_grad_(False).eval()
        quantised = getattr(model, "quantization_method", None)
        self.settings: dict[str, Any] = {"target": sha256, "dtype": str(quantised or model.dtype)}
        """What a resumed run must find unchanged, as JSON."""
        self._forward = make_forward(model)
        self.vocab_size = self._forward.vocab_size

    def place(self, device: torch.device | str) -> None:
        """Move the model; one in 8 bits stays where it was loaded."""
        if getattr(self.model, "quantization_method", None) is None:
            self.model.to(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> DenseTeacher:
        """Hidden states [X, E] and projection [V, E], or logits [X, V] and None, of a batch; row x is that of the token
        after position x. In the model's own precision."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            return DenseTeacher(self._forward(batch).flatten(0, 1), self._forward.weight_VD())


class StatesTeacher:
    """The target's output layer over its hidden states from disk. Raises ValueError: logits that are more than a
    product with these."""

    def __init__(self, model: Any, states: CachedHidden) -> None:
        forward = make_forward(model.requires_grad_(False).eval())
        weight_VD = forward.weight_VD()
        if weight_VD is None or weight_VD.shape[1] != states.hidden_size:
            raise ValueError(f"the logits of {type(model).__name__} are no product with its hidden states")
        self._weight_VD, self._states, self.vocab_size = weight_VD, states, forward.vocab_size

    @torch.no_grad()
    def __call__(self, batch: Batch) -> DenseTeacher:
        """`ModelTeacher`'s, with states rounded to the type that they are kept in."""
        return DenseTeacher(self._states.hidden(batch).flatten(0, 1).to(self._weight_VD.dtype), self._weight_VD)


class CachedTeacher:
    """The target's most likely tokens from disk: `caches`, of one target, are of all the data that batches may come
    from."""

    def __init__(self, *caches: TeacherCache) -> None:
        self._caches = caches
        first = caches[0].source
        self.top_k = first.top_k
        self.vocab_size = caches[0].size
        self.settings: dict[str, Any] = {
            "target": first.sha256,
            "dtype": first.dtype,
            "load_in_8bit": first.load_in_8bit,
            "cached_top_k": first.top_k,
        }

    def place(self, device: torch.device | str) -> None:
        """Rows lie on disk, and go where the batch is."""

    def __call__(self, batch: Batch) -> SparseTeacher:
        """Ids int64 [X, K] and float32 log-probabilities [X, K], the most likely first. Raises ValueError: a batch with
        documents that no cache was made from; a damaged file."""
        cache, positions_R, rows_R = look_up(self._caches, batch)
        ids_RK, log_probs_RK = cache.read(rows_R)
        device = batch.tokens_BT.device
        positions = torch.from_numpy(positions_R).to(device)
        ids_XK = torch.arange(self.top_k, device=device).repeat(batch.tokens_BT.numel(), 1)
        log_probs_XK = torch.zeros(ids_XK.shape, device=device)
        ids_XK[positions] = ids_RK.to(device)
        log_probs_XK[positions] = log_probs_RK.to(device)
        return SparseTeacher(ids_XK, log_probs_XK)


Teacher = ModelTeacher | CachedTeacher


def load_teacher(
    source: str, dtype: str = "auto", load_in_8bit: bool = False, device: torch.device | str = "cpu"
) -> ModelTeacher:
    """The target from a folder or a hub id, ready to teach on `device`; with `load_in_8bit` its matrices but the output
    projection are in 8 bits (LLM.int8: Dettmers et al. 2022, arXiv 2208.07339), the rest in float16 by default. Raises
    ValueError: no such model; 8 bits without what they need; what `ModelTeacher` raises."""
    ref = resolve_model(source)
    if not load_in_8bit:
        return ModelTeacher(load_model(ref.path, dtype=dtype, device=str(device)), ref.sha256)
    dtype, eight_bit = "float16" if dtype == "auto" else dtype, BitsAndBytesConfig(load_in_8bit=True)
    try:
        model = load_model(ref.path, dtype=dtype, device_map={"": str(device)}, quantization_config=eight_bit)
    except ValueError as error:
        raise ValueError(f"in 8 bits on {device}: {error}; try it without `teacher.load_in_8bit`") from error
    return ModelTeacher(model, ref.sha256)
