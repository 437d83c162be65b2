"""Rendering of traces: texts of tokens, marks, and the command line on real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode.evaluation.trace import TracedStep
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.recipe import named_rows
from draftsmith.recipes.report.trace import TokenTexts, trace_lines
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def byte_level() -> Any:
    """Bytes and a few merges: most characters beyond ASCII take several tokens."""
    return train_bpe(["the tree the token 東京 naïve"] * 3, 275, ("<pad>", "<end>"))


def byte_fallback() -> Any:
    """As LLaMA's: a word begins with ▁, and what the vocabulary lacks is bytes."""
    words = ["<unk>", "▁the", "▁tree", "▁", "s", "東", "\n"]
    pieces = words + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def joined(name: str, tokens: list[int]) -> bool:
    """Whether the texts of tokens join to the text of all."""
    texts = TokenTexts(TOKENIZERS[name])
    whole = "".join(texts.add(token) for token in tokens) + texts.rest()
    return bool(whole == TOKENIZERS[name].decode(tokens, clean_up_tokenization_spaces=False))


@given(
    ids=st.lists(st.integers(0, 274), max_size=24),
    words=st.lists(
        st.sampled_from(["▁the", "▁tree", "▁", "s", "東", "\n"]) | st.characters(codec="utf-8"), max_size=16
    ),
)
@settings(max_examples=150, deadline=None)
def test_the_texts_of_tokens_join_to_the_text_of_all_whatever_the_bytes(ids: list[int], words: list[str]) -> None:
    known = TOKENIZERS["byte-fallback"].get_vocab()
    pieces = [[word] if word in known else [f"<0x{byte:02X}>" for byte in word.encode()] for word in words]
    assert joined("byte-fallback", [known[piece] for word in pieces for piece in word])
    assert joined("byte-level", ids)


@given(text=st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
@settings(max_examples=150, deadline=None)
def test_a_character_of_several_tokens_is_shown_whole(text: str) -> None:
    texts = TokenTexts(TOKENIZERS["byte-level"])
    pieces = [texts.add(token) for token in TOKENIZERS["byte-level"].encode(text, add_special_tokens=False)]
    assert ("".join(pieces), texts.rest()) == (text, "")
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_token_that_is_not_kept_leaves_no_trace() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    the, tree, e9 = (tokenizer.convert_tokens_to_ids(piece) for piece in ("▁the", "▁tree", "<0xE9>"))
    texts = TokenTexts(tokenizer, [the])
    assert texts.would_add(tree) == " tree"  # the space that the first word of a text would lose
    assert texts.would_add(e9) == "\ufffd"
    assert texts.add(the) == " the"


def test_steps_are_shown_with_styles_or_marks() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdxy"}
    steps = [
        TracedStep((ids["a"], ids["b"]), (0, 1), (ids["x"], ids["y"]), ids["c"], 6),
        TracedStep((), (), (), ids["d"], 0),
        TracedStep((ids["a"],), (0,), (), None, 4, (ids["x"], ids["y"], ids["a"])),
    ]
    summary = "5 tokens in 3 steps, 3 of 10 draft tokens kept, 3 accepted but after the end"
    assert [line.plain for line in trace_lines(steps, tokenizer, [], marks=True)] == [
        "   1  2/6  »ab+1[-x-]+1{+c+}", "   2  0/0  abc»{d}", "   3  1/4  abcd»a(x)+2", summary
    ]  # fmt: skip
    assert trace_lines(steps, tokenizer, [], marks=False)[1].plain == "   2  0/0  abcd"


def test_the_command_prints_what_was_decoded(evaluation: dict[str, Any], tmp_path: Path, cli: Any) -> None:
    methods: list[dict[str, Any]] = [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 2}}]
    out = tmp_path / "runs" / "results.json"
    small = {"limit": 1, "compare_with_transformers": False, "energy": "off", "again": 0, "max_new_tokens": 20}
    recipe = EvaluateRecipe.model_validate(evaluation | small | {"out": str(out), "methods": methods})
    run_evaluate(recipe)
    done = cli("report", str(out), "--trace", "speculative", "--prompt", "keeps the [red]tree?", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "{+" in done.stdout
    assert "speculative: keeps the [red]tree?" in done.stdout
    assert " tokens in " in done.stdout
    with pytest.raises(ValueError, match="'speculative'"):
        named_rows(recipe, ["speculatve"])
    (row,) = named_rows(recipe, ["spectr"])
    assert (row.method, row.options, row.temperature) == ("spectr", {}, None)
