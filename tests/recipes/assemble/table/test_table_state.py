"""The folder of a table's counts: who may count into it, who is told to stop, and what damage is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.table.count import _Job
from draftsmith.recipes.assemble.table.state import (
    CONSIDERABLE,
    IDENTITY,
    PARTS,
    STOP,
    TOKEN,
    counted_tokens,
    differences,
)
from draftsmith.recipes.commands.training.train import accelerator_for
from draftsmith.recipes.schema.training import CountSection, TableRecipe
from draftsmith.train.parallel.processes import StoppedError
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.documents import PLACE, spilled_place
from draftsmith.train.table.run_files import INDEX

V = 320
KEPT = 79  # of 80 conversations; one is held out


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> TableRecipe:
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "cache": str(tmp_path / "prepared")}
    values = {"kind": "table", "out": str(tmp_path / "table"), "tokenizer": str(corpus / "tokenizer"), "data": data}
    return TableRecipe.model_validate(values)


@pytest.fixture
def launch(recipe: TableRecipe) -> Iterator[Callable[..., _Job]]:
    """Begins a launch of one process, behind what `begin` and `see` do; the test's end gives its lock back."""
    with ExitStack() as stack:

        def begin(changed: TableRecipe = recipe) -> _Job:
            stack.pop_all().close()
            size = changed.vocab_size or V
            job = _Job(changed, accelerator_for(changed), load_tokenizer(recipe.tokenizer), size)
            job.see(job.broadcast(job.begin(stack)))
            return job

        yield begin


def hold(folder: Path, tokens: int) -> None:
    """Counts of so many tokens more, as an earlier process left them."""
    with PairCounter(V, folder / "rank-0-of-2") as counter:
        counter.add(np.arange(tokens, dtype=np.int32) % V, np.zeros(1, dtype=np.int64), {PLACE: 1})
        counter.spill()


@pytest.mark.parametrize("more", [-1, 0])
def test_counts_of_other_settings_are_let_go_if_they_are_few(
    launch: Callable[..., _Job], recipe: TableRecipe, capsys: pytest.CaptureFixture[str], more: int
) -> None:
    folder = launch().folder
    hold(folder, CONSIDERABLE + more)
    other = recipe.model_copy(
        update={
            "count": CountSection(pairs="messages", roles=["user"]),
            "vocab_size": 384,
            "data": recipe.data.model_copy(update={"template": "plain", "workers": 5, "heldout_limit": 3}),
        }
    )
    words = (
        f"{folder} holds counts of {CONSIDERABLE + more:,} tokens with other settings "
        '(data.template: "chatml" there, "plain" here; count.pairs: "documents" there, "messages" here; '
        'count.roles: [] there, ["user"] here; vocab_size: 320 there, 384 here)'
    )
    if more < 0:
        launch(other)
        assert f"table: counting anew: {words}" in capsys.readouterr().err
        assert not (folder / "rank-0-of-2").exists()
        return
    with pytest.raises(ValueError, match=r"set them back .*, delete that folder .*, or choose another `out`") as caught:
        launch(other)
    assert words in str(caught.value)
    assert counted_tokens(folder) == CONSIDERABLE
    launch(recipe.model_copy(update={"count": CountSection(memory_mb=7)}))
    assert counted_tokens(folder) == CONSIDERABLE, "the settings are set back: nothing was lost"


def test_counts_of_nothing_alarm_nobody(
    launch: Callable[..., _Job], recipe: TableRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    launch()
    launch(recipe.model_copy(update={"count": CountSection(pairs="answers")}))
    assert "anew" not in capsys.readouterr().err


def test_what_differs_is_named_as_recipes_name_it() -> None:
    theirs = {
        "options": {"source": "a.jsonl"},
        "cleaning": {"html": "drop"},
        "sources": [{"files": {"a.jsonl": "0" * 64}}],
    }
    mine = {
        "options": {"source": "a.jsonl"},
        "cleaning": {"html": "keep"},
        "sources": [{"files": {"a.jsonl": "1" * 64}}],
    }
    hashes = (f'"{"0" * 39}…', f'"{"1" * 39}…')
    assert differences(theirs, mine) == (
        'data.clean.html: "drop" there, "keep" here; '
        f"what the corpus holds (0.files.a.jsonl): {hashes[0]} there, {hashes[1]} here"
    )
    many = differences({"options": dict.fromkeys("abcdef", 1)}, {"options": dict.fromkeys("abcdef", 2)})
    assert many.endswith("data.d: 1 there, 2 here; and 2 more")
    assert differences({"roles": ["a", "b"]}, {"roles": []}) == 'count.roles: ["a", "b"] there, [] here'


def straggle(folder: Path, place: int) -> None:
    """What a process of an earlier launch of three puts on disk."""
    with PairCounter(V, folder / "rank-0-of-3") as counter:
        counter.add(np.arange(5, dtype=np.int32), np.zeros(1, dtype=np.int64), {PLACE: place})
        counter.spill()


def test_only_this_launchs_word_stops_a_count(launch: Callable[[], _Job]) -> None:
    job = launch()
    for word in ("", "another launch's"):
        (job.folder / STOP).write_text(word)
        assert job.count()["conversations"] == KEPT
        assert spilled_place(job.folder / "rank-0-of-1") == KEPT
    job = launch()
    assert not (job.folder / STOP).exists()
    (job.folder / STOP).write_text(job.word)
    with pytest.raises(StoppedError, match="stopped by another process"):
        job.count()


def test_a_stopped_process_keeps_what_it_counted_and_says_that_it_is_incomplete(launch: Callable[[], _Job]) -> None:
    job = launch()
    (job.folder / STOP).write_text(job.word)
    with pytest.raises(StoppedError):
        job.count()
    assert spilled_place(job.folder / "rank-0-of-1") == 0
    assert launch().count()["conversations"] == KEPT


def test_a_process_that_outlives_its_launch_is_refused(launch: Callable[[], _Job], recipe: TableRecipe) -> None:
    folder = Path(recipe.out + ".state") / "count"
    with PairCounter(V, folder / "rank-2-of-3"), pytest.raises(ValueError, match=r"another process .*rank-2-of-3"):
        launch()
    earlier = launch()
    launch()
    with pytest.raises(ValueError, match="it was started after this one"):
        earlier.count()
    assert run_is_whole(launch)


def run_is_whole(launch: Callable[[], _Job]) -> bool:
    job = launch()
    return bool(job.count()["conversations"] == spilled_place(job.folder / "rank-0-of-1") == KEPT)


def test_counts_of_others_that_grow_meanwhile_are_refused_for_good(launch: Callable[[], _Job]) -> None:
    straggle(launch().folder, 7)
    job = launch()
    job.count()
    job.merge()  # nothing moved
    straggle(job.folder, 9)
    with pytest.raises(ValueError, match=r"process 0 of .* 3 processes went on to conversation 9 from 7"):
        job.merge()
    with pytest.raises(ValueError, match=f"{IDENTITY} is missing.*delete .* to count anew"):
        launch()


@pytest.mark.parametrize("text", ["", '{"pairs": "docu', "[]", None])
def test_counts_are_not_deleted_where_nothing_says_whose_they_are(launch: Callable[[], _Job], text: str | None) -> None:
    job = launch()
    identity = job.folder / IDENTITY
    identity.unlink()
    if text is not None:
        identity.write_text(text)
    launch()  # nothing is counted yet: nothing to lose
    job.word = (job.folder / TOKEN).read_text()
    job.count()
    identity.unlink()
    if text is not None:
        identity.write_text(text)
    with pytest.raises(ValueError, match=rf"{IDENTITY} is (damaged|missing).*delete .* to count anew"):
        launch()
    assert spilled_place(job.folder / "rank-0-of-1") == KEPT


def test_parts_of_a_killed_merge_go(launch: Callable[[], _Job]) -> None:
    job = launch()
    job.count()
    job.merge()
    assert list((job.folder / PARTS).iterdir())
    again = launch()
    assert not (again.folder / PARTS).exists()
    again.count()
    again.merge()
    again.finish({})


@pytest.mark.parametrize("text", ['{"place"', "{}", "[]", '{"place": 3}'])
def test_a_damaged_index_is_named(launch: Callable[[], _Job], text: str) -> None:
    job = launch()
    job.count()
    index = job.folder / "rank-0-of-1" / INDEX
    index.write_text(text)
    with pytest.raises(ValueError, match=f"{index} is damaged: .*; delete {index.parent} to count anew"):
        launch().count()
