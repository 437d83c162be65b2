"""Packing of whole documents into training blocks, and selection of the blocks of each batch.

Shape suffixes: B batch size (blocks), T tokens per block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

IGNORED = -100  # label that losses ignore
PADDING = -1  # document number of padding tokens


class Batch(NamedTuple):
    """Batch of packed documents, represented by four int64 tensors [B, T].

    `labels_BT[b, t]` is the unshifted label of token t. It is −100 for unsupervised tokens and for the first token of a
    document. Positions restart at 0 in each document. `documents_BT` is the document of each token, −1 for padding.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Move the batch to a device."""
        return Batch(*(tensor.to(device) for tensor in self))

    def rows(self, rows: np.ndarray) -> "Batch":
        """Return a batch with the rows at the given indices."""
        return Batch(*(tensor[torch.from_numpy(rows)] for tensor in self))

    def attention_mask_B1TT(self) -> torch.Tensor:
        """Return the causal, block-diagonal attention mask, bool [B, 1, T, T]. Each padding token attends to itself."""
        documents_BT = self.documents_BT
        length = documents_BT.shape[1]
        ones_TT = torch.ones(length, length, dtype=torch.bool, device=documents_BT.device)
        same_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]) & (documents_BT != PADDING)[:, :, None]
        mask_BTT = same_BTT & ones_TT.tril()
        return (mask_BTT | torch.eye(length, dtype=torch.bool, device=documents_BT.device))[:, None]


def pack_best_fit(lengths: Sequence[int], block_tokens: int) -> list[list[int]]:
    """Pack documents into blocks with best-fit decreasing bin packing. Return the document indices of each block."""
    if lengths and max(lengths) > block_tokens:
        raise ValueError(f"a document has {max(lengths)} tokens, but a block has only {block_tokens}")
    blocks: list[list[int]] = []
    open_by_space: list[list[int]] = [[] for _ in range(block_tokens + 1)]
    spaces = 0  # Bit r is set if a block with r free tokens exists, so that bit operations find the best fit.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            block = open_by_space[space].pop()
            if not open_by_space[space]:
                spaces ^= 1 << space
        else:
            space, block = block_tokens, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        open_by_space[space - length].append(block)
        spaces |= 1 << (space - length)
    return blocks


@dataclass(frozen=True, slots=True)
class Document:
    """Document in a block, with token `ids` [T], loss mask `trained` [T] and document `number`."""

    ids: np.ndarray
    trained: np.ndarray
    number: int


def make_batch(blocks: Sequence[Sequence[Document]], length: int, padding_id: int) -> Batch:
    """Concatenate the documents of each block into one row, and pad the rows to `length` tokens."""
    shape = (len(blocks), length)
    tokens_BT = np.full(shape, padding_id, dtype=np.int64)
    labels_BT = np.full(shape, IGNORED, dtype=np.int64)
    documents_BT = np.full(shape, PADDING, dtype=np.int64)
    positions_BT = np.zeros(shape, dtype=np.int64)
    for row, documents in enumerate(blocks):
        at = 0
        for document in documents:
            span = slice(at, at + len(document.ids))
            tokens_BT[row, span] = document.ids
            labels_BT[row, span] = np.where(document.trained, document.ids.astype(np.int64), IGNORED)
            labels_BT[row, at] = IGNORED  # no token precedes the first one, so it cannot be predicted
            documents_BT[row, span] = document.number
            positions_BT[row, span] = np.arange(len(document.ids))
            at = span.stop
        positions_BT[row, at:] = np.arange(length - at)
    return Batch(*map(torch.from_numpy, (tokens_BT, labels_BT, positions_BT, documents_BT)))


def pack(lengths: np.ndarray, block_tokens: int, packing: str) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into blocks. Return their indices in block order and the number of documents per block (int64)."""
    if packing == "pad":
        return np.arange(len(lengths)), np.ones(len(lengths), dtype=np.int64)
    blocks = pack_best_fit(lengths.tolist(), block_tokens)
    order = np.array([document for block in blocks for document in block], dtype=np.int64)
    return order, np.array([len(block) for block in blocks], dtype=np.int64)


def global_batch(blocks: int, batch_blocks: int, step: int, seed: int) -> np.ndarray:
    """Return the indices of the blocks of a global batch, int64 [batch_blocks].

    Blocks are shuffled in each epoch, and a batch may span two epochs. The result depends only on the arguments.
    """
    epochs, offsets = np.divmod(np.arange(step * batch_blocks, (step + 1) * batch_blocks), blocks)
    parts = [_epoch(blocks, epoch, seed)[offsets[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
    return np.concatenate(parts)


@lru_cache(maxsize=4)
def _epoch(blocks: int, epoch: int, seed: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(blocks).astype(np.int64)
    order.setflags(write=False)  # all callers share the cached array
    return order
