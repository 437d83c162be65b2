"""Texts stored with a table: continuations of a context equal those of a full search."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import CONTEXT, TEXTS_FILE, TextStore
from safetensors.numpy import load_file, save_file

VOCAB = 5


def documents(seed: int, count: int = 30) -> list[np.ndarray]:
    """Return short repetitive texts; some have one token or none."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, draw.integers(0, 25)).astype(np.int32) for _ in range(count)]


def followers(texts: list[np.ndarray], context: list[int]) -> tuple[int, list[tuple[int, ...]]]:
    """Find the longest suffix of the context in the texts; return its length and continuations."""
    for length in range(min(CONTEXT, len(context)), 0, -1):
        end = context[-length:]
        rows = [text.tolist() for text in texts]
        results = [tuple(row[at:]) for row in rows for at in range(length, len(row)) if row[at - length : at] == end]
        if results:
            return length, results
    return 0, []


@pytest.mark.parametrize("seed", range(3))
def test_continuations_of_a_context(tmp_path: Path, seed: int) -> None:
    texts = documents(seed)
    TextStore.from_documents(texts).save(tmp_path)
    store = TextStore.load(tmp_path, VOCAB)
    assert store is not None
    draw, lengths = np.random.default_rng(100 + seed), set()
    for _ in range(300):
        context = draw.integers(0, VOCAB, draw.integers(0, 11)).tolist()
        if draw.random() < 0.5 and context:  # half of the contexts occur in a text
            text = texts[draw.integers(len(texts))].tolist()
            context = text[: draw.integers(len(text) + 1)] or context
        length, places_N = store.matches(np.array(context))
        expected_length, expected = followers(texts, context)
        continuations = []
        for start in places_N:
            end = start + int((store.ids_T[start:] < 0).argmax())  # a negative id ends a text
            continuations.append(tuple(store.ids_T[start:end].tolist()))
        assert (length, sorted(continuations)) == (expected_length, sorted(expected))
        lengths.add(length)
    assert lengths >= {0, 1, 2, 3, CONTEXT}


def test_a_table_saves_its_texts(tmp_path: Path) -> None:
    texts = documents(7)
    table = BigramTable.from_documents(texts, VOCAB)
    table.save(tmp_path)
    assert BigramTable.load(tmp_path).texts is None
    table.texts = TextStore.from_documents(texts)
    table.save(tmp_path)
    loaded = BigramTable.load(tmp_path).to("cpu").texts
    assert loaded is not None
    assert np.array_equal(loaded.places_N, table.texts.places_N)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.update(ids=np.where(tensors["ids"] == 4, VOCAB, tensors["ids"])), ("ids", "5", "4")),
        (lambda tensors: tensors.update(places=tensors["places"] - CONTEXT), ("places", str(CONTEXT))),
        (lambda tensors: tensors.update(places=tensors["places"] + CONTEXT), ("places",)),
        (lambda tensors: tensors.update(ids=tensors["ids"].astype(np.int64)), ("int32",)),
        (lambda tensors: tensors.pop("places"), ("places",)),
    ],
)
def test_invalid_texts_are_refused(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], parts: tuple[str, ...]
) -> None:
    TextStore.from_documents(documents(1)).save(tmp_path)
    tensors = load_file(tmp_path / TEXTS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / TEXTS_FILE)
    with pytest.raises(ValueError, match=TEXTS_FILE) as caught:
        TextStore.load(tmp_path, VOCAB)
    for part in parts:
        assert part in str(caught.value)
    (tmp_path / TEXTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=TEXTS_FILE):
        TextStore.load(tmp_path, VOCAB)
