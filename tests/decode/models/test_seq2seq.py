"""Encoder-decoders: decoder states, greedy identity with transformers, exactness of samples, and refusals.

Sources differ in length, and rows of a batch accept different numbers of tokens, because both reveal wrong relative
positions and padding.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, Step, generate
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.models.seq2seq import Seq2SeqModel
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from transformers import AutoConfig, AutoModelForSeq2SeqLM, LlamaForCausalLM, PreTrainedModel

VOCAB = 40
START = 3
COUNT = 20  # exceeds the largest relative distance
SOURCES = [[5, 9, 3, 7, 1], [8], [0, 11, 0, 39, 2, 4, 17, 1], [6, 1]]  # includes the padding token 0
LOSSLESS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("multi-candidate", "dynamic-tree", "specinfer", "bigram", "suffix", "slim-s")),
    ("medusa", {}),
    ("suffix", {"fallback": "drafter"}),
]
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": START,
}
SCALES = {"relative_attention_bias": 6.0, "shared": 4.0, "q": 0.6, "o": 3.0, "wo": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5"},  # T5 1.0: ReLU, tied and scaled output projection
    "flan-t5": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "untied": True},
    "mt5": {"model_type": "mt5", "untied": True},
    "umt5": {"model_type": "umt5", "num_layers": 3, "num_decoder_layers": 2},
}


def build(family: str, seed: int = 2, noise: float = 0.0, **overrides: Any) -> PreTrainedModel:
    """Return a random model with peaked logits; with small `noise`, it mostly agrees with the model without noise."""
    settings = SIZES | FAMILIES.get(family, {"model_type": family}) | overrides
    untied = settings.pop("untied", False)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    # Eager attention, because the decoder of UMT5 is not causal with SDPA without a mask in transformers 5.17.
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(seed)
    disturbance = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = SCALES.get(name.split(".")[-2], 1.5) * parameter.shape[-1] ** -0.5
            if parameter.dim() == 2:
                parameter.normal_(0.0, scale, generator=generator)
                parameter += noise * scale * torch.randn(parameter.shape, generator=disturbance)
        # A tied projection would repeat each token; random signs in the last norm's weight prevent that.
        model.decoder.final_layer_norm.weight.normal_(0.0, 2.0 if untied else 20.0, generator=generator)
    model.generation_config.eos_token_id = None
    return model


def greedy(model: PreTrainedModel, source: Sequence[int], count: int, stop: int | None = None) -> list[int]:
    ids = torch.tensor([list(source)])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=count, **options)[0, 1:].tolist()


@cache
def scorer(family: str, noise: float = 0.0) -> LanguageModel:
    return wrap_model(build(family, noise=noise))


@cache
def expected(family: str) -> tuple[list[list[int]], int, list[list[int]]]:
    """Return the outputs of transformers without an end token, an id, and the outputs with this id as end token."""
    model = build(family)
    full = [greedy(model, source, COUNT) for source in SOURCES]
    assert min(len(set(ids)) for ids in full) >= 3, "rows that repeat themselves would hide wrong positions"
    stop = full[0][6]
    return full, stop, [greedy(model, source, COUNT, stop) for source in SOURCES]


def run(
    target: LanguageModel,
    name: str,
    parts: Parts,
    sources: Sequence[Sequence[int]] = SOURCES,
    limits: Limits = Limits(COUNT),  # noqa: B008
    sampling: Sampling = Sampling(),  # noqa: B008
    **options: object,
) -> tuple[list[list[int]], list[Step]]:
    method = build_method(name, parts, sampling, **options)
    steps = list(generate(target, *method, sources, limits, sampling, Rng.for_rows(0, len(sources))))
    return [[token for step in steps for token in step.new_ids[row]] for row in range(len(sources))], steps


@pytest.fixture
def make_parts(make_heads: Callable[..., torch.nn.Module]) -> Callable[..., Parts]:
    """Return a function that builds all draft artifacts for a target of a family."""

    def make(family: str) -> Parts:
        table = BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB, 2000)], VOCAB)
        return Parts(scorer(family, 0.15), make_heads(4, SIZES["d_model"], VOCAB), table)

    return make


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_forward_equals_plain_forwards(family: str) -> None:
    """Sources differ in length; some prefixes exceed the largest distance of the relative position bias."""
    target = scorer(family)
    generator = torch.Generator().manual_seed(1)
    lengths = [20, 1, 5, 3]
    committed_BT = torch.randint(VOCAB, (len(SOURCES), max(lengths)), generator=generator)
    tree = Tree.k_ary((2, 2, 1))
    tokens_BN = torch.randint(VOCAB, (len(SOURCES), tree.nodes), generator=generator)
    _, slots = target.begin(SOURCES, max(lengths) + tree.nodes)
    target.extend(slots, committed_BT)
    slots.set_lengths(lengths)
    at_once_BND = target.extend(slots, tokens_BN, tree)
    levels = [target.extend(slots, tokens_BN[:, low:high], tree, low) for low, high in ((0, 1), (1, 3), (3, 11))]
    for hidden_BND in (at_once_BND, torch.cat(levels, 1)):
        logits_BNV = target.logits(hidden_BND)
        for row, node in itertools.product(range(len(SOURCES)), range(tree.nodes)):
            path = torch.nonzero(tree.ancestors_BNN[0, node])[:, 0]
            ids = torch.cat((committed_BT[row, : lengths[row]], tokens_BN[row, path]))
            expected_output = target.model(input_ids=torch.tensor([SOURCES[row]]), decoder_input_ids=ids[None])
            difference = (logits_BNV[row, node] - expected_output.logits[0, -1]).abs().max()
            assert difference < 2e-5 * expected_output.logits.abs().max()


@torch.inference_mode()
def test_overflows_in_half_precision_are_clamped_as_in_transformers() -> None:
    model = build("t5").to(torch.float16)
    for block in model.decoder.block:
        block.layer[0].SelfAttention.o.weight.mul_(2e4)
    expected_TV = model(input_ids=torch.tensor([SOURCES[0]]), decoder_input_ids=torch.tensor([[START, 4]])).logits[0]
    target = wrap_model(model, check=False)
    _, slots = target.begin(SOURCES[:1], 1)
    logits_TV = target.logits(target.extend(slots, torch.tensor([[START, 4]])))[0]
    assert expected_TV.isfinite().all()
    assert (logits_TV - expected_TV).abs().max() <= 0.02 * expected_TV.abs().max()


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [("flan-t5", *row) for row in (*LOSSLESS, ("speculative", {}))]
    + [(family, name, {}) for family in ("t5", "umt5") for name in ("autoregressive", "speculative", "prompt-lookup")],
)
def test_greedy_output_equals_transformers(
    make_parts: Callable[..., Parts], family: str, name: str, options: dict[str, Any]
) -> None:
    target, parts = scorer(family), make_parts(family)
    full, stop, stopped = expected(family)
    assert len(stopped[0]) <= 7
    output, steps = run(target, name, parts, **options)
    assert output == full
    if (family, name) == ("flan-t5", "speculative"):  # some steps accept different numbers of tokens in the rows
        assert any(len({len(ids) for ids in step.new_ids}) >= 3 for step in steps)
    assert run(target, name, parts, limits=Limits(COUNT, (stop,)), **options)[0] == stopped
    assert [run(target, name, parts, [source], **options)[0][0] for source in SOURCES[:2]] == full[:2]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.lossless])
def test_lossy_methods_run(make_parts: Callable[..., Parts], name: str) -> None:
    output, _ = run(scorer("t5"), name, make_parts("t5"))
    assert [len(ids) for ids in output] == [COUNT] * len(SOURCES)


def test_the_source_is_encoded_once(make_parts: Callable[..., Parts]) -> None:
    model = build("flan-t5")
    target, calls = wrap_model(model), []
    for module in (model.encoder, *(block.layer[1].EncDecAttention.k for block in model.decoder.block)):
        module.register_forward_hook(lambda *_: calls.append(1))
    run(target, "speculative", make_parts("flan-t5"))
    assert len(calls) == 1 + 2


def test_a_folder_is_loaded_with_its_head(tmp_path: Path) -> None:
    for family in FAMILIES:
        model = build(family)
        model.save_pretrained(tmp_path / family)
        loaded = load_model(str(tmp_path / family))
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert isinstance(wrap_model(loaded), Seq2SeqModel)


def bart() -> PreTrainedModel:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCAB}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes, **heads))


def spread() -> PreTrainedModel:
    model = build("t5", untied=True)
    model.lm_head.to("meta")
    return model


def hooked() -> PreTrainedModel:
    model = build("t5")
    model.decoder.block[0].register_forward_hook(lambda module, inputs, output: (1.5 * output[0], *output[1:]))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bart, "'bart'.*t5, mt5, umt5"),
        (lambda: build("t5", decoder_start_token_id=None), "'t5'.*decoder_start_token_id.*None"),
        (spread, "cpu and meta"),
        (hooked, "'t5' model differs from its family"),
    ],
    ids=["another family", "no first token", "several devices", "more than its family does"],
)
def test_unsupported_models_are_refused(make: Callable[[], PreTrainedModel], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap_model(make())


def test_settings_for_decoders_only_are_refused(
    make_llama: Callable[..., LlamaForCausalLM], make_parts: Callable[..., Parts]
) -> None:
    decoder, encoder_decoder = wrap_model(make_llama(VOCAB)), scorer("t5")
    for target, drafter in ((decoder, encoder_decoder), (encoder_decoder, decoder)):
        with pytest.raises(ValueError, match="must both be"):
            run(target, "speculative", Parts(drafter=drafter))
    with pytest.raises(ValueError, match="attention: tree"):
        run(encoder_decoder, "multi-candidate", make_parts("t5"), attention="batch")
