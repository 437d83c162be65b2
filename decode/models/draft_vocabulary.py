"""Draft vocabularies, which restrict a drafter's output projection to a subset of tokens to reduce latency.

A token outside the draft vocabulary has draft probability 0, which exact verifiers support (FR-Spec: Zhao et al. 2025,
arXiv 2502.14856; EAGLE-3: Li et al. 2025, arXiv 2503.01840, which calls the map d2t).

Shape letters: R draft vocabulary, V vocabulary.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoints.storage.draft_vocabulary import check_tokens, read_vocabulary
from .products.shared import stored_weights

_BUFFER = "draft_tokens_R"


def keep_tokens(model: Any, ids_R: Tensor) -> None:
    """Restrict a model to the draft vocabulary `ids_R`.

    Raises:
        ValueError: The token ids are not increasing or exceed the model's vocabulary.
    """
    weight = stored_weights(model.get_output_embeddings())
    check_tokens(ids_R, weight.shape[0])
    model.register_buffer(_BUFFER, ids_R.long().to(weight.device), persistent=False)


def kept_tokens(model: Any) -> Tensor | None:
    """Return the token ids of a model's draft vocabulary in increasing order, int64 [R], or None if there is none."""
    return getattr(model, _BUFFER, None)


def load_vocabulary(model: Any, folder: Path) -> None:
    """Load the draft vocabulary in `folder`, if there is one, and restrict the model to it.

    Raises:
        ValueError: The file of the draft vocabulary is invalid.
    """
    ids_R = read_vocabulary(folder, stored_weights(model.get_output_embeddings()).shape[0])
    if ids_R is not None:
        keep_tokens(model, ids_R)
