"""Streams: every row once an epoch, on any number of ranks and workers, after any interruption; mixtures by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.blocks.prepared import prepare
from draftsmith.data.blocks.stream import StreamedData
from draftsmith.data.conversations import Conversation, Turn, write_conversations
from draftsmith.data.rendering.render import Renderer
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.reading import Part, mix, read_conversations

CHATML = get_template("chatml")
BLOCK = 64
ROWS = 90


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        Conversation(f"row{i}", (Turn("user", f"question {i}"), Turn("assistant", f"answer {i} " * (1 + i % 4))))
        for i in range(ROWS)
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_conversations(rows, path)
    return path


def open_epoch(path: Path, epoch: int) -> Iterator[Conversation]:
    return read_conversations(str(path))


def stream(rows_file: Path, bpe: Any, **options: Any) -> StreamedData:
    settings: dict[str, Any] = {"size": 16, "seed": 3, "identity": {"name": "rows"}} | options
    return StreamedData(partial(open_epoch, rows_file), bpe, CHATML, BLOCK, **settings)


def documents_of(batch: Any) -> list[tuple[int, ...]]:
    """The token ids of each document of a batch."""
    found = []
    for tokens, numbers in zip(batch.tokens_BT.tolist(), batch.documents_BT.tolist(), strict=True):
        borders = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1]] + [len(numbers)]
        found += [tuple(tokens[a:b]) for a, b in pairwise(borders) if numbers[a] != -1]
    return found


@pytest.fixture(scope="module")
def all_documents(rows_file: Path, bpe: Any) -> list[tuple[int, ...]]:
    documents = [tuple(d.ids.tolist()) for d in Renderer(CHATML, bpe, BLOCK)(open_epoch(rows_file, 0))]
    assert len(set(documents)) == len(documents) == ROWS
    return documents


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_is_seen_once_an_epoch(
    rows_file: Path, bpe: Any, all_documents: list[tuple[int, ...]], workers: int
) -> None:
    data = stream(rows_file, bpe, workers=workers)
    seen: list[tuple[int, ...]] = []
    step = 0
    while len(seen) < 2 * ROWS:
        seen += documents_of(data.step_batch(step, 1, 0)[1])
        step += 1
    assert Counter(seen[:ROWS]) == Counter(all_documents)
    assert Counter(seen[ROWS : 2 * ROWS]) == Counter(all_documents), "epochs follow each other without overlap"
    assert seen[:ROWS] != seen[ROWS : 2 * ROWS], "and in another order"
    assert seen[:ROWS] != all_documents


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_goes_on_where_it_stopped(rows_file: Path, bpe: Any, workers: int) -> None:
    straight = stream(rows_file, bpe)
    batches = [straight.step_batch(step, 3, 0)[1].tokens_BT for step in range(40)]
    state: dict[str, int] = {}
    for step in range(40):  # a new process at every step
        data = stream(rows_file, bpe, workers=workers if step % 8 == 0 else 0)
        data.restore(state or data.state())
        assert torch.equal(data.step_batch(step, 3, 0)[1].tokens_BT, batches[step]), step
        state = data.state()


def test_streamed_blocks_are_made_as_prepared_ones(rows_file: Path, bpe: Any, tmp_path: Path) -> None:
    data = stream(rows_file, bpe, size=ROWS)
    prepared = prepare(open_epoch(rows_file, 0), bpe, CHATML, BLOCK, tmp_path / "p", source={})
    batch = data.step_batch(0, prepared.blocks, 0)[1]
    whole = prepared.batch(range(prepared.blocks))

    def rows(b: Any) -> list[Any]:
        return sorted(zip(b.tokens_BT.tolist(), b.labels_BT.tolist(), b.positions_BT.tolist(), strict=True))

    assert rows(batch) == rows(whole)
    assert data.state()["epoch"] == 0


def test_padding_is_to_the_longest_of_the_batch(rows_file: Path, bpe: Any, tmp_path: Path) -> None:
    for data in (
        stream(rows_file, bpe, packing="pad"),
        prepare(open_epoch(rows_file, 0), bpe, CHATML, BLOCK, tmp_path / "p", source={}, packing="pad"),
    ):
        _, batch = data.step_batch(0, 5, 0)
        documents = documents_of(batch)
        assert len(documents) == 5
        assert batch.tokens_BT.shape == (5, max(map(len, documents)))
        assert (batch.documents_BT[:, 0] >= 0).all()


def test_an_empty_stream_is_an_error(bpe: Any, tmp_path: Path, rows_file: Path) -> None:
    write_conversations([], tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no conversation"):
        stream(tmp_path / "none.jsonl", bpe).step_batch(0, 1, 0)
    long = [
        Conversation(f"{i}", (Turn("system", "s" * 99), Turn("user", "q"), Turn("assistant", "a"))) for i in range(40)
    ]
    write_conversations(long, tmp_path / "long.jsonl")
    with pytest.raises(ValueError, match="40"):
        stream(tmp_path / "long.jsonl", bpe).step_batch(0, 1, 0)


def part(name: str, rows: int, weight: float) -> Part:
    turns = (Turn("user", "q"), Turn("assistant", "a"))
    return Part(weight, lambda _: (Conversation(f"{name}{i}", turns) for i in range(rows)))


def test_a_mixture_uses_rows_as_often_as_their_weight_says() -> None:
    rows = [c.id for c in mix([part("a", 400, 1.0), part("b", 100, 2.0), part("c", 1000, 0.25)], seed=1)]
    times = Counter(rows)
    assert all(times[f"a{i}"] == 1 for i in range(400))
    assert all(times[f"b{i}"] == 2 for i in range(100))
    share = sum(times[f"c{i}"] for i in range(1000))
    assert max(times[f"c{i}"] for i in range(1000)) == 1
    assert 180 < share < 320  # 250 with a deviation of 13.7: outside once in 4 million
    again = [c.id for c in mix([part("a", 400, 1.0), part("b", 100, 2.0), part("c", 1000, 0.25)], seed=1)]
    assert rows == again
    # mixed, not one after the other: of the first 100 about 100 · 1/3.25 are of a (σ = 4.6) and 100 · 2/3.25 of b
    first = Counter(name[0] for name in rows[:100])
    assert 5 < first["a"] < 60
    assert 35 < first["b"] < 90
