"""Evaluation of heads of every form: the target is wrapped, and its projection lent, as they need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact import save_artifact, tokenizer_fingerprint
from draftsmith.checkpoints.heads import PredictionHeads, save_heads
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes import evaluate
from draftsmith.recipes.config import EvaluateRecipe
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
METHODS = [{"method": "autoregressive"}, {"method": "medusa", "options": {"tree": "2x1"}}, {"method": "bpd"}]
FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "before": {"states": "before-norm"},
    "target": {"projection": "target"},
    "low-rank": {"projection": "low-rank", "rank": 4, "states": "before-norm"},
}


@pytest.fixture
def target(corpus: Path, tmp_path: Path) -> LlamaForCausalLM:
    """A random model that is also at tmp_path/target, with the corpus's tokenizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **ATTENTION)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(tmp_path / "target")
    load_tokenizer(str(corpus / "tokenizer")).save_pretrained(tmp_path / "target")
    return model


def recipe(heads: PredictionHeads, corpus: Path, folder: Path) -> EvaluateRecipe:
    """A recipe that measures these heads, which are kept as an artifact."""
    save_artifact(
        folder / "heads",
        kind="heads",
        write=lambda place: save_heads(heads, place, "target"),
        vocab_size=heads.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(str(corpus / "tokenizer"))),
        **{name: {} for name in ("target", "shapes", "recipe", "data", "training")},
    )
    places = {"out": str(folder / "results.json"), "target": str(folder / "target"), "heads": str(folder / "heads")}
    asked = {"prompts": str(corpus / "rows.json"), "template": "chatml", "limit": 3, "max_new_tokens": 12}
    asked |= {"kind": "evaluate", "device": "cpu", "methods": METHODS}
    return EvaluateRecipe(**(places | asked))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_heads_of_every_form_are_measured(
    target: LlamaForCausalLM,
    corpus: Path,
    tmp_path: Path,
    form: str,
    kept: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), 3, 1, **FORMS[form]).to(kept)
    used: list[tuple[Any, Any]] = []
    measure = evaluate.measure

    def noted(scorer: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
        used.append((scorer, parts.heads))
        return measure(scorer, parts, *args, **kwargs)

    monkeypatch.setattr(evaluate, "measure", noted)
    results = evaluate.run_evaluate(recipe(heads, corpus, tmp_path))
    ((scorer, loaded),) = used
    assert scorer.states == loaded.states == FORMS[form].get("states", "after-norm")
    assert scorer.dtype == next(loaded.parameters()).dtype == loaded.projection(0).dtype == torch.float32
    assert results["errors"] == []
    for row in results["methods"]:
        assert row["identical_to_greedy"] == [3, 3]
        assert row["tokens"] > 0


def test_heads_of_another_size_are_refused(target: LlamaForCausalLM, corpus: Path, tmp_path: Path) -> None:
    weight_VD = target.lm_head.weight.detach()
    wider = PredictionHeads.from_lm_head(torch.zeros(320, 24), 3, 1)
    with pytest.raises(ValueError, match="take hidden states of 24, the target makes 16"):
        evaluate.run_evaluate(recipe(wider, corpus, tmp_path))
    fewer = PredictionHeads.from_lm_head(weight_VD[:310].clone(), 3, 1, projection="target")
    with pytest.raises(ValueError, match=r"310.*320"):
        evaluate.run_evaluate(recipe(fewer, corpus, tmp_path))
