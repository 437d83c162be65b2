"""Forward passes of T5-type encoder-decoders on packed blocks: the decoder predicts each answer from its prefix.

Letters: B batch (blocks), T tokens of a block, P answers (runs of supervised tokens), R rows of the encoder or of the
decoder, S source tokens of a row, M decoder tokens of a row, D hidden, V vocabulary, X answer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.blocks.packing import IGNORED, PADDING, Batch
from ...decode.models.base import bare_model
from ...decode.models.seq2seq import SCALED_IF, Seq2SeqModel

_NO_ANSWER = -1  # answer number of padding


class BaseForward:
    """Base class of forward passes. `plain_head` is True if the logits are hidden states times a projection."""

    model: Any
    plain_head: bool

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, equal to the number of rows of the output projection."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def weight_VD(self) -> Tensor | None:
        """Return the output projection; None if logits have a bias, cap or scale, so that calls return logits."""
        return self.model.get_output_embeddings().weight if self.plain_head else None


class SourceForward(BaseForward):
    """Forward pass of an encoder-decoder on packed blocks.

    An answer is a run of supervised tokens. The encoder input is the part of the document before the answer. The
    decoder input is the start token and the answer without its last token, as in decoding (`decode.models.seq2seq`).
    The state that predicts token t + 1 is returned at t. States of positions without a prediction are 0.

    Encoder and decoder run once per batch, with several sources or answers per row. This is exact because T5's relative
    positions do not depend on the offset of a source, and masks separate the sources. Raises ValueError for models of
    other families and for decoders without a start token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model = bare_model(model)
        self.config = model.config
        self.start_id = Seq2SeqModel(model).start_id  # raises ValueError for other families
        scaled_if = SCALED_IF[self.config.model_type]
        self._scale = self.config.d_model**-0.5 if scaled_if and getattr(self.config, scaled_if) else 1.0
        head = model.get_output_embeddings()
        self.plain_head = isinstance(head, nn.Linear) and head.bias is None

    def __call__(self, batch: Batch) -> Tensor:
        """Return the decoder's last hidden states [B, T, D], or logits [B, T, V] if `weight_VD()` is None."""
        hidden_BTD = self.hidden(batch)
        return hidden_BTD if self.plain_head else self.model.get_output_embeddings()(hidden_BTD)

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states [B, T, D] of the decoder, scaled for the output projection."""
        plan = _plan(batch, self.start_id)
        dtype = self.model.dtype
        source_mask_RSS = plan.sources_RS[:, :, None] == plan.sources_RS[:, None]
        encoded_RSD = self.model.encoder(
            plan.source_tokens_RS, attention_mask=_additive(source_mask_RSS, dtype)
        ).last_hidden_state
        answer_mask_RMM = (plan.answers_RM[:, :, None] == plan.answers_RM[:, None]).tril()
        across_RMS = plan.answers_RM[:, :, None] == plan.read_RS[:, None]
        across_RMS[:, :, 0] |= plan.answers_RM == _NO_ANSWER  # avoids rows without any visible token
        decoded_RMD = self.model.decoder(
            plan.answer_tokens_RM,
            attention_mask=_additive(answer_mask_RMM, dtype),
            encoder_hidden_states=encoded_RSD.flatten(0, 1)[plan.read_at_RS],
            encoder_attention_mask=_additive(across_RMS, dtype),
            use_cache=False,
        ).last_hidden_state
        states_XD = decoded_RMD.flatten(0, 1)[plan.flat_X]
        if self._scale != 1.0:
            states_XD = states_XD * self._scale
        hidden_XD = states_XD.new_zeros(batch.tokens_BT.numel(), states_XD.shape[-1])
        return hidden_XD.index_copy(0, plan.positions_X, states_XD).view(*batch.tokens_BT.shape, -1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Inputs of encoder and decoder, and positions of the decoder states in the blocks, all int64."""

    source_tokens_RS: Tensor
    sources_RS: Tensor  # answer to which each source token belongs
    answer_tokens_RM: Tensor
    answers_RM: Tensor  # answer to which each decoder token belongs
    read_RS: Tensor  # answer to which each encoder state that a decoder row attends to belongs
    read_at_RS: Tensor  # positions of these states in the encoder's output
    flat_X: Tensor  # flattened decoder positions
    positions_X: Tensor  # flattened block positions of their states


def _plan(batch: Batch, start_id: int) -> _Plan:
    tokens = batch.tokens_BT.cpu().numpy().ravel()
    answers = find_answers(batch.labels_BT.cpu().numpy(), batch.documents_BT.cpu().numpy())
    if not len(answers):
        answers = np.array([[0, 1, 2]])  # position 0 has no label in such a batch, so this state is unused
    source_lengths, answer_lengths = answers[:, 1] - answers[:, 0], answers[:, 2] - answers[:, 1]
    rows = _fill_rows(source_lengths[:, None], [int(source_lengths.max())])
    source_at_RS, sources_RS = _positions(rows, answers[:, 0], source_lengths)
    # A decoder row attends to all its sources, so their total length is limited as well.
    room = [int(answer_lengths.max()), int(max(source_lengths.max(), answer_lengths.max()))]
    rows = _fill_rows(np.stack((answer_lengths, source_lengths), 1), room)
    state_at_RM, answers_RM = _positions(rows, answers[:, 1] - 1, answer_lengths)
    owners, firsts = np.unique(sources_RS, return_index=True)
    encoded_at = firsts[owners != _NO_ANSWER]  # start of each source, in the order of the answers
    read_at_RS, read_RS = _positions(rows, encoded_at, source_lengths)
    inputs_RM = tokens[state_at_RM]
    begins_RM = np.ones_like(answers_RM, dtype=bool)
    begins_RM[:, 1:] = answers_RM[:, 1:] != answers_RM[:, :-1]
    inputs_RM[begins_RM] = start_id
    flat_X = np.flatnonzero(answers_RM.ravel() != _NO_ANSWER)
    positions_X = state_at_RM.ravel()[flat_X]
    arrays = (tokens[source_at_RS], sources_RS, inputs_RM, answers_RM, read_RS, read_at_RS, flat_X, positions_X)
    return _Plan(*(torch.from_numpy(array).to(batch.tokens_BT.device) for array in arrays))


def find_answers(labels_BT: np.ndarray, documents_BT: np.ndarray) -> np.ndarray:
    """Return the start of the document, the start and the end of each run of supervised tokens, int64 [P, 3]."""
    begins_BT = np.ones(documents_BT.shape, dtype=bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    begins = begins_BT.ravel()
    trained = ((labels_BT != IGNORED) & (documents_BT != PADDING) & ~begins_BT).ravel()
    document = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
    change = np.flatnonzero(np.diff(np.concatenate(([0], trained.astype(np.int8), [0]))))
    starts, ends = change[::2], change[1::2]
    return np.stack((document[starts], starts, ends), 1).astype(np.int64)


def _fill_rows(sizes_PK: np.ndarray, room_K: Sequence[int]) -> list[list[int]]:
    """Pack items into rows by first-fit decreasing, subject to K size limits. Return the items of each row."""
    free = np.empty((0, len(room_K)), dtype=np.int64)
    rows: list[list[int]] = []
    for item in np.lexsort(sizes_PK.T[::-1])[::-1].tolist():
        fitting = np.flatnonzero((free >= sizes_PK[item]).all(1))
        if len(fitting):
            row = int(fitting[0])
        else:
            row = len(rows)
            rows.append([])
            free = np.concatenate((free, np.array([room_K], dtype=np.int64)))
        rows[row].append(item)
        free[row] -= sizes_PK[item]
    return rows


def _positions(rows: Sequence[Sequence[int]], begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the original position and the item of each token in packed rows (padding: 0 and −1), int64 [R, width]."""
    width = max(int(lengths[row].sum()) for row in map(list, rows))
    positions = np.zeros((len(rows), width), dtype=np.int64)
    owners = np.full((len(rows), width), _NO_ANSWER, dtype=np.int64)
    for number, row in enumerate(rows):
        at = 0
        for item in row:
            end = at + int(lengths[item])
            positions[number, at:end] = begins[item] + np.arange(end - at)
            owners[number, at:end] = item
            at = end
    return positions, owners


def _additive(visible_RMS: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive mask [R, 1, M, S] of 0 and the lowest finite number."""
    mask_RMS = torch.zeros(visible_RMS.shape, dtype=dtype, device=visible_RMS.device)
    return mask_RMS.masked_fill_(~visible_RMS, torch.finfo(dtype).min)[:, None]
