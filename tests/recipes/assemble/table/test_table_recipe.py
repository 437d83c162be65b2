"""A recipe of kind table: what it counts and prunes, and what it refuses, against counts by hand."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable
from draftsmith.data.conversations import Conversation, CorpusReport, Turn
from draftsmith.data.rendering.render import render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import prepare_data, training_conversations
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.documents import (
    CONVERSATION,
    Share,
    count_packed,
    pack_documents,
    read_progress,
    token_documents,
)
from draftsmith.train.table.merging import counted
from hypothesis import given, settings
from hypothesis import strategies as st

Pairs = Counter[tuple[int, int]]


def pairs_of(documents: Iterable[Iterable[int]]) -> Pairs:
    """Neighbours within documents."""
    return Counter(pair for document in documents for pair in pairwise(list(document)))


def pairs_in(table: BigramTable) -> Pairs:
    rows = np.repeat(np.arange(table.vocab_size), np.diff(table.row_ptr.numpy()))
    return Counter(dict(zip(zip(rows.tolist(), table.col.tolist(), strict=True), table.count.tolist(), strict=True)))


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe's values."""
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "heldout_share": 0.2}
    return {
        "kind": "table",
        "out": str(tmp_path / "table"),
        "tokenizer": str(corpus / "tokenizer"),
        "data": data | {"cache": str(tmp_path / "prepared")},
    }


def loaded(recipe: dict[str, Any]) -> TableRecipe:
    return TableRecipe.model_validate(recipe)


def conversations(recipe: TableRecipe) -> list[Conversation]:
    reports = [CorpusReport() for _ in recipe.data.parts()]
    return list(training_conversations(recipe.data, reports, tell=False))


def test_whole_conversations_are_counted_as_they_are_rendered(recipe: dict[str, Any]) -> None:
    mine = loaded(recipe)
    out = run_train(mine)
    tokenizer, template = load_tokenizer(mine.tokenizer), get_template("chatml")
    chats = conversations(mine)
    assert 0 < len(chats) < 80, "some are held out"
    rendered = [render(chat, template, tokenizer).ids.tolist() for chat in chats]
    assert max(map(len, rendered)) > 64, "longer than a block, and never split"
    table = BigramTable.load(out)
    assert pairs_in(table) == pairs_of(rendered)
    assert table.unigram.tolist() == np.bincount(np.concatenate(rendered), minlength=320).tolist()
    manifest = verify_artifact(out)
    assert manifest.data["conversations"] == manifest.data["documents"] == len(chats)
    assert manifest.data["tokens"] == sum(map(len, rendered))
    assert manifest.data["corpus"]["kept"] == 80
    assert manifest.shapes["entries"] == len(table.col)
    assert not Path(mine.data.cache, "train").exists()
    assert not Path(f"{out}.state").exists(), "what was counted is in the artifact"
    heldout = prepare_data(mine.data, tokenizer, quiet=True).folder / "heldout.jsonl"
    kept = {json.loads(line)["id"] for line in heldout.read_text().splitlines()}
    assert kept.isdisjoint(chat.id for chat in chats)
    assert len(kept) + len(chats) == 80


def test_answers_are_the_pairs_whose_right_token_is_trained_on(recipe: dict[str, Any]) -> None:
    mine = loaded(recipe | {"count": {"pairs": "answers"}})
    table = BigramTable.load(run_train(mine))
    tokenizer, template = load_tokenizer(mine.tokenizer), get_template("chatml")
    expected: Pairs = Counter()
    for chat in conversations(mine):
        document = render(chat, template, tokenizer)
        flags = document.trainable()
        expected.update(
            pair for pair, trained in zip(pairwise(document.ids.tolist()), flags[1:], strict=True) if trained
        )
    assert pairs_in(table) == expected


@pytest.mark.parametrize("roles", [[], ["user"], ["assistant", "user", "system"]])
def test_messages_are_counted_without_the_templates_tokens(
    recipe: dict[str, Any], tmp_path: Path, roles: list[str]
) -> None:
    talk = (("system", "the tree keeps"), ("user", "the token"), ("assistant", "draft target"))
    row = json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) + "\n"
    source = tmp_path / "rows.jsonl"
    source.write_text(row * 30)
    recipe["data"]["source"] = str(source)
    mine = loaded(recipe | {"count": {"pairs": "messages", "roles": roles}})
    table = BigramTable.load(run_train(mine))
    tokenizer = load_tokenizer(mine.tokenizer)
    wanted = roles or ["user", "assistant"]
    texts = [turn.text for chat in conversations(mine) for turn in chat.turns if turn.role in wanted]
    assert pairs_in(table) == pairs_of(tokenizer(texts, add_special_tokens=False).input_ids)


@pytest.mark.shared
def test_messages_behind_a_space_begin_with_a_word(shared_data: Path) -> None:
    """Sentencepiece writes the first word of a message otherwise than the middle of one."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizer" / "llama2c"))
    turns = (Turn("user", "Hello there"), Turn("assistant", "Fine"), Turn("user", "world"), Turn("assistant", " two"))
    chat = Conversation("a", turns)
    for name in ("vicuna-v1.1", "plain", "alpaca"):
        template = get_template(name)
        whole = render(chat, template, tokenizer).ids.tolist()
        ((number, found),) = token_documents([(7, chat)], tokenizer, template, pairs="messages")
        assert number == 7
        assert len(found) == 4
        for ids in found:
            text = ids.tolist()
            assert text in [whole[at : at + len(text)] for at in range(len(whole))], name


def test_pruning_keeps_the_whole_table_beside_the_pruned_one(recipe: dict[str, Any], tmp_path: Path) -> None:
    whole = BigramTable.load(run_train(loaded(recipe)))
    pruned_recipe = recipe | {"out": str(tmp_path / "small"), "prune": {"min_count": 3}}
    pruned = BigramTable.load(run_train(loaded(pruned_recipe)))
    assert pairs_in(pruned) == Counter({pair: n for pair, n in pairs_in(whole).items() if n >= 3})
    assert (tmp_path / "small-whole" / TABLE_FILE).read_bytes() == (tmp_path / "table" / TABLE_FILE).read_bytes()
    assert load_manifest(tmp_path / "small-whole").recipe["prune"] is None
    assert load_manifest(tmp_path / "small").data == load_manifest(tmp_path / "small-whole").data
    shutil.rmtree(tmp_path / "small")
    run_train(loaded(pruned_recipe))
    assert (tmp_path / "small" / "artifact.json").is_file(), "of the whole table that is there already"
    alone = recipe | {"out": str(tmp_path / "alone"), "prune": {"top": 2, "keep_whole": False}}
    run_train(loaded(alone))
    assert not (tmp_path / "alone-whole").exists()


def test_a_run_that_is_refused_before_it_counts_leaves_nothing(recipe: dict[str, Any], tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"id": "torn')
    for changes, words in (
        ({"data": recipe["data"] | {"heldout_share": 0.999}}, "0 conversations of"),
        ({"data": recipe["data"] | {"source": str(torn)}}, "torn.jsonl"),
        ({"prune": {"megabytes": 0.01}}, "320 tokens takes 0.012296 megabytes"),
        ({"vocab_size": 319}, "`vocab_size` is 319"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            run_train(loaded(recipe | changes))
        assert not list(tmp_path.glob("table*")), changes


def test_settings_that_change_nothing_leave_a_finished_table_as_it_is(recipe: dict[str, Any]) -> None:
    out = run_train(loaded(recipe))
    stamp = (out / "artifact.json").stat().st_mtime_ns
    data = {"workers": 3, "block_tokens": 64, "heldout_limit": 7, "cache": recipe["data"]["cache"] + "-2"}
    saturation = {"target": "target", "heads": "heads"}
    same = {"count": {"memory_mb": 3, "save_minutes": 1.0}, "saturation": saturation, "data": recipe["data"] | data}
    assert run_train(loaded(recipe | same)) == out
    moved = out.rename(out.with_name("moved"))
    run_train(loaded(recipe | same | {"out": str(moved)}))
    assert (moved / "artifact.json").stat().st_mtime_ns == stamp
    for change, words in (
        ({"count": {"pairs": "answers"}}, "count.pairs: 'documents' there, 'answers' here"),
        ({"data": recipe["data"] | {"heldout_share": 0.3}}, "data.heldout_share: 0.2 there, 0.3 here"),
    ):
        with pytest.raises(ValueError, match=words):
            run_train(loaded(recipe | change | {"out": str(moved)}))


@pytest.mark.parametrize("keep_whole", [True, False])
def test_what_pruning_refuses_is_not_counted_again(
    recipe: dict[str, Any], keep_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(recipe["out"])
    with pytest.raises(ValueError, match=f"{out}-whole" if keep_whole else "`prune`"):
        run_train(loaded(recipe | {"prune": {"min_count": 10**6, "keep_whole": keep_whole}}))
    assert not out.exists()
    capsys.readouterr()
    run_train(loaded(recipe | {"prune": {"min_count": 2, "keep_whole": keep_whole}}))
    said = capsys.readouterr().err
    assert ("pruning the counts of" if keep_whole else "tokens that are counted already") in said.replace("\n", " ")
    assert "margins kept whole" in said
    assert int(BigramTable.load(out).count.min()) == 2
    assert not Path(f"{out}.state").exists()


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_every_conversation_is_counted_once_whatever_processes_come_and_go(
    examples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def count(data: st.DataObject) -> None:
        count_in_generations(data, tmp_path_factory.mktemp("generations"))

    settings(max_examples=examples, deadline=None)(given(data=st.data())(count))()


def count_in_generations(data: st.DataObject, folder: Path) -> None:
    """Runs of any number of processes, each killed anywhere behind its last spill, as the recipe counts them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = [rng.integers(0, 9, size=rng.integers(0, 12)).astype(np.int32) for _ in range(data.draw(st.integers(1, 25)))]
    runs = [*data.draw(st.lists(st.integers(1, 4), max_size=5)), data.draw(st.integers(1, 4))]
    for last, world in [(number == len(runs) - 1, world) for number, world in enumerate(runs)]:
        earlier: dict[int, dict[int, int]] = {}
        for path in folder.glob("rank-*"):
            rank, of = (int(part) for part in path.name.removeprefix("rank-").split("-of-"))
            earlier.setdefault(of, {})[rank] = read_progress(path).position
        for rank in range(world):
            share = Share(rank, world, tuple(earlier.items()))
            mine = [(number, [row]) for number, row in enumerate(rows) if share.wants(number)]
            stop = len(mine) if last else data.draw(st.integers(0, len(mine)))
            megabytes = data.draw(st.integers(1, 40)) / 2**14  # of so many tokens
            with PairCounter(9, folder / f"rank-{rank}-of-{world}", 1) as counter:
                count_packed(pack_documents(mine[:stop], megabytes), counter, save_seconds=0)
                for batch in pack_documents(mine[stop:], megabytes):  # counted, and lost
                    counter.add(batch.tokens_T, batch.starts_D, {CONVERSATION: batch.position})
    folders = sorted(folder.glob("rank-*"))
    found = counted(folders, 9)
    parts = [folder / f"part{number}" for number in range(2)]
    found.merge(parts)
    (folder / "out").mkdir()
    found.assemble(parts, folder / "out" / TABLE_FILE)
    table = BigramTable.load(folder / "out")
    assert pairs_in(table) == pairs_of(row.tolist() for row in rows)
    assert table.unigram.tolist() == np.bincount(np.concatenate(rows), minlength=9).tolist()


TABLES = sorted(name for name in shipped_recipes() if name.startswith("table/"))


@pytest.mark.parametrize("name", TABLES)
def test_every_shipped_recipe_counts_a_stand_in(name: str, stand_ins: Any, tmp_path: Path) -> None:
    assert TABLES == ["table/any-corpus", "table/vicuna-lmsys"]
    target = stand_ins.target("lmsys/vicuna-7b-v1.3")
    recipe = load_recipe(name, [f"out={tmp_path / 'out'}", f"tokenizer={target}", f"data.path={stand_ins.rows}"])
    assert isinstance(recipe, TableRecipe)
    table = BigramTable.load(run_train(recipe))
    tokenizer = load_tokenizer(str(target))
    template = get_template(recipe.data.template, tokenizer)
    assert pairs_in(table) == pairs_of(render(chat, template, tokenizer).ids.tolist() for chat in conversations(recipe))
