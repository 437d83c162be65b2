"""`results.json`: what is written is what is documented, and a damaged file is refused with its line and key."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import Entry, measure
from draftsmith.decode.evaluation.summary import EvalPrompt, Summariser
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.schema import results as results_module
from draftsmith.recipes.schema.results import CATEGORY, FILE, PROMPT, ROW, load_results, write_results
from transformers import LlamaForCausalLM

ENTRIES = [
    Entry("greedy", "autoregressive"),
    Entry("chain", "speculative"),
    Entry("sampled", "autoregressive", {}, Sampling(1.0)),
]
ASKED = [EvalPrompt([3, 5], "a", "math", ("x",)), EvalPrompt([4], "b", "text"), EvalPrompt([9, 9], "c", "math")]


@pytest.fixture
def results(make_llama: Callable[..., LlamaForCausalLM]) -> dict[str, Any]:
    """Of a real measurement."""
    target, parts, limits = wrap_model(make_llama(32)), Parts(wrap_model(make_llama(32, seed=1))), Limits(6)
    runs = measure(target, parts, ENTRIES, [prompt.ids for prompt in ASKED], limits)
    summary = Summariser(target, parts, ASKED, runs, limits, text_of=str).summarise(ENTRIES)
    return {
        "schema": 2,
        "kind": "evaluation",
        "machine": {"device": "cpu"},
        "recipe": {"target": "T"},
        "prompts": 3,
        "prompts_sha256": "0" * 64,
        "passed_over": {"counts": {"too long": 0}, "too_long": []},
        "categories": {"math": 2, "text": 1},
        "resumed": 0,
        "greedy_equals_transformers": None,
        "methods": summary.rows,
        "errors": summary.errors,
    }


def test_what_is_written_is_read_again(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write_results(path, results)
    assert load_results(path) == json.loads(json.dumps(results))
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_every_key_is_checked_and_documented(results: dict[str, Any]) -> None:
    assert set(results) == set(FILE)
    assert {len(row) for row in results["methods"]} == {len(ROW)}
    for row in results["methods"]:
        assert set(row) == set(ROW)
        assert all(set(part) == set(CATEGORY) for part in row["by_category"].values())
        assert all(set(part) == set(PROMPT) for part in row["by_prompt"])
    words = re.findall(r"\w+", results_module.__doc__ or "")
    assert {*FILE, *ROW, *CATEGORY, *PROMPT} <= set(words)
    starred = set(re.findall(r"(\w+) \*", results_module.__doc__ or "")) - {"marked"}
    assert starred == set(CATEGORY) - {"prompts"}


def test_results_of_no_number_are_not_written(results: dict[str, Any], tmp_path: Path) -> None:
    results["methods"][1]["speedup"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        write_results(tmp_path / "results.json", results)
    results["methods"][1]["speedup"] = "fast"
    with pytest.raises(AssertionError, match=r"methods.1.speedup is \"fast\""):
        write_results(tmp_path / "results.json", results)
    assert list(tmp_path.iterdir()) == []


def change(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place; `...` deletes it."""
    value = copy.deepcopy(value)
    inner = value
    for part in place[:-1]:
        inner = inner[part]
    if new is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return value


@pytest.mark.parametrize(
    ("place", "new", "key", "message"),
    [
        (
            ("methods", 1, "speedup"),
            "fast",
            '"speedup": "fast"',
            r'`methods\[1\].speedup` is "fast", expected a finite',
        ),
        (
            ("methods", 1, "seconds"),
            None,
            '"seconds": null',
            r"`methods\[1\].seconds` is null, expected a finite number",
        ),
        (("methods", 0, "lossless"), 1, '"lossless": 1', r"`methods\[0\].lossless` is 1, expected true or false"),
        (("methods", 2, "label"), "chain", None, r"`methods\[2\].label` is 'chain', as that of a row before it"),
        (("methods", 2, "tokens"), 7.5, '"tokens": 7.5', r"`methods\[2\].tokens` is 7.5, expected a whole number"),
        (("methods", 1, "bound"), ..., None, r"`methods\[1\].bound` is missing"),
        (
            ("methods", 1, "by_category", "text", "tokens_per_step"),
            [2],
            None,
            r"`methods\[1\].by_category.text.tokens_per_step` is \[2\], expected a finite number or null",
        ),
        (("methods", 1, "by_prompt", 2, "seconds"), ..., None, r"`methods\[1\].by_prompt\[2\].seconds` is missing"),
        (("methods", 1), 5, None, r"`methods\[1\]` is 5, expected an object"),
        (("machine",), "cpu", '"machine": "cpu"', '`machine` is "cpu", expected an object'),
        (("kind",), "training", '"kind": "training"', "`kind` is 'training', expected 'evaluation'"),
        (("errors",), [3], None, r"`errors` is \[3\], expected a list of texts"),
        (("methods",), ..., None, "`methods` is missing"),
        (("schema",), 3, '"schema": 3', "results of schema 3, this version reads 1 to 2"),
    ],
)
def test_a_damaged_key_is_named_with_its_line(
    results: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], new: Any, key: str | None, message: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(change(results, place, new), indent=2))
    with pytest.raises(ValueError, match=message) as caught:
        load_results(path)
    found = re.match(rf"{re.escape(str(path))}:(\d+)", str(caught.value))
    assert found is not None
    line = path.read_text().splitlines()[int(found[1]) - 1]
    if key is not None:
        assert line.strip().rstrip(",") == key
    elif new is ...:
        assert line.strip().endswith("{")


def test_the_line_is_that_of_the_right_row(results: dict[str, Any], tmp_path: Path) -> None:
    """The same key stands in every row; texts hold braces and quotes."""
    results["errors"] = ['a "quoted" } and ] text', "{"]
    results = {"errors": results.pop("errors")} | results
    path = tmp_path / "results.json"
    path.write_text(json.dumps(change(results, ("methods", 2, "efficiency"), "x"), indent=1))
    with pytest.raises(ValueError, match=r"methods\[2\].efficiency") as caught:
        load_results(path)
    number = int(str(caught.value).split(":")[1])
    lines = path.read_text().splitlines()
    assert lines[number - 1].strip() == '"efficiency": "x",'
    path.write_text(json.dumps(change(results, ("methods", 2, "efficiency"), "x")))
    with pytest.raises(ValueError, match=r"results.json:1: `methods\[2\].efficiency`"):
        load_results(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "schema": 2,\n  "kind": oops\n}', r"results.json:3 is damaged: Expecting value \(column 11\)"),
        ('{\n  "schema": 2,\n', "results.json:3 is damaged"),
        ("", "results.json:1 is damaged"),
        ("[1, 2]", "holds no results of `draftsmith evaluate`: it has no `schema`"),
        ('{"kind": "evaluation"}', "it has no `schema`"),
        ('{"schema": "2"}', "it has no `schema`"),
        ('{"schema": 0}', "results of schema 0"),
        ('{"schema": 1,\n "kind": "diagnosis"}', r"json:2: .*kind.* is 'diagnosis', expected 'evaluation'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_results(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no results at"):
        load_results(tmp_path / "results.json")
    (tmp_path / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        load_results(tmp_path / "results.json")


def test_half_a_file_is_refused_wherever_it_ends(results: dict[str, Any], tmp_path: Path) -> None:
    path, whole = tmp_path / "results.json", json.dumps(results, indent=2)
    for end in range(0, len(whole) - 1, 997):
        path.write_text(whole[:end])
        with pytest.raises(ValueError, match=r"results.json:\d+ is damaged"):
            load_results(path)


def test_results_of_the_first_schema_are_upgraded(results: dict[str, Any], tmp_path: Path) -> None:
    old = {key: results[key] for key in ("machine", "recipe", "prompts", "categories", "greedy_equals_transformers")}
    lacked = {"by_prompt", "phases_us", "near_ties", "prediction", "energy_source", "self_consistency"}
    lacked |= {"tokens_per_step_interval"}
    rows = [{key: value for key, value in row.items() if key not in lacked} for row in results["methods"]]
    del rows[2]["speedup_over_transformers"]
    for row in rows:
        row["by_category"] = {"math": {"prompts": 2, "tokens_per_step": 1.5}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(old | {"schema": 1, "methods": rows, "errors": []}))
    new = load_results(path)
    assert (new["schema"], new["kind"], new["resumed"]) == (2, "evaluation", 0)
    assert [row["speedup"] for row in new["methods"]] == [row["speedup"] for row in results["methods"]]
    assert new["methods"][0]["by_prompt"] == []
    assert new["methods"][0]["phases_us"] is None
    del rows[1]["perplexity"]
    path.write_text(json.dumps(old | {"schema": 1, "methods": rows, "errors": []}))
    with pytest.raises(ValueError, match=r"`methods\[1\].perplexity` is missing"):
        load_results(path)
    path.write_text(json.dumps(old | {"schema": 1, "methods": "none", "errors": []}))
    with pytest.raises(ValueError, match='`methods` is "none", expected a list'):
        load_results(path)
