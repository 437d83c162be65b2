"""Exported drafters with a draft vocabulary propose the same tokens in other engines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.export import drafter as export_drafter
from draftsmith.checkpoints.export.base import SERVING_FILE
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.sides import read_model_info
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.draft_vocabulary import kept_tokens
from draftsmith.decode.models.loading import load_model
from transformers import AutoModelForCausalLM, Gemma2Config, PhiConfig

VOCAB = 48
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
KEPT = torch.arange(1, VOCAB, 3)
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


def likeliest(folder: Path, states: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Load a model; return its most likely tokens and its draft-vocabulary logits for `states` random hidden states."""
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    hidden_XD = torch.randn(states, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits_XV = model.get_output_embeddings()(hidden_XD)
        assert torch.equal(model(KEPT[None]).logits[0], model.lm_head(model.base_model(KEPT[None])[0])[0])
    return logits_XV.argmax(-1), logits_XV[:, KEPT]


@pytest.mark.parametrize("form", ["transformers", "vllm-sglang"])
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_tokens_outside_the_draft_vocabulary_are_never_proposed(
    form: str, tied: bool, dtype: torch.dtype, make_drafter: Make, export: Export
) -> None:
    artifact = make_drafter(dtype, proposed=KEPT, tie_word_embeddings=tied)
    out, report = export(artifact, form)
    before, logits_XR = likeliest(artifact)
    after, same_XR = likeliest(out)
    assert not torch.isin(before, KEPT).all(), "the test needs likely tokens outside the draft vocabulary"
    assert torch.isin(after, KEPT).all()
    assert torch.equal(logits_XR, same_XR)
    assert f"in the draft vocabulary of {len(KEPT)} tokens" in report
    exported, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, artifact))
    assert torch.equal(exported.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert exported.dtype == dtype
    text = (out / SERVING_FILE).read_text()
    assert f"The draft vocabulary has {len(KEPT)} of {VOCAB} tokens." in text
    if form == "transformers":
        assert torch.equal(kept_tokens(load_model(str(out))), KEPT)
    else:
        assert "Do not use SGLang's `--speculative-token-map`" in text
        assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all of them"


def test_an_output_layer_with_a_bias(make_drafter: Make, export: Export) -> None:
    config = PhiConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    phi = AutoModelForCausalLM.from_config(config)
    out, _ = export(make_drafter(also=phi.save_pretrained, proposed=KEPT), "transformers")
    assert torch.isin(likeliest(out)[0], KEPT).all()


def test_an_adapter_is_merged(make_adapter: Make, export: Export) -> None:
    artifact = make_adapter(proposed=KEPT)
    assert not torch.isin(likeliest(artifact)[0], KEPT).all()
    out, _ = export(artifact, "transformers")
    assert torch.isin(likeliest(out)[0], KEPT).all()


def test_gguf(make_drafter: Make, export: Export, llama_cpp: Path) -> None:
    artifact = make_drafter(proposed=KEPT, tie_word_embeddings=True)
    out, report = export(artifact, "gguf", llama_cpp=llama_cpp)
    assert "all 21 tensors are identical" in report, "20 tensors, and an untied output layer"
    assert f"The draft vocabulary has {len(KEPT)} of {VOCAB} tokens." in (out / SERVING_FILE).read_text()


def test_gemma_is_refused(make_drafter: Make, refused: Callable[..., str], llama_cpp: Path) -> None:
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(vocab_size=VOCAB, head_dim=4, num_hidden_layers=2, **SIZES))
    artifact = make_drafter(also=gemma.save_pretrained, proposed=KEPT)
    assert "cannot have a draft vocabulary" in refused(artifact, "vllm-sglang")
    assert DRAFT_VOCABULARY in refused(artifact, "gguf", llama_cpp=llama_cpp)


def test_an_export_with_another_draft_vocabulary_is_refused(
    make_drafter: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make_drafter(proposed=KEPT)
    monkeypatch.setattr(export_drafter, "_pad", lambda model, ids_R: None)
    assert f"draft vocabulary ({len(KEPT)} tokens)" in refused(artifact, "transformers")


def test_doctor_and_inspection_accept_a_draft_vocabulary(make_drafter: Make, export: Export, target: Path) -> None:
    artifact = make_drafter(proposed=KEPT)
    sides = [read_model_info(str(folder), load_tokenizer) for folder in (target, artifact)]
    diagnosis = examine(*sides)
    assert [finding.check for finding in diagnosis.findings] == ["draft vocabulary"]
    outcomes = {name: verdict.outcome for name, verdict in diagnosis.verdicts.items()}
    others = dict.fromkeys(("transformers", "sglang", "llama.cpp"), "works but")
    assert outcomes == others | {"vllm": "refused", "draftsmith": "works"}
    assert find_faults(artifact)[1] == []
    for form in ("transformers", "vllm-sglang"):
        out, _ = export(artifact, form)
        assert not examine(sides[0], read_model_info(str(out), load_tokenizer)).findings
        assert find_faults(out)[1] == []
