"""The trained vocabulary is exact, complete and the same every time; loading fails clearly."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["the cat and the hat and the bat", "a man, a plan, a canal", "print(the_cat + the_hat)"] * 3


TOKENIZER = train_bpe(TEXTS, 280, SPECIALS)


def test_exact_size_and_special_ids() -> None:
    assert len(TOKENIZER) == 280
    assert [TOKENIZER.convert_tokens_to_ids(token) for token in SPECIALS] == [0, 1, 2]
    assert (TOKENIZER.pad_token, TOKENIZER.bos_token, TOKENIZER.eos_token) == (SPECIALS[0], SPECIALS[0], SPECIALS[2])
    assert TOKENIZER("<|im_start|>").input_ids == [1]
    assert len(TOKENIZER("the").input_ids) < 3, "merges were learnt"
    assert train_bpe(iter(TEXTS), 280, SPECIALS).get_vocab() == TOKENIZER.get_vocab(), "the same every time"


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_byte_for_byte(text: str) -> None:
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert TOKENIZER.decode(ids) == text


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert sorted(loaded.all_special_tokens) == sorted(SPECIALS)
    assert loaded("the <|im_end|>").input_ids == TOKENIZER("the <|im_end|>").input_ids
    assert loaded.eos_token_id == 2
