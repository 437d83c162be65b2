"""Data as a user meets it on the command line: preparing, linting, mixtures, streams, prompts by group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.data.prompts import load_prompts
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.schema.data import DataSection
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """The command line in this process."""
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Any:
    return load_tokenizer(str(corpus / "tokenizer"))


def section(corpus: Path, tmp_path: Path, **changes: Any) -> DataSection:
    base = {"source": str(corpus / "rows.json"), "template": "chatml", "block_tokens": 64, "heldout_share": 0.2}
    return DataSection(**(base | {"cache": str(tmp_path / "prepared")} | changes))


def test_prepared_data_is_reused_when_and_only_when_nothing_that_matters_has_changed(
    corpus: Path, tokenizer: Any, tmp_path: Path
) -> None:
    copy = tmp_path / "rows.json"
    copy.write_bytes((corpus / "rows.json").read_bytes())
    base = {"source": str(copy)}
    first = prepare_data(section(corpus, tmp_path, **base), tokenizer)
    stamp = (first.folder / "report.json").stat().st_mtime_ns
    for same in ({}, {"workers": 3}, {"window": 7}, {"min_trained_share": 0.0}):
        again = prepare_data(section(corpus, tmp_path, **base, **same), tokenizer)
        assert again.folder == first.folder
        assert (again.folder / "report.json").stat().st_mtime_ns == stamp
    copy.touch()  # another time, the same content
    assert prepare_data(section(corpus, tmp_path, **base), tokenizer).folder == first.folder
    folders = {first.folder}
    changes: list[dict[str, Any]] = [
        {"block_tokens": 80}, {"packing": "pad"}, {"template": "plain"}, {"clean": {"min_characters": 3}}, {"limit": 20}
    ]  # fmt: skip
    for other in changes:
        folders.add(prepare_data(section(corpus, tmp_path, **base, **other), tokenizer).folder)
    rows = json.loads(copy.read_text())
    copy.write_text(json.dumps(rows[:-1]))
    folders.add(prepare_data(section(corpus, tmp_path, **base), tokenizer).folder)
    assert len(folders) == 2 + len(changes)


def test_prepare_says_what_became_of_every_row(run: Run, drafter_recipe: Path, tmp_path: Path) -> None:
    rows = [
        {"id": "good", "messages": [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d e"}]},
        {"id": "good", "messages": [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d e"}]},
        {"id": "tool", "messages": [{"role": "user", "content": "b"}, {"role": "tool", "content": "d"}]},
    ]
    good = [rows[0] | {"id": f"row{n}"} for n in range(40)]
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *good]) + '{"id": "torn", "mess')
    options = [str(drafter_recipe), f"data.source={source}", "data.clean={duplicates: [id]}"]
    assert "row 44" in str(run("prepare", *options).exception)
    done = run("prepare", *options, "data.skip_broken=true")
    assert done.exit_code == 0, done.stderr
    report = json.loads((Path(done.stdout.split()[-1]) / "report.json").read_text())
    assert (report["rows"], report["kept"]) == (44, 41)
    assert sum(report["dropped"].values()) == 3
    assert report["rows"] == report["kept"] + sum(report["dropped"].values())
    assert "form messages" in done.stderr


def test_the_linter_shows_rows_and_fails_below_a_floor(run: Run, drafter_recipe: Path) -> None:
    good = run("prepare", str(drafter_recipe), "--lint")
    assert good.exit_code == 0
    assert "no faults" in good.stdout
    assert "<|im_end|>" in good.stdout, "rows are shown"
    low = run("prepare", str(drafter_recipe), "--lint", "data.min_trained_share=0.99")
    assert low.exit_code == 1
    assert "the floor is 99 %" in low.stderr
    refused = run("prepare", str(drafter_recipe), "data.min_trained_share=0.99")
    assert "the floor is 99 %" in str(refused.exception)


def test_a_mixture_reports_each_of_its_corpora(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    source = str(corpus / "rows.json")
    mixed = [{"source": source, "weight": 2.0}, {"source": source, "limit": 10, "weight": 0.5}]
    both = prepare_data(section(corpus, tmp_path, source=None, mixture=mixed), tokenizer)
    once = prepare_data(section(corpus, tmp_path), tokenizer)
    assert isinstance(both.train, PreparedData)
    assert isinstance(once.train, PreparedData)
    extra = both.train.manifest["rows"] - 2 * once.train.manifest["rows"]
    assert 0 <= extra <= 10
    assert [entry["kept"] for entry in both.report["sources"]] == [once.report["kept"], 10]


def test_prompts_of_a_set_come_from_all_its_groups(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"question_id": n, "category": category, "turns": [f"b {n}", "c"]}
        for n, category in enumerate(["writing"] * 5 + ["roleplay"] * 2 + ["translation"] * 5 + ["rag"])
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_prompts("spec-bench", "chatml", tokenizer, 6, 999, path=str(path))
    groups = [prompt.category for prompt, _ in found]
    assert groups == ["mt_bench", "translation", "rag", "mt_bench", "translation", "mt_bench"]
    assert all(prompt.follow_ups == ("c",) for prompt, _ in found)
    only = load_prompts("spec-bench", "chatml", tokenizer, 99, 999, path=str(path), groups=["translation"])
    assert [prompt.category for prompt, _ in only] == ["translation"] * 5
    with pytest.raises(ValueError, match="'translation'"):
        load_prompts("spec-bench", "chatml", tokenizer, 9, 99, path=str(path), groups=["translations"])
