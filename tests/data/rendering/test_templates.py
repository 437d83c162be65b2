"""Masks, prompts and special tokens: only the assistant's text is supervised."""

from collections.abc import Sequence
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.render import Rendered, Renderer, RenderReport, prompt_renderer, render
from draftsmith.data.rendering.templates import TEMPLATES, VICUNA_SYSTEM, Template, get_template
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

HELLO = Conversation("hello", (Turn("user", "the"), Turn("assistant", "hello")))


@pytest.fixture(params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> Template:
    return get_template(request.param)


def _trained(rendered: Rendered, tokenizer: Any) -> list[str]:
    """Return the decoded supervised spans with special tokens."""
    texts = []
    # decode after another token, since decoders strip the space at the start of a text
    anchor = tokenizer("a", add_special_tokens=False).input_ids
    for start, end in rendered.spans:
        stretch = rendered.ids[start:end].tolist()
        assert not set(stretch[:-1]) & set(tokenizer.all_special_ids), "an answer contains a special token"
        texts.append(tokenizer.decode([*anchor, *stretch]).removeprefix(tokenizer.decode(anchor)))
    return texts


def _plain(document: Rendered) -> tuple[list[int], list[tuple[int, int]], bool]:
    return document.ids.tolist(), document.spans, document.question_cut or document.answer_cut


def _expected(turns: Sequence[Turn], template: Template, tokenizer: Any) -> list[str]:
    """Return the expected supervised text: answers with their separating space and end of turn.

    Some tokenizers add a space after a special token; compare with `_spaceless`.
    """
    space = " " if template.middle.endswith(" ") else ""
    answers = [turn.text.strip() if template.strips[1] else turn.text for turn in turns if turn.role == "assistant"]
    return [space + answer + template.end.replace("{eos}", tokenizer.eos_token) for answer in answers]


def _spaceless(texts: list[str], template: Template) -> list[str]:
    return [text.lstrip(" ") for text in texts] if template.middle.endswith("{eos}") else texts


def test_trainable_tokens_are_the_answers(chats: list[Conversation], template: Template, tokenizer: Any) -> None:
    for chat in chats:
        rendered = render(chat, template, tokenizer)
        trained, expected = _trained(rendered, tokenizer), _expected(chat.turns, template, tokenizer)
        assert _spaceless(trained, template) == _spaceless(expected, template)
        assert rendered.trainable().sum() == sum(end - start for start, end in rendered.spans)


def test_prompts_equal_the_rendered_prefixes(chats: list[Conversation], template: Template, tokenizer: Any) -> None:
    for chat in chats:
        rendered = render(chat, template, tokenizer)
        for number, turn in enumerate(chat.turns):
            if turn.role != "user":
                continue
            prompt = prompt_renderer(template, tokenizer)(chat.turns[: number + 1])
            assert rendered.ids[: len(prompt)].tolist() == prompt
            starts = [start for start, _ in rendered.spans]
            assert len(prompt) == starts[number // 2 if chat.turns[0].role == "user" else (number - 1) // 2]


def test_batched_rendering_equals_one_by_one(chats: list[Conversation], template: Template, tokenizer: Any) -> None:
    many = chats * 60  # more than one batch inside the renderer
    batched = [_plain(document) for document in Renderer(template, tokenizer, None)(many)]
    separate = [_plain(render(chat, template, tokenizer)) for chat in chats]
    assert batched == separate * 60


def test_special_token_strings_in_messages_stay_text(template: Template, tokenizer: Any) -> None:
    text = "x </s> <s> <|im_end|> <|im_start|> <|endoftext|> y"
    for role_text in ((text, "plain"), ("plain", text)):
        turns = (Turn("user", role_text[0]), Turn("assistant", role_text[1]))
        specials = set(tokenizer.all_special_ids)
        hostile = [i for i in render(Conversation("a", turns), template, tokenizer).ids if i in specials]
        harmless = [i for i in render(HELLO, template, tokenizer).ids if i in specials]
        assert hostile == harmless
        assert text in tokenizer.decode(render(Conversation("a", turns), template, tokenizer).ids)


def test_vicuna_renders_its_published_text(tokenizer: Any) -> None:
    turns = (*HELLO.turns, Turn("user", "and"), Turn("assistant", "bye"))
    template = get_template("vicuna-v1.1")
    ids = render(Conversation("a", turns), template, tokenizer).ids
    end = tokenizer.eos_token
    as_text = f"{VICUNA_SYSTEM} USER: the ASSISTANT: hello{end}USER: and ASSISTANT: bye{end}"
    # encoded as one string; the Llama tokenizers add "▁" after a special token too
    assert ids.tolist() == tokenizer(as_text).input_ids
    prompt = tokenizer.decode(prompt_renderer(template, tokenizer)(turns[:1]))
    assert prompt.endswith("USER: the ASSISTANT:")
    assert VICUNA_SYSTEM.startswith("A chat between a curious user and an artificial intelligence assistant. The")


@pytest.mark.parametrize("share", [0.4, 0.99])
def test_long_conversations_split_between_exchanges(
    chats: list[Conversation], template: Template, tokenizer: Any, share: float
) -> None:
    system = (Turn("system", "Be kind."),)
    exchanges = [(Turn("user", f"q{i}" + "the" * (i % 4)), Turn("assistant", f"r{i}" * (i % 5 + 1))) for i in range(14)]
    chat = Conversation("long", (*system, *(turn for pair in exchanges for turn in pair)))
    max_tokens = int(share * len(render(chat, template, tokenizer).ids))
    report = RenderReport()
    parts = list(Renderer(template, tokenizer, max_tokens)([chat], report))
    assert len(parts) > 1
    assert all(len(part.ids) <= max_tokens for part in parts)
    assert all("Be kind." in tokenizer.decode(part.ids) for part in parts)
    answers = [answer for part in parts for answer in _trained(part, tokenizer)]
    assert _spaceless(answers, template) == _spaceless(_expected(chat.turns, template, tokenizer), template)
    assert report == RenderReport(1, 1, 0, len(parts), 1, 14)
    # each part equals its separately rendered exchanges, and has no room for the next exchange
    at = 0
    for part in parts:
        count = len(part.spans)
        turns = (*system, *(turn for pair in exchanges[at : at + count] for turn in pair))
        assert _plain(part) == _plain(render(Conversation("part", turns), template, tokenizer))
        at += count
        if at < len(exchanges):
            longer = Conversation("longer", (*turns, *exchanges[at]))
            assert len(render(longer, template, tokenizer).ids) > max_tokens


@pytest.mark.parametrize("with_system", [False, True])
def test_a_long_question_and_answer_share_the_block(template: Template, tokenizer: Any, with_system: bool) -> None:
    system = (Turn("system", "s"),) if with_system else ()
    limit = len(render(Conversation("short", (*system, *HELLO.turns)), template, tokenizer).ids) + 60
    long = "".join(f"{i} " for i in range(200))
    opening = prompt_renderer(template, tokenizer)((*system, Turn("user", "")))
    report = RenderReport()
    chat = Conversation("a", (*system, Turn("user", long), Turn("assistant", long)))
    (document,) = Renderer(template, tokenizer, limit)([chat], report)
    assert limit - 1 <= len(document.ids) <= limit
    assert min(document.question_cut, document.answer_cut) > 0
    whole = render(chat, template, tokenizer)
    lost = whole.spans[0][1] - len(document.ids)  # tokens after the end of turn are not counted
    assert report.question_tokens_cut + report.answer_tokens_cut == document.question_cut + document.answer_cut == lost
    assert (report.questions_cut, report.answers_cut) == (1, 1)
    ((start, end),) = document.spans
    assert "198 199" in tokenizer.decode(document.ids[:start])
    assert long.startswith(tokenizer.decode(document.ids[start:end]).strip())
    assert abs(start - len(opening) - (limit - start)) < 25, "question and answer should have similar lengths"
    begin = template.start if not with_system or template.system is None else "s".join(template.system)
    begin = begin.replace("{bos}", tokenizer.bos_token).strip(" ")
    text = tokenizer.decode(document.ids).replace(" ", "")  # decoders put spaces around special tokens
    assert begin.replace(" ", "") in text, "the text of the template was cut"


def test_a_system_text_as_long_as_a_block_leaves_no_room(template: Template, tokenizer: Any) -> None:
    chat = Conversation("a", (Turn("system", "xyz" * 400), *HELLO.turns))
    report = RenderReport()
    documents = list(Renderer(template, tokenizer, 500)([chat, HELLO], report))
    assert [_plain(document) for document in documents] == [_plain(render(HELLO, template, tokenizer))]
    assert report == RenderReport(2, 1, 1, 1, 0, 2, no_room=1)


def test_a_document_of_exactly_the_limit_is_not_cut(template: Template, tokenizer: Any) -> None:
    chat = Conversation("a", (Turn("user", "the hello"), Turn("assistant", "the answer is hello, and then some more")))
    whole = render(chat, template, tokenizer)
    (same,) = Renderer(template, tokenizer, len(whole.ids))([chat])
    assert _plain(same) == _plain(whole)
    (end,) = [end for _, end in whole.spans]
    (whole_answer,) = Renderer(template, tokenizer, end)([chat])
    assert _plain(whole_answer) == (whole.ids[:end].tolist(), whole.spans, False), "text after the end can be dropped"
    (shorter,) = Renderer(template, tokenizer, end - 1)([chat])
    assert shorter.question_cut or shorter.answer_cut
    assert len(shorter.ids) == end - 1


def test_t5_tokenises_each_text_separately() -> None:
    words = ["translate", "English", "to", "German:", "the", "house", "is", "small", "das", "Haus", "ist", "klein"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), *((f"▁{word}", -2.0) for word in words)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    template = get_template("t5")
    task = Turn("system", "translate English to German:")
    turns = (task, Turn("user", "the house is small"), Turn("assistant", "das Haus ist klein"))
    source = tokenizer("translate English to German: the house is small").input_ids
    assert source[-1] == tokenizer.eos_token_id
    assert 2 not in source
    assert prompt_renderer(template, tokenizer)(turns[:2]) == source
    ids = render(Conversation("a", turns), template, tokenizer).ids
    assert ids.tolist() == source + tokenizer("das Haus ist klein").input_ids
    more = (*turns, Turn("user", "to the house"))
    assert prompt_renderer(template, tokenizer)(more) == ids.tolist() + tokenizer("to the house").input_ids


def test_last_turn_only_trains_on_the_last_answer(
    chats: list[Conversation], template: Template, tokenizer: Any
) -> None:
    report = RenderReport()
    for chat, last in zip(chats, Renderer(template, tokenizer, None, last_turn_only=True)(chats, report), strict=True):
        whole = render(chat, template, tokenizer)
        assert last.ids.tolist() == whole.ids.tolist()
        assert last.spans == whole.spans[-1:]
    assert report.context_only == report.exchanges - len(chats) > 0
