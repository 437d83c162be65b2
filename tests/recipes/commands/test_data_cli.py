"""Data commands: preparation, linting, mixtures, and prompts by group."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data.conversations import Conversation, FollowUp, Turn
from draftsmith.data.prompts import load_prompts
from draftsmith.data.rendering.render import render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.recipes.assemble.data import colour, is_held_out, prepare_data
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.schema.data import DataSection
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Any:
    return load_tokenizer(str(corpus / "tokenizer"))


def section(corpus: Path, tmp_path: Path, **changes: Any) -> DataSection:
    base = {"source": str(corpus / "rows.json"), "template": "chatml", "block_tokens": 64, "heldout_share": 0.2}
    return DataSection(**(base | {"cache": str(tmp_path / "prepared")} | changes))


def test_prepared_data_is_reused_unless_relevant_settings_change(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    copy = tmp_path / "rows.json"
    copy.write_bytes((corpus / "rows.json").read_bytes())
    base = {"source": str(copy)}
    first = prepare_data(section(corpus, tmp_path, **base), tokenizer)
    stamp = (first.folder / "report.json").stat().st_mtime_ns
    for same in ({}, {"min_trained_share": 0.0}):
        again = prepare_data(section(corpus, tmp_path, **base, **same), tokenizer)
        assert again.folder == first.folder
        assert (again.folder / "report.json").stat().st_mtime_ns == stamp
    copy.touch()  # a new modification time with the same content
    assert prepare_data(section(corpus, tmp_path, **base), tokenizer).folder == first.folder
    folders = {first.folder}
    changes: list[dict[str, Any]] = [
        {"block_tokens": 80}, {"packing": "pad"}, {"template": "plain"}, {"clean": {"html": "markdown"}}, {"limit": 20}
    ]  # fmt: skip
    for other in changes:
        folders.add(prepare_data(section(corpus, tmp_path, **base, **other), tokenizer).folder)
    rows = json.loads(copy.read_text())
    copy.write_text(json.dumps(rows[:-1]))
    folders.add(prepare_data(section(corpus, tmp_path, **base), tokenizer).folder)
    assert len(folders) == 2 + len(changes)


def test_prepare_reports_all_rows(run: Run, drafter_recipe: Path, tmp_path: Path) -> None:
    rows = [
        {"id": "good", "messages": [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d e"}]},
        {"id": "good", "messages": [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d e"}]},
        {"id": "tool", "messages": [{"role": "user", "content": "b"}, {"role": "tool", "content": "d"}]},
    ]
    good = [rows[0] | {"id": f"row{n}"} for n in range(40)]
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *good]))
    options = [str(drafter_recipe), f"data.source={source}", "data.clean={duplicates: [id]}"]
    done = run("prepare", *options)
    assert done.exit_code == 0, done.stderr
    report = json.loads((Path(done.stdout.split()[-1]) / "report.json").read_text())
    assert (report["rows"], report["kept"]) == (43, 41)
    assert report["dropped"] == {"duplicate id": 1, "unmapped role tool": 1}
    assert "41 of 43 rows kept (messages)" in done.stderr


def test_the_linter_shows_rows_and_fails_below_a_limit(run: Run, drafter_recipe: Path) -> None:
    good = run("prepare", str(drafter_recipe), "--lint")
    assert good.exit_code == 0
    assert "no faults" in good.stdout
    assert "<|im_end|>" in good.stdout, "the faulty rows must be printed"
    low = run("prepare", str(drafter_recipe), "--lint", "data.min_trained_share=0.99")
    assert low.exit_code == 1
    assert "at least 99 %" in low.stderr
    refused = run("prepare", str(drafter_recipe), "data.min_trained_share=0.99")
    assert "at least 99 %" in str(refused.exception)


def test_a_mixture_reports_each_of_its_corpora(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    source = str(corpus / "rows.json")
    mixed = [{"source": source, "weight": 2.0}, {"source": source, "limit": 10, "weight": 0.5}]
    both = prepare_data(section(corpus, tmp_path, source=None, mixture=mixed), tokenizer)
    once = prepare_data(section(corpus, tmp_path), tokenizer)
    extra = both.train.manifest["rows"] - 2 * once.train.manifest["rows"]
    assert 0 <= extra <= 10
    assert [entry["kept"] for entry in both.report["sources"]] == [once.report["kept"], 10]


def test_prompts_are_drawn_from_all_groups(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"question_id": n, "category": category, "turns": [f"b {n}", "c"]}
        for n, category in enumerate(["writing"] * 5 + ["roleplay"] * 2 + ["translation"] * 5 + ["rag"])
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts("spec-bench", get_template("chatml"), tokenizer, 6, 999, path=str(path))
    groups = [prompt.category for prompt, _ in prompts]
    assert groups == ["mt_bench", "translation", "rag", "mt_bench", "translation", "mt_bench"]
    assert all(prompt.follow_ups == (FollowUp("", "c"),) for prompt, _ in prompts)
    only = load_prompts(
        "spec-bench", get_template("chatml"), tokenizer, 99, 999, path=str(path), groups=["translation"]
    )
    assert [prompt.category for prompt, _ in only] == ["translation"] * 5
    with pytest.raises(ValueError, match="'translation'"):
        load_prompts("spec-bench", get_template("chatml"), tokenizer, 9, 99, path=str(path), groups=["translations"])


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


PAIR = {"instruction": "b c?", "output": "d e."}
UNUSABLE: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
    "empty": ([], {}, ("0 of 0 rows", "no rows")),
    "questions": (["b?", "c?"], {}, ("2 only questions", "regenerate")),
    "roles": ([{"messages": [{"role": "Visitor", "content": "b"}, {"role": "x", "content": "c"}]}], {},
              ("1 unmapped role Visitor", "`clean:")),
    "neighbours": ([{"turns": ["b"], "messages": [{"role": "user", "content": "b"}] * 2
                     + [{"role": "assistant", "content": "c"}]}], {},
                   ("1 roles do not alternate", "Merge adjacent messages")),
    "system": ([{"messages": [{"role": role, "content": role} for role in ("user", "assistant", "system") * 2]}],
               {"non_alternating": "merge"}, ("1 system message after", "or remove it")),
    "tools": ([{"messages": [{"role": "tool", "content": "b"}]}], {}, ("template: tokenizer",)),
    "blank": ([{"prompt": "b", "response": " "}], {}, ("1 no complete exchange", "columns")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("command", ["prepare", "count"])
def test_empty_training_data_is_explained(
    name: str, command: str, run: Run, drafter_recipe: Path, corpus: Path, tmp_path: Path
) -> None:
    rows, clean, needles = UNUSABLE[name]
    data = [f"data.source={lines(tmp_path / 'mine.jsonl', *rows)}", f"data.clean={json.dumps(clean)}"]
    if command == "count":
        table = tmp_path / "table.yaml"
        table.write_text(
            f"kind: table\nout: {tmp_path}/table\ntokenizer: {corpus}/tokenizer\ndata: {{template: chatml}}\n"
        )
        failed = run("train", str(table), *data)
    else:
        failed = run("prepare", str(drafter_recipe), *data)
    assert isinstance(failed.exception, ValueError)
    for needle in ("mine.jsonl", *needles):
        assert needle in str(failed.exception)


def test_a_share_that_holds_out_nothing_is_an_error(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    source = lines(tmp_path / "1.jsonl", PAIR)
    with pytest.raises(ValueError, match=r"1 row .*heldout_share \(0\.01\)"):
        prepare_data(section(corpus, tmp_path, source=source, heldout_share=0.01), tokenizer)


def rows_of(tmp_path: Path, ids: list[Any], **more: Any) -> str:
    return lines(
        tmp_path / "ids.jsonl", *({"id": each, **PAIR, "output": f"d{n}"} | more for n, each in enumerate(ids))
    )


@pytest.mark.parametrize("ids", [["identity_0"] * 60, [""] * 60, ["a", "b", "c"] * 20])
def test_rows_with_few_ids_are_held_out_by_content(
    ids: list[str], corpus: Path, tokenizer: Any, tmp_path: Path
) -> None:
    source = rows_of(tmp_path, ids)
    counts = []
    for share in (0.01, 0.3, 0.9):
        prepared = prepare_data(section(corpus, tmp_path, source=source, heldout_share=share), tokenizer)
        counts.append(prepared.heldout.manifest["rows"])
    assert counts[0] <= 3 < 10 < counts[1] < 27 < 45 < counts[2] < 60
    half = section(corpus, tmp_path, source=None, mixture=[{"source": source, "weight": 0.5}], heldout_share=0.1)
    assert 15 < prepare_data(half, tokenizer).train.manifest["rows"] < 40, "weight 0.5 must keep about half of the rows"


def test_blank_ids_are_ignored(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    source = rows_of(tmp_path, ["", " ", None, 0, 7])
    prepared = prepare_data(section(corpus, tmp_path, source=source, clean={"duplicates": ["id"]}), tokenizer)
    assert prepared.report["kept"] == 5


def test_equal_rows_and_data_without_training_rows_are_errors(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    source = rows_of(tmp_path, ["a"] * 5, output="same")
    for share, message in ((0.01, r"5 identical rows.*heldout_source"), (0.99, "all 5 .*decrease it")):
        with pytest.raises(ValueError, match=message):
            prepare_data(section(corpus, tmp_path, source=source, heldout_share=share), tokenizer)


def share_of(ids: list[str]) -> float:
    chosen = DataSection(source="any", heldout_share=0.2)
    return sum(is_held_out(chosen, Conversation(name, ())) for name in ids) / len(ids)


def test_parts_of_a_conversation_are_held_out_jointly() -> None:
    # The share of 1000 independent rows is outside [0.15, 0.25] with a probability below 1e-4.
    assert 0.15 < share_of([f"alpaca_data-{number}" for number in range(1000)]) < 0.25
    assert 0.15 < share_of([f"identity_{number}" for number in range(1000)]) < 0.25
    for whole in ("QWJhYvA", "abcdefg", "0123456"):
        assert share_of([f"{whole}_{part}" for part in range(50)]) in (0.0, 1.0)


def test_supervised_and_special_tokens_are_highlighted() -> None:
    tokenizer = train_bpe(["The user asks and the assistant answers."], 280, ("<|im_start|>", "<|im_end|>"))
    turns = [Turn("user", "\x1b[31mred\r\n"), Turn("assistant", "the 你好 " * 200)]
    document = render(Conversation("long", tuple(turns)), get_template("chatml"), tokenizer)
    whole = tokenizer.decode(document.ids).replace("\x1b", "␛").replace("\r", "␍")
    trained = "the 你好 " * 200 + "<|im_end|>"
    marked = whole.replace(trained, f"⟦{trained}⟧")
    text = colour(document, tokenizer)
    assert text.plain == marked != whole
    green = [text.plain[span.start : span.end] for span in text.spans if "green" in span.style]
    assert "".join(green) == f"⟦{trained}⟧"
    dim = [text.plain[span.start : span.end] for span in text.spans if "dim" in span.style]
    assert dim == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>⟧"]
    (start, end), strange = document.spans[0], [-1, 10**6]
    odd = replace(document, ids=np.insert(document.ids, 3, strange), spans=[(start + 2, end + 2)])
    assert colour(odd, tokenizer).plain == marked
