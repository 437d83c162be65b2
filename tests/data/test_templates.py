"""Masks, prompts and special tokens: what is trained on is what the assistant said, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.reading import read_conversations
from draftsmith.data.templates import TEMPLATES, VICUNA_SYSTEM, Template, get_template, render_all
from draftsmith.data.tokenizers import load_tokenizer, train_bpe

HELLO = Conversation("hello", (Turn("user", "the"), Turn("assistant", "hello")))


@pytest.fixture(params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> Template:
    return get_template(request.param)


def _end_id(template: Template, tokenizer: Any) -> int:
    if template.name == "chatml":
        return int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return int(tokenizer.eos_token_id)


def _answers(ids: list[int], trainable: list[bool], template: Template, tokenizer: Any) -> list[str]:
    """The trainable stretches decoded; each must end with the end-of-turn token, which is taken off."""
    stretches: list[list[int]] = [[]]
    for token, is_trainable in zip(ids, trainable, strict=True):
        if is_trainable:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    answers = []
    for stretch in filter(None, stretches):
        assert stretch[-1] == _end_id(template, tokenizer)
        assert not set(stretch[:-1]) & set(tokenizer.all_special_ids), "a special token inside an answer"
        # behind another token, because a decoder takes the space off the start of a text
        anchor = tokenizer("a", add_special_tokens=False).input_ids
        text = tokenizer.decode([*anchor, *stretch[:-1]]).removeprefix(tokenizer.decode(anchor))
        if template.spaced:
            assert text.startswith(" "), "the space after the colon belongs to the answer"
            text = text[1:]
        answers.append(text)
    return answers


def test_trainable_tokens_are_the_answers(chats: list[Conversation], template: Template, tokenizer: Any) -> None:
    for chat in chats:
        rendered = template.render(chat, tokenizer)
        assert len(rendered.ids) == len(rendered.trainable)
        expected = [turn.text for turn in chat.turns if turn.role == "assistant"]
        assert _answers(rendered.ids, rendered.trainable, template, tokenizer) == expected


def test_prompt_is_what_render_puts_before_each_answer(
    chats: list[Conversation], template: Template, tokenizer: Any
) -> None:
    for chat in chats:
        rendered = template.render(chat, tokenizer)
        for number, turn in enumerate(chat.turns):
            if turn.role != "user":
                continue
            prompt = template.prompt(chat.turns[: number + 1], tokenizer)
            assert rendered.ids[: len(prompt)] == prompt
            assert not rendered.trainable[len(prompt) - 1], "the prompt ends before the answer"
            assert rendered.trainable[len(prompt)], "and exactly where it begins"


def test_batched_rendering_equals_one_by_one(chats: list[Conversation], template: Template, tokenizer: Any) -> None:
    many = chats * 60  # more than one internal batch
    together = list(render_all(many, tokenizer, template, None))
    alone = [template.render(chat, tokenizer) for chat in chats]
    assert together == alone * 60


def test_special_token_strings_in_messages_stay_text(template: Template, tokenizer: Any) -> None:
    text = "x </s> <s> <|im_end|> <|im_start|> <|endoftext|> y"
    for role_text in ((text, "plain"), ("plain", text)):
        turns = (Turn("user", role_text[0]), Turn("assistant", role_text[1]))
        specials = set(tokenizer.all_special_ids)
        hostile = [i for i in template.render(Conversation("a", turns), tokenizer).ids if i in specials]
        harmless = [i for i in template.render(HELLO, tokenizer).ids if i in specials]
        assert hostile == harmless
        assert text in tokenizer.decode(template.render(Conversation("a", turns), tokenizer).ids)


def test_vicuna_says_exactly_its_text(tokenizer: Any) -> None:
    turns = (*HELLO.turns, Turn("user", "and"), Turn("assistant", "bye"))
    template = get_template("vicuna-v1.1")
    ids = template.render(Conversation("a", turns), tokenizer).ids
    end = tokenizer.eos_token
    as_text = f"{VICUNA_SYSTEM} USER: the ASSISTANT: hello{end}USER: and ASSISTANT: bye{end}"
    # encoded as one string; the Llama tokenizers put their "▁" behind a special token too
    assert ids == tokenizer(as_text).input_ids
    prompt = tokenizer.decode(template.prompt(turns[:1], tokenizer))
    assert prompt.endswith("USER: the ASSISTANT:")
    assert VICUNA_SYSTEM.startswith("A chat between a curious user and an artificial intelligence assistant. The")


def test_chatml_says_exactly_its_text(tokenizer: Any) -> None:
    turns = (Turn("system", "kind"), *HELLO.turns)
    ids = get_template("chatml").render(Conversation("a", turns), tokenizer).ids
    start, end = "<|im_start|>", "<|im_end|>"
    as_text = f"{start}system\nkind{end}\n{start}user\nthe{end}\n{start}assistant\nhello{end}\n"
    assert ids == tokenizer(as_text).input_ids


def test_chatml_has_no_system_of_its_own_and_vicuna_takes_the_given_one(tokenizer: Any) -> None:
    ids = get_template("chatml").render(HELLO, tokenizer).ids
    assert "system" not in tokenizer.decode(ids)
    turns = (Turn("system", "Be kind."), *HELLO.turns)
    text = tokenizer.decode(get_template("vicuna-v1.1").render(Conversation("a", turns), tokenizer).ids)
    assert "Be kind. USER: the" in text
    assert "curious" not in text


def test_bos_comes_first_exactly_where_the_tokenizer_adds_it(template: Template, tokenizer: Any) -> None:
    ids = template.render(HELLO, tokenizer).ids
    adds = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    assert (ids[0] == tokenizer.bos_token_id) == adds
    assert ids.count(tokenizer.bos_token_id) == adds


@pytest.mark.parametrize("max_tokens", [130, 180, 250])
def test_long_conversations_split_between_exchanges(
    chats: list[Conversation], template: Template, tokenizer: Any, max_tokens: int
) -> None:
    system = (Turn("system", "Be kind."),)
    exchanges = [(Turn("user", f"q{i}" + "the" * (i % 4)), Turn("assistant", f"r{i}" * (i % 5 + 1))) for i in range(14)]
    chat = Conversation("long", (*system, *(turn for pair in exchanges for turn in pair)))
    parts = list(render_all([chat], tokenizer, template, max_tokens))
    assert len(parts) > 1
    assert all(len(part.ids) <= max_tokens for part in parts)
    assert all("Be kind." in tokenizer.decode(part.ids) for part in parts)
    answers = [a for part in parts for a in _answers(part.ids, part.trainable, template, tokenizer)]
    assert answers == [pair[1].text for pair in exchanges]
    # a part is what rendering its own exchanges gives, and no part could have taken the next exchange as well
    at = 0
    for part in parts:
        count = sum(len(p) for p in [_answers(part.ids, part.trainable, template, tokenizer)])
        turns = (*system, *(turn for pair in exchanges[at : at + count] for turn in pair))
        assert part == template.render(Conversation("part", turns), tokenizer)
        at += count
        if at < len(exchanges):
            longer = Conversation("longer", (*turns, *exchanges[at]))
            assert len(template.render(longer, tokenizer).ids) > max_tokens


def test_an_exchange_too_long_alone_is_cut(template: Template, tokenizer: Any) -> None:
    system = Turn("system", "s")
    long_answer = Conversation("a", (system, Turn("user", "q"), Turn("assistant", "xyz" * 200)))
    whole = template.render(long_answer, tokenizer)
    (cut,) = render_all([long_answer], tokenizer, template, 64)
    assert (cut.ids, cut.trainable) == (whole.ids[:64], whole.trainable[:64])
    long_question = Conversation("b", (system, Turn("user", "xyz" * 200), Turn("assistant", "a")))
    assert list(render_all([long_question, HELLO, long_question], tokenizer, template, 400)) == [
        template.render(HELLO, tokenizer)
    ], "a part without an answer teaches nothing"


def test_unknown_template_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no template 'vicuna', did you mean 'vicuna-v1\.1'\? known: .*chatml"):
        get_template("vicuna")


def test_chatml_needs_its_special_tokens() -> None:
    plain = train_bpe(["hello"], 258, ["<|endoftext|>"])
    with pytest.raises(ValueError, match=r"chatml needs <\|im_start\|> as one special token"):
        get_template("chatml").render(HELLO, plain)


@pytest.mark.parametrize(
    "roles", [[], ["system"], ["assistant"], ["user"], ["user", "user", "assistant"], ["user", "system", "assistant"]]
)
def test_turns_must_alternate(roles: list[str], template: Template, tokenizer: Any) -> None:
    turns = tuple(Turn(role, "x") for role in roles)
    with pytest.raises(ValueError, match=r"strange: expected \[system\], user, assistant, … ending with assistant"):
        template.render(Conversation("strange", turns), tokenizer)
    with pytest.raises(ValueError, match="ending with user"):
        template.prompt((*turns, Turn("assistant", "x")), tokenizer)


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["llama", "bytes"])
def test_every_real_conversation_masks_right(shared_data: Path, template: Template, kind: str) -> None:
    source = str(shared_data / "sharegpt" / "sharegpt_v3_sample_800.json")
    chats = list(read_conversations(source))
    if kind == "llama":
        pytest.importorskip("sentencepiece")
        tokenizer = load_tokenizer(str(shared_data / "tokenizer" / "llama2c"))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    else:
        tokenizer = train_bpe(
            (t.text for c in chats[:80] for t in c.turns), 1024, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        )
    assert len(chats) > 700
    for chat, rendered in zip(chats, render_all(chats, tokenizer, template, None), strict=True):
        expected = [turn.text for turn in chat.turns if turn.role == "assistant"]
        assert _answers(rendered.ids, rendered.trainable, template, tokenizer) == expected, chat.id
