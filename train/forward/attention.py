"""Attention over packed blocks, computed separately for each document because this is faster on CPUs.

It is registered with transformers as `NAME`. Without `spans`, it equals SDPA. Letters: B batch, H heads, T tokens,
D head size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "draftsmith_documents"

Spans = Sequence[Sequence[tuple[int, int]]]
"""Start and end (exclusive) of each document and of the padding, for each row of a batch."""


def document_spans(documents_BT: Tensor) -> Spans:
    """Return the spans of the documents and of the padding in packed blocks."""
    spans = []
    for row in documents_BT.cpu():
        borders = (torch.nonzero(row[1:] != row[:-1]).flatten() + 1).tolist()
        spans.append(list(zip([0, *borders], [*borders, len(row)], strict=True)))
    return spans


def register() -> None:
    """Register the per-document attention with transformers as `NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, documents_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def documents_attention(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    spans: Spans | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each span and return the output [B, T, H, D]. Supports grouped queries."""
    if spans is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query_BHTD, key_BHTD, value_BHTD, attention_mask, dropout, scaling, is_causal, **options
        )
    gqa, inputs = query_BHTD.shape[1] != key_BHTD.shape[1], (query_BHTD, key_BHTD, value_BHTD)
    attend: Any = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling, is_causal=True)
    rows = []
    for row, borders in enumerate(spans):
        parts = [[input_BHTD[row : row + 1, :, start:end] for input_BHTD in inputs] for start, end in borders]
        rows.append(torch.cat([attend(*part, enable_gqa=gqa) for part in parts], dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous(), None
