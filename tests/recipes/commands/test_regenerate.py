"""`draftsmith regenerate` in this process and with servers, and resumed after a kill."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.storage.messages import install_hint
from draftsmith.data.regeneration import RegenerationReport
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.serving import client
from draftsmith.recipes.commands.training import regenerate
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.schema.evaluation import RegenerateRecipe
from draftsmith.recipes.schema.loading import load_recipe, parse_recipe
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner


@pytest.fixture
def models(corpus: Path, tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """Save random Llama models to target/ and drafter/."""
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    tokenizer.chat_template = CHATML_JINJA
    end = tokenizer.eos_token_id
    for name, seed in (("target", 0), ("drafter", 1)):
        model = make_llama(320, seed, 2.0, eos_token_id=end, max_position_embeddings=512)
        with torch.no_grad():
            model.lm_head.weight[end] *= 2
        model.generation_config.eos_token_id = end
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


@pytest.fixture
def values(corpus: Path, models: Path) -> dict[str, Any]:
    """Return a recipe that decodes in this process and keeps every answer."""
    return {
        "kind": "regenerate",
        "out": str(models / "out.jsonl"),
        "source": str(corpus / "rows.json"),
        "target": str(models / "target"),
        "template": "chatml",
        "max_new_tokens": 24,
        "on_length": "keep",
        "limit": 30,
    }


def run(values: dict[str, Any], **changes: Any) -> RegenerationReport:
    recipe = parse_recipe(values | changes, "the test's recipe")
    return run_regenerate(recipe)  # type: ignore[arg-type]


def served(values: dict[str, Any], url: str, **server: Any) -> dict[str, Any]:
    """Return the recipe with a server instead of the target."""
    section = {"url": url, "model": values["target"]} | server
    return {key: value for key, value in values.items() if key != "target"} | {"server": section}


def rows(path: str | Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    return {line["key"]: line for line in lines}


def errors(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(values["out"] + ".errors.jsonl").read_text().splitlines()]


def test_sources_with_only_questions_are_answered(values: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    source.write_text('{"turns": ["b c?", "d?"]}\n"e f?"\n')
    assert run(values, source=str(source)).written == 2
    roles = [[message["role"] for message in row["messages"]] for row in rows(values["out"]).values()]
    assert sorted(roles) == [["user", "assistant"], ["user", "assistant", "user", "assistant"]]
    source.write_text("")
    with pytest.raises(ValueError, match="0 of 0 rows"):
        run(values, source=str(source), out=f"{values['out']}.more.jsonl")


def test_answers_equal_transformers_turn_by_turn(values: dict[str, Any]) -> None:
    report = run(values)
    model = AutoModelForCausalLM.from_pretrained(values["target"])
    tokenizer = load_tokenizer(values["target"])
    finishes = []
    for row in rows(values["out"]).values():
        finishes += row["finish"]
        for turn in range(1, len(row["messages"]), 2):
            ids = tokenizer.apply_chat_template(
                row["messages"][:turn], add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            reply = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            assert row["messages"][turn]["content"] == tokenizer.decode(reply, skip_special_tokens=True)
            ended = int(reply[-1]) == tokenizer.eos_token_id
            assert row["finish"][turn // 2] == ("stop" if ended else "length")
    assert report.written + report.failed == 30
    assert min(finishes.count("stop"), finishes.count("length")) > 5
    assert len(finishes) > 30


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_batch_order_or_interruption(values: dict[str, Any], temperature: float) -> None:
    values |= {"temperature": temperature, "top_k": 40}
    one, four, parts = (values["out"].replace("out.", f"{name}.") for name in ("one", "four", "parts"))
    run(values, out=one, batch=1)
    run(values, out=four, batch=4)
    run(values, out=parts, batch=3, limit=11)
    run(values, out=parts, batch=7)
    assert rows(one) == rows(four) == rows(parts)
    other = values["out"].replace("out.", "other.")
    run(values, out=other, seed=1)
    assert (rows(other) == rows(one)) == (temperature == 0)
    with pytest.raises(ValueError, match=r"max_new_tokens 24.* 25"):  # answers of different settings must not be mixed
        run(values, out=one, max_new_tokens=25)
    Path(values["target"]).rename(Path(values["target"]).with_name("former"))
    Path(values["target"]).with_name("drafter").rename(values["target"])
    with pytest.raises(ValueError, match="hash"):
        run(values, out=one)


def test_a_random_share_of_the_questions_is_answered(values: dict[str, Any]) -> None:
    answers = {}
    for name, changes in {"cold": {}, "hot": {"temperature": 1.0}, "mixed": {"sampled": 0.4}}.items():
        run(values, **(changes | {"out": (out := values["out"].replace("out.", f"{name}."))}))
        answers[name] = {key: row["messages"][1]["content"] for key, row in rows(out).items()}
    everywhere = answers["cold"].keys() & answers["hot"].keys() & answers["mixed"].keys()  # without empty answers
    distinct = [key for key in everywhere if answers["cold"][key] != answers["hot"][key]]
    hot = sum(answers["mixed"][key] == answers["hot"][key] for key in distinct)
    assert hot + sum(answers["mixed"][key] == answers["cold"][key] for key in distinct) == len(distinct) > 10
    assert 0 < hot < len(distinct)


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"server": {"url": "http://127.0.0.1:1/v1", "model": "x"}}, ["`target`", "`server`", "both"]),
        ({"method": "medusa"}, ["'method'"]),
        ({"out": "answers.json"}, ["'out'"]),
        ({"max_new_tokens": 600}, ["600", "512"]),
    ],
)
def test_recipe_errors_are_one_line(values: dict[str, Any], changes: dict[str, Any], needles: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run(values, **changes)
    assert all(needle in str(caught.value) for needle in needles), caught.value
    assert not Path(values["out"]).exists() or not Path(values["out"]).stat().st_size


def test_the_same_command_resumes_after_stop_and_kill(
    values: dict[str, Any], tmp_path: Path, stop: Callable[..., tuple[int, str]]
) -> None:
    values |= {"limit": 40, "batch": 2, "max_new_tokens": 60, "temperature": 1.0}
    whole = str(tmp_path / "whole.jsonl")
    report = run(values, out=whole)
    assert report.written > 25
    recipe, out = tmp_path / "recipe.yaml", Path(values["out"])
    recipe.write_text(json.dumps(values))
    for lines, signal_number, code in ((4, signal.SIGKILL, -signal.SIGKILL), (10, signal.SIGTERM, 143)):
        ended, log = stop(out, lines - 1, signal_number, "regenerate", str(recipe))
        assert ended == code
        assert "Traceback" not in log
        assert ("stopped by signal 15; run the same command again to resume" in log) == (code == 143)
        assert lines <= out.read_bytes().count(b"\n") < report.written

    resumed = CliRunner().invoke(app, ["regenerate", str(recipe)])
    assert resumed.exit_code == (1 if report.failed else 0)
    actual, expected = rows(out), rows(whole)
    assert actual.keys() == expected.keys()
    # Rounding depends on the batch, so that one of 2,400 sampled tokens may differ (the probability is about 1e-5 per
    # token), and with it the rest of an answer. With other random numbers, nearly all answers would differ.
    assert sum(actual[key] != expected[key] for key in expected) <= 2
    before = out.read_bytes()
    repeated = CliRunner().invoke(app, ["regenerate", str(tmp_path / "out.recipe.yaml")])
    assert f"{report.failed} conversations to answer; {out} already has {report.written}" in repeated.stderr
    assert out.read_bytes() == before


@pytest.mark.slow
def test_answers_of_a_server_equal_those_of_the_engine(values: dict[str, Any]) -> None:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
    command += [values["target"], "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--device", "cpu"]
    run(values)  # the server omits special tokens from answers, as does this template
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as process:
        try:
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                time.sleep(0.1)
            from_server = values["out"].replace("out.", "served.")
            for limit in (8, 30):
                run(served(values, f"{url}/v1", concurrency=3), out=from_server, limit=limit)
        finally:
            process.kill()
    assert len(rows(from_server)) > 20
    # `finish` may differ: this server also reports "length" if the last allowed token is the end of turn
    messages = [{key: row["messages"] for key, row in rows(out).items()} for out in (from_server, values["out"])]
    assert messages[0] == messages[1]


class Server:
    """HTTP server that answers with `reply(body)`: a status (0 closes the connection), and bytes or a JSON value."""

    def __init__(self, reply: Callable[[dict[str, Any]], tuple[int, Any]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.times: list[float] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.times.append(time.monotonic())
                server.bodies.append(body)
                server.keys.append(self.headers["authorization"])
                status, value = reply(body)
                if isinstance(value, Iterator):
                    self.send_response(status)
                    self.end_headers()
                    with suppress(OSError):
                        for piece in value:
                            self.wfile.write(piece)
                    return
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                if not status:
                    return  # closes the connection
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def reply_with(text: str, finish: str | None = "stop") -> tuple[int, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    pytest.importorskip("openai")
    servers: list[Server] = []

    def build(reply: Callable[[dict[str, Any]], tuple[int, Any]]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield build
    for server in servers:
        server.close()


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    return reply_with(f"{len(body['messages'])} messages, the last {body['messages'][-1]['content']}")


def test_requests_to_a_server(values: dict[str, Any], serve: Callable[..., Server]) -> None:
    server = serve(echo)
    run(served(values, server.url, model="a model"), limit=3)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in server.bodies} == {("a model", 0, 24)}
    assert not {"seed", "top_k"} & {name for body in server.bodies for name in body}
    for row in rows(values["out"]).values():
        for turn in range(1, len(row["messages"]), 2):
            assert row["messages"][turn]["content"].startswith(f"{turn} messages, the last")
    server.bodies.clear()
    run(served(values, server.url), out=values["out"].replace("out.", "other."), temperature=0.5, top_k=9, limit=9)
    assert {body["top_k"] for body in server.bodies} == {9}
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies) > 9


def test_failures_are_recorded_without_the_key_and_retried(
    values: dict[str, Any], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SERVERS_KEY", "very-secret")
    broken = True

    def moody(body: dict[str, Any]) -> tuple[int, Any]:
        length = len(body["messages"])
        if broken and length == 1:
            return 400, {"error": {"message": f"Bearer very-secret may not ask this {length}"}}
        if broken and length == 3:
            return reply_with("cannot say", "content_filter")
        return reply_with(" \ud83d") if length == 1 else echo(body)

    server = serve(moody)
    recipe = served(values, server.url, key_variable="A_SERVERS_KEY") | {"template": "vicuna-v1.1", "limit": 5}
    assert run(recipe).failed == 5
    assert set(server.keys) == {"Bearer very-secret"}
    assert all("may not ask this 1" in row["error"] and "…" in row["error"] for row in errors(values))
    broken = False
    assert run(recipe).written == 5
    assert {row["messages"][1]["content"] for row in rows(values["out"]).values()} == {"\ufffd"}
    again = load_recipe(values["out"].replace(".jsonl", ".recipe.yaml"))
    assert isinstance(again, RegenerateRecipe)
    assert again.server is not None
    assert again.server.key_variable == "A_SERVERS_KEY"
    for path in Path(values["out"]).parent.glob("out.*"):
        assert "very-secret" not in path.read_text()
    monkeypatch.delenv("A_SERVERS_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "meant for somebody else")
    run(recipe, out=values["out"].replace("out.", "other."))
    assert server.keys[-1] == "Bearer none"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_are_kept_and_tool_calls_are_failures(
    values: dict[str, Any], serve: Callable[..., Server], key: str
) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"]) == 1:
            return chosen(content="4.", tool_calls=[], **{key: "Two and two."})
        return chosen(content=None, tool_calls=[{"type": "function", "function": {"name": "add"}}])

    report = run(served(values, serve(reply).url), limit=8)
    assert report.written > 0
    assert report.failed > 0
    answers = {row["messages"][1]["content"] for row in rows(values["out"]).values()}
    assert answers == {"<think>\nTwo and two.\n</think>\n\n4."}
    assert all("calls tools" in row["error"] for row in errors(values))


def chosen(**message: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


ODD: list[tuple[int, Any]] = [
    (200, json.dumps(reply_with("caf\u00e9")[1], ensure_ascii=False).encode("latin-1")),
    (200, b'{"choices": [{"mess'),
    (200, {"choices": [7]}),
    (200, {"error": "busy"}),
    chosen(content=[{"type": "text", "text": "yes"}]),
    chosen(),
    reply_with("yes", {"reason": "stop"}),  # type: ignore[arg-type]
    (403, {"error": {"message": "this one is not allowed"}}),
    (404, {"error": {"message": "no such thing"}}),
    (0, None),
]


def test_an_invalid_reply_fails_one_conversation(
    values: dict[str, Any], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "_RETRIES", 0)
    questions: list[str] = []
    healed = False

    def odd(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"]) == 1:
            questions.append(body["messages"][0]["content"])
        number = len(questions) - 2  # the first is answered
        if healed or len(body["messages"]) > 1 or not 0 <= number < len(ODD):
            return echo(body)
        return ODD[number]

    server = serve(odd)
    report = run(served(values, server.url, concurrency=1))
    assert (report.written, report.failed) == (30 - len(ODD), len(ODD))
    said_of = [row["error"] for row in errors(values)]
    assert len(said_of) == len(ODD)
    assert all(0 < len(error) <= 600 for error in said_of)
    assert re.search("UTF-8|utf-8", said_of[0])
    healed = True
    monkeypatch.undo()
    assert run(served(values, server.url, concurrency=2)).written == len(ODD)
    assert len(rows(values["out"])) == 30


@pytest.mark.parametrize(("pause", "error"), [(0.0, "larger than 1 MiB"), (0.1, "no answer within 1 s")])
def test_a_reply_without_end_is_a_failure(
    values: dict[str, Any],
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    pause: float,
    error: str,
) -> None:
    monkeypatch.setattr(regenerate, "_RETRIES", 0)
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 20)

    def endless(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, (time.sleep(pause) or b" " * (1 if pause else 1 << 16) for _ in range(1000))

    recipe = served(values, serve(endless).url)
    recipe["server"]["timeout"] = 1.0 if pause else 60.0
    report = run(recipe, limit=2)
    assert (report.written, report.failed) == (0, 2)
    assert all(error in row["error"] for row in errors(values))


def test_a_refusing_server_is_a_one_line_error(
    values: dict[str, Any], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    server = serve(lambda body: (401, {"error": {"message": "no very-secret here"}}))
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as caught:
        run(served(values, server.url))
    assert "very-secret" not in str(caught.value)
    server = serve(lambda body: (422, {"error": {"message": "unknown field"}}))
    with pytest.raises(ConnectionError, match="unknown field"):
        run(served(values, server.url), limit=60)
    assert rows(values["out"]) == {}
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=re.escape(install_hint("regenerate"))):
        run(served(values, server.url))


def test_a_lost_server_ends_the_run_which_resumes(
    values: dict[str, Any], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "_RETRIES", 0)
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:1/v1"):
        run(served(values, "http://127.0.0.1:1/v1"))

    def leave(body: dict[str, Any]) -> tuple[int, Any]:
        if len(leaving.bodies) == 6:
            leaving.close()
        return echo(body)

    leaving = serve(leave)
    with pytest.raises(ConnectionError, match=leaving.url):
        run(served(values, leaving.url, concurrency=1))
    written = rows(values["out"])
    assert 0 < len(written) <= 6
    assert not Path(values["out"] + ".errors.jsonl").exists()
    monkeypatch.undo()
    assert run(served(values, serve(echo).url)).written == 30 - len(written)
