"""Methods inside `model.generate`: supported settings give the same result, and errors name unsupported ones."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode import method
from draftsmith.decode.custom_generate import method as drop_in
from draftsmith.decode.warpers import Sampling
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EosTokenCriteria,
    LlamaForCausalLM,
    StoppingCriteria,
    TopKLogitsWarper,
)

VOCAB = 64
PAD = 63
ONE = torch.tensor([[1, 2, 3]])
PADDED = torch.tensor([[PAD, PAD, 1, 2, 3], [9, 8, 7, 6, 5], [PAD, PAD, PAD, PAD, 11]])
MASK = (PADDED != PAD).long()
BATCH = {"inputs": PADDED, "attention_mask": MASK, "pad_token_id": PAD}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "transformers.md"


def check_same(model: Any, custom: drop_in.CustomGenerate, **settings: Any) -> torch.Tensor:
    """Check that `generate` returns the same output with and without `custom`, and return the output."""
    expected = model.generate(**settings)
    output = model.generate(custom_generate=custom, **settings)
    assert output.dtype == expected.dtype
    assert output.tolist() == expected.tolist()
    return output


class Recorder:
    """Streamer that records its input."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


class Divisible(StoppingCriteria):
    """Stopping criterion that ends a row at a token divisible by a number, and records its input."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), scores))
        return input_ids[:, -1] % self.number == 0


@pytest.mark.parametrize("inputs", [{"inputs": ONE}, BATCH], ids=["one", "padded"])
@pytest.mark.parametrize("name", ["autoregressive", "speculative", "multi-candidate", "prompt-lookup", "slim-s", "bpd"])
def test_greedy_output_equals_generate(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    make_heads: Callable[..., Any],
    name: str,
    inputs: dict[str, Any],
) -> None:
    table = BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB, 2000)], VOCAB)
    custom = method(name, drafter=drafter, heads=make_heads(3, 32, VOCAB), table=table)
    output = check_same(target, custom, **inputs, max_new_tokens=20)
    assert output.shape[1] == inputs["inputs"].shape[1] + 20


def test_sampling_is_reproducible(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        settings = BATCH | {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2}
        outputs += [target.generate(**settings, custom_generate=speculative) for _ in range(2)]
    assert [output.shape for output in outputs] == [(6, 17)] * 6
    assert outputs[0].tolist() == outputs[2].tolist()
    assert outputs[1].tolist() == outputs[3].tolist()
    assert outputs[0].tolist() != outputs[1].tolist()
    assert outputs[0].tolist() != outputs[4].tolist()
    assert outputs[0][0].tolist() != outputs[0][1].tolist()  # two samples of one prompt
    assert outputs[0][:, :5].tolist() == PADDED.repeat_interleave(2, 0).tolist()


def test_the_output_can_be_a_dictionary(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    settings = BATCH | {"max_new_tokens": 6, "return_dict_in_generate": True}
    with torch.inference_mode():  # a model that is wrapped in inference mode also works outside of it
        expected, output = target.generate(**settings), target.generate(**settings, custom_generate=speculative)
    assert type(output) is type(expected)
    assert output.sequences.tolist() == expected.sequences.tolist()
    check_same(target, speculative, inputs=ONE, max_new_tokens=6)


def test_prompt_tuning_is_refused_and_adapters_are_applied(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": ONE, "max_new_tokens": 12}
    before = check_same(target, speculative, **inputs)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(target, settings).eval()
    assert check_same(adapted, speculative, **inputs).tolist() != before.tolist()
    with adapted.disable_adapter():
        assert check_same(adapted, speculative, **inputs).tolist() == before.tolist()
    merged = adapted.merge_and_unload()
    assert check_same(merged, speculative, **inputs).tolist() != before.tolist()
    tuned = peft.get_peft_model(merged, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    with pytest.raises(ValueError, match="prompt tuning"):
        tuned.generate(**inputs, custom_generate=speculative)


def test_artifacts_must_fit_the_target(
    target: LlamaForCausalLM, make_llama: Callable[..., LlamaForCausalLM], make_heads: Callable[..., Any]
) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("speculative", {}, "drafter"),
        ("slim-s", {"heads": make_heads(3, 32, VOCAB)}, "table"),
        ("speculative", {"drafter": torch.nn.Linear(1, 1)}, "Linear"),
        ("speculative", {"drafter": "./nowhere"}, r"\./nowhere"),
        ("medusa", {"heads": "nowhere"}, "'nowhere'"),
        ("speculative", {"drafter": make_llama(32)}, "32 .*64"),
        ("bigram", {"table": BigramTable.from_documents([np.arange(9)], 32)}, "table has 32 .*64"),
        ("medusa", {"heads": PredictionHeads(4, 0, 16, VOCAB)}, "size 16.*32"),
        ("medusa", {"heads": PredictionHeads(4, 0, 32, VOCAB).double()}, "float64.*float32"),
    ]
    for name, parts, message in cases:
        with pytest.raises(ValueError, match=message):
            target.generate(ONE, custom_generate=method(name, **parts), max_new_tokens=3)


def test_a_model_is_wrapped_once(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = []
    wrap = drop_in.wrap_model
    monkeypatch.setattr(drop_in, "wrap_model", lambda model, **options: wrapped.append(model) or wrap(model, **options))
    for _ in range(2):
        check_same(target, method("speculative", drafter=drafter), inputs=ONE, max_new_tokens=6)
    assert wrapped == [target, drafter]


def stepped(model: LlamaForCausalLM, up: torch.Tensor) -> None:
    model(ONE, labels=ONE).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


def loaded(model: LlamaForCausalLM, up: torch.Tensor) -> None:
    model.load_state_dict({name: weight.roll(1, 0) for name, weight in model.state_dict().items()}, assign=True)


def assigned(model: LlamaForCausalLM, up: torch.Tensor) -> None:
    model.lm_head.weight.data = torch.randn(VOCAB, 32)


CHANGES: dict[str, Callable[[LlamaForCausalLM, torch.Tensor], Any]] = {
    "in place": lambda model, up: up.mul_(-1),
    "an optimizer": stepped,
    "load_state_dict, assigned": loaded,
    "other data": assigned,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_used(target: LlamaForCausalLM, change: str) -> None:
    settings = {"inputs": ONE, "max_new_tokens": 40}
    before = check_same(target, method("autoregressive"), **settings).tolist()
    context = torch.enable_grad() if change == "an optimizer" else torch.no_grad()
    with context:
        CHANGES[change](target, target.model.layers[0].mlp.up_proj.weight)
    after = check_same(target, method("autoregressive"), **settings).tolist()
    assert after != before


def test_changed_heads_are_used(target: LlamaForCausalLM) -> None:
    heads, states = PredictionHeads.from_lm_head(torch.randn(VOCAB, 32), 2, 1).eval(), torch.randn(5, 32)
    custom = method("bpd", heads=heads)
    target.generate(ONE, custom_generate=custom, max_new_tokens=4)
    for weight in heads.parameters():
        weight.data.add_(1.0)
    target.generate(ONE, custom_generate=custom, max_new_tokens=4)
    with torch.no_grad():
        stacked = heads(states)
    torch.testing.assert_close(stacked, heads(states).detach())  # the heads use no copies if gradients are enabled


def test_compiled_models_are_unwrapped(target: LlamaForCausalLM, drafter: LlamaForCausalLM) -> None:
    compiled = method("speculative", drafter=torch.compile(drafter), gamma=3)
    check_same(target, compiled, inputs=ONE, max_new_tokens=12)
    check_same(torch.compile(target), compiled, inputs=ONE, max_new_tokens=12)


def test_rows_end_with_their_end_token_and_are_padded(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    full = target.generate(**BATCH, max_new_tokens=20)[:, 5:]
    ends = [int(full[0, 6]), int(full[1, 11]), int(full[2, 3])]
    output = check_same(target, speculative, **BATCH, max_new_tokens=20, eos_token_id=ends)
    assert (output[:, 5:] == PAD).any()
    assert output.shape[1] < 25
    check_same(target, speculative, **BATCH, max_length=11, eos_token_id=ends[0])
    check_same(target, speculative, **(BATCH | {"pad_token_id": None}), max_new_tokens=20, eos_token_id=ends)
    check_same(target, speculative, inputs=ONE, max_new_tokens=1, eos_token_id=ends[1])


@pytest.mark.parametrize("eos_token_id", [None, 17])
def test_criteria_get_the_same_input_as_in_generate(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate, eos_token_id: int | None
) -> None:
    rules = [Divisible(3), Divisible(3)]
    settings = BATCH | {"max_new_tokens": 40, "eos_token_id": eos_token_id}
    expected = target.generate(**settings, stopping_criteria=[rules[0]])
    output = target.generate(**settings, stopping_criteria=[rules[1]], custom_generate=speculative)
    assert output.tolist() == expected.tolist()
    assert output.shape[1] < 45
    assert rules[0].seen == rules[1].seen
    single = target.generate(ONE, max_new_tokens=40, stopping_criteria=[Divisible(3)], custom_generate=speculative)
    assert single[0, -1] % 3 == 0


def test_streamers_get_the_same_input_as_in_generate(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    for settings in ({"inputs": ONE}, BATCH | {"eos_token_id": [17, 3, 5]}):
        reference, recorder = Recorder(), Recorder()
        target.generate(**settings, max_new_tokens=12, streamer=reference)
        target.generate(**settings, max_new_tokens=12, streamer=recorder, custom_generate=speculative)
        assert recorder.seen == reference.seen
        assert recorder.seen[-1] == "end"


@pytest.mark.parametrize(
    ("settings", "sampling"),
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
def test_warping_equals_generate(
    target: LlamaForCausalLM,
    speculative: drop_in.CustomGenerate,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    sampling: Sampling,
) -> None:
    calls = []
    build = drop_in.build_method
    monkeypatch.setattr(
        drop_in,
        "build_method",
        lambda name, parts, used, **more: calls.append(used) or build(name, parts, used, **more),
    )
    target.generate(ONE, max_new_tokens=3, custom_generate=speculative, **settings)
    assert calls == [sampling]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams"),
    ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
    ({"min_new_tokens": 4, "eos_token_id": 5}, "MinLengthLogitsProcessor"),
    ({"do_sample": True, "logits_processor": [TopKLogitsWarper(3)]}, "top_k, then top_k"),
    ({"logits_processor": [TopKLogitsWarper(3, filter_value=-9.0)]}, "filter_value.*TopKLogitsWarper"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"past_key_values": DynamicCache()}, "past_key_values"),
    ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
    ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"stopping_criteria": [EosTokenCriteria(5)]}, "pad_token_id"),
    ({"attention_mask": torch.tensor([[1, 1, 0]])}, r"row 0.*padding_side"),
    ({"max_length": 255}, "252 .*3 .*256"),
]


@pytest.mark.parametrize(("kwargs", "error"), REFUSED, ids=lambda value: "+".join(value) if type(value) is dict else "")
def test_unsupported_settings_are_refused_by_name(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate, kwargs: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        target.generate(input_ids=ONE, custom_generate=speculative, **({"max_length": 7} | kwargs))


def test_unsupported_models_are_refused(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    def decode(**settings: Any) -> None:
        target.generate(ONE, custom_generate=speculative, max_new_tokens=3, **settings)

    with pytest.raises(ValueError, match="assistant_model"):
        decode(assistant_model=drafter)
    target.train()
    with pytest.raises(ValueError, match="the target is in training mode"):
        decode()
    target.eval()
    drafter.train()
    with pytest.raises(ValueError, match="the drafter is in training mode"):
        decode()
    drafter.eval()
    next(target.parameters()).ds_id = 0  # attribute of a parameter that ZeRO-3 has partitioned
    with pytest.raises(ValueError, match="ZeRO-3"):
        decode()


def test_encoder_decoders() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    source = torch.tensor([[5, 6, 7, 1], [9, 1, 0, 0]])
    settings = {"attention_mask": (source > 0).long(), "max_new_tokens": 12}
    custom = method("prompt-lookup")
    check_same(model, custom, inputs=source, **settings)
    check_same(model, custom, inputs=source.flip(1), **settings | {"attention_mask": (source.flip(1) > 0).long()})
    rows = model.generate(source, **settings, custom_generate=custom, do_sample=True, num_return_sequences=2)
    assert len(rows) == 4
    output = model.generate(source, **settings, custom_generate=custom, return_dict_in_generate=True)
    assert type(output).__name__ == "GenerateEncoderDecoderOutput"
    encoded = model.encoder(source, attention_mask=settings["attention_mask"])
    with pytest.raises(ValueError, match="encoder_outputs"):
        model.generate(encoder_outputs=encoded, **settings, custom_generate=custom)
    with pytest.raises(ValueError, match="decoder_input_ids"):
        model.generate(source, decoder_input_ids=torch.tensor([[0, 4], [0, 5]]), **settings, custom_generate=custom)


@pytest.fixture
def quickstart(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """Write the folder of a finished quickstart with tiny models; return its parent folder."""
    folder = tmp_path / "runs" / "quickstart"
    text = ["The user asks and the assistant answers. What does the token do in the tree of the draft model?"]
    tokenizer = train_bpe(text, 280, SPECIALS)
    for seed, name in enumerate(("target", "drafter")):
        model = make_llama(280, seed=seed, num_hidden_layers=2 - seed, bos_token_id=0, eos_token_id=2)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return tmp_path


def test_the_example_of_the_documentation_runs(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(quickstart)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(compile(example, PAGE.name, "exec"), names)
    expected = names["model"].generate(**names["inputs"], max_new_tokens=64)
    assert names["output"].tolist() == expected.tolist()
    text = names["tokenizer"].decode(expected[0, names["inputs"]["input_ids"].shape[1] :])
    assert capsys.readouterr().out == text + "\n"
