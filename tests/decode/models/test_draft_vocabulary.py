"""Draft vocabularies: tokens, logits and files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.storage.draft_vocabulary import write_vocabulary
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.draft_vocabulary import keep_tokens, kept_tokens
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.models import cut_layers
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

VOCAB = 48
KEPT = torch.arange(1, VOCAB, 3)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_logits_equal_those_of_the_whole_layer(
    make_llama: Callable[..., LlamaForCausalLM], fast: bool, states: str, tokens: int
) -> None:
    model, reference = make_llama(VOCAB), make_llama(VOCAB)
    keep_tokens(model, KEPT)
    small, full = (wrap_model(m, fast=fast, states=states) for m in (model, reference))
    prompt = torch.arange(tokens)[None]
    with torch.inference_mode():
        logits, expected = (m.logits(m.extend(m.new_cache(1, 32), prompt)) for m in (small, full))
    assert (small.vocab_size, small.draft_vocab_size) == (VOCAB, len(KEPT) if fast else VOCAB)
    torch.testing.assert_close(logits[..., KEPT], expected[..., KEPT], rtol=1e-4, atol=1e-4)
    assert logits.isfinite().sum() == logits[..., KEPT].numel()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("speculative", {"gamma": 3}),
        ("multi-candidate", {"k_config": "3x2x1"}),
        ("spectr", {"num_drafts": 3, "gamma": 2}),
    ],
)
def test_greedy_text_equals_the_targets(
    make_llama: Callable[..., LlamaForCausalLM], method: str, options: dict[str, object]
) -> None:
    target, model = wrap_model(make_llama(VOCAB)), make_llama(VOCAB)
    keep_tokens(model, KEPT)
    prompts, limits, sampling = [[3, 5, 8], [1]], Limits(30), Sampling()

    def text(name: str, parts: Parts, **settings: object) -> tuple[list[list[int]], int]:
        built = build_method(name, parts, sampling, **settings)
        steps = list(generate(target, *built, prompts, limits, sampling, Rng.for_rows(0, 2)))
        return [[token for step in steps for token in step.new_ids[row]] for row in range(2)], len(steps)

    expected, _ = text("autoregressive", Parts())
    drafted, steps = text(method, Parts(wrap_model(model)), **options)
    assert drafted == expected
    assert any(token in KEPT for row in expected for token in row)
    assert steps < 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_and_all_weights_survive_a_round_trip(
    make_llama: Callable[..., LlamaForCausalLM], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_llama(VOCAB, tie_word_embeddings=True).to(dtype)
    write_vocabulary(kept_tokens(model), tmp_path)
    assert not (tmp_path / DRAFT_VOCABULARY).exists()
    keep_tokens(model, KEPT)
    model.save_pretrained(tmp_path)
    write_vocabulary(kept_tokens(model), tmp_path)
    loaded = load_model(str(tmp_path))
    assert torch.equal(kept_tokens(loaded), KEPT)
    assert torch.equal(kept_tokens(cut_layers(loaded, [1], "the model")), KEPT)
    for reloaded in (loaded, LlamaForCausalLM.from_pretrained(tmp_path)):
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in reloaded.state_dict().items())


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"d2t": torch.tensor([3, 2])}, "0 and 47"),
        ({"d2t": KEPT.float()}, "0 and 47"),
        ({"t2d": KEPT}, "t2d"),
        ({"d2t": KEPT + VOCAB}, "0 and 47"),
    ],
)
def test_other_files_are_refused(
    tensors: dict[str, torch.Tensor], named: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    make_llama(VOCAB).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / DRAFT_VOCABULARY)
    with pytest.raises(ValueError, match=named):
        load_model(str(tmp_path))
