"""Training for parallel drafting, which predicts several tokens per forward pass at mask tokens (PARD).

Source: An et al. 2025, arXiv 2504.18583. The j-th mask token after a prefix predicts the token j positions after the
next token. To reduce the cost, mask tokens are dropped at random, more often for larger j. A mask token is only kept if
all mask tokens before it are kept (conditional drop).

Letters: B batch (blocks), T tokens, M mask tokens of a block, L = T + M, X = B · L flattened positions, P positions
with a token j positions ahead, K tokens drafted per forward pass (for mask tokens: K − 1).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.blocks.packing import PADDING, Batch
from ..config import Parallel
from ..forward.packed import MaskedBatch
from ..losses.drafter import IGNORED, shifted_labels


@dataclass(frozen=True)
class ExtendedBatch:
    """Batch of blocks with appended mask tokens, and the labels of all tokens."""

    batch: MaskedBatch
    labels_X: Tensor
    teacher_rows_X: Tensor
    """Flattened position in the original batch [B · T] at which the teacher predicts the label."""


def append_mask_tokens(batch: Batch, parallel: Parallel, progress: float) -> ExtendedBatch:
    """Append mask tokens to each row for random positions, which depend only on its tokens and on `progress`."""
    rows, length = batch.tokens_BT.shape
    device = batch.tokens_BT.device
    labels_BT = shifted_labels(batch.labels_BT, batch.documents_BT, 1)
    chance_BT = torch.stack([_chances(row_T, progress) for row_T in batch.tokens_BT.cpu()]).to(device)
    position_T, trained = torch.arange(length, device=device), list[Tensor]()
    for number, share in enumerate(parallel.shares(), 1):  # mask token j is j positions ahead, predicts the next
        documents_BP, has_label_BP = batch.documents_BT[:, :-number], labels_BT[:, number:] != IGNORED
        is_trained_BP = (documents_BP == batch.documents_BT[:, number:]) & (documents_BP != PADDING) & has_label_BP
        trained.append(F.pad(is_trained_BP, (0, number)) & (chance_BT < share))
    trained_KBT = torch.stack(trained)
    # mask tokens before a kept one are needed as context, even without a label
    needed_KBT = trained_KBT.flip(0).int().cummax(0).values.flip(0).bool()
    most = int(needed_KBT.sum((0, 2)).max())
    number_KBT = torch.arange(1, parallel.tokens, device=device)[:, None, None].expand_as(needed_KBT)
    end_KBT = position_T.expand_as(needed_KBT)
    order_BM = needed_KBT.permute(1, 0, 2).flatten(1).int().argsort(dim=1, descending=True, stable=True)[:, :most]

    def select(values_KBT: Tensor) -> Tensor:
        return values_KBT.permute(1, 0, 2).flatten(1).gather(1, order_BM)

    exists_BM, number_BM, end_BM = select(needed_KBT), select(number_KBT), select(end_KBT)
    position_BM = (end_BM + number_BM).clamp(max=length - 1)
    label_BM = torch.where(select(trained_KBT), labels_BT.gather(1, position_BM), IGNORED)
    documents_BM = torch.where(exists_BM, batch.documents_BT.gather(1, end_BM), PADDING)
    visible_BLL = _visible(batch, documents_BM, end_BM, number_BM)
    positions_BM = batch.positions_BT.gather(1, end_BM) + number_BM
    masked = MaskedBatch(
        torch.cat((batch.tokens_BT, torch.full_like(end_BM, parallel.token)), 1),
        torch.cat((batch.positions_BT, torch.where(exists_BM, positions_BM, 0)), 1),
        torch.cat((batch.documents_BT, documents_BM), 1),
        visible_BLL,
    )
    rows_B1 = length * torch.arange(rows, device=device)[:, None]
    teacher_rows_BL = torch.cat((rows_B1 + position_T, rows_B1 + position_BM), 1)
    return ExtendedBatch(masked, torch.cat((labels_BT, label_BM), 1).flatten(), teacher_rows_BL.flatten())


def _visible(batch: Batch, documents_BM: Tensor, end_BM: Tensor, number_BM: Tensor) -> Tensor:
    """Return the attention mask of a batch with appended mask tokens, bool [B, L, L].

    Attention is causal within a document. A mask token attends to its prefix and to earlier mask tokens of this prefix.
    """
    length, masks = batch.tokens_BT.shape[1], end_BM.shape[1]
    position_T = torch.arange(length, device=end_BM.device)
    visible_BLL = torch.zeros(len(end_BM), length + masks, length + masks, dtype=torch.bool, device=end_BM.device)
    visible_BLL[:, :length, :length] = batch.attention_mask_B1TT()[:, 0]
    same_document_BMT = documents_BM[:, :, None] == batch.documents_BT[:, None]
    inside_BM1 = (documents_BM != PADDING)[:, :, None]
    visible_BLL[:, length:, :length] = same_document_BMT & (position_T <= end_BM[:, :, None]) & inside_BM1
    before_BMM = (end_BM[:, :, None] == end_BM[:, None]) & (number_BM[:, None] <= number_BM[:, :, None])
    visible_BLL[:, length:, length:] = before_BMM & inside_BM1 & inside_BM1.mT
    itself_L = torch.arange(length, length + masks, device=end_BM.device)
    visible_BLL[:, itself_L, itself_L] = True
    return visible_BLL


def _chances(tokens_T: Tensor, progress: float) -> Tensor:
    """Return a pseudorandom number in [0, 1) for each position, seeded by the tokens and the progress."""
    odd_T = 2 * torch.arange(len(tokens_T)) + 1
    seed = int((tokens_T * odd_T).sum()) * 1_000_003 + round(progress * 1e6)
    return torch.rand(len(tokens_T), generator=torch.Generator().manual_seed(seed % 2**63))
