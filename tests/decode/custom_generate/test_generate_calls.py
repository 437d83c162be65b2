"""What `model.generate` asks for is done as it would be done there, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.decode import method
from draftsmith.decode.custom_generate import method as drop_in
from draftsmith.decode.warpers import Sampling
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 64
PAD = 63
ONE = torch.tensor([[1, 2, 3]])
PADDED = torch.tensor([[PAD, PAD, 1, 2, 3], [9, 8, 7, 6, 5], [PAD, PAD, PAD, PAD, 11]])
MASK = (PADDED != PAD).long()
BATCH = {"inputs": PADDED, "attention_mask": MASK, "pad_token_id": PAD}


class Recorder:
    """A streamer that keeps what is put into it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


class Divisible(StoppingCriteria):
    """Ends a row with the first new token that a number divides, and keeps what it was shown."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), scores))
        return input_ids[:, -1] % self.number == 0


def check_same(model: Any, custom: drop_in.CustomGenerate, **asked: Any) -> torch.Tensor:
    """What `generate` gives with and without the method is the same tensor, which is returned."""
    wanted = model.generate(**asked)
    output = model.generate(custom_generate=custom, **asked)
    assert output.dtype == wanted.dtype
    assert output.tolist() == wanted.tolist()
    return output


def test_rows_end_with_their_end_token_and_are_padded(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    plain = target.generate(**BATCH, max_new_tokens=20)[:, 5:]
    ends = [int(plain[0, 6]), int(plain[1, 11]), int(plain[2, 3])]
    output = check_same(target, speculative, **BATCH, max_new_tokens=20, eos_token_id=ends)
    assert (output[:, 5:] == PAD).any()
    assert output.shape[1] < 25
    check_same(target, speculative, **BATCH, max_new_tokens=20, eos_token_id=ends[0])
    check_same(target, speculative, **BATCH, max_length=11, eos_token_id=ends[0])
    check_same(target, speculative, **(BATCH | {"pad_token_id": None}), max_new_tokens=20, eos_token_id=ends)
    check_same(target, speculative, inputs=ONE, max_new_tokens=1, eos_token_id=ends[1])


@pytest.mark.parametrize("eos_token_id", [None, 17])
def test_criteria_see_what_they_see_in_plain_generate(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate, eos_token_id: int | None
) -> None:
    rules = [Divisible(3), Divisible(3)]
    asked = BATCH | {"max_new_tokens": 40, "eos_token_id": eos_token_id}
    wanted = target.generate(**asked, stopping_criteria=[rules[0]])
    output = target.generate(**asked, stopping_criteria=[rules[1]], custom_generate=speculative)
    assert output.tolist() == wanted.tolist()
    assert output.shape[1] < 45
    assert rules[0].seen == rules[1].seen
    alone = target.generate(ONE, max_new_tokens=40, stopping_criteria=[Divisible(3)], custom_generate=speculative)
    assert alone[0, -1] % 3 == 0


def test_time_ends_decoding(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    output = check_same(target, speculative, inputs=ONE, max_new_tokens=20, max_time=1e-9)
    assert output.shape[1] == 4


def test_streamers_are_put_what_plain_generate_puts(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    for asked in ({"inputs": ONE}, BATCH | {"eos_token_id": [17, 3, 5]}):
        plain, mine = Recorder(), Recorder()
        target.generate(**asked, max_new_tokens=12, streamer=plain)
        target.generate(**asked, max_new_tokens=12, streamer=mine, custom_generate=speculative)
        assert mine.seen == plain.seen
        assert mine.seen[-1] == "end"


def test_a_streamer_is_fed_step_by_step(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    class Impatient(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.seen) == 4:
                raise KeyboardInterrupt

    streamer = Impatient()
    with pytest.raises(KeyboardInterrupt):
        target.generate(ONE, max_new_tokens=200, streamer=streamer, custom_generate=speculative)
    assert len(streamer.seen) == 4


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({}, Sampling()),
        ({"do_sample": True}, Sampling(1.0, 50)),
        ({"do_sample": True, "top_k": 0}, Sampling(1.0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}, Sampling(0.7, 5, 0.9)),
        ({"do_sample": True, "top_k": 0, "top_p": 0.5, "renormalize_logits": True}, Sampling(1.0, 0, 0.5)),
        ({"logits_processor": [TopKLogitsWarper(3)]}, Sampling()),
        ({"do_sample": True, "top_k": 0, "logits_processor": [TopKLogitsWarper(3)]}, Sampling(1.0, 3)),
    ],
)
def test_warping_is_that_of_generate(
    target: LlamaForCausalLM,
    speculative: drop_in.CustomGenerate,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    sampling: Sampling,
) -> None:
    seen = []
    build = drop_in.build_method
    monkeypatch.setattr(
        drop_in, "build_method", lambda name, parts, how, **rest: seen.append(how) or build(name, parts, how, **rest)
    )
    target.generate(ONE, max_new_tokens=3, custom_generate=speculative, **asked)
    assert seen == [sampling]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beam_search.*num_beams"),
    ({"prompt_lookup_num_tokens": 3}, "assisted_generation.*prompt_lookup_num_tokens"),
    ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor.*generation_config"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
    ({"bad_words_ids": [[3]]}, "NoBadWordsLogitsProcessor"),
    ({"min_new_tokens": 4, "eos_token_id": 5}, "MinLengthLogitsProcessor"),
    ({"min_length": 7, "eos_token_id": 5}, "MinLengthLogitsProcessor"),
    ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
    ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
    ({"suppress_tokens": [4]}, "SuppressTokensLogitsProcessor"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "PrefixConstrainedLogitsProcessor"),
    ({"logits_processor": [MinPLogitsWarper(0.1)]}, "MinPLogitsWarper"),
    ({"do_sample": True, "logits_processor": [TopKLogitsWarper(3)]}, "top_k, then top_k.*once each, in this order"),
    ({"do_sample": True, "logits_processor": [TopPLogitsWarper(0.5)]}, "top_p, then top_k"),
    ({"logits_processor": [TopKLogitsWarper(3, filter_value=-9.0)]}, "filter_value.*TopKLogitsWarper"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    ({"past_key_values": DynamicCache()}, "past_key_values"),
    ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
    ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"stopping_criteria": [EosTokenCriteria(5)]}, "eos_token_id alone: give pad_token_id"),
    ({"attention_mask": torch.tensor([[1, 1, 0]])}, r"padding that is not on the left \(row 0\).*padding_side"),
    ({"attention_mask": torch.tensor([[0, 0, 0]])}, "prompt 0 has no tokens"),
    ({"max_length": 255}, "252 new ones and a look-ahead of 3.*target has 256"),
]


@pytest.mark.parametrize(
    ("asked", "message"), REFUSED, ids=lambda value: "+".join(value) if type(value) is dict else ""
)
def test_what_it_cannot_do_is_refused_by_name(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        target.generate(input_ids=ONE, custom_generate=speculative, **({"max_length": 7} | asked))


def test_models_that_cannot_be_decoded_so_are_refused(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    def decode(**asked: Any) -> None:
        target.generate(ONE, custom_generate=speculative, max_new_tokens=3, **asked)

    with pytest.raises(ValueError, match=r"assistant_model.*`drafter` of the method"):
        decode(assistant_model=drafter)
    target.train()
    with pytest.raises(ValueError, match=r"the target is in training mode.*eval\(\)"):
        decode()
    target.eval()
    drafter.train()
    with pytest.raises(ValueError, match="the drafter is in training mode"):
        decode()
    drafter.eval()
    elsewhere = SimpleNamespace(device=torch.device("meta"), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="the drafter is on cpu, the target on meta"):
        speculative.drafters[0].scorer(elsewhere)
    config = GenerationConfig(cache_implementation="quantized")
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        speculative(target, ONE, logits_processor=[], stopping_criteria=[], generation_config=config)
    next(target.parameters()).ds_id = 0  # what ZeRO-3 leaves of a parameter
    with pytest.raises(ValueError, match="ZeRO-3"):
        decode()


def test_encoder_decoders() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    source = torch.tensor([[5, 6, 7, 1], [9, 1, 0, 0]])
    asked = {"attention_mask": (source > 0).long(), "max_new_tokens": 12}
    custom = method("prompt-lookup")
    check_same(model, custom, inputs=source, **asked)
    check_same(model, custom, inputs=source.flip(1), **asked | {"attention_mask": (source.flip(1) > 0).long()})
    rows = model.generate(source, **asked, custom_generate=custom, do_sample=True, num_return_sequences=2)
    assert len(rows) == 4
    output = model.generate(source, **asked, custom_generate=custom, return_dict_in_generate=True)
    assert type(output).__name__ == "GenerateEncoderDecoderOutput"
    encoded = model.encoder(source, attention_mask=asked["attention_mask"])
    with pytest.raises(ValueError, match=r"encoder_outputs.*reads the source as input_ids"):
        model.generate(encoder_outputs=encoded, **asked, custom_generate=custom)
    with pytest.raises(ValueError, match="decoder_input_ids"):
        model.generate(source, decoder_input_ids=torch.tensor([[0, 4], [0, 5]]), **asked, custom_generate=custom)
