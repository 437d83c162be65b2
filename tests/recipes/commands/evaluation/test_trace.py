"""Traces as people see them: texts of tokens, marks, pages, and the command line on real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.prompts import load_prompts
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.evaluation.trace import TracedStep
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.recipe import named_rows
from draftsmith.recipes.commands.evaluation.trace import run_trace
from draftsmith.recipes.report.trace import TokenTexts, describe_steps, kept_text, step_line
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


def test_steps_are_described_as_they_were() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdxy"}
    steps = [
        TracedStep((ids["a"], ids["b"]), (0, 1), (ids["x"], ids["y"]), ids["c"], 6),
        TracedStep((), (), (), ids["d"], 0),
        TracedStep((ids["a"],), (0,), (), None, 4, (ids["x"], ids["y"], ids["a"])),
    ]
    traced = describe_steps(steps, tokenizer, [])
    assert traced[0]["tokens"] == [
        {"kind": "accepted", "text": "a"},
        {"kind": "accepted", "text": "b", "more": 1},
        {"kind": "rejected", "text": "x", "more": 1},
        {"kind": "corrected", "text": "c"},
    ]
    assert traced[1]["tokens"] == [{"kind": "added", "text": "d"}]
    assert kept_text(traced) == "abcda"
    assert traced[2] == {"proposed": 4, "accepted": 1, "cut": 3, "tokens": [
        {"kind": "accepted", "text": "a"}, {"kind": "cut", "text": "x", "more": 2}
    ]}  # fmt: skip
    assert step_line(3, "d", traced[2], marks=True).plain == "   3  1/4  d»a(x)+2"
    assert step_line(1, "", traced[0], marks=True).plain == "   1  2/6  »ab+1[-x-]+1{+c+}"
    assert step_line(12, "abc", traced[1], marks=True).plain == "  12  0/0  abc»{d}"
    assert step_line(12, "abc", traced[1], marks=False).plain == "  12  0/0  abcd"


@pytest.fixture
def recipe(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Two chains and a tree."""
    methods: list[dict[str, Any]] = [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 2}}]
    methods.append({"method": "autoregressive", "temperature": 1.0})
    methods.append({"method": "multi-candidate", "temperature": 1.0, "label": "tree", "options": {"k_config": "3x2"}})
    return evaluation | {"max_new_tokens": 20, "seed": 4, "methods": methods}


def test_the_command_shows_and_keeps_what_was_decoded(recipe: dict[str, Any], tmp_path: Path, cli: Any) -> None:
    small = {"limit": 1, "compare_with_transformers": False, "energy": "off", "again": 0}
    out = tmp_path / "runs" / "results.json"
    run_evaluate(EvaluateRecipe.model_validate(recipe | small | {"out": str(out)}))
    tokenizer = load_tokenizer(str(tmp_path / "target"))
    target = wrap_model(load_model(str(tmp_path / "target"), device="cpu"))
    parts = Parts(wrap_model(load_model(str(tmp_path / "drafter"), device="cpu")))
    prompts = load_prompts(recipe["prompts"], "chatml", tokenizer, 2, 1024)
    for label, row, width in (("tree", recipe["methods"][3], 9), ("speculative", recipe["methods"][1], 2)):
        run_trace(out, label, limit=2)
        kept = json.loads((tmp_path / "runs" / "trace.json").read_text())
        assert kept["row"]["label"] == label
        for place, ((prompt, ids), shown) in enumerate(zip(prompts, kept["prompts"], strict=True)):
            assert shown["prompt"] == prompt.turns[-1].text
            sampling = Sampling(row.get("temperature", 0.0))
            method = build_method(row["method"], parts, sampling, **row["options"])
            limits = Limits(20, (tokenizer.eos_token_id,))
            wanted = decode(target, method, sampling, 4 + place, ids, limits)
            whole, before = tokenizer.decode([*ids[-8:], *wanted.ids]), tokenizer.decode(ids[-8:])
            assert kept_text(shown["steps"]) == whole[len(before) :]
            assert len(shown["steps"]) == wanted.tally.steps
            assert sum(step["proposed"] for step in shown["steps"]) == width * len(shown["steps"])
    done = cli("report", str(out), "--trace", "speculative", "--prompt", "keeps the [red]tree?", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "{+" in done.stdout
    assert "speculative: keeps the [red]tree?" in done.stdout


def test_rows_by_name(recipe: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'speculative'"):
        named_rows(EvaluateRecipe(**recipe), ["speculatve"])
    (row,) = named_rows(EvaluateRecipe(**recipe), ["spectr"])
    assert (row.method, row.options, row.temperature) == ("spectr", {}, None)
