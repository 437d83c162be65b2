"""Drafters of few tokens or low rank: what they propose, what a decoder makes of them, and their file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.draft_vocabulary import (
    LowRankHead,
    factorise,
    keep_tokens,
    kept_tokens,
    save_vocabulary,
    state_of_whole,
)
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.models import cut_layers
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

VOCAB = 48
KEPT = torch.arange(1, VOCAB, 3)
RANK = 7


def of_low_rank(model: LlamaForCausalLM) -> None:
    factorise(model, RANK)


def of_few_tokens(model: LlamaForCausalLM) -> None:
    keep_tokens(model, KEPT)


def of_both(model: LlamaForCausalLM) -> None:
    keep_tokens(model, KEPT)
    factorise(model, RANK)


SHAPES = [of_low_rank, of_few_tokens, of_both]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kept", [None, KEPT])
def test_factors_start_as_the_nearest_matrix_of_their_rank(
    make_llama: Callable[..., LlamaForCausalLM], tied: bool, kept: torch.Tensor | None
) -> None:
    """What is lost are the smallest singular values, and nothing else of the model changes."""
    model = make_llama(VOCAB, tie_word_embeddings=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kept is not None:
        keep_tokens(model, kept)
    factorise(model, RANK)
    rows_RD = before["lm_head.weight"].double()[slice(None) if kept is None else kept]
    made = state_of_whole(model)
    assert made is not None
    lost = (rows_RD - made["lm_head.weight"].double()[slice(None) if kept is None else kept]).square().sum()
    torch.testing.assert_close(lost, torch.linalg.svdvals(rows_RD)[RANK:].square().sum(), rtol=1e-4, atol=0)
    assert made.keys() == before.keys()
    assert all(torch.equal(made[name], before[name]) for name in before if name != "lm_head.weight")
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.get_output_embeddings(), LowRankHead)
    assert model.get_output_embeddings().weight.shape == (VOCAB, RANK), "not tied again"
    factorise(model, RANK - 2)
    assert model.get_output_embeddings().weight.shape == (VOCAB, RANK - 2)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_factors_are_their_product(
    make_llama: Callable[..., LlamaForCausalLM], fast: bool, states: str, shape: Callable[..., None], tokens: int
) -> None:
    model, plain = make_llama(VOCAB), make_llama(VOCAB)
    shape(model)
    plain.load_state_dict(state_of_whole(model) or model.state_dict())
    small, whole = (wrap_model(m, fast=fast, states=states) for m in (model, plain))
    prompt = torch.arange(tokens)[None]
    with torch.inference_mode():
        found, wanted = (m.logits(m.extend(m.new_cache(1, 32), prompt)) for m in (small, whole))
    assert (small.vocab_size, small.hidden_size) == (whole.vocab_size, whole.hidden_size)
    kept = slice(None) if shape is of_low_rank else KEPT
    torch.testing.assert_close(found[..., kept], wanted[..., kept], rtol=1e-4, atol=1e-4)
    assert found.isfinite().sum() == found[..., kept].numel()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("speculative", {"gamma": 3}),
        ("multi-candidate", {"k_config": "3x2x1"}),
        ("spectr", {"num_drafts": 3, "gamma": 2}),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_stays_the_targets(
    make_llama: Callable[..., LlamaForCausalLM], method: str, options: dict[str, object], shape: Callable[..., None]
) -> None:
    """The drafter is the target but for its output layer: it is often right."""
    target, model = wrap_model(make_llama(VOCAB)), make_llama(VOCAB)
    shape(model)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_keeps_its_output_layer(
    make_llama: Callable[..., LlamaForCausalLM], shape: Callable[..., None], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_llama(VOCAB, tie_word_embeddings=True).to(dtype)
    save_vocabulary(model, tmp_path)
    assert not (tmp_path / DRAFT_VOCABULARY).exists()
    shape(model)
    model.save_pretrained(tmp_path, state_dict=state_of_whole(model))
    save_vocabulary(model, tmp_path)
    loaded = load_model(str(tmp_path))
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (kept_tokens(loaded) is None) == (shape is of_low_rank)
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    assert plain.get_output_embeddings().weight.shape == (VOCAB, 32)
    ids = torch.arange(VOCAB)[None]
    with torch.inference_mode():
        tolerance = 1e-4 if dtype == torch.float32 else 1e-1
        torch.testing.assert_close(plain(ids).logits, loaded(ids).logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_that_are_cut_out_keep_it(
    make_llama: Callable[..., LlamaForCausalLM], shape: Callable[..., None], tmp_path: Path
) -> None:
    model = make_llama(VOCAB, tie_word_embeddings=True)
    shape(model)
    small = cut_layers(model, [1], "the model")
    mine, theirs = model.get_output_embeddings().state_dict(), small.get_output_embeddings().state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert str(kept_tokens(small)) == str(kept_tokens(model))


FACTORS = {"inner": torch.zeros(3, 32), "outer": torch.zeros(VOCAB, 3)}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"d2t": torch.tensor([3, 2])}, f"{VOCAB}"),
        ({"d2t": KEPT.float()}, f"{VOCAB}"),
        ({"t2d": KEPT}, "t2d"),
        ({"inner": FACTORS["inner"]}, "outer"),
        (FACTORS | {"outer": torch.zeros(VOCAB, 4)}, f"3 x 32.*{VOCAB} x 4"),
        (FACTORS | {"outer": torch.zeros(VOCAB + 1, 3)}, f"{VOCAB + 1} x 3.* {VOCAB} "),
        (FACTORS | {"inner": torch.zeros(3, 31)}, "31.*32"),
        (FACTORS | {"d2t": KEPT + VOCAB}, f"{VOCAB}"),
    ],
)
def test_files_that_are_none(
    tensors: dict[str, torch.Tensor], named: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    make_llama(VOCAB).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / DRAFT_VOCABULARY)
    with pytest.raises(ValueError, match=named):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("rank", "bias", "named"), [(32, False, "32.*48 x 32"), (3, True, "3 .*bias")])
def test_ranks_that_are_none(rank: int, bias: bool, named: str, make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama(VOCAB)
    model.lm_head = torch.nn.Linear(32, VOCAB, bias=bias)
    with pytest.raises(ValueError, match=named):
        factorise(model, rank)
