"""The draft tokens that decoding tried, by what they have in common, with examples of those that were refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....decode.evaluation.diagnose.agreement import Cell, Tried, bands, cells, probabilities, quantile_edges, score
from ....decode.evaluation.diagnose.token_classes import classify
from ...report.trace import TokenTexts
from .case import Case
from .stages import Measured

_PLACES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_FIFTHS = 5
_EXAMPLES = 3
_BEFORE = 60
"""Letters before an example."""


def entropies(case: Case, found: Measured) -> NDArray[Any]:
    """The target's entropy at every token tried, nats, in the texts that decoding wrote."""
    assert found.source is not None
    scores = score(case.target, found.source, found.texts, found.entry.sampling)
    starts = np.cumsum([0, *(len(passage.text) for passage in found.texts)])
    flat = [starts[number] + each.place for number, row in enumerate(found.tried) for each in row]
    return scores.entropy_T[np.array(flat, dtype=np.int64)]


def cells_of(
    case: Case,
    found: Measured,
    entropy_X: NDArray[Any],
    block: int | None,
    more: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """By split, the cells of all tokens tried, those first that cost most.

    Args:
        entropy_X: of the target at every token tried.
        block: length of a training block.
        more: names of every token tried, by split.
    """
    rows = [(number, each) for number, row in enumerate(found.tried) for each in row]
    if not rows:
        return {}
    texts = _Texts(case, found)
    accepted_X = np.array([each.accepted for _, each in rows])
    passage_X = np.array([number for number, _ in rows])
    place_X = np.array([each.place for _, each in rows])
    depth_X = np.array([each.depth for _, each in rows])
    start_X = np.array([len(found.texts[number].prompt) for number, _ in rows])
    names: dict[str, Sequence[str]] = {
        "token class": [texts.classes[number][each.place] for number, each in rows],
        "place in the answer": bands(place_X, _PLACES),
        "depth in the draft": [str(depth + 1) for depth in depth_X],
        "target's entropy": bands(entropy_X, quantile_edges(entropy_X, _FIFTHS), " nats", 2),
    }
    categories = [case.questions[number].category for number, _ in rows]
    if len(set(categories)) > 1:
        names["category"] = [category or "(none)" for category in categories]
    if block is not None and (place_X + start_X >= block).any():
        beyond = f"beyond the {block} tokens of a training block"
        names["position"] = [beyond if flag else "within a training block" for flag in place_X + start_X >= block]
    told = {}
    for split, each_X in (names | dict(more or {})).items():
        found_cells = cells(split, each_X, accepted_X, passage_X, case.resamples)
        told[split] = [_cell(cell, rows, texts) for cell in found_cells]
    return told


class _Texts:
    """The texts that decoding wrote, token by token, and the odds of what was tried there."""

    def __init__(self, case: Case, found: Measured) -> None:
        assert found.source is not None
        tokenizer = case.opened.tokenizer
        self.tokenizer, self.passages = tokenizer, found.texts
        self.names = [question.name for question in case.questions]
        special = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.pieces, self.classes = [], []
        for passage in found.texts:
            texts = TokenTexts(tokenizer, passage.prompt)
            pieces = [texts.add(token) for token in passage.text]
            self.pieces.append(pieces)
            self.classes.append(classify(pieces, [token in special for token in passage.text]))
        self._odds = probabilities(case.target, found.source, found.texts, found.tried)
        self._places = [{each.place: at for at, each in enumerate(row)} for row in found.tried]

    def odds(self, number: int, each: Tried) -> tuple[float, float, float]:
        """What target and source gave the draft, and the target its own token."""
        return self._odds[number][self._places[number][each.place]]

    def example(self, number: int, each: Tried) -> dict[str, Any]:
        """A refused token with what stands before it."""
        passage = self.passages[number]
        before = "".join(self.pieces[number][: each.place])
        texts = TokenTexts(self.tokenizer, [*passage.prompt, *passage.text[: each.place]])
        target_drafted, source_drafted, target_said = self.odds(number, each)
        return {
            "prompt": self.names[number],
            "before": before[-_BEFORE:],
            "drafted": texts.would_add(each.drafted),
            "said": texts.would_add(each.said),
            "target_drafted": target_drafted,
            "source_drafted": source_drafted,
            "target_said": target_said,
        }


def _cell(cell: Cell, rows: list[tuple[int, Tried]], texts: _Texts) -> dict[str, Any]:
    """A cell for JSON, with the refused tokens that the source was surest of."""
    refused = [rows[member] for member in cell.members if not rows[member][1].accepted]
    surest = sorted(refused, key=lambda row: -texts.odds(*row)[1])
    return {
        "name": cell.name,
        "examined": cell.examined,
        "accepted": cell.accepted,
        "share": cell.share,
        "rejections_share": cell.rejections_share,
        "excess": cell.excess,
        "interval": cell.interval,
        "examples": [texts.example(*row) for row in surest[:_EXAMPLES]],
    }
