"""Benchmarks of servers, with a stand-in that streams like vLLM and llama.cpp and simulates failures."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.prompts import load_questions
from draftsmith.data.rendering.render import prompt_renderer
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.evaluation.serving import Block, Reply, serving_metrics
from draftsmith.recipes.commands.diagnosis.pair import check_server
from draftsmith.recipes.commands.evaluation.evaluate import evaluate_once
from draftsmith.recipes.commands.serving.bench import bench_recipe, run_bench
from draftsmith.recipes.report.page import run_report, verdict
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import load_results
from helpers.server import Engine

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    threads = [threading.Thread(target=engine.serve_forever, daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for engine in engines:
            engine.shutdown()
            engine.server_close()


@pytest.fixture
def questions(tmp_path: Path) -> list[str]:
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(9)]
    rows = [{"id": str(i), "conversations": [{"from": "human", "value": t}]} for i, t in enumerate(texts)]
    (tmp_path / "questions.json").write_text(json.dumps(rows))
    return texts


@pytest.fixture
def measured(tmp_path: Path, questions: list[str]) -> Callable[..., dict[str, Any]]:
    def measure(server: str, *overrides: str, concurrency: str = "1,4", **settings: str | None) -> dict[str, Any]:
        named = {"prompts": str(tmp_path / "questions.json"), "out": str(tmp_path / "bench.json")} | settings
        return run_bench(bench_recipe(None, overrides, server=server, concurrency=concurrency, **named))

    return measure


@pytest.fixture
def own_results(tmp_path: Path, questions: list[str], tiny_pair: Path) -> dict[str, Any]:
    """Evaluate the tiny pair with this engine on the same questions."""
    values = {"kind": "evaluate", "out": str(tmp_path / "here.json"), "prompts": str(tmp_path / "questions.json")}
    values |= {"target": str(tiny_pair / "target"), "drafter": str(tiny_pair / "drafter"), "limit": 2}
    rows = [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 3}}]
    more = {"methods": rows, "max_new_tokens": 4, "template": "chatml", "energy": "off"}
    return evaluate_once(EvaluateRecipe.model_validate(values | more))


@pytest.mark.parametrize("prefix", ["vllm", "llamacpp"])
def test_drafts_are_counted_and_texts_compared(measured: Callable[..., Any], tmp_path: Path, prefix: str) -> None:
    """Each answer has 13 tokens: one, then six steps with two each, in which one of three draft tokens is accepted."""
    drafting, plain = Engine(2), Engine(1)
    drafting.prefix = prefix
    with running(drafting, plain):
        results = measured(drafting.url, baseline=plain.url)
    assert load_results(tmp_path / "bench.json", "bench")["methods"] == json.loads(json.dumps(results["methods"]))
    rows = results["methods"]
    assert [row["concurrency"] for row in rows] == [1, 1, 4, 4]
    assert [row["label"] for row in rows[2:]] == ["concurrency 4", "concurrency 4, baseline"]
    for row, baseline in zip(rows[::2], rows[1::2], strict=True):
        assert (row["requests"], row["failed"], row["tokens"]) == (9, 0, 9 * 13)
        assert row["tokens_per_step"] == 2
        assert row["acceptance_rate"] == pytest.approx(1 / 3)
        assert row["acceptance_by_depth"] == [1.0]
        assert baseline["tokens_per_step"] is None
        assert baseline["speedup"] == 1
        assert row["identical_to_greedy"] == [9, 9]
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] <= high
        assert row["ms_to_first"]["median"] <= row["ms_to_first"]["p99"]
    assert results["errors"] == []
    page = (tmp_path / "bench.html").read_text()
    assert f"{rows[0]['speedup']:.2f}" in page
    assert all(each in page for each in ("By load", "Acceptance by depth", "concurrency 4"))
    warm = len(drafting.asked) - 2 * 9
    assert warm == 1 + 4, "one warm-up request per concurrent stream"
    assert {request["temperature"] for request in drafting.asked} == {0.0}


def test_failed_requests_are_counted_but_not_averaged(
    measured: Callable[..., Any], questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API key in the error message of the server is redacted."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    drafting = Engine(2)
    drafting.faults = {questions[6]: ["half"], questions[7]: ["400"]}
    with running(drafting):
        results = measured(drafting.url, concurrency="3")
    ours = results["methods"][0]
    assert (ours["requests"], ours["failed"], ours["tokens"]) == (9, 2, 7 * 13)
    assert len(ours["failures"]) == 2
    assert any("2 of 9 requests failed" in line for line in results["errors"])
    assert "sk-secret" not in json.dumps(results)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        measured("http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Engine(1, says="no "), "texts equal the baseline's"),
        (Engine(1, "other"), "other"),
        (Engine(2), "baseline server also uses speculative"),
    ],
    ids=["other texts", "another model", "a baseline that drafts"],
)
def test_pairs_without_common_requests(measured: Callable[..., Any], other: Engine, named: str) -> None:
    drafting = Engine(2)
    with running(drafting, other):
        results = measured(drafting.url, concurrency="4", baseline=other.url)
    assert any(named in line for line in results["errors"])


def test_the_doctor_compares_a_server_with_this_engine(
    measured: Callable[..., Any], own_results: dict[str, Any], questions: list[str], tmp_path: Path, tiny_pair: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The server accepts one of three draft tokens in each step, like the results of this engine."""
    for row in own_results["methods"]:
        drafter = row["method"] == "speculative"
        row |= {"acceptance_by_depth": [1.0, 0.0] if drafter else [], "options": {"gamma": 3} if drafter else {}}
    (path := tmp_path / "own.json").write_text(json.dumps(own_results))
    target = str(tiny_pair / "target")
    tokenizer = load_tokenizer(target)
    encode = prompt_renderer(get_template("chatml", tokenizer), tokenizer)
    prompts = {prompt.turns[-1].text: prompt for prompt in load_questions(str(tmp_path / "questions.json"), 80)}
    for more, temperature, reasons in (
        (0, "0", []),
        (5, "0", ["+5 to +5"]),
        (0, "1", None),
    ):
        with running(engine := Engine(2)):
            engine.reads = lambda question, more=more: len(encode(prompts[question].turns)) + more
            measured(engine.url, f"temperature={temperature}", concurrency="2")
        files = [tmp_path / "bench.json", path]
        if reasons is None:
            with pytest.raises(ValueError, match=r"temperature 0, expected 1$"):
                check_server(target, files)
            continue
        assert check_server(target, files) == (not reasons)
        out = capsys.readouterr()
        assert all(reason in " ".join(out.out.split()) for reason in reasons)
    with pytest.raises(ValueError, match=r"files of both `bench` and `evaluate`, got .*bench.json$"):
        check_server(target, [tmp_path / "bench.json"])


@pytest.mark.parametrize(
    ("counters", "steps"),
    [
        ({"drafts": 7.0, "drafted": 21.0, "accepted": 5.0}, 7),  # one token was accepted after the end of a text
        ({"drafts": 4.0, "drafted": 12.0, "accepted": 5.0}, 6),  # some steps had no draft tokens
        ({"drafted": 21.0, "accepted": 5.0}, 6),
    ],
)
def test_steps_are_counted_by_drafts_and_tokens(counters: dict[str, float], steps: int) -> None:
    reply = Reply("x", tokens=12, first=0.1, last=1.0)
    metrics = serving_metrics([Block(1.0, [reply], counters)])
    assert metrics["tokens_per_step"] == 11 / steps


def test_drafts_are_read_from_the_answers_of_llama_cpp(measured: Callable[..., Any]) -> None:
    with running(engine := Engine(2, metrics=False)):
        ours = measured(engine.url, concurrency="2")["methods"][0]
    assert ours["acceptance_rate"] == pytest.approx(8 / 30)
    assert ours["tokens_per_step"] == 12 / (12 - 8)


@pytest.mark.parametrize("concurrency", ["0", "a,b", ""])
def test_a_wrong_concurrency_is_refused(concurrency: str) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        bench_recipe(None, [], server="http://127.0.0.1:1/v1", concurrency=concurrency)


def test_the_command(tmp_path: Path, questions: list[str], cli: Any) -> None:
    with running(engine := Engine(2)):
        out = tmp_path / "bench.json"
        options = ("--server", engine.url, "--prompts", str(tmp_path / "questions.json"), "--out", str(out))
        done = cli("bench", *options, "--concurrency", "2", "limit=4")
        assert done.returncode == 0, done.stderr
        assert "concurrency 2" in done.stdout
        assert json.loads(out.read_text())["prompts"] == len(questions[:4])
        out.unlink()
        again = cli("bench", str(out.with_suffix(".recipe.yaml")), "--concurrency", "1")
        assert again.returncode == 0, again.stderr
    assert [row["concurrency"] for row in load_results(out)["methods"]] == [1], "the written recipe differs"
    other = out.with_name("other.json")
    shutil.copyfile(out, other)
    page = run_report([out, other], tmp_path / "both.html").read_text()
    assert "bench.json" in page
    assert "other.json" in page
    assert "Tokens per step" in page, "the report must compare the rows of both files"
    assert "pass --baseline" in page


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([1.5, 1.2], "1.50×.* at concurrency 1.$"),
        ([1.5, 0.9], "1.50×.* not faster than the baseline at concurrency 4"),
        ([0.8, 0.9], "0.90×.* at concurrency 4; not faster than the baseline at concurrency 1, concurrency 4"),
    ],
)
def test_the_report_shows_speedup_and_acceptance(speedups: list[float], expected: str) -> None:
    rows = [
        {"label": f"concurrency {load}", "method": "server", "speedup": speedup, "speedup_interval": [0.1, 2.0]}
        for load, speedup in zip((1, 4), speedups, strict=True)
    ]
    assert re.search(expected, verdict(rows))


def test_prompts_are_extended_to_a_context(measured: Callable[..., Any], questions: list[str]) -> None:
    """The length is calibrated with the server's own count. Prompts differ from their beginning."""
    drafting, plain = Engine(2), Engine(1)
    for engine in (drafting, plain):
        engine.reads = lambda question: len(question) // 3
    with running(drafting, plain):
        rows = measured(drafting.url, baseline=plain.url, context="400,1000", concurrency="1,2")["methods"]
    assert [(row["context"], row["concurrency"]) for row in rows[::2]] == [(400, 1), (400, 2), (1000, 1), (1000, 2)]
    for row in rows:
        assert all(abs(tokens - row["context"]) < 0.05 * row["context"] for tokens in row["prompt_tokens"].values())
    asked = [request["messages"][-1]["content"] for request in drafting.asked[-len(questions) :]]
    assert len({text[:20] for text in asked}) == len(questions)
    assert all(any(text.endswith(question) for question in questions) for text in asked)
