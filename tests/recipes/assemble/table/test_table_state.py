"""The folder of a table's counts: who may count into it, who is made to stop, and what damage is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.table.count import Job
from draftsmith.recipes.assemble.table.state import CONSIDERABLE, IDENTITY, STOP, counted_tokens
from draftsmith.recipes.commands.training.train import accelerator_for
from draftsmith.recipes.schema.training import CountSection, TableRecipe
from draftsmith.train.parallel.processes import StoppedError
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.documents import CONVERSATION, read_progress

V = 320
KEPT = 79  # of 80 conversations; one is held out


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> TableRecipe:
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "cache": str(tmp_path / "prepared")}
    values = {"kind": "table", "out": str(tmp_path / "table"), "tokenizer": str(corpus / "tokenizer"), "data": data}
    return TableRecipe.model_validate(values)


@pytest.fixture
def launch(recipe: TableRecipe) -> Iterator[Callable[..., Job]]:
    """Begins a launch of one process, up to `join`; the test's end gives its lock back."""
    with ExitStack() as stack:

        def begin(changed: TableRecipe = recipe) -> Job:
            stack.pop_all().close()
            size = changed.vocab_size or V
            job = Job(changed, accelerator_for(changed), load_tokenizer(recipe.tokenizer), size)
            job.join(job.claim(stack))
            return job

        yield begin


def hold(folder: Path, tokens: int) -> None:
    """Counts of so many tokens more, as an earlier process left them."""
    with PairCounter(V, folder / "rank-0-of-2") as counter:
        counter.add(np.arange(tokens, dtype=np.int32) % V, np.zeros(1, dtype=np.int64), {CONVERSATION: 1})
        counter.spill()


@pytest.mark.parametrize("tokens", [CONSIDERABLE - 1, CONSIDERABLE])
def test_counts_of_other_settings_are_discarded_if_they_are_few(
    launch: Callable[..., Job], recipe: TableRecipe, capsys: pytest.CaptureFixture[str], tokens: int
) -> None:
    folder = launch().folder
    launch(recipe.model_copy(update={"count": CountSection(pairs="answers")}))
    assert "tokens" not in capsys.readouterr().err, "counts of nothing alarm nobody"
    launch()
    hold(folder, tokens)
    other = recipe.model_copy(
        update={
            "count": CountSection(pairs="messages", roles=["user"]),
            "vocab_size": 384,
            "data": recipe.data.model_copy(update={"last_turn_only": True, "workers": 5, "heldout_limit": 3}),
        }
    )
    words = (f"{folder} holds counts of {tokens:,} tokens", 'count.pairs: "documents" there, "messages" here')
    if tokens < CONSIDERABLE:
        launch(other)
        shown = capsys.readouterr().err
        assert all(part in shown for part in words)
        assert not (folder / "rank-0-of-2").exists()
        return
    with pytest.raises(ValueError, match=r"\S") as caught:
        launch(other)
    assert all(part in str(caught.value) for part in words)
    launch(recipe.model_copy(update={"count": CountSection(memory_mb=7)}))
    assert counted_tokens(folder) == CONSIDERABLE, "the settings are set back: nothing was lost"


def test_a_stopped_process_keeps_what_it_counted(launch: Callable[[], Job]) -> None:
    job = launch()
    (job.folder / STOP).touch()
    with pytest.raises(StoppedError):
        job.count()
    assert read_progress(job.folder / "rank-0-of-1").position == 0
    job = launch()
    assert not (job.folder / STOP).exists()
    job.count()
    assert job.stats.conversations == read_progress(job.folder / "rank-0-of-1").position == KEPT


def test_a_process_that_outlives_its_launch_is_refused(launch: Callable[[], Job], recipe: TableRecipe) -> None:
    folder = Path(recipe.out + ".state") / "count"
    with PairCounter(V, folder / "rank-2-of-3"), pytest.raises(ValueError, match=r"rank-2-of-3"):
        launch()
    earlier = launch()
    job = launch()
    with pytest.raises(ValueError, match=str(folder)):
        earlier.count()
    job.count()
    assert job.stats.conversations == KEPT


@pytest.mark.parametrize("text", ['{"pairs": "docu', None])
def test_counts_are_not_deleted_where_nothing_says_whose_they_are(launch: Callable[[], Job], text: str | None) -> None:
    job = launch()
    identity = job.folder / IDENTITY

    def damage() -> None:
        identity.unlink()
        if text is not None:
            identity.write_text(text)

    damage()
    job = launch()  # nothing is counted yet: nothing to lose
    job.count()
    damage()
    with pytest.raises(ValueError, match=str(identity)):
        launch()
    assert read_progress(job.folder / "rank-0-of-1").position == KEPT


def test_a_killed_merge_is_done_again(launch: Callable[[], Job]) -> None:
    job = launch()
    job.count()
    job.merge()
    job.parts()[0].write_bytes(b"half")
    again = launch()
    again.count()
    again.merge()
    again.finish(again.gather())
    assert (Path(again.recipe.out) / "artifact.json").is_file()
    assert not again.folder.exists()
