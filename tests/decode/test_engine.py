"""The decoding loop: greedy identity with transformers, ragged batches, stopping rules and invalid inputs."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import TextStore
from draftsmith.decode import engine
from draftsmith.decode.engine import Limits, Step, generate
from draftsmith.decode.methods import METHODS, Parts, build_method, method_config, method_variants
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

VOCAB = 64
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [63, 0]]
LOSSLESS = [row for row in method_variants() if method_config(*row).is_lossless]


@pytest.fixture
def target_model(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB, seed=0, num_hidden_layers=3)


@pytest.fixture
def parts(make_llama: Callable[..., LlamaForCausalLM], make_heads: Callable[..., torch.nn.Module]) -> Parts:
    drafter = wrap_model(make_llama(VOCAB, seed=1, num_hidden_layers=1))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, 5000).astype(np.int32)]
    table = BigramTable.from_documents(texts, VOCAB)
    table.texts = TextStore.from_documents(texts)
    return Parts(drafter, make_heads(4, 32, VOCAB), table)


def run(
    target: LanguageModel,
    name: str,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling = Sampling(),  # noqa: B008
    seed: int = 0,
    **options: object,
) -> tuple[list[list[int]], list[Step]]:
    method = build_method(name, parts, sampling, **options)
    steps = list(generate(target, *method, prompts, limits, sampling, Rng.for_rows(seed, len(prompts))))
    return [[token for step in steps for token in step.new_ids[row]] for row in range(len(prompts))], steps


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], count: int, stop: int | None = None) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    output = model.generate(ids, max_new_tokens=count, **options)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("name", "options"), LOSSLESS, ids=str)
def test_greedy_output_equals_transformers(
    target_model: LlamaForCausalLM, parts: Parts, name: str, options: dict[str, Any], fast: bool
) -> None:
    target = wrap_model(target_model, fast=fast)
    expected = [greedy(target_model, prompt, 30) for prompt in PROMPTS]
    batched, _ = run(target, name, parts, PROMPTS, Limits(30), **options)
    single = [run(target, name, parts, [prompt], Limits(30), **options)[0][0] for prompt in PROMPTS]
    assert batched == expected
    assert single == expected


@pytest.mark.parametrize("name", ["speculative", "multi-candidate", "mjsd"])
def test_a_drafter_that_is_the_target_is_always_accepted(target_model: LlamaForCausalLM, name: str) -> None:
    target = wrap_model(target_model)
    options = {"multi-candidate": {"k_config": "2x1x1x1"}, "mjsd": {"num_beams": 1}}.get(name, {})
    output, steps = run(target, name, Parts(drafter=target), PROMPTS[:1], Limits(30), **options)
    assert len(steps) == 6  # four draft tokens and a bonus token per step
    assert output[0] == greedy(target_model, PROMPTS[0], 30)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *method_variants(),
        ("adaptive", {"policy": "oracle"}),
        ("multi-candidate", {"attention": "batch", "replacement": True}),
        ("specinfer", {"num_drafts": 3}),
    ],
    ids=str,
)
def test_samples_do_not_depend_on_other_rows(
    target_model: LlamaForCausalLM, parts: Parts, name: str, options: dict[str, Any]
) -> None:
    target, sampling = wrap_model(target_model), Sampling(1.0)
    batched, _ = run(target, name, parts, PROMPTS, Limits(20), sampling, seed=40, **options)
    for row, prompt in enumerate(PROMPTS):
        single, _ = run(target, name, parts, [prompt], Limits(20), sampling, seed=40 + row, **options)
        assert single[0] == batched[row]


def test_a_drafter_reads_many_tokens_in_a_ragged_batch(
    target_model: LlamaForCausalLM, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Most draft tokens of one row are rejected, so that its drafter reads more tokens than the other row contains."""
    near = make_llama(VOCAB, seed=0, num_hidden_layers=3)
    with torch.no_grad():
        near.lm_head.weight += 0.05 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    target = wrap_model(target_model)
    parts = Parts(wrap_model(near), more_drafters=(wrap_model(make_llama(VOCAB, seed=1, num_hidden_layers=1)),))
    prompts, limits, sampling = [[1, 2, 3, 4, 5, 6], [5]], Limits(12), Sampling(1.0)
    for seed in range(40):
        batched, _ = run(target, "specinfer", parts, prompts, limits, sampling, seed, gamma=6)
        single, _ = run(target, "specinfer", parts, prompts[:1], limits, sampling, seed, gamma=6)
        assert batched[0] == single[0]


@pytest.mark.parametrize(("name", "options"), LOSSLESS, ids=str)
def test_texts_end_at_a_stop_token_or_the_limit(
    target_model: LlamaForCausalLM, parts: Parts, name: str, options: dict[str, Any]
) -> None:
    target = wrap_model(target_model)
    full = [greedy(target_model, prompt, 25) for prompt in PROMPTS]
    stop = full[0][9]
    output, _ = run(target, name, parts, PROMPTS, Limits(23, (stop,)), **options)
    for text, full_text in zip(output, full, strict=True):
        end = full_text.index(stop) + 1 if stop in full_text[:23] else 23
        assert text == full_text[:end]


def test_a_stop_token_in_the_prompt_does_not_end_decoding(target_model: LlamaForCausalLM, parts: Parts) -> None:
    output, _ = run(wrap_model(target_model), "speculative", parts, [[7, 7, 1]], Limits(5, (7,)))
    assert output[0] == greedy(target_model, [7, 7, 1], 5, stop=7)


def heads_of(vocab: int, hidden: int) -> Parts:
    return Parts(heads=PredictionHeads.from_lm_head(torch.randn(vocab, hidden), 2, 1))


UNFIT: dict[str, tuple[str, list[list[int]], dict[str, Any], str]] = {
    "an empty prompt": ("speculative", [[1], []], {}, "prompt 1"),
    "an empty batch": ("speculative", [], {}, "empty"),
    "an unknown token": ("speculative", [[64]], {}, "token 64.* 64 "),
    "a long prompt": ("speculative", [[1] * 250], {}, "250 .*257 .*256"),
    "a long look-ahead": ("speculative", PROMPTS, {"gamma": 300}, "prompt 0 has 3 .*300 .*306 .*256"),
    "too many candidates of a head": ("medusa", PROMPTS, {"tree": "65x1"}, "65 .*64"),
    "too high a rank": ("medusa", PROMPTS, {"tree": "0, 64"}, "65 .*64"),
    "too many candidates of a drafter": ("multi-candidate", PROMPTS, {"k_config": "65x1"}, "65 .*64"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_prompts_and_trees_must_fit_the_target(target_model: LlamaForCausalLM, parts: Parts, case: str) -> None:
    name, prompts, options, message = UNFIT[case]
    with pytest.raises(ValueError, match=message):
        run(wrap_model(target_model), name, parts, prompts, Limits(4), **options)


def test_artifacts_of_another_target_are_refused(
    target_model: LlamaForCausalLM, parts: Parts, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    short = wrap_model(make_llama(VOCAB, num_hidden_layers=1, max_position_embeddings=16))
    other = wrap_model(make_llama(32, num_hidden_layers=1))
    table = BigramTable.from_documents([np.arange(32)], 32)
    cases = [("speculative", Parts(short), "16 .*27"), ("bpd", heads_of(64, 16), "16.*32")]
    cases += [(name, Parts(other), "32 .*64") for name in ("speculative", "mjsd", "spectr", "adaptive")]
    cases += [("bigram", Parts(table=table), "32 .*64"), ("slim-s", Parts(heads=parts.heads, table=table), "32 .*64")]
    for name, artifacts, message in [*cases, ("bpd", heads_of(32, 16), "32 .*64")]:
        with pytest.raises(ValueError, match=message):
            run(wrap_model(target_model), name, artifacts, [[1, 2, 3, 4]], Limits(20))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("speculativ", {}, "'speculative'"),
        ("speculative", {"gama": 3}, "'gamma'"),
        ("speculative", {"gamma": 0}, "got 0"),
        ("speculative", {"gamma": "4"}, "int"),
        ("multi-candidate", {"k_config": "4x0"}, "4x0"),
        ("multi-candidate", {"attention": "paths"}, "tree, batch"),
        ("mjsd", {"likelihood_threshold": 2.0}, r"\[0, 1\], got 2.0"),
        ("medusa", {"tree": "2x1x1x1x1"}, "5 levels.*4 heads"),
        ("medusa", {"tree": "0, 1, 1.x"}, "'1.x'"),
        ("medusa", {"acceptance": "typical", "delta": 2.0}, r"\(0, 1\], got 0.09 and 2.0"),
        ("slim-s", {"max_depth": 7}, "4, got 7"),
        ("slim-s", {"unseen_correlation": -1.0}, "got -1.0"),
        ("adaptive", {"confidence_threshold": 1.5}, r"\[0, 1\], got 1.5"),
        ("adaptive", {"policy": "oracle", "draft_cost": 0.0}, "got 0.0"),
        ("adaptive", {"policy": "oracle", "token_cost": -0.1}, "and -0.1"),
        ("bild", {"rollback_threshold": -1.0}, "got -1.0"),
        ("relaxed-opt", {"epsilon": 1.5}, r"\[0, 1\], got 1.5"),
        ("batch-speculative", {"num_drafts": 0}, "'num_drafts' .* at least 1, got 0"),
        ("spectr", {"num_drafts": 0}, "'num_drafts' .* at least 1, got 0"),
        ("mjgd", {"gamma": 0}, "'gamma' .* at least 1, got 0"),
        ("beam", {"num_beams": 0}, "'num_beams' .* at least 1, got 0"),
        ("bigram", {"prior": 0.0}, "got 0.0"),
        ("bigram", {"add_k": -0.3}, "add_k.* -0.3"),
        ("prompt-lookup", {"max_ngram": 0}, "'max_ngram' .* at least 1, got 0"),
        ("prompt-lookup", {"max_ngram": 2, "min_ngram": 3}, r"\(2\), got 3"),
        ("suffix", {"max_depth": 0}, "at least 1, got 0"),
        ("suffix", {"fallback": "heads", "min_prob": 1.0}, "below 1, got 1.0"),
        ("slim-s", {"min_prob": 1.5}, "below 1, got 1.5"),
        *((*row, f"requires `{needs[0]}`") for row in method_variants() if (needs := method_config(*row).needs)),
    ],
)
def test_wrong_options_and_missing_artifacts_are_refused(
    parts: Parts, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_method(name, Parts() if message.startswith("requires") else parts, Sampling(1.0), **options)


def test_a_row_that_has_ended_does_not_run_past_learned_positions() -> None:
    """The longer row ends first, at the model's last position, and the shorter row continues."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    target_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    drafter_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    target, parts = wrap_model(target_model), Parts(drafter=wrap_model(drafter_model))
    prompts = [list(range(14)), [1, 2, 3]]
    for options in ({"gamma": 3}, {"gamma": 2}):
        output, _ = run(target, "speculative", parts, prompts, Limits(8), **options)
        assert output == [greedy(target_model, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("stops", [(), (3, 9, 20, 33)], ids=["to the limit", "with ends"])
@pytest.mark.parametrize(("beams", "width", "gamma"), [(1, 1, 4), (2, 2, 3), (4, 8, 3), (8, 32, 2)])
def test_speculative_beams_equal_the_targets_in_fewer_forwards(
    target_model: LlamaForCausalLM,
    make_llama: Callable[..., LlamaForCausalLM],
    beams: int,
    width: int,
    gamma: int,
    stops: tuple[int, ...],
) -> None:
    """Three rows are decoded jointly, by drafters of different quality."""
    near, target = copy.deepcopy(target_model), wrap_model(target_model)
    with torch.no_grad():
        near.lm_head.weight += 0.02 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    limits, sampling = Limits(14, stops), Sampling()
    expected, plain_steps = run(target, "beam", Parts(), PROMPTS, limits, sampling, num_beams=beams)
    forwards = {}
    for name, model in {"same": target_model, "near": near, "far": make_llama(VOCAB, seed=5)}.items():
        options = {"num_beams": beams, "draft_beams": width, "draft_gamma": gamma}
        texts, steps = run(target, "beam", Parts(wrap_model(model)), PROMPTS, limits, sampling, **options)
        assert texts == expected
        forwards[name] = steps[0].forwards
    assert forwards["same"] <= forwards["near"] <= forwards["far"] <= plain_steps[0].forwards
    assert forwards["same"] <= 2 + -(-13 // (1 + gamma)) * (1 if not stops else 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_auxiliary_states_do_not_change_texts(
    target_model: LlamaForCausalLM, parts: Parts, name: str, temperature: float
) -> None:
    limits, sampling = Limits(24), Sampling(temperature)
    targets = [wrap_model(target_model, aux_layers=layers) for layers in ((), (1, 2))]
    without_aux, with_aux = (run(target, name, parts, PROMPTS, limits, sampling)[0] for target in targets)
    assert with_aux == without_aux


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["speculative", "medusa"])
@torch.inference_mode()
def test_a_long_prompt_is_read_in_parts(
    target_model: LlamaForCausalLM, parts: Parts, name: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = wrap_model(target_model, fast=fast, aux_layers=(0, 2))
    expected, _ = run(target, name, parts, PROMPTS, Limits(30))
    context = engine.Context(target, PROMPTS, Limits(30), Sampling(), Rng.for_rows(0, 4), (3, 3))
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 2)
    assert run(target, name, parts, PROMPTS, Limits(30))[0] == expected
    in_parts = engine.Context(target, PROMPTS, Limits(30), Sampling(), Rng.for_rows(0, 4), (3, 3))
    assert in_parts.aux_BSG is not None
    assert context.aux_BSG is not None
    for row, prompt in enumerate(PROMPTS):
        positions = slice(0, len(prompt) - 1)
        assert torch.allclose(in_parts.aux_BSG[row, positions], context.aux_BSG[row, positions], atol=1e-5)


def test_beams_equal_those_of_transformers(target_model: LlamaForCausalLM) -> None:
    """There is no end token, so that lengths are not penalised. A hundred prompts are decoded with a drafter."""
    draws, target = torch.Generator().manual_seed(7), wrap_model(target_model)
    prompts = [torch.randint(1, VOCAB, (length % 9 + 1,), generator=draws).tolist() for length in range(100)]
    options = {"num_beams": 4, "draft_beams": 8, "draft_gamma": 2}
    texts, _ = run(target, "beam", Parts(target), prompts, Limits(7), Sampling(), **options)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        settings = {"num_beams": 4, "do_sample": False, "max_new_tokens": 7, "length_penalty": 0.0}
        settings |= {"return_dict_in_generate": True, "output_scores": True}
        inputs = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        reference = target_model.generate(ids, **settings, **inputs)
        assert reference.sequences[0, len(prompt) :].tolist() == text
        logits_TV = target_model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        score = logits_TV.log_softmax(-1).gather(1, torch.tensor(text)[:, None]).sum()
        assert score.item() == pytest.approx(float(reference.sequences_scores[0]), abs=1e-4)
