"""The registry of corpora, and the conversion of their rows to dialogues and prompts."""

import json
from collections import Counter
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from draftsmith.data.conversations import CorpusReport, FollowUp, Turn, write_conversations
from draftsmith.data.rendering.lint import Linter
from draftsmith.data.rendering.render import Renderer, RenderReport
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.files import Row
from draftsmith.data.sources.reading import open_dialogues, read_conversations, read_prompts
from draftsmith.data.sources.registry import CORPORA
from huggingface_hub import constants

CHAT = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


PAIR = {"translation": {"de": "Guten Tag", "en": "Good day"}}


@pytest.mark.parametrize(
    ("name", "row", "questions", "references", "category"),
    [
        ("cnn-dailymail", {"article": "A {b} c", "highlights": "A", "id": "7"}, ["Summarize: A {b} c"], ("A",), ""),
        ("wmt14-de-en", PAIR, ["Translate German to English: Guten Tag"], ("Good day",), ""),
        ("wmt14-en-de", PAIR,
         ["Translate the input English sentence into German.\nInput: Good day\nOutput: "], ("Guten Tag",), ""),
        ("piqa", {"goal": "How?", "sol1": "so", "sol2": "thus", "label": 1}, ["How?"], ("thus",), ""),
        ("piqa", {"goal": "How?", "sol1": "so", "sol2": "thus", "label": -1}, ["How?"], (), ""),
        ("web-questions", {"url": "u", "question": "who?", "answers": ["he", "she"]}, ["who?"], ("he", "she"), ""),
        ("alpaca-eval", {"instruction": "Do.", "dataset": "koala", "generator": "g"}, ["Do."], (), "koala"),
        ("mt-bench", {"prompt_id": 1, "category": "stem", "prompt": ["a", "b"], "reference": []}, ["a", "b"], (),
         "stem"),
        ("mt-bench", {"question_id": 1, "category": "stem", "turns": ["a", "b"], "reference": ["1", "2"]}, ["a", "b"],
         ("1",), "stem"),
        ("spec-bench", {"question_id": 1, "category": "humanities", "turns": ["a", "b"]}, ["a", "b"], (), "mt_bench"),
        ("spec-bench", {"question_id": 1, "category": "rag", "turns": ["a"], "reference": [["r"]]}, ["a"], ("r",),
         "rag"),
        # a copy with columns that differ from those on the hub
        ("cnn-dailymail", {"turns": ["Summarize: this"], "category": "summarization"}, ["Summarize: this"], (),
         "summarization"),
    ],
)  # fmt: skip
def test_rows_of_evaluation_sets(
    name: str, row: Any, questions: list[str], references: tuple[str, ...], category: str
) -> None:
    dialogue = CORPORA[name].read(Row(row, "here, row 1", "here-1"))
    assert dialogue.messages == tuple(("user", question) for question in questions)
    assert dialogue.references == references
    assert dialogue.category == category


def test_a_local_path_stands_in_for_a_corpus(tmp_path: Path) -> None:
    for split in ("train_sft", "test_sft"):
        jsonl(tmp_path / f"{split}-00000.jsonl", {"prompt": "p", "messages": [{"role": "user", "content": split}]})
    jsonl(tmp_path / "piqa.jsonl", {"goal": "How?", "sol1": "so", "sol2": "thus", "label": 0})

    def last_questions(*source: str, **options: Any) -> list[str]:
        return [prompt.turns[-1].text for prompt in read_prompts(*source, **options)]

    folder = str(tmp_path)
    assert last_questions("ultrachat-200k", path=folder) == ["train_sft"]
    assert last_questions("HuggingFaceH4/ultrachat_200k", path=folder, split="test_sft") == ["test_sft"]
    (prompt,) = read_prompts("ybisk/piqa", path=str(tmp_path / "piqa.jsonl"))
    assert prompt.references == ("so",)
    assert last_questions("someone/else", path=str(tmp_path / "piqa.jsonl")) == ["How?"]


@pytest.mark.parametrize(
    ("name", "row", "question", "answer"),
    [
        ("t5-cnn-dailymail", {"article": "Long.", "highlights": "S.", "id": "1"}, "summarize: Long.", "S."),
        ("cnn-dailymail", {"article": "Long.", "highlights": "S.", "id": "1"}, "Summarize: Long.", "S."),
        (
            "t5-wmt14-en-de",
            {"translation": {"de": "Hut", "en": "hat"}},
            "translate English to German: hat",
            "Hut",
        ),
        ("wmt14-de-en", {"translation": {"de": "Hut", "en": "hat"}}, "Translate German to English: Hut", "hat"),
    ],
)
def test_references_are_answers_in_training(
    name: str, row: dict[str, Any], question: str, answer: str, tmp_path: Path
) -> None:
    report = CorpusReport()
    (conversation,) = read_conversations(name, path=jsonl(tmp_path / "rows.jsonl", row), report=report)
    assert conversation.turns == (Turn("user", question), Turn("assistant", answer))
    assert report.changed == {"references used as answers": 1}


@pytest.mark.parametrize("key", ["weight", "train", "loss", "trainable", "step_loss_mask"])
@pytest.mark.parametrize("form", [("role", "content"), ("from", "value")])
def test_answers_of_weight_0_are_context(key: str, form: tuple[str, str], bpe: Any, tmp_path: Path) -> None:
    role, content = form
    texts = [("user", "one?"), ("assistant", "the"), ("user", "two?"), ("assistant", "hello")]
    row: dict[str, Any] = {"messages": [{role: name, content: text} for name, text in texts]}
    row["messages"][1] |= {key: 0, "name": "Bo", "mask": False, "audio": None}
    row["messages"][3] |= {key: 0.5}
    report, rendering = CorpusReport(), RenderReport()
    (conversation,) = read_conversations(jsonl(tmp_path / "rows.jsonl", row), report=report)
    assert report.changed == {
        "answers kept as context": 1,
        f"`{key}` of messages is neither 0 nor 1, treated as 1": 1,
        **dict.fromkeys((f"ignored key `{name}` of messages" for name in ("name", "mask")), 1),
    }
    template = get_template("chatml")
    (document,) = Renderer(template, bpe, 99)([conversation], rendering)
    ((start, end),) = document.spans
    assert bpe.decode(document.ids[start:end]) == "hello<|im_end|>"
    assert (rendering.context_only, rendering.exchanges) == (1, 2)
    assert Linter(bpe, template).check(document) is None
    write_conversations([conversation], tmp_path / "again.jsonl")
    assert [each.turns for each in read_conversations(str(tmp_path / "again.jsonl"))] == [conversation.turns]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_supervised_before_their_answers(key: str, tmp_path: Path) -> None:
    row = {"messages": [message("user", "2 + 2?"), message("assistant", "4.") | {key: "Add."}]}
    report = CorpusReport()
    (conversation,) = read_conversations(jsonl(tmp_path / "rows.jsonl", row), report=report)
    assert conversation.turns[1].text == "<think>\nAdd.\n</think>\n\n4."
    assert report.changed == {"reasoning converted to <think>": 1}


@pytest.mark.parametrize(("kind", "key"), [("thinking", "thinking"), ("reasoning", "text")])
def test_reasoning_parts_and_messages_as_json_are_read(kind: str, key: str, tmp_path: Path) -> None:
    answer = [{"type": kind, key: [{"type": "text", "text": "Add."}]}, {"type": "text", "text": "4."}]
    row = {"messages": json.dumps([message("user", "2 + 2?"), message("assistant", answer) | {"name": "Bo"}])}
    report = CorpusReport()
    (conversation,) = read_conversations(jsonl(tmp_path / "rows.jsonl", row), report=report)
    assert conversation.turns[1].text == "<think>\nAdd.\n</think>\n\n4."
    assert report.changed == {"ignored key `name` of messages": 1}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_prompts_of_conversations(tmp_path: Path) -> None:
    # fmt: off
    talk = [message("system", "Be kind."), message("gpt", "lost"), message("user", "one?"), message("gpt", "1"),
            message("user", "\ud83d"), message("gpt", "2"), message("tool", "x"), message("user", "of the tool")]
    # fmt: on
    rows = [
        {"id": "whole", "messages": talk},
        {"messages": [message("user", " "), message("assistant", "hi")]},
        {"text": "no question here"},
        {"id": "bare", "category": "math", "prompt": "p", "reference": "r"},
    ]
    skipped = Counter[str]()
    first, second = read_prompts(jsonl(tmp_path / "a.jsonl", *rows), skipped=skipped)
    assert first.turns == (Turn("system", "Be kind."), Turn("user", "one?"))
    assert (first.id, first.follow_ups, first.references) == ("whole", (FollowUp("1", "\ufffd", ("2",)),), ("1",))
    assert (second.id, second.category, second.references) == ("bare", "math", ("r",))
    assert skipped == {"no question": 2}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Replace `datasets.load_dataset` by a function that returns fixed rows; return its recorded calls and the rows."""
    datasets = pytest.importorskip("datasets")
    last_questions: list[dict[str, Any]] = []
    rows = [{"prompt": str(i), "response": "hi", "scores": [i]} for i in range(11)]

    def load(path: str, **options: Any) -> Any:
        last_questions.append({"path": path, **options})
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return last_questions, rows


def test_the_hub_is_read_in_shards(hub: tuple[Any, list[dict[str, Any]]]) -> None:
    parts = [[d.messages[0][1] for d in open_dialogues("someone/chats", shard=(i, 4))] for i in range(4)]
    assert parts == [["0", "4", "8"], ["1", "5", "9"], ["2", "6", "10"], ["3", "7"]]


def test_the_hub_gets_the_arguments_of_registry_or_user(hub: tuple[list[dict[str, Any]], Any]) -> None:
    last_questions, _ = hub
    list(open_dialogues("someone/chats", config="c", split="test", revision="abc", file="x.json"))
    for name, split in (("piqa", None), ("lmsys/lmsys-chat-1m", "train[:10]")):
        with suppress(ValueError):  # the rows have other columns
            list(open_dialogues(name, split=split))
    nothing = {"name": None, "split": "train", "revision": None, "data_files": None}
    assert last_questions == [
        {"path": "someone/chats", "name": "c", "split": "test", "revision": "abc", "data_files": "x.json"},
        {**nothing, "path": "ybisk/piqa", "split": "validation", "revision": "refs/convert/parquet"},
        {**nothing, "path": "lmsys/lmsys-chat-1m", "split": "train[:10]"},
    ]


def test_an_unreachable_hub_is_one_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"someone/chats.*reach") as refused:
        next(read_conversations("someone/chats"))
    assert "Errno" not in str(refused.value)


def test_a_file_with_a_url_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    rows = [{"question_id": i, "category": "math", "turns": [str(i)], "reference": [str(i)]} for i in range(5)]
    (tmp_path / "www").mkdir()
    jsonl(tmp_path / "www" / "question.jsonl", *rows)
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "www")))
    Thread(target=served.serve_forever, daemon=True).start()
    file = f"http://127.0.0.1:{served.server_address[1]}/question.jsonl"
    for _ in range(2):
        (prompt,) = read_prompts("spec-bench", file=file, shard=(3, 4))
        assert (prompt.turns[0].text, prompt.category, prompt.references) == ("3", "mt_bench", ("3",))
        served.shutdown()
        served.server_close()


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "path", "prompts", "references"),
    [
        ("spec-bench", "eval/spec_bench_question.jsonl", 480, 359), ("piqa", "qa/piqa", 1838, 0),
        ("mt-bench", "eval/mt_bench_question.jsonl", 80, 39), ("lmsys-chat-1m", "lmsys_like", 6057, 6057),
        ("alpaca-eval", "instruct/alpaca_eval/vicuna-7b-v1.3.json", 805, 805),
        ("wmt14-en-de", "mt/mcsd_wmt_ende_prompts.json", 1000, 0),
    ],
)  # fmt: skip
def test_real_copies_of_corpora(shared_data: Path, name: str, path: str, prompts: int, references: int) -> None:
    loaded = list(read_prompts(name, path=str(shared_data / path)))
    assert len(loaded) == prompts
    assert sum(bool(prompt.references) for prompt in loaded) == references
    groups = Counter(prompt.category for prompt in loaded)
    if CORPORA[name].groups:
        assert set(groups) == set(CORPORA[name].groups)
    if name == "spec-bench":
        assert set(groups.values()) == {80}
