"""User errors raise a ValueError that names the position, both values and the nearest valid name."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.storage.messages import install_hint
from draftsmith.data.blocks.packing import pack_best_fit
from draftsmith.data.blocks.prepared import prepare
from draftsmith.data.cleaning.cleaner import Cleaner, Cleaning
from draftsmith.data.conversations import Conversation, CorpusReport, Dialogue, Turn
from draftsmith.data.rendering.render import prompt_renderer, render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.documentation import documentation_conversations
from draftsmith.data.sources.files import Row
from draftsmith.data.sources.forms import read_dialogue
from draftsmith.data.sources.reading import open_dialogues, read_prompts
from draftsmith.data.sources.registry import CORPORA
from draftsmith.data.tokenizers import load_tokenizer, train_bpe

TEXTS = ["the cat and the hat and the bat", "a man, a plan, a canal"]
LOCATION = "data.jsonl, row 7"


def form(value: Any) -> Any:
    return read_dialogue(Row(value, LOCATION, "data-7", 6))


def adapted(name: str, value: Any) -> Any:
    return CORPORA[name].read(Row(value, LOCATION, "data-7", 6))


def source(name: str, **opening: Any) -> Any:
    return list(open_dialogues(name, **opening))


def talk(*roles: str) -> Conversation:
    return Conversation("strange", tuple(Turn(role, "x" * 500) for role in roles))


def bare_bpe() -> Any:
    return train_bpe(["hello"], 258, ["<|endoftext|>"])


def endless_bpe() -> Any:
    tokenizer = bare_bpe()
    tokenizer.eos_token = None
    return tokenizer


def prepared(conversations: list[Conversation], block_tokens: int, out: str = "prepared") -> Any:
    return prepare(conversations, bare_bpe(), get_template("plain"), block_tokens, out, source={})


def chat_tokenizer(text: str | None) -> Any:
    tokenizer = train_bpe(["user assistant the hello"], 270, ("<pad>", "<turn>", "</turn>", "<|im_end|>"))
    tokenizer.chat_template = text
    return tokenizer


def own_template(text: str | None) -> Any:
    return get_template("tokenizer", chat_tokenizer(text))


MESSAGE = "{% for m in messages %}<turn>{{ m['role'] }}\n"
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    # sources
    "no-file": (lambda: source("sharegpt_trian.jsonl"), ("sharegpt_trian.jsonl", "sharegpt_train.jsonl")),
    "no-corpus": (lambda: source("piqua"), ("piqua", "piqa")),
    "no-hub-id": (lambda: source("a/b/c"), ("a/b/c",)),
    "no-stand-in": (lambda: source("piqa", path="gone.jsonl"), ("gone.jsonl",)),
    "no-suffix-known": (lambda: source("a.csv"), ("a.csv", ".parquet")),
    "nothing-in-folder": (lambda: source("folder"), ("README.md", ".parquet")),
    "no-address": (lambda: source("spec-bench", file="http://127.0.0.1:9/a.jsonl"), ("127.0.0.1:9/a.jsonl", "path")),
    "no-group": (lambda: list(read_prompts("spec-bench", groups=["mt-bench"])), ("mt-bench", "mt_bench", "rag")),
    "no-group-there": (lambda: list(read_prompts("questions.jsonl", groups=["maths"])), ("maths", "'math'", "'qa'")),
    "documentation-dotted": (lambda: documentation_conversations(["torch.nn"]), ("torch.nn",)),
    # rows
    "row-empty": (lambda: form({}), (LOCATION, "(none)", "conversations")),
    "row-misspelt": (lambda: form({"mesages": [], "other": 1}), (LOCATION, "mesages, other", "'messages'")),
    "message-odd": (lambda: form({"messages": [{"from": "x", "text": "a"}]}), (LOCATION, "message 1", "from, text")),
    "article-null": (lambda: adapted("cnn-dailymail", {"article": None, "highlights": ""}), (LOCATION, "`article`")),
    "tools-text": (lambda: form({"messages": [], "tools": "[{"}), (LOCATION, "`tools`", "'[{'")),
    "pair-text": (lambda: adapted("wmt14-de-en", {"translation": "a"}), (LOCATION, "{de, en}", "str")),
    # cleaning
    "choice": (lambda: Cleaning(html="dorp"), ("html", "'dorp'", "'keep'", "'markdown'")),  # type: ignore[arg-type]
    "role-meaning": (lambda: Cleaning(roles={"bot": "asistant"}), ("roles.bot", "'assistant'")),  # type: ignore
    # tokenizers
    "small": (lambda: train_bpe(TEXTS, 258, ["<a>", "<b>", "<c>"]), ("258", "259")),
    "large": (lambda: train_bpe(["ab ab"], 4000, ["<a>"]), ("4000",)),
    "specials-twice": (lambda: train_bpe(TEXTS, 300, ["<a>", "<a>"]), ("['<a>', '<a>']",)),
    "no-tokenizer": (lambda: load_tokenizer("folder"), ("folder",)),
    "tokenizer-file": (lambda: load_tokenizer("a.csv"), ("a.csv",)),
    "tokenizer-revision": (lambda: load_tokenizer("folder@main"), ("folder@main",)),
    # rendering
    "no-template": (lambda: get_template("vicuna"), ("'vicuna'", "'vicuna-v1.1'", "chatml")),
    "no-special": (lambda: render(talk("user", "assistant"), get_template("chatml"), bare_bpe()), ("<|im_start|>",)),
    "no-eos": (lambda: render(talk("user", "assistant"), get_template("plain"), endless_bpe()), ("plain", "{eos}")),
    "bare-text": (lambda: render(talk("assistant"), get_template("alpaca"), bare_bpe()), ("strange", "plain")),
    "no-turns": (lambda: render(talk(), get_template("plain"), bare_bpe()), ("strange",)),
    "two-questions": (lambda: render(talk("user", "user", "assistant"), get_template("plain"), bare_bpe()),
                      ("strange", "user, user, assistant")),
    "no-question": (lambda: prompt_renderer(get_template("plain"), bare_bpe())(talk("user", "assistant").turns),
                    ("user, assistant",)),
    "own-missing": (lambda: own_template(None), ("no chat template",)),
    "own-silent": (lambda: own_template("{% for m in messages %}<turn>{{ m['role'] }}</turn>{% endfor %}"), ("once",)),
    "own-date": (lambda: get_template("tokenizer", chat_tokenizer(ENDLESS), {"date": "May"}), ("May",)),
    "own-endless": (lambda: render(talk("user", "assistant"), own_template(ENDLESS), chat_tokenizer(ENDLESS)),
                    (r"'\n'", "special token", "chatml")),
    "options": (lambda: get_template("chatml", None, {"enable_thinking": False}), ("chatml", "enable_thinking")),
    # blocks
    "long-document": (lambda: pack_best_fit([3, 11], 10), ("11", "10")),
    "no-conversation": (lambda: prepared([], 64), ("0 conversations", "64")),
    "no-room": (lambda: prepared([talk("system", "user", "assistant")], 64), ("1 conversations", "64")),
    "others-folder": (lambda: prepared([talk("user", "assistant")], 64, "folder"), ("folder",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_user_errors_name_both_values(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("years of work")
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "sharegpt_train.jsonl").write_text("")
    rows = [{"category": category, "turns": ["?"]} for category in ("math", "qa")]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call, needles = REFUSED[mistake]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for needle in needles:
        assert needle in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.csv", "folder", "questions.jsonl", "sharegpt_train.jsonl"
    ]  # fmt: skip
    assert (tmp_path / "folder" / "README.md").read_text() == "years of work"


def cleaned(**options: Any) -> Any:
    return Cleaner(Cleaning(**options), CorpusReport())(Dialogue("a", (("user", "<p>x</p>"), ("assistant", "y")), ""))


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("pyarrow", "train", lambda: source("a.parquet")),
        ("datasets", "train", lambda: source("piqa")),
        ("markdownify", "clean", lambda: cleaned(html="markdown")),
        ("py3langid", "clean", lambda: cleaned(languages=["en"])),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(
    package: str, extra: str, call: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=re.escape(install_hint(extra))):
        call()
