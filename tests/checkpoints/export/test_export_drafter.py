"""Exports of drafters for transformers, vLLM and SGLang: round trips and planted faults."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export import drafter as export_drafter
from draftsmith.checkpoints.export.base import SERVING_FILE
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GenerationConfig,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 48
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


def served(out: Path) -> dict[str, Any]:
    """Run the Python example of SERVING.md and return its variables."""
    code = (out / SERVING_FILE).read_text().partition("```python\n")[2].partition("```")[0]
    values: dict[str, Any] = {}
    exec(code.replace(f'"{out.name}"', repr(str(out))).replace("Question", "w1 w2"), values)
    return values


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None] % VOCAB).logits.float()


def test_an_assistant_keeps_its_settings_and_is_lossless(make_drafter: Make, export: Export, target: Path) -> None:
    artifact = make_drafter()
    out, report = export(artifact, "transformers", speculative_tokens=3)
    drafter = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(drafter), logits(AutoModelForCausalLM.from_pretrained(artifact)))
    settings = GenerationConfig.from_pretrained(out)
    assert settings.num_assistant_tokens == drafter.generation_config.num_assistant_tokens == 3
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0
    assert "all 21 tensors are identical" in report
    assert not (out / "recipe.yaml").exists()
    values = served(out)
    alone = values["target"].generate(**values["inputs"], max_new_tokens=12, do_sample=False)
    assert torch.equal(values["answer"][:, : alone.shape[1]], alone)
    assert export(artifact, "transformers")[0] == out, "an earlier export of the same form is replaced"
    assert GenerationConfig.from_pretrained(out).num_assistant_tokens == 4


def test_an_encoder_decoder_as_assistant(save: Make, export: Export, target: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    (target / "config.json").unlink()
    T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).save_pretrained(target)
    artifact = save(T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).save_pretrained)
    out, _ = export(artifact, "transformers")
    assert AutoModelForSeq2SeqLM.from_pretrained(out).generation_config.num_assistant_tokens == 4
    values = served(out)
    assert isinstance(values["drafter"], T5ForConditionalGeneration)
    alone = values["target"].generate(**values["inputs"], max_new_tokens=128, do_sample=False)
    assert torch.equal(values["answer"], alone)


VICUNA = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1, "bos_token_id": 0, "max_length": 60}
"""The generation_config.json of Vicuna. transformers loads it with a warning and does not save changed copies."""


def vicuna(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(VICUNA))


def test_settings_that_transformers_does_not_save_are_kept(make_drafter: Make, export: Export) -> None:
    out, _ = export(make_drafter(also=vicuna), "transformers", speculative_tokens=3)
    assert json.loads((out / "generation_config.json").read_text()) == VICUNA | export_drafter.speculation(3)
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.top_p == 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged(dtype: torch.dtype, make_adapter: Make, export: Export, tmp_path: Path) -> None:
    artifact = make_adapter(dtype)
    out, report = export(artifact, "transformers")
    assert "with the adapter merged" in report
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == dtype
    assert not (out / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    apart = PeftModel.from_pretrained(base, str(artifact))
    difference = (logits(merged) - logits(apart)).abs().max() / logits(apart).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 1e-1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(merged) - logits(plain)).abs().max() > 0.1


def test_a_wrong_merge_is_detected(
    make_adapter: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = export_drafter.with_adapter

    def forget(folder: Path, load: Callable[[str], Any], *, merged: bool) -> Any:
        return load(export_drafter.base_of(folder)) if merged else good(folder, load, merged=False)

    artifact = make_adapter()
    monkeypatch.setattr(export_drafter, "with_adapter", forget)
    assert "logits" in refused(artifact, "transformers")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("model.safetensors", b"", b"\1"),
        ("tokenizer.json", b'"w3"', b'"ww"'),
        ("tokenizer_config.json", b'"eos_token"', b'"no_token"'),
    ],
)
def test_a_failed_copy_leaves_no_files(
    name: str, old: bytes, new: bytes, make_drafter: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = shutil.copyfile

    def err(source: Path, copy: Path) -> None:
        good(source, copy)
        if copy.name == name:
            data = copy.read_bytes()
            copy.write_bytes(data.replace(old, new) if old else data[:-1] + new)

    artifact = make_drafter()
    monkeypatch.setattr(export_drafter.shutil, "copyfile", err)
    assert " in " in refused(artifact, "transformers")


def test_a_draft_model_for_vllm_and_sglang(
    make_drafter: Make, make_adapter: Make, export: Export, target: Path
) -> None:
    out, report = export(make_drafter(tie_word_embeddings=True), "vllm-sglang", speculative_tokens=5)
    assert f"vocabulary, tokens and context length equal those of {target}" in report
    text = (out / SERVING_FILE).read_text()
    assert '"method": "draft_model", "model": "exported-vllm-sglang", "num_speculative_tokens": 5}' in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in text
    out, _ = export(make_adapter(), "vllm-sglang")
    assert not (out / "adapter_config.json").exists()
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors"]


def test_vllm_gets_one_attention_kind(make_drafter: Make, export: Export) -> None:
    """Without `--disable-hybrid-kv-cache-manager`, vLLM rejects drafters with two kinds of attention (Gemma 2)."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Gemma2Config(vocab_size=VOCAB, head_dim=4, num_hidden_layers=2, **sizes)
    assert len(set(config.layer_types)) == 2
    gemma = AutoModelForCausalLM.from_config(config)
    for also, flagged in ((gemma.save_pretrained, True), (None, False)):
        out, _ = export(make_drafter(also=also), "vllm-sglang")
        assert (" --disable-hybrid-kv-cache-manager \\\n" in (out / SERVING_FILE).read_text()) == flagged
