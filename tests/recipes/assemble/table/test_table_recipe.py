"""Table recipes: counts of each process equal counts by hand, and invalid recipes are refused."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.conversations import Conversation, CorpusReport
from draftsmith.data.rendering.render import render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import prepare_data, training_conversations
from draftsmith.recipes.assemble.table.count import Share, claim, count_tokens
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.data import DataSection, SourceSection
from draftsmith.recipes.schema.loading import load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter
from hypothesis import given, settings
from hypothesis import strategies as st

Pairs = Counter[tuple[int, int]]
V = 320


def pairs_of(documents: Iterable[Iterable[int]]) -> Pairs:
    """Count the pairs of adjacent tokens within documents."""
    return Counter(pair for document in documents for pair in pairwise(list(document)))


def pairs_in(table: BigramTable) -> Pairs:
    rows = np.repeat(np.arange(table.vocab_size), np.diff(table.row_ptr.numpy()))
    return Counter(dict(zip(zip(rows.tolist(), table.col.tolist(), strict=True), table.count.tolist(), strict=True)))


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> dict[str, Any]:
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
    return list(training_conversations(recipe.data, reports))


def test_rendered_conversations_are_counted(recipe: dict[str, Any]) -> None:
    table_recipe = loaded(recipe)
    out = run_train(table_recipe)
    tokenizer, template = load_tokenizer(table_recipe.tokenizer), get_template("chatml")
    chats = conversations(table_recipe)
    assert 0 < len(chats) < 80, "the test needs held-out conversations"
    rendered = [render(chat, template, tokenizer).ids.tolist() for chat in chats]
    assert max(map(len, rendered)) > 64, "the test needs a conversation longer than a block"
    table = BigramTable.load(out)
    assert pairs_in(table) == pairs_of(rendered)
    assert table.unigram.tolist() == np.bincount(np.concatenate(rendered), minlength=320).tolist()
    manifest = verify_artifact(out)
    assert manifest.data["conversations"] == manifest.data["documents"] == len(chats)
    assert manifest.data["tokens"] == sum(map(len, rendered))
    assert manifest.data["corpus"]["kept"] == 80
    assert manifest.shapes["entries"] == len(table.col)
    assert not Path(table_recipe.data.cache, "train").exists()
    assert not Path(f"{out}.state").exists(), "the artifact records the numbers of pairs"
    heldout = prepare_data(table_recipe.data, tokenizer, quiet=True).folder / "heldout.jsonl"
    held_out_ids = {json.loads(line)["id"] for line in heldout.read_text().splitlines()}
    assert held_out_ids.isdisjoint(chat.id for chat in chats)
    assert len(held_out_ids) + len(chats) == 80


def test_answers_are_pairs_with_a_supervised_right_token(recipe: dict[str, Any]) -> None:
    table_recipe = loaded(recipe | {"count": {"pairs": "answers", "texts": 500}})
    table = BigramTable.load(run_train(table_recipe))
    tokenizer, template = load_tokenizer(table_recipe.tokenizer), get_template("chatml")
    expected: Pairs = Counter()
    answers = []
    for chat in conversations(table_recipe):
        document = render(chat, template, tokenizer)
        answers.append(document)
        flags = document.trainable()
        expected.update(
            pair for pair, trained in zip(pairwise(document.ids.tolist()), flags[1:], strict=True) if trained
        )
    assert pairs_in(table) == expected
    documents = (document.ids[max(0, start - 1) : end] for document in answers for start, end in document.spans)
    first = [token for ids in documents for token in ids.tolist()][:500]
    assert table.texts is not None
    assert table.texts.ids_T[table.texts.ids_T >= 0].tolist() == first
    assert len(table.texts.places_N) < 500


def test_a_refused_run_leaves_no_files(recipe: dict[str, Any], tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"id": "torn')
    for changes, message in (
        ({"data": recipe["data"] | {"heldout_share": 0.999}}, "0 conversations of"),
        ({"data": recipe["data"] | {"source": str(torn)}}, "torn.jsonl"),
        ({"vocab_size": 319}, "`vocab_size` must be at least 320"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_train(loaded(recipe | changes))
        assert not list(tmp_path.glob("table*")), changes


@pytest.mark.parametrize("nested", [False, True])
def test_a_table_has_a_row_for_each_embedding_of_the_model(
    nested: bool, recipe: dict[str, Any], tmp_path: Path
) -> None:
    model = shutil.copytree(recipe["tokenizer"], tmp_path / "model")
    sizes = {"vocab_size": V + 64}  # padded embeddings
    (model / "config.json").write_text(json.dumps({"text_config": sizes} if nested else sizes))
    assert BigramTable.load(run_train(loaded(recipe | {"tokenizer": str(model)}))).vocab_size == V + 64
    assert BigramTable.load(run_train(loaded(recipe | {"out": str(tmp_path / "plain")}))).vocab_size == V


def test_irrelevant_settings_reuse_a_finished_table(recipe: dict[str, Any]) -> None:
    out = run_train(loaded(recipe))
    stamp = (out / "artifact.json").stat().st_mtime_ns
    data = {"block_tokens": 64, "heldout_limit": 7, "cache": recipe["data"]["cache"] + "-2"}
    same = {"count": {"memory_mb": 3, "save_minutes": 1.0}, "data": recipe["data"] | data}
    assert run_train(loaded(recipe | same)) == out
    assert (out / "artifact.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"count\.pairs: 'documents', expected 'answers'"):
        run_train(loaded(recipe | {"count": {"pairs": "answers"}}))


def test_counts_of_other_settings_are_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "count"
    with ExitStack() as stack:
        claim(folder, {"pairs": "documents", "options": {"limit": None}}, stack)
        hold(folder / "rank-0-of-2", 7)
        with pytest.raises(ValueError, match=f"process {os.getpid()} on .*{folder.parent}"):
            claim(folder, {}, stack)  # another run uses this folder
    parts = (f"{folder} contains counts of 7 tokens", "options.limit: None, expected 3")
    with ExitStack() as stack, pytest.raises(ValueError, match=r"\S") as caught:
        claim(folder, {"pairs": "documents", "options": {"limit": 3}}, stack)
    assert all(part in str(caught.value) for part in parts)
    assert count_tokens(folder) == 7, "a refused claim must not delete counts"
    with PairCounter(V, folder / "rank-0-of-2"), ExitStack() as stack, pytest.raises(ValueError, match="rank-0-of-2"):
        claim(folder, {}, stack)  # a process of an earlier run is active
    for stored, changes, named in (("{", {}, folder / "identity.json"), ('{"limit": null}', {"other": 1}, folder)):
        (folder / "identity.json").write_text(stored)
        with ExitStack() as stack, pytest.raises(ValueError, match=f"{named}.*delete"):
            claim(folder, changes, stack)
    with ExitStack() as stack, pytest.raises(ValueError, match=f"{folder} contains counts"):
        claim(folder, {}, stack)  # `limit` is null in the file and missing from the settings


def hold(folder: Path, tokens: int) -> None:
    """Write the counts of `tokens` tokens to a folder, as an earlier process would leave them."""
    with PairCounter(V, folder) as counter:
        counter.add(np.arange(tokens, dtype=np.int32) % V, np.zeros(1, dtype=np.int64), 1)
        counter.spill()


WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 2.25])
KINDS = ["good", "good", "good", "other form", "alone", "unknown role"]


def line(kind: str, name: str) -> str:
    """Return a JSON-lines row of a kind such as "good" or "no form"; an unlisted kind gives an incomplete row."""
    turns = [{"role": "user", "content": f"question {name}"}, {"role": "assistant", "content": f"answer {name}"}]
    rows: dict[str, Any] = {
        "good": {"id": name, "messages": turns},
        "other form": {"id": name, "prompt": f"question {name}", "response": f"answer {name}"},
        "no form": {"id": name, "colour": "red"},
        "alone": {"id": name, "messages": turns[:1]},
        "unknown role": {"id": name, "messages": [{"role": "oracle", "content": "?"}, *turns]},
    }
    return json.dumps(rows[kind]) if kind in rows else '{"id": "torn'


def write_rows(path: Path, kinds: list[str]) -> str:
    path.write_text("".join(f"{line(kind, f'{path.stem}-{n}')}\n\n" for n, kind in enumerate(kinds)))
    return str(path)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_processes_partition_the_corpus(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rows")
    parts = []
    for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]:
        source = write_rows(folder / f"{name}.jsonl", data.draw(st.lists(st.sampled_from(KINDS), max_size=20)))
        parts.append(SourceSection(source=source, weight=data.draw(WEIGHTS)))
    clean = {"unknown_roles": data.draw(st.sampled_from(["drop", "cut"]))}
    by_row = data.draw(st.booleans())
    section = DataSection(mixture=parts, heldout_share=0.3, clean=clean | {"duplicates": [] if by_row else ["id"]})
    reports, heldout = [CorpusReport() for _ in parts], []
    whole = list(training_conversations(section, reports, hold=heldout.append))
    shares = [Share(section, rank, world) for world in [data.draw(st.integers(1, 5))] for rank in range(world)]
    own = [list(share) for share in shares]
    assert own == [list(Share(section, rank, len(shares))) for rank in range(len(shares))], "not deterministic"
    assert Counter(chain(*own)) == Counter(whole)
    rows = shares[0]
    for share in shares[1:] if by_row else ():
        rows.add(share)
    assert [report.as_dict() for report in rows.reports] == [report.as_dict() for report in reports]
    assert (rows.conversations, rows.held_out) == (len(whole), len(heldout))


@pytest.mark.parametrize("kind", ["torn", "no form"])
def test_an_invalid_row_is_reported_by_its_process_only(kind: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["good"] * 7 + [kind] + ["good"] * 4)
    section = DataSection(source=source, heldout_share=0)
    for rank in range(3):
        if rank == 7 % 3:
            with pytest.raises(ValueError, match=r"a\.jsonl, row 15: "):
                list(Share(section, rank, 3))
        else:
            assert len(list(Share(section, rank, 3))) == 4


TABLES = sorted(name for name in shipped_recipes() if name.startswith("table/"))


@pytest.mark.parametrize("name", TABLES)
def test_every_shipped_recipe_counts(name: str, stand_ins: Any, tmp_path: Path) -> None:
    assert TABLES == ["table/any-corpus", "table/t5", "table/vicuna-lmsys"]
    target = stand_ins.target("lmsys/vicuna-7b-v1.3")
    recipe = load_recipe(name, [f"out={tmp_path / 'out'}", f"tokenizer={target}", f"data.path={stand_ins.rows}"])
    assert isinstance(recipe, TableRecipe)
    table = BigramTable.load(run_train(recipe))
    tokenizer = load_tokenizer(str(target))
    template = get_template(recipe.data.template, tokenizer)
    whole = recipe.count.pairs == "documents"
    template = replace(template, start=template.next) if whole else template  # without the default system prompt
    rendered = [render(chat, template, tokenizer) for chat in conversations(recipe)]
    expected = [[(0, len(each.ids))] if whole else [(start - 1, end) for start, end in each.spans] for each in rendered]
    ids = [each.ids[start:end].tolist() for each, spans in zip(rendered, expected, strict=True) for start, end in spans]
    assert pairs_in(table) == pairs_of(ids)
