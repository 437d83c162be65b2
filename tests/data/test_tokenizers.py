"""Trained vocabularies have the exact size and are reproducible; loading errors are clear."""

from pathlib import Path

import pytest
from draftsmith.checkpoints.storage.names import HEADS_FILE, TABLE_FILE
from draftsmith.checkpoints.verify.model_files import load_config
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, ByT5Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["the cat and the hat and the bat", "a man, a plan, a canal", "print(the_cat + the_hat)"] * 3


TOKENIZER = train_bpe(TEXTS, 280, SPECIALS)


def test_exact_size_and_special_ids() -> None:
    assert len(TOKENIZER) == 280
    assert [TOKENIZER.convert_tokens_to_ids(token) for token in SPECIALS] == [0, 1, 2]
    assert (TOKENIZER.pad_token, TOKENIZER.bos_token, TOKENIZER.eos_token) == (SPECIALS[0], SPECIALS[0], SPECIALS[2])
    assert TOKENIZER("<|im_start|>").input_ids == [1]
    assert len(TOKENIZER("the").input_ids) < 3, "no merges were learned"
    assert train_bpe(iter(TEXTS), 280, SPECIALS).get_vocab() == TOKENIZER.get_vocab(), "training is not deterministic"


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert TOKENIZER.decode(ids) == text


def test_a_tokenizer_survives_a_round_trip(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert sorted(loaded.all_special_tokens) == sorted(SPECIALS)
    assert loaded("the <|im_end|>").input_ids == TOKENIZER("the <|im_end|>").input_ids
    assert loaded.eos_token_id == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "t5", "gpt2", "pegasus"])
def test_a_folder_without_a_tokenizer_names_the_files_to_copy(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"the folder has no tokenizer: copy tokenizer\.json and tokenizer_config\.json"
    ):
        load_tokenizer(str(tmp_path))
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")  # needs no vocabulary
    assert len(load_tokenizer(str(tmp_path / "bytes"))) == 384


@pytest.mark.parametrize(("name", "kind"), [(HEADS_FILE, "heads"), (TABLE_FILE, "a table")])
def test_an_artifact_in_place_of_a_model_is_named(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    for load in (load_tokenizer, load_config):
        with pytest.raises(ValueError, match=f"it contains {kind}"):
            load(str(tmp_path))
