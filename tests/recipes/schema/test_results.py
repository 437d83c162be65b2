"""`results.json`: all written keys are documented, and a damaged file is refused with line and key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import Entry, measure
from draftsmith.decode.evaluation.serving import Block, Reply, load_rows
from draftsmith.decode.evaluation.summary import EvalPrompt, Summariser
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.schema.results import LoadRow, load_results, write_results
from transformers import LlamaForCausalLM

ENTRIES = [
    Entry("greedy", "autoregressive"),
    Entry("chain", "speculative"),
    Entry("sampled", "autoregressive", {}, Sampling(1.0)),
]
ASKED = [EvalPrompt([3, 5], "a", "math", ("x",)), EvalPrompt([4], "b", "text"), EvalPrompt([9, 9], "c", "math")]


@pytest.fixture
def results(make_llama: Callable[..., LlamaForCausalLM]) -> dict[str, Any]:
    target, parts, limits = wrap_model(make_llama(32)), Parts(wrap_model(make_llama(32, seed=1))), Limits(6)
    runs = measure(target, parts, ENTRIES, [prompt.ids for prompt in ASKED], limits)
    summary = Summariser(target, parts, ASKED, runs, limits, text_of=str).summarise(ENTRIES)
    return {
        "kind": "evaluation",
        "created": "2026-01-01T00:00:00+00:00",
        "machine": {"device": "cpu"},
        "artifacts": {},
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


def test_results_survive_a_round_trip(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write_results(path, results)
    assert load_results(path) == json.loads(json.dumps(results))
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "results.md"
KEYS = set(re.findall(r"^- `(\w+)`", DOCUMENT.read_text(), re.MULTILINE))


def test_all_keys_are_documented(results: dict[str, Any]) -> None:
    parts = [results, *results["methods"]]
    for row in results["methods"]:
        parts += [*row["by_category"].values(), *row["by_prompt"]]
    assert {key for part in parts for key in part} <= KEYS


def test_rows_of_servers_have_the_same_metrics() -> None:
    reply = Reply("x", tokens=12, first=0.1, last=1.0, prompt_tokens=5)
    sides = [[Block(1.0, [reply], {"drafts": 7.0, "drafted": 21.0, "accepted": 5.0})], [Block(2.0, [reply], {})]]
    rows = load_rows(4, [("a", "math")], sides, temperature=0.0)
    for row in rows:
        assert set(row) <= KEYS
        LoadRow.model_validate(json.loads(json.dumps(row)))
    assert rows[0]["by_category"]["math"] == {"prompts": 1, "speedup": 1.0, "speedup_interval": None} | {
        "identical_to_greedy": [1, 1]
    }


def test_nan_results_are_not_written(results: dict[str, Any], tmp_path: Path) -> None:
    results["methods"][1]["speedup"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        write_results(tmp_path / "results.json", results)
    results["methods"][1]["speedup"] = "fast"
    with pytest.raises(ValueError, match=r"methods\.1\.speedup"):
        write_results(tmp_path / "results.json", results)
    assert list(tmp_path.iterdir()) == []
    results["methods"][1] |= {"speedup": 1.0, "label": "sampled"}
    with pytest.raises(ValueError, match="'sampled'"):
        write_results(tmp_path / "results.json", results)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("methods", 1, "speedup"), "fast"),
        (("methods", 1, "speedup_interval"), [1.0]),
        (("methods", 1, "seconds"), ...),
        (("kind",), "training"),
    ],
)
def test_a_damaged_key_is_named(results: dict[str, Any], tmp_path: Path, path: tuple[Any, ...], new: Any) -> None:
    file = tmp_path / "results.json"
    inner: Any = results
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = new
    if new is ...:
        del inner[path[-1]]
    file.write_text(json.dumps(results))
    with pytest.raises(ValueError, match=re.escape(".".join(map(str, path)))) as caught:
        load_results(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{\n  "kind": oops\n}', "results.json.*line 2"),
        (b'{"kind": "evaluation"}', "is missing"),
        (b'{"methods": [], "kind": "diagnosis"}', "results.json.*'diagnosis'"),
        (None, "results.json"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        load_results(path)
