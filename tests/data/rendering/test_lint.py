"""The linter reports every planted fault by name, and no faults in rendered conversations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data.conversations import Conversation, CorpusReport, Turn
from draftsmith.data.rendering import lint as f
from draftsmith.data.rendering.lint import Linter
from draftsmith.data.rendering.render import Rendered, Renderer, prompt_renderer, render
from draftsmith.data.rendering.templates import TEMPLATES, Template, get_template
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TALK = ["what is the first question", "the first answer here", "and then?", "another answer to that", "so?", "then end"]
MARKERS = ("</s>", "<s>", "<unk>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "USER: ", " ASSISTANT:", "[/INST]")


@pytest.fixture(scope="session", params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> Template:
    return get_template(request.param)


def _talk(texts: Sequence[str], system: str | None = None, name: str = "talk") -> Conversation:
    turns = tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    return Conversation(name, (*((Turn("system", system),) if system is not None else ()), *turns))


Plant = Callable[[Rendered, Any], Rendered]


def _spans(change: Callable[[list[tuple[int, int]], int], list[tuple[int, int]]]) -> Plant:
    return lambda document, _: replace(document, spans=change(list(document.spans), len(document.ids)))


def _inserted(document: Rendered, position: int, number: int) -> Rendered:
    spans = [(s + (s > position), e + (e > position)) for s, e in document.spans]
    return replace(document, ids=np.insert(document.ids, position, number), spans=spans)


def _without_end(document: Rendered, _: Any) -> Rendered:
    *others, (start, end) = document.spans
    return replace(document, ids=np.delete(document.ids, end - 1), spans=[*others, (start, end - 1)])


def _with_id(number: int) -> Plant:
    def plant(document: Rendered, _: Any) -> Rendered:
        ids = document.ids.copy()
        ids[-2] = number
        return replace(document, ids=ids)

    return plant


PLANTS: dict[str, tuple[Plant, str]] = {
    "nothing": (_spans(lambda _, length: []), f.BROKEN_SPANS),
    "everything": (_spans(lambda _, length: [(0, length)]), f.ANSWER_DIFFERS),
    "a question too": (_spans(lambda s, _: [s[0], (s[0][1] + 2, s[1][1]), s[2]]), f.ANSWER_DIFFERS),
    "an answer not": (_spans(lambda s, _: [s[0], s[2]]), f.ANSWER_DIFFERS),
    "an end not": (_spans(lambda s, _: [s[0], (s[1][0], s[1][1] - 1), s[2]]), f.ANSWER_DIFFERS),
    "no end": (_without_end, f.ANSWER_DIFFERS),
    "end token in an answer": (
        lambda document, tokenizer: _inserted(document, document.spans[1][0] + 3, tokenizer.eos_token_id),
        f.ANSWER_DIFFERS,
    ),
    "a large id": (_with_id(10**6), f.BROKEN_SPANS),
    "a span in two": (_spans(lambda s, _: [(s[0][0], s[0][0] + 2), (s[0][0] + 2, s[0][1]), *s[1:]]), f.BROKEN_SPANS),
    "a span too long": (_spans(lambda s, length: [*s[:-1], (s[-1][0], length + 1)]), f.BROKEN_SPANS),
    "exchanges that are not there": (lambda document, _: replace(document, first=7), f.ANSWER_DIFFERS),
}


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_planted_faults_are_found_by_name(template: Template, tokenizer: Any, system: str | None) -> None:
    document = render(_talk(TALK, system), template, tokenizer)
    for planted, (plant, expected) in PLANTS.items():
        linter = Linter(tokenizer, template)
        assert linter.check(document) is None
        assert linter.check(plant(document, tokenizer)) == expected, planted
        assert (linter.report.documents, linter.report.clean) == (2, 1)
    other = replace(document, conversation=_talk([TALK[0], TALK[1], "another question", *TALK[3:]], system))
    assert linter.check(other) == f.QUESTION_DIFFERS


@pytest.mark.parametrize(
    ("before", "after", "fault"), [("", "", False), ("", "\n\n", True), ("  ", "", True), ("\n", "", True)]
)
def test_white_space_around_answers_is_reported(tokenizer: Any, before: str, after: str, fault: bool) -> None:
    written, template = _talk([TALK[0], before + TALK[1] + after]), get_template("vicuna-v1.1")
    document = replace(render(written, template, tokenizer), conversation=_talk(TALK[:2]))
    assert Linter(tokenizer, template).check(document) == (f.ANSWER_DIFFERS if fault else None)


@pytest.mark.parametrize(
    "answer", ["so many words " * 30, "你好，世界😀" * 20, "é" * 90], ids=["words", "bytes", "pairs"]
)
def test_the_beginning_of_a_cut_answer_is_accepted(template: Template, tokenizer: Any, answer: str) -> None:
    linter, chat = Linter(tokenizer, template), _talk(["the question", answer])
    length = len(prompt_renderer(template, tokenizer)(chat.turns[:1]))
    for limit in range(length + 40, length + 44):
        (document,) = Renderer(template, tokenizer, limit)([chat])
        assert linter.check(document) is None
        assert linter.check(replace(document, answer_cut=0)) == f.ANSWER_DIFFERS
        if answer.isascii():  # a broken character makes the whole run of bytes undecodable
            other = replace(document, conversation=_talk(["the question", "x" + answer]))
            assert linter.check(other) == f.ANSWER_DIFFERS
        start, end = document.spans[0]
        assert linter.check(replace(document, spans=[(start - 4, end)]))
        closed = replace(document, ids=np.append(document.ids, tokenizer.eos_token_id), spans=[(start, end + 1)])
        assert linter.check(closed) == f.ANSWER_DIFFERS, "an end token after a cut answer must be reported"


def test_a_cut_question_is_no_fault(template: Template, tokenizer: Any) -> None:
    question = "so many words " * 30
    linter, chat = Linter(tokenizer, template), _talk([question, "the answer"])
    length = len(render(_talk(["", "the answer"]), template, tokenizer).ids)
    (document,) = Renderer(template, tokenizer, length + 40)([chat])
    assert linter.check(document) is None
    assert linter.check(replace(document, question_cut=0)) == f.QUESTION_DIFFERS


def test_bare_text_is_fully_supervised(tokenizer: Any) -> None:
    text = Conversation("text", (Turn("assistant", "the hello 你好 " * 30),))
    linter = Linter(tokenizer, get_template("plain"))
    parts = list(Renderer(get_template("plain"), tokenizer, 40)([text]))
    for part in parts:
        assert linter.check(part) is None
    part = parts[1]
    ((start, end),) = part.spans
    assert linter.check(replace(part, spans=[(start + 3, end)])) == f.ANSWER_DIFFERS
    assert linter.check(_inserted(part, start + 5, tokenizer.eos_token_id)) == f.ANSWER_DIFFERS
    other = Conversation("other", (Turn("assistant", "something else"),))
    assert linter.check(replace(part, conversation=other)) == f.ANSWER_DIFFERS


def test_tokenizers_that_change_texts() -> None:
    text = ["the USER asks ASSISTANT answers cafe\u0301 user assistant"]
    composing = train_bpe(text, 290, ["<s>", "</s>"])
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "a", "the", "user", ":", "assistant", "hello", "\n"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    unknowing = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    template = get_template("vicuna-v1.1")
    texts, other_texts = ["the cafe\u0301", "hello  the cafe\u0301"], ["the cafe\u0301", "hello a hello"]
    for tokenizer in (composing, unknowing):
        document = render(_talk(texts), template, tokenizer)
        linter = Linter(tokenizer, template)
        assert linter.check(document) is None
        assert linter.check(replace(document, conversation=_talk(other_texts))) == f.ANSWER_DIFFERS


TEXTS = st.lists(
    st.one_of(st.sampled_from(MARKERS), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)), max_size=6
).map("".join)
CHATS = st.tuples(
    st.one_of(st.none(), TEXTS), st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.integers(20, 200)
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(CHATS, min_size=1, max_size=4), st.booleans())
@example([(None, [("</s>", "</s></s></s></s></s>")], 20)], False)
@example([("\x1b", [("\x80</s></s><|im_end|>", "")], 20)], False)  # cut inside a character that follows other bytes
def test_user_text_is_never_supervised(
    template: Template, tokenizer: Any, made: list[Any], last_turn_only: bool
) -> None:
    linter = Linter(tokenizer, template)
    for system, exchanges, room in made:
        chat = _talk([text for exchange in exchanges for text in exchange], system)
        opening = len(prompt_renderer(template, tokenizer)((*chat.turns[: system is not None], Turn("user", ""))))
        for max_tokens in (None, opening + room):
            documents = Renderer(template, tokenizer, max_tokens, last_turn_only=last_turn_only)([chat])
            for document in documents:
                assert linter.check(document) is None, (document, tokenizer.decode(document.ids))


REAL = (
    "sharegpt/sharegpt_v3_sample_800.json",
    "chat_multi/moss_without_plugins_sharegpt.json",
    "instruct/alpaca_en_demo.json",
    "instruct/alpaca_eval/vicuna-7b-v1.3.json",
    pytest.param("lmsys_like/train-00000-of-00001.parquet", marks=pytest.mark.slow),
)


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL)
def test_masks_of_real_rows(shared_data: Path, name: str) -> None:
    from draftsmith.data.cleaning.cleaner import ROLES
    from draftsmith.data.sources.reading import open_dialogues, read_conversations

    pytest.importorskip("sentencepiece")
    source, report = str(shared_data / name), CorpusReport()
    usable = 0
    for dialogue in open_dialogues(source):
        roles = [ROLES.get(role) if str(text or "").strip() else None for role, text in dialogue.messages]
        usable += ("user", "assistant") in pairwise(roles)
    tokenizer = load_tokenizer(str(shared_data / "tokenizer" / "llama2c"))
    template = get_template("vicuna-v1.1")
    linter = Linter(tokenizer, template)
    chats = read_conversations(source, report=report)
    for document in Renderer(template, tokenizer, 2048)(chats):
        linter.check(document)
    assert report.rows == report.kept + sum(report.dropped.values())
    assert report.kept >= 0.98 * usable > 0, report.summary()
    assert linter.report.documents >= report.kept
    assert linter.report.clean == linter.report.documents, linter.report.summary()
