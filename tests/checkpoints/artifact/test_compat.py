"""Saved models and tokenizers can be read by transformers 5 and earlier versions."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.compat import patch_model, patch_tokenizer, save_tokenizer
from draftsmith.checkpoints.artifact.model_ref import tokenizer_fingerprint
from draftsmith.data.tokenizers import train_bpe
from transformers import AutoConfig, AutoTokenizer, GPTNeoXConfig, LlamaConfig, Phi3Config, PreTrainedTokenizerFast

TEXT = "some <s> words <|user|> of\n  a text"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    trained = train_bpe(["some words of a text"] * 3, 270, ["<pad>", "<s>", "<|user|>", "</s>"])
    trained.chat_template = "{{ messages[0].content }}é"
    return trained


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return config


@pytest.mark.parametrize("model_type", [None, "llama", "t5"])
def test_all_versions_load_the_same_tokenizer(
    model_type: str | None, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """transformers selects the tokenizer class by the `model_type` of a config.json in the folder."""
    tokenizer.save_pretrained(tmp_path / "5")
    save_tokenizer(tokenizer, tmp_path / "both")
    plain, config = config_of(tmp_path / "5"), config_of(tmp_path / "both")
    assert plain["tokenizer_class"] == "TokenizersBackend", "transformers no longer needs this patch"
    assert isinstance(plain["extra_special_tokens"], list)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 knows no other class name"
    assert "extra_special_tokens" not in config, "transformers 4 does not accept a list"
    assert config["additional_special_tokens"] == ["<s>", "<|user|>"]
    assert config["chat_template"] == tokenizer.chat_template
    for folder in ("5", "both"):
        if model_type is not None:
            (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    saved, patched = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("5", "both"))
    assert type(saved) is type(patched)
    assert saved.special_tokens_map == patched.special_tokens_map
    assert saved.all_special_tokens == patched.all_special_tokens
    assert saved.chat_template == patched.chat_template == tokenizer.chat_template
    assert tokenizer_fingerprint(saved) == tokenizer_fingerprint(patched)
    assert saved(TEXT) == patched(TEXT)
    ids = patched(TEXT).input_ids
    assert saved.decode(ids, skip_special_tokens=True) == patched.decode(ids, skip_special_tokens=True)


def test_a_template_file_takes_precedence(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another")
    patch_tokenizer(tmp_path)
    assert config_of(tmp_path)["chat_template"] == "another" == AutoTokenizer.from_pretrained(tmp_path).chat_template


PLAIN = {"rope_type": "default", "rope_theta": 5e5}
SCALED = {"rope_type": "linear", "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        (LlamaConfig(rope_parameters=dict(PLAIN)), {"rope_theta": 5e5}),
        (LlamaConfig(rope_parameters=PLAIN | SCALED), {"rope_theta": 5e5, "rope_scaling": SCALED}),
        (GPTNeoXConfig(rope_parameters=dict(PARTIAL)), {"rotary_emb_base": 2e4, "rotary_pct": 0.5}),
        (Phi3Config(rope_parameters=dict(PARTIAL)), {"rope_theta": 2e4, "partial_rotary_factor": 0.5}),
    ],
    ids=["llama", "scaled", "gpt-neox", "phi-3"],
)
def test_rotary_settings_are_readable_by_transformers_4(config: Any, added: dict[str, Any], tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    plain = AutoConfig.from_pretrained(tmp_path)
    assert not set(added) & set(before), "transformers no longer needs this patch"
    patch_model(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == before | added
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == plain.rope_parameters == config.rope_parameters
