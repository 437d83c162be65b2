"""`draftsmith table` as a user meets it: what is shown, exact merging and pruning, refusals that name both sides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.recipes.commands.artifacts.tables import prune_table
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.training import TableRecipe


def run(*arguments: object) -> None:
    """The command line in this process."""
    app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def tables(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables of three parts of a corpus (a, b, c), of the whole, of a padded vocabulary and of another
    tokenizer of as many tokens."""
    folder = tmp_path_factory.mktemp("tables")
    rows = json.loads((corpus / "rows.json").read_text())
    texts = ["".join(chr(97 + n * n % 23) for n in range(k, k + 40)) for k in range(300)]
    other = train_bpe(texts, 320, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    other.save_pretrained(folder / "tokenizer")
    assert len(other) == 320
    sides: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "a": (rows[:30], {}),
        "b": (rows[30:50], {}),
        "c": (rows[50:], {}),
        "whole": (rows, {}),
        "padded": (rows[:30], {"vocab_size": 384}),
        "answers": (rows[30:50], {"count": {"pairs": "answers"}}),
        "other": (rows[30:50], {"tokenizer": str(folder / "tokenizer")}),
    }
    for name, (part, changes) in sides.items():
        source = folder / f"{name}.json"
        source.write_text(json.dumps(part))
        data = {"source": str(source), "template": "chatml", "heldout_share": 0.0, "cache": str(folder / "cache")}
        values = {"kind": "table", "out": str(folder / name), "tokenizer": str(corpus / "tokenizer"), "data": data}
        run_train(TableRecipe.model_validate(values | changes))
    prune_table(folder / "b", folder / "pruned", min_count=2)
    return folder


def refused(arguments: Sequence[object], *parts: object) -> None:
    """A user's mistake, told with all the parts."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        run(*arguments)
    for part in parts:
        assert str(part) in str(caught.value)


def bytes_of(table: Path) -> bytes:
    return (table / TABLE_FILE).read_bytes()


def test_merged_tables_are_exactly_that_of_the_whole(tables: Path, tmp_path: Path) -> None:
    out, order = tmp_path / "merged", ["c", "a", "b"]
    run("table", "merge", *(tables / name for name in order), "--out", out)
    assert bytes_of(out) == bytes_of(tables / "whole")
    manifest, whole = verify_artifact(out, "table"), load_manifest(tables / "whole")
    assert [Path(part["table"]).name for part in manifest.data["parts"]] == order
    for name, part in zip(order, manifest.data["parts"], strict=True):
        assert part["sha256"] == load_manifest(tables / name).files[TABLE_FILE]["sha256"]
        assert part["source"] == load_manifest(tables / name).data["source"]
    for key in ("conversations", "held_out", "documents", "tokens"):
        assert manifest.data[key] == whole.data[key]
    assert manifest.tokenizer_fingerprint == whole.tokenizer_fingerprint
    assert not list(tmp_path.glob(".merged*")), "nothing is left beside it"


def test_merging_in_steps_remembers_all_parts(tables: Path, tmp_path: Path) -> None:
    run("table", "merge", tables / "a", tables / "b", "--out", tmp_path / "ab")
    run("table", "merge", tables / "c", tmp_path / "ab", "--out", tmp_path / "cab")
    assert bytes_of(tmp_path / "cab") == bytes_of(tables / "whole")
    assert [Path(part["table"]).name for part in load_manifest(tmp_path / "cab").data["parts"]] == ["c", "a", "b"]
    twice = ["table", "merge", tables / "a", tmp_path / "ab", "--out", tmp_path / "twice"]
    refused(twice, f"{tables / 'a'} and {tables / 'a'}")
    refused(["table", "merge", tables / "a", "--out", tmp_path / "one"], "got 1")
    assert {path.name for path in tmp_path.iterdir()} == {"ab", "cab"}


def test_what_cannot_be_merged_is_refused_with_both_sides(tables: Path, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "merged"]

    def merging(*names: str) -> list[object]:
        return ["table", "merge", *(tables / name for name in names), *out]

    refused(merging("b", "padded"), f"{tables / 'b'} and {tables / 'padded'}", 320, 384)
    marks = [str(load_manifest(tables / name).tokenizer_fingerprint)[:16] for name in ("a", "other")]
    refused(merging("a", "other"), tables / "a", tables / "other", *marks)
    refused(merging("a", "answers"), f"{tables / 'a'} and {tables / 'answers'}", "`count.pairs` is documents")
    refused(merging("a", "pruned"), tables / "pruned")
    copied = tmp_path / "copy"
    shutil.copytree(tables / "a", copied)
    refused(["table", "merge", tables / "a", copied, *out], f"{tables / 'a'} and {copied}", "--again")
    torn = copied / TABLE_FILE
    torn.write_bytes(torn.read_bytes()[:-8])
    refused(["table", "merge", tables / "b", copied, *out], torn, "bytes")
    assert not (tmp_path / "merged").exists()
    run(*merging("a", "a"), "--again")
    once, both = BigramTable.load(tables / "a"), BigramTable.load(tmp_path / "merged")
    assert (both.count == 2 * once.count).all()
    refused(merging("a", "b"), tmp_path / "merged", "is there already")


def test_tables_that_share_a_file_are_merged_only_if_asked_to(tables: Path, tmp_path: Path) -> None:
    """The same shard in two corpora, under another name, beside others, and cleaned otherwise."""
    both = tmp_path / "ac"
    both.mkdir()
    shutil.copy(tables / "a.json", both / "monday.json")
    shutil.copy(tables / "c.json", both / "tuesday.json")
    recipe = load_manifest(tables / "a").recipe
    data = recipe["data"] | {"source": str(both), "clean": {"html": "markdown"}}
    run_train(TableRecipe.model_validate(recipe | {"out": str(tmp_path / "two"), "data": data}))
    merging = ["table", "merge", tables / "b", tables / "a", tmp_path / "two", "--out", tmp_path / "merged"]
    refused(merging, f"{tables / 'a'} and {tmp_path / 'two'}", "(a.json)", "--again")


def test_a_table_is_pruned_and_the_whole_one_stays(tables: Path, tmp_path: Path) -> None:
    before = bytes_of(tables / "whole")
    run("table", "prune", tables / "whole", "--min-count", 3, "--top", 5, "--out", tmp_path / "p")
    assert bytes_of(tables / "whole") == before
    pruned, whole = BigramTable.load(tmp_path / "p"), BigramTable.load(tables / "whole")
    assert 0 < len(pruned.col) < len(whole.col)
    assert int(pruned.count.min()) >= 3
    assert int(pruned.row_ptr.diff().max()) <= 5
    manifest = verify_artifact(tmp_path / "p", "table")
    assert manifest.data == load_manifest(tables / "whole").data
    assert manifest.recipe["whole"] == str(tables / "whole")
    assert 0 < manifest.training["mass"] < 1
    refused(["table", "prune", tables / "whole", "--out", tmp_path / "q"], "leaves nothing out")
    refused(["table", "prune", tables / "whole", "--top", 1, "--out", tmp_path / "p"], "there already")
    refused(["table", "prune", tables / "pruned", "--top", 1, "--out", tmp_path / "q"], "pruned already")


def test_a_table_is_shown(tables: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = BigramTable.load(tables / "whole")
    run("table", "show", tables / "whole")
    shown = capsys.readouterr().out
    for words in (f"{len(table.col):,}", f"{int(table.unigram.sum()):,}", "whole.json", "320", "80 conversations"):
        assert words in shown, words
    text = load_tokenizer(str(corpus / "tokenizer")).convert_ids_to_tokens(range(320))
    assert any(token in shown for token in text if len(token) > 3), "the most extreme pairs are shown as text"
    assert "are shown by their ids" not in shown
    run("table", "show", tables / "pruned")
    assert "min_count 2" in capsys.readouterr().out
    foreign = tables / "tokenizer"
    mark = str(load_manifest(tables / "whole").tokenizer_fingerprint)[:16]
    refused(["table", "show", tables / "whole", "--tokenizer", foreign], tables / "whole", foreign, mark)
    refused(["table", "show", tmp_path / "none"], tmp_path / "none", "no such folder")
    refused(["table", "show", foreign], "artifact.json")
