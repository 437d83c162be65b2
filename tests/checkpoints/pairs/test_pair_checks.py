"""Rarer differences of a pair, planted one at a time: each has its finding, and the verdicts that follow from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.repair import plan_repairs, repair
from draftsmith.checkpoints.pairs.sides import Diagnosis, open_side
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

VOCAB = 280
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def pair(make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> tuple[Path, Path]:
    model = make_llama(VOCAB, **SIZES, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(tmp_path / "target")
    train_bpe(["a little text of words to merge, and more"], VOCAB, ("<s>", "</s>")).save_pretrained(
        tmp_path / "target"
    )
    return tmp_path / "target", Path(shutil.copytree(tmp_path / "target", tmp_path / "drafter"))


def look(pair: tuple[Path, Path]) -> Diagnosis:
    return examine(*(open_side(str(folder), load_tokenizer) for folder in pair))


def found(pair: tuple[Path, Path]) -> dict[str, str]:
    return {finding.check: finding.severity for finding in look(pair).findings}


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def left(pair: tuple[Path, Path], out: Path) -> list[str]:
    sides = [open_side(str(folder), load_tokenizer) for folder in pair]
    return repair(*sides, examine(*sides).findings, out, "").left


def test_an_encoder_decoder_for_a_decoder(pair: tuple[Path, Path]) -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
        eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(pair[1])
    assert found(pair)["kind of model"] == "fault"
    assert {verdict.outcome for verdict in look(pair).verdicts.values()} == {"refused"}


def test_one_adds_bos_and_the_other_does_not(pair: tuple[Path, Path]) -> None:
    own = load_tokenizer(str(pair[1]))
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own.save_pretrained(pair[1])
    assert found(pair) == {"bos and eos around a text": "fault"}
    finding = look(pair).findings[0]
    assert (finding.target, finding.drafter) == ("adds nothing", "adds bos")
    assert [name for name, verdict in look(pair).verdicts.items() if verdict.outcome == "refused"] == ["llama.cpp"]


def test_a_bos_that_is_added_must_be_the_same_for_llama_cpp(pair: tuple[Path, Path]) -> None:
    for folder, bos in zip(pair, ("<s>", "</s>"), strict=True):
        own = load_tokenizer(str(folder))
        own.bos_token = bos
        ids = [(bos, own.convert_tokens_to_ids(bos))]
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
        own.save_pretrained(folder)
    assert found(pair) == {"special ids": "fault"}
    assert "bos that is added" in look(pair).verdicts["llama.cpp"].reasons[0]


def test_types_of_vocabularies(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["byte_fallback"] = True
    path.write_text(json.dumps(state))
    assert found(pair) == {"vocabulary type": "fault", "tokenizer settings": "note"}
    assert look(pair).verdicts["llama.cpp"].reasons == ("its vocabulary types differ, BPE and SPM",)


def test_notes_hinder_nobody(pair: tuple[Path, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(pair[1]).to(torch.bfloat16).save_pretrained(pair[1])
    change(pair[1] / "generation_config.json", pad_token_id=1)
    own = load_tokenizer(str(pair[1]))
    own.chat_template = "{{ messages }}"
    own.add_tokens(["beyond"])
    own.save_pretrained(pair[1])
    assert found(pair) == {
        "dtype": "note", "special ids": "note", "chat template": "note", "tokens without a row": "note",
        "missing tokens": "fault",
    }  # fmt: skip
    assert any("'beyond'" in line for line in left(pair, tmp_path / "out"))


def test_quantised_weights_stay_as_they_are(pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[1] / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    state = json.loads((pair[1] / "tokenizer.json").read_text())
    order = {100: 101, 101: 100}
    state["model"]["vocab"] = {text: order.get(number, number) for text, number in state["model"]["vocab"].items()}
    (pair[1] / "tokenizer.json").write_text(json.dumps(state))
    assert found(pair) == {"quantisation": "note", "token texts": "fault"}
    assert any("quantised" in line for line in left(pair, tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (pair[1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_sliding_window_is_a_limit_of_this_engine_alone(pair: tuple[Path, Path], kind: str) -> None:
    change(pair[1] / "config.json", model_type=kind, architectures=None, head_dim=8, sliding_window=64)
    assert found(pair)["context length"] == "weakness"
    (finding,) = (one for one in look(pair).findings if one.check == "context length")
    assert finding.drafter == "256 positions, a sliding window of 64"
    reasons = {name: effect.reason for name, effect in finding.effects.items()}
    assert reasons == {"draftsmith": "texts of more than 64 tokens, drafts included, are refused"}
    sides = [open_side(str(folder), load_tokenizer) for folder in pair]  # whose weights are another model's
    assert any("sliding window of 64" in line for line in plan_repairs(*sides, look(pair).findings).left)
    for folder, window in zip(pair, (32, 64), strict=True):  # the target's is the shorter one
        change(folder / "config.json", model_type=kind, architectures=None, head_dim=8, sliding_window=window)
    assert "context length" not in found(pair)


def test_fewer_positions_than_the_window(pair: tuple[Path, Path]) -> None:
    change(
        pair[1] / "config.json", model_type="mistral", architectures=None, sliding_window=64,
        max_position_embeddings=128,
    )  # fmt: skip
    reasons = {name: verdict.reasons[0] for name, verdict in look(pair).verdicts.items()}
    assert "64 tokens" in reasons.pop("draftsmith")
    assert len(reasons) == 4
    assert all("128" in reason for reason in reasons.values())


def test_encoder_decoders_are_for_two_of_them(pair: tuple[Path, Path]) -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
        eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    for folder in pair:
        T5ForConditionalGeneration(config).save_pretrained(folder)
    verdicts = look(pair).verdicts
    assert {name for name, verdict in verdicts.items() if verdict.outcome == "works"} == {"transformers", "draftsmith"}
    for name in ("vllm", "sglang", "llama.cpp"):
        assert verdicts[name].reasons == ("it does not draft with encoder-decoders",)


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(10 ** 99) %}{% endfor %}", "{{ 1 / 0 }}", "{{ 'a' * 10 ** 18 }}", "{{ messages.x.y }}",
     "{{ [] | first + 1 }}", "{{ 'a'.join(3) }}", "{{ '{1}'.format(1) }}"],
)  # fmt: skip
def test_a_template_that_cannot_be_rendered_is_said(pair: tuple[Path, Path], template: str) -> None:
    for folder, text in zip(pair, ("{{ messages | length }}", template), strict=True):
        own = load_tokenizer(str(folder))
        own.chat_template = text
        own.save_pretrained(folder)
    (finding,) = (one for one in look(pair).findings if one.check == "chat template")
    assert finding.drafter.startswith('"(cannot be rendered: ')


def test_a_target_without_a_tokenizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for path in pair[0].glob("*token*"):
        path.unlink()
    assert found(pair) == {"tokenizer": "fault"}
    assert any("target has no tokenizer" in line for line in left(pair, tmp_path / "out"))
    (pair[0] / "config.json").write_text("{")
    with pytest.raises(ValueError, match="configuration cannot be read"):
        look(pair)


def test_damaged_weights_are_named(pair: tuple[Path, Path]) -> None:
    (pair[1] / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        look(pair)
    with pytest.raises(ValueError, match="is a file"):
        open_side(str(pair[1] / "config.json"), load_tokenizer)
    change(pair[0] / "config.json", vocab_size=None)
    with pytest.raises(ValueError, match="configuration cannot be read"):
        look(pair)
    (pair[0] / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="'vit', has no vocab_size"):
        look(pair)
