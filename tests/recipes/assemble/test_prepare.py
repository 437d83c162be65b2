"""Data that is prepared: whole conversations are held out, whatever their ids look like, and rows shown in colour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.render import render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import train_bpe
from draftsmith.recipes.assemble.data import colour, is_held_out
from draftsmith.recipes.schema.data import DataSection


def share_of(ids: list[str]) -> float:
    section = DataSection(source="any", heldout_share=0.2)
    return sum(is_held_out(section, Conversation(name, ())) for name in ids) / len(ids)


def test_rows_are_held_out_one_by_one_and_parts_of_one_conversation_together() -> None:
    # 1000 independent rows at 0.2: outside [0.15, 0.25] with a probability under 1e-4.
    assert 0.15 < share_of([f"alpaca_data-{number}" for number in range(1000)]) < 0.25
    assert 0.15 < share_of([f"identity_{number}" for number in range(1000)]) < 0.25
    for whole in ("QWJhYvA", "abcdefg", "0123456"):
        assert share_of([f"{whole}_{part}" for part in range(50)]) in (0.0, 1.0)


def test_what_is_trained_stands_between_marks_and_is_coloured_and_what_is_special_is_dim() -> None:
    tokenizer = train_bpe(["The user asks and the assistant answers."], 280, ("<|im_start|>", "<|im_end|>"))
    turns = [Turn("user", "\x1b[31mred\r\n"), Turn("assistant", "the 你好 " * 200)]
    document = render(Conversation("long", tuple(turns)), get_template("chatml"), tokenizer)
    whole = tokenizer.decode(document.ids).replace("\x1b", "␛").replace("\r", "␍")
    trained = "the 你好 " * 200 + "<|im_end|>"
    marked = whole.replace(trained, f"⟦{trained}⟧")
    text = colour(document, tokenizer)
    assert text.plain == marked != whole
    green = [text.plain[span.start : span.end] for span in text.spans if "green" in span.style]
    assert "".join(green) == f"⟦{trained}⟧"
    dim = [text.plain[span.start : span.end] for span in text.spans if "dim" in span.style]
    assert dim == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>⟧"]
    (start, end), strange = document.spans[0], [-1, 10**6]
    odd = replace(document, ids=np.insert(document.ids, 3, strange), spans=[(start + 2, end + 2)])
    assert colour(odd, tokenizer).plain == marked
