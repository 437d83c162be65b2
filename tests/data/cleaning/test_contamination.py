"""Evaluation texts in a training text: runs of words, whole short texts, and what is neither."""

from __future__ import annotations

import pytest
from draftsmith.data.cleaning.cleaner import EvaluationTexts
from hypothesis import given, settings
from hypothesis import strategies as st

LONG = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences."
SHORT = "Who wrote the Iliad?"


@pytest.mark.parametrize(
    ("question", "found"),
    [
        (LONG, True),
        ("please: " + LONG.upper().replace(" ", "\n\n") + " thanks", True),
        ("x " + " ".join(LONG.split()[2:15]) + " y", True),
        ("x " + " ".join(LONG.split()[3:15]) + " y", False),
        ("Tell me who WROTE the Iliad, quickly", True),
        ("who wrote the new Iliad", False),
        ("flashlight!", True),
        ("my flashlight is broken", False),
        ("我想知道，今天天气怎么样？谢谢", True),
        ("今天的天气", False),
        ("", False),
        ("?!", False),
    ],
)
def test_contamination_is_a_run_of_words_or_a_whole_text(question: str, found: bool) -> None:
    index = EvaluationTexts([LONG, SHORT, "Flashlight", "今天天气怎么样", "", "..."], 13)
    assert index.found_in(question) is found


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=9), max_size=4),
    st.lists(st.sampled_from("abc"), max_size=14),
    st.integers(4, 6),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_index_finds_what_a_plain_search_finds(texts: list[list[str]], words: list[str], run: int) -> None:
    def inside(part: list[str]) -> bool:
        return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))

    expected = any(
        words == text
        if 0 < len(text) < 4
        else any(inside(text[i : i + run]) for i in range(max(1, len(text) - run + 1)))
        for text in texts
        if text
    )
    assert EvaluationTexts(map(" ".join, texts), run).found_in(" ".join(words)) is expected
