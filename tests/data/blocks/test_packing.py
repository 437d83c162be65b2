"""Packed blocks, masks and the order of batches."""

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch, global_batch, pack_best_fit
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=60))))
def test_packing_places_every_document_once_with_little_padding(case: tuple[int, list[int]]) -> None:
    size, lengths = case
    blocks = pack_best_fit(lengths, size)
    assert sorted(i for block in blocks for i in block) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in block) for block in blocks]
    assert all(0 < total <= size for total in used)
    # no two blocks fit into one: a block is only started if no existing block has room
    assert all(a + b > size for n, a in enumerate(used) for b in used[:n])


def test_best_fit_takes_the_fullest_block_with_room() -> None:
    # the 7 and the 6 need two blocks of 10; the 3 fits into both and fills the first one completely
    assert pack_best_fit([6, 7, 3], 10) == [[1, 2], [0]]


def test_the_attention_mask_equals_a_plain_loop() -> None:
    documents_BT = torch.tensor([[4, 4, 4, 9, 9, -1, -1], [7, 2, 2, 2, -1, -1, -1]])
    empty = torch.zeros_like(documents_BT)
    mask_B1TT = Batch(empty, empty, empty, documents_BT).attention_mask_B1TT()
    assert mask_B1TT.dtype == torch.bool
    assert mask_B1TT.shape == (2, 1, 7, 7)
    for b in range(2):
        for row in range(7):
            for column in range(7):
                same = documents_BT[b, row] == documents_BT[b, column] != -1
                expected = row == column or (bool(same) and column <= row)
                assert mask_B1TT[b, 0, row, column] == expected, (b, row, column)


@pytest.mark.parametrize(("blocks", "batch_blocks"), [(10, 3), (7, 7), (5, 8), (1, 4), (12, 1), (3, 20)])
def test_every_block_is_used_once_per_epoch(blocks: int, batch_blocks: int) -> None:
    steps = 3 * blocks  # three epochs with a batch size of one, otherwise more
    stream = np.concatenate([global_batch(blocks, batch_blocks, step, seed=5) for step in range(steps)])
    assert len(stream) == steps * batch_blocks
    epochs = stream[: len(stream) // blocks * blocks].reshape(-1, blocks)
    assert all(sorted(epoch) == list(range(blocks)) for epoch in epochs.tolist())
