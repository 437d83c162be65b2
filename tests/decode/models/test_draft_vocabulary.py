"""Drafters of few tokens: what they propose, what a decoder makes of them, and their file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.draft_vocabulary import keep_tokens, kept_tokens, save_vocabulary
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

VOCAB = 48
KEPT = torch.arange(1, VOCAB, 3)


@pytest.mark.parametrize("fast", [True, False])
def test_logits_are_the_whole_models_where_they_are_computed(
    make_llama: Callable[..., LlamaForCausalLM], fast: bool
) -> None:
    whole = wrap_model(make_llama(VOCAB), fast=fast)
    model = make_llama(VOCAB)
    keep_tokens(model, KEPT)
    small = wrap_model(model, fast=fast)
    prompt = torch.tensor([[3, 5, 8, 1]])
    with torch.inference_mode():
        found, wanted = (m.logits(m.extend(m.new_cache(1, 8), prompt)) for m in (small, whole))
    assert small.vocab_size == VOCAB
    torch.testing.assert_close(found[..., KEPT], wanted[..., KEPT])
    assert found.isfinite().sum(-1).eq(len(KEPT)).all()


@pytest.mark.parametrize(
    ("method", "options"),
    [("speculative", {"gamma": 3}), ("multi-candidate", {"k_config": "3x2x1"}), ("spectr", {"drafts": 3, "gamma": 2})],
)
def test_greedy_text_stays_the_targets(
    make_llama: Callable[..., LlamaForCausalLM], method: str, options: dict[str, object]
) -> None:
    """The drafter is the target but for its vocabulary: it is right wherever the target says a token of that."""
    target, model = wrap_model(make_llama(VOCAB)), make_llama(VOCAB)
    keep_tokens(model, KEPT)
    prompts, limits, sampling = [[3, 5, 8], [1]], Limits(30), Sampling()

    def text(name: str, parts: Parts, **settings: object) -> tuple[list[list[int]], int]:
        made = build_method(name, parts, sampling, **settings)
        steps = list(generate(target, *made, prompts, limits, sampling, Rng.for_rows(0, 2)))
        return [[token for step in steps for token in step.new_ids[row]] for row in range(2)], len(steps)

    plain, _ = text("autoregressive", Parts())
    drafted, steps = text(method, Parts(wrap_model(model)), **options)
    assert drafted == plain
    assert any(token in KEPT for row in plain for token in row)
    assert steps < 30


def test_a_folder_keeps_its_vocabulary(make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model = make_llama(VOCAB)
    save_vocabulary(model, tmp_path)
    assert not (tmp_path / DRAFT_VOCABULARY).exists()
    keep_tokens(model, KEPT)
    model.save_pretrained(tmp_path)
    save_vocabulary(model, tmp_path)
    loaded = load_model(str(tmp_path))
    assert torch.equal(kept_tokens(loaded), KEPT)
    assert LlamaForCausalLM.from_pretrained(tmp_path)(torch.tensor([[1]])).logits.isfinite().all()
    for wrong, named in (({"d2t": torch.tensor([3, 2])}, str(VOCAB)), ({"t2d": KEPT}, "t2d")):
        save_file(wrong, tmp_path / DRAFT_VOCABULARY)
        with pytest.raises(ValueError, match=named):
            load_model(str(tmp_path))
