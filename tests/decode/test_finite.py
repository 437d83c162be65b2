"""NaN, infinite or fully masked logits raise an error that names their source and position, in every method."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method, method_config, method_variants
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng, categorical, draw_many
from draftsmith.decode.warpers import Sampling
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

VOCAB = 12
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
BROKEN = 8
"""The position after whose token nothing can be told."""
SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=5, top_p=0.9)]
BAD = {"nan": math.nan, "inf": math.inf, "all masked": -math.inf}
VARIANTS: list[tuple[str, dict[str, Any]]] = [row for row in method_variants() if "datastore" not in row[1]] + [
    ("adaptive", {"policy": "oracle"}),
    ("adaptive", {"policy": "oracle"}),
    ("multi-candidate", {"attention": "batch", "replacement": True}),
    ("multi-candidate", {"k_config": "1x1x1"}),
]
OF_DRAFTERS = [(name, options) for name, options in VARIANTS if "drafter" in method_config(name, options).needs]
OF_HEADS = [(name, options) for name, options in VARIANTS if "heads" in method_config(name, options).needs]


class Chain:
    """Builder of Markov chains with one damaged logit, or only masked logits, at the state `BROKEN`."""

    def __init__(self, make_markov: Callable[[Tensor], Any]) -> None:
        self._make = make_markov

    def __call__(self, seed: int, bad: float | None = None) -> Any:
        torch.manual_seed(seed)
        model = self._make(torch.rand(40, VOCAB, VOCAB).softmax(-1))
        model.hidden_size = 1
        rows = slice(BROKEN * VOCAB, (BROKEN + 1) * VOCAB)
        if bad == -math.inf:
            model._logits_XV[rows] = bad
        elif bad is not None:
            model._logits_XV[rows, VOCAB - 2] = bad
        model._logits_XV[:, 0] = -math.inf  # a single masked token is valid
        return model


@pytest.fixture
def chain(make_markov: Callable[[Tensor], Any]) -> Chain:
    return Chain(make_markov)


def decoded(name: str, options: dict[str, Any], target: Any, parts: Parts, sampling: Sampling) -> list[list[int]]:
    method = build_method(name, parts, sampling, **options)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for step in generate(target, *method, PROMPTS, Limits(12), sampling, Rng.for_rows(0, len(PROMPTS))):
        texts = [ids + new for ids, new in zip(texts, step.new_ids, strict=True)]
    return texts


def parts_of(chain: Chain, heads: PredictionHeads | None = None, bad: float | None = None) -> Parts:
    heads = heads or PredictionHeads.from_lm_head(torch.randn(VOCAB, 1), 4, 1).eval()
    table = BigramTable.from_documents([torch.randint(0, VOCAB, (200,)).numpy()], VOCAB)
    return Parts(chain(1, bad), heads, table)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_the_targets_logits_are_named(chain: Chain, name: str, options: dict[str, Any], sampling: Sampling) -> None:
    parts = parts_of(chain)
    assert all(0 < token < VOCAB for ids in decoded(name, options, chain(0), parts, sampling) for token in ids)
    for bad in BAD.values():
        with pytest.raises(ValueError, match=f"^the target's logits .*position {BROKEN + 1} .*row [01]"):
            decoded(name, options, chain(0, bad), parts, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("name", "options"), OF_DRAFTERS, ids=str)
def test_a_drafters_logits_are_named(chain: Chain, name: str, options: dict[str, Any], sampling: Sampling) -> None:
    for bad in BAD.values():
        with pytest.raises(ValueError, match=f"^the drafter's logits .*position {BROKEN + 1} "):
            decoded(name, options | SURE.get(name, {}), chain(0), parts_of(chain, bad=bad), sampling)


SURE: dict[str, dict[str, Any]] = {
    "adaptive": {"confidence_threshold": 0.0, "draft_cost": 0.001},
    "bild": {"fallback_threshold": 0.0},
}


def test_the_drafter_with_damaged_logits_is_named(chain: Chain) -> None:
    parts = Parts(chain(1), more_drafters=(chain(2), chain(3, math.nan)))
    for sampling in SAMPLINGS:
        with pytest.raises(ValueError, match=f"^drafter 3's logits .*position {BROKEN + 1} "):
            decoded("specinfer", {}, chain(0), parts, sampling)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("name", "options"), OF_HEADS, ids=str)
def test_a_heads_logits_are_named(
    chain: Chain, name: str, options: dict[str, Any], sampling: Sampling, bad: float
) -> None:
    heads = PredictionHeads.from_lm_head(torch.ones(VOCAB, 1), 4, 1).eval()
    with torch.no_grad():
        heads.projection(2)[5] = bad
    with pytest.raises(ValueError, match=r"^head 3's logits .*position 5 .*row 0, step 1"):
        decoded(name, options, chain(0), parts_of(chain, heads), sampling)


def test_damaged_logits_of_ended_rows_are_ignored(chain: Chain) -> None:
    """The logits are damaged after the stop token of the longer row. The shorter row ends earlier."""
    target = chain(0)
    method = build_method("autoregressive", Parts(), Sampling())
    (_, longer) = decoded("autoregressive", {}, target, Parts(), Sampling())
    stop, end = longer[BROKEN - len(PROMPTS[1])], BROKEN
    assert stop not in longer[: end - len(PROMPTS[1])]
    broken, limits = chain(0, math.nan), Limits(6, (stop,))
    steps = list(generate(broken, *method, PROMPTS, limits, Sampling(), Rng.for_rows(0, 2)))
    assert [token for step in steps for token in step.new_ids[1]] == longer[: end + 1 - len(PROMPTS[1])]


def test_samples_from_nan_are_valid_tokens() -> None:
    nan_BV, uniform_B = torch.full((3, VOCAB), math.nan), torch.rand(3, dtype=torch.float64)
    assert categorical(nan_BV, uniform_B).max() < VOCAB
    drawn_BMC, wanted_BMC = draw_many(nan_BV[None], uniform_B[None, :, None].expand(-1, -1, 2))
    assert drawn_BMC.max() < VOCAB
    assert wanted_BMC.isnan().all()


@pytest.mark.parametrize("fast", [True, False])
def test_nan_weights_are_named_before_decoding(make_llama: Callable[..., LlamaForCausalLM], fast: bool) -> None:
    model = make_llama(VOCAB)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match=r"'llama'.*layers.1.mlp.up_proj.weight") as caught:
        wrap_model(model, fast=fast)
    assert "ALiBi" not in str(caught.value)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    source_model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", decoder_start_token_id=0, **sizes))
    with torch.no_grad():
        source_model.decoder.final_layer_norm.weight[0] = math.inf
    with pytest.raises(ValueError, match=r"'t5'.*decoder.final_layer_norm.weight"):
        wrap_model(source_model)


def test_masked_tokens_are_valid() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", num_attention_heads=2, **sizes)).eval()
    with torch.no_grad():
        model.lm_head.bias[:4] = -math.inf
    target = wrap_model(model)
    for sampling in SAMPLINGS:
        texts = decoded("speculative", {}, target, Parts(target), sampling)
        assert all(4 <= token < VOCAB for ids in texts for token in ids)


def test_temperatures_that_overflow_are_refused() -> None:
    for temperature in (-1.0, 1e-40, math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"1e-30.*got {temperature}"):
            Sampling(temperature)
