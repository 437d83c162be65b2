"""Chat templates of tokenizers: rendered token ids equal those of serving."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, CorpusReport, Turn
from draftsmith.data.rendering.lint import ANSWER_DIFFERS, TEMPLATE_DIFFERS, Linter
from draftsmith.data.rendering.render import Renderer, RenderReport, prompt_renderer, render
from draftsmith.data.rendering.templates import CHATML_JINJA, get_template
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

SPECIALS = ("<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<turn>", "</turn>", "</s>")
# typical templates: a default system text; a header with blank lines and stripped messages; no system role and a
# different name of the assistant; the system text inside the first instruction
TEMPLATES = {
    "default-system": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "header": (
        "<s>{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n"
        "{{ m['content'] | trim }}</turn>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
    ),
    "no-system": (
        "<s>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "inside": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set s = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set s = '' %}{% endif %}"
        "{% for m in rest %}{% if m['role'] == 'user' %}"
        "<s>[INST] {% if loop.first and s %}<<SYS>>\n{{ s }}\n<</SYS>>\n\n{% endif %}{{ m['content'] | trim }} [/INST]"
        "{% else %} {{ m['content'] | trim }} </s>{% endif %}{% endfor %}"
    ),
}


def _tokenizer(chat_template: str | None) -> Any:
    texts = ["system user assistant model You help the hello\n\n INST SYS answer question " * 5]
    tokenizer = train_bpe(texts, 300, SPECIALS)
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(["<|eot|>"])  # some fine-tuned models have such a token, which is not special
    return tokenizer


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return _tokenizer(TEMPLATES[request.param])


def _served(tokenizer: Any, turns: tuple[Turn, ...], prompt: bool) -> list[int]:
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


WORDS = st.lists(st.sampled_from(["the", "hello", "question", "¿qué?", "😀", "x\n\ny"]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(WORDS.map(" ".join), min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_ids_equal_those_of_serving(tokenizer: Any, texts: list[str]) -> None:
    turns = tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    template = get_template("tokenizer", tokenizer)
    rendered = render(Conversation("c", turns), template, tokenizer)
    # this tokenizer merges "\n\n" with the text after it: generated tokens differ from the encoded conversation, and
    # only the first prompt can be compared
    generated = not template.middle.endswith("\n\n")
    if generated:
        assert rendered.ids.tolist() == _served(tokenizer, turns, prompt=False)
    assert tokenizer.decode(rendered.ids) == tokenizer.decode(_served(tokenizer, turns, prompt=False))
    for number in range(0, len(turns), 2):
        prompt = prompt_renderer(template, tokenizer)(turns[: number + 1])
        assert prompt == _served(tokenizer, turns[: number + 1], prompt=True)
        start, end = rendered.spans[number // 2]
        assert start == len(prompt) or not (generated or number == 0)
        space = " " if template.middle.endswith(" ") else ""
        assert tokenizer.decode(rendered.ids[start:end]) == space + turns[number + 1].text + template.end


def test_system_prompts_follow_the_template(tokenizer: Any) -> None:
    turns: tuple[Turn, ...] = (Turn("system", "the system"), Turn("user", "hello"))
    template = get_template("tokenizer", tokenizer)
    ids = prompt_renderer(template, tokenizer)(turns)
    if template.system is None:
        turns = (Turn("user", "the system\n\nhello"),)
    assert ids == _served(tokenizer, turns, prompt=True)


def test_white_space_is_stripped_as_by_the_template(tokenizer: Any) -> None:
    turns = (Turn("user", "  hello\n"), Turn("assistant", "\n the answer  "))
    template = get_template("tokenizer", tokenizer)
    text = tokenizer.decode(render(Conversation("c", turns), template, tokenizer).ids)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% for %}", "Expected an expression"),
        ("{{ 'x' * 3000000000 }}", "more than 2 GiB"),
    ],
)
def test_a_template_that_fails_is_refused(template: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        get_template("tokenizer", _tokenizer(template))


def test_the_quickstarts_chat_template_is_chatml(chats: list[Conversation]) -> None:
    tokenizer = _tokenizer(CHATML_JINJA)
    own = get_template("tokenizer", tokenizer)
    for chat in (chat for chat in chats if not any("<" in turn.text for turn in chat.turns)):
        one, other = (render(chat, template, tokenizer) for template in (own, get_template("chatml")))
        assert one.ids.tolist() == other.ids.tolist()
        assert one.spans == other.spans


FOR = "{% for m in messages %}"
LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# templates that constant texts cannot reproduce, like those of the named families; with the number of documents and
# the beginning and ending of answers
REWRITING = {
    "thoughts of the last answer (Qwen3)": (
        LAST + FOR + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
        + ASKED, 2, "", "<|im_end|>"),
    "a thought begins in the prompt (DeepSeek-R1)": (
        FOR + "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        + ASKED.replace("\n{% endif", "\n<think>\n{% endif"), 1, "", "<|im_end|>"),
    "the end of the sequence (Phi-3)": (
        FOR + "<turn>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<turn>assistant\n{% else %}{{ eos_token }}{% endif %}", 1, "", "<|im_end|>"),
    "a line break before the answer (Zephyr)": (
        FOR + "<turn>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant"
        "{% endif %}", 1, "\n", "</s>"),
    "another end in the history (gpt-oss)": (
        FOR + "<turn>{{ m.role }}<|im_start|>{{ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant{% endif %}", 2, "", "</s>"),
    "the system text in the last question (Mistral v0.3)": (
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}" + FOR + "{% if m.role == 'user' %}"
        "<turn>{% if loop.last and s %}{{ s }}\n\n{% endif %}{{ m.content }}</turn>{% elif m.role == 'assistant' %}"
        " {{ m.content }}</s>{% endif %}{% endfor %}", 1, " ", "</s>"),
    "an end token that is not special, and a system text that is required": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        + FOR + "<turn>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
        + ASKED.replace("<|im_start|>", "<turn>"), 1, "", "<|eot|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITING)
def test_complex_templates_are_rendered_answer_by_answer(name: str) -> None:
    chat_template, documents, begins, ends = REWRITING[name]
    tokenizer = _tokenizer(chat_template)
    template, linter = get_template("tokenizer", tokenizer), Linter(tokenizer, get_template("tokenizer", tokenizer))
    assert template.jinja
    turns = tuple(Turn(*each) for each in (("system", "Be kind."), ("user", "hello"), ("assistant", "the answer"),
                                           ("user", "then?"), ("assistant", "¿qué? 😀")))  # fmt: skip
    report = RenderReport()
    rendered = list(Renderer(template, tokenizer, 200)([Conversation("c", turns)], report))
    assert len(rendered) == report.documents == documents
    assert report.exchanges == 2 == sum(len(document.spans) for document in rendered)
    answers = []
    for document in rendered:
        assert document.ids.tolist() == _served(tokenizer, turns[: 3 + 2 * document.last], prompt=False)
        assert linter.check(document) is None
        answers += [tokenizer.decode(document.ids[start:end]) for start, end in document.spans]
    assert answers == [f"{begins}the answer{ends}", f"{begins}¿qué? 😀{ends}"]
    for number in (2, 4):
        assert prompt_renderer(template, tokenizer)(turns[:number]) == _served(tokenizer, turns[:number], prompt=True)
    thinking = Conversation("d", (*turns[:2], Turn("assistant", "<think>why</think>ok")))
    assert [linter.check(each) for each in Renderer(template, tokenizer, 200)([thinking], report)] == [None]
    assert linter.report.dropped_thoughts == ("thought" in name)
    damaged = replace(rendered[0], ids=rendered[0].ids[::-1].copy())
    assert linter.check(damaged) == TEMPLATE_DIFFERS
    shifted = replace(rendered[0], spans=[(start - 4, end - 4) for start, end in rendered[0].spans])
    assert linter.check(shifted) == ANSWER_DIFFERS
    (short,) = list(Renderer(template, tokenizer, len(rendered[0].ids) - 3)([Conversation("c", turns[:3])], report))
    assert (len(short.ids), short.answer_cut, short.spans[-1][1]) == (
        len(rendered[0].ids) - 3,
        3,
        len(short.ids),
    ) or documents == 1


def test_a_template_that_changes_messages_serves_prompts() -> None:
    tokenizer = _tokenizer(FOR + "<turn>{{ m.content | upper }}</turn>{% endfor %}")
    turns = (Turn("user", "hello"),)
    prompt = prompt_renderer(get_template("tokenizer", tokenizer), tokenizer)(turns)
    assert prompt == _served(tokenizer, turns, prompt=True)


def test_template_variables_are_passed_and_the_date_is_fixed() -> None:
    tokenizer = _tokenizer(
        FOR + "{{ m.content }}</s>{% endfor %}{{ strftime_now('%d %B %Y') }}{% if think %}!{% endif %}"
    )
    for options, text in (({}, "26 July 2024"), ({"date": "2026-01-02", "think": True}, "02 January 2026!")):
        ids = prompt_renderer(get_template("tokenizer", tokenizer, options), tokenizer)((Turn("user", "hello"),))
        assert tokenizer.decode(ids) == f"hello</s>{text}"


# like Qwen 2.5: tools in the system text, calls and results in tags
WITH_TOOLS = (
    "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}"
    "{% if tools %}{{ '\n\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{\"name\": \"' + call.function.name + '\", ' }}"
    "\"arguments\": {{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("sky", "höhe")]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}


CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain on the höhe?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [_call("sky", at={"x": 1}, how="ö\""), _call("höhe")]},
    {"role": "tool", "content": "dry"},
    {"role": "tool", "content": "{\"m\": 3}"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "", "tool_calls": [_call("sky")]},
    {"role": "tool", "content": "wet"},
    {"role": "assistant", "content": "Yes."},
]  # fmt: skip


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1], None])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_tools_calls_and_results_equal_serving(tools: list[Any] | None, system: list[Any], tmp_path: Path) -> None:
    tokenizer = _tokenizer(WITH_TOOLS)
    texts = json.loads(json.dumps(CALLS))  # as in OpenAI's format, arguments are JSON inside JSON
    for call in (call["function"] for message in texts for call in message.get("tool_calls", [])):
        call["arguments"] = json.dumps(call["arguments"])
    for name, written in (("list", tools), ("text", json.dumps(tools))):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"messages": [*system, *texts], "tools": written}))
        (conversation,) = read_conversations(str(file), tools=True)
        template, linter = get_template("tokenizer", tokenizer), Linter(tokenizer, get_template("tokenizer", tokenizer))
        document = render(conversation, template, tokenizer)
        served = tokenizer.apply_chat_template([*system, *CALLS], tools=tools, return_dict=False)
        assert document.ids.tolist() == served
        assert linter.check(document) is None
        answers = [tokenizer.decode(document.ids[start:end]) for start, end in document.spans]
        assert [answer[:11] for answer in answers] == ["I look.\n<to", "No.<|im_end", "<tool_call>", "Yes.<|im_en"]
    report = CorpusReport()
    assert not list(read_conversations(str(file), report=report))
    assert report.dropped == {"unmapped role function_call": 1}


def test_templates_with_other_tool_calls_are_not_trained() -> None:
    turns = (Turn("user", "hello"), Turn("assistant", "the"))
    for chat_template, needle in (
        (TEMPLATES["default-system"], "not support tools"),
        (WITH_TOOLS.replace("tool_call>", "call>"), "<call>"),
    ):  # fmt: skip
        tokenizer = _tokenizer(chat_template)
        with pytest.raises(ValueError, match=f"{needle}.*`tools`"):
            render(Conversation("c", turns, json.dumps(TOOLS)), get_template("tokenizer", tokenizer), tokenizer)
    with pytest.raises(ValueError, match=r"chatml.*template: tokenizer"):
        render(Conversation("c", turns, json.dumps(TOOLS)), get_template("chatml"), tokenizer)
