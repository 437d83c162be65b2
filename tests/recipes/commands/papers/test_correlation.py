"""How often the correlation of a table mends a head's choice, against hand computation.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.evaluation.replay.recording import HeadDrafts, Recording
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.papers.tables import corrected
from draftsmith.recipes.schema.experiments import CorrelationSettings


def test_correlation_by_hand() -> None:
    """Tokens 0, 1, 2. After 0 the table has seen 1 twice as often as 2, after 1 only 2, after 2 only 0.

    One text, 1 2 0, after a root 0; two heads of two candidates each. r(0, 1) = (2/6)/((3/6)(2/6)) = 2,
    r(0, 2) = (1/6)/((3/6)(2/6)) = 1, r(1, 2) = (1/6)/((1/6)(2/6)) = 3, r(2, 0) = (2/6)/((2/6)(2/6)) = 3.
    """
    table = BigramTable.from_documents([np.array(pair) for pair in ([0, 1], [0, 1], [0, 2], [1, 2], [2, 0], [2, 0])], 3)
    chances = [[[0.6, 0.4], [0.9, 0.1]], [[0.7, 0.3], [0.5, 0.4]], [[0.9, 0.1], [0.5, 0.5]]]
    recording = Recording(
        Sampling(), [[0]], [[1, 2, 0]],
        heads=HeadDrafts(
            np.array([0, 1, 2], dtype=np.int32),
            np.array([[[2, 1], [1, 2]], [[0, 2], [0, 1]], [[0, 1], [0, 1]]], dtype=np.int32),
            np.log(np.array(chances, dtype=np.float32)),
        ),
    )  # fmt: skip
    settings = CorrelationSettings(candidates=2, unseen=0.01)
    with_TH, without_TH, within_TH = corrected(recording, table, settings)
    # Place 0, head 1: 2 at 0.6 x 1, 1 at 0.4 x 2: mended. Head 2, after 1: 1 at 0.9 x 0.01, 2 at 0.1 x 3: mended.
    # Place 1, head 1, after 1: 0 at 0.7 x 0.01, 2 at 0.3 x 3: mended. Head 2, after 2: 0 was right and stays.
    # Place 2, head 1: right and stays; head 2 speaks of what lies beyond the text.
    assert without_TH.tolist() == [[False, False], [False, True], [True, without_TH[2, 1]]]
    assert with_TH.tolist() == [[True, True], [True, True], [True, with_TH[2, 1]]]
    assert within_TH.tolist() == [[True, True], [True, True], [True, False]]


def test_correlation_may_spoil_and_never_leaves_the_candidates(tiny_pair: Path) -> None:
    """Against plain loops, on random heads and tables, several texts of different lengths."""
    rng = np.random.default_rng(0)
    vocab, texts = 6, [[1, 2, 3, 4], [5], [0, 0, 2]]
    table = BigramTable.from_documents([rng.integers(0, vocab, 40)], vocab)
    order = np.stack([rng.permutation(vocab)[:3] for _ in range(8 * 2)]).reshape(8, 2, 3)
    logs = np.log(-np.sort(-rng.dirichlet(np.ones(3), (8, 2)), -1))
    roots = rng.integers(0, vocab, 8)
    heads = HeadDrafts(roots.astype(np.int32), order.astype(np.int32), logs.astype(np.float32))
    recording = Recording(Sampling(), [[0]] * 3, texts, heads=heads)
    found = corrected(recording, table, CorrelationSettings(candidates=3, unseen=0.1))
    place, spoiled = 0, 0
    for text in texts:
        for start in range(len(text)):
            for head in range(2):
                inside = start + head < len(text)
                assert found[2][place, head] == inside
                if inside:
                    before = int(roots[place]) if head == 0 else text[start + head - 1]
                    scores = [
                        log + float(table.log_correlation(torch.tensor(before), torch.tensor(int(token)), 0.1))
                        for log, token in zip(logs[place, head], order[place, head], strict=True)
                    ]
                    right = order[place, head][int(np.argmax(scores))] == text[start + head]
                    assert found[0][place, head] == right
                    assert found[1][place, head] == (order[place, head, 0] == text[start + head])
                    spoiled += found[1][place, head] and not right
            place += 1
    assert spoiled or found[0].sum() != found[1].sum()
