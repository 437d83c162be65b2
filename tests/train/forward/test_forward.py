"""Forward passes of packed blocks with every attention kernel, including flash kernels and FlexAttention."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch
from draftsmith.decode.models.final_norm import final_norm
from draftsmith.decode.models.loading import wrap_model
from draftsmith.train.forward.attention import NAME, documents_attention
from draftsmith.train.forward.packed import PackedForward, has_plain_head, make_forward
from draftsmith.train.tasks.drafter import DrafterTask
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

# The name makes transformers treat it as a flash kernel, which gets document boundaries instead of a mask.
REFERENCE = "flash_reference"
COMMON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = COMMON | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "opt": COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "gpt_neox": COMMON | {"intermediate_size": 24, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "phi": LLAMA | {"num_key_value_heads": 2},  # its output projection has a bias
}


ALL_FAMILIES = FAMILIES | {
    "mistral": LLAMA | {"sliding_window": 5},  # shorter than the blocks
    "gemma2": LLAMA | {"sliding_window": 5, "final_logit_softcapping": 3.0, "pad_token_id": 0},
    "cohere": LLAMA | {"logit_scale": 0.3, "pad_token_id": 0},
}


def flash_reference(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within the documents given by `cu_seq_lens_q`; without it, each row is one document."""
    assert attention_mask is None, "flash kernels do not accept a mask"
    borders = options.pop("cu_seq_lens_q", torch.tensor([0, query.shape[2]], dtype=torch.int32))
    assert borders.dtype == torch.int32, "flash kernels require int32"
    if len(borders) > 2:
        assert len(query) == 1
        assert options["max_length_q"] == int(borders.diff().max())
    row = list(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True))
    supported = {name: options[name] for name in ("dropout", "scaling") if name in options}
    return documents_attention(module, query, key, value, None, spans=[row] * len(query), **supported)


@pytest.fixture
def reference() -> Iterator[str]:
    """Register the reference kernel with transformers during a test."""
    AttentionInterface.register(REFERENCE, flash_reference)
    AttentionMaskInterface.register(REFERENCE, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    yield REFERENCE
    AttentionInterface._global_mapping.pop(REFERENCE)
    AttentionMaskInterface._global_mapping.pop(REFERENCE)


def build(family: str, attention: str, **overrides: Any) -> Any:
    config = AutoConfig.for_model(family, **(ALL_FAMILIES[family] | overrides))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.config._attn_implementation = attention
    return model


@pytest.mark.parametrize("kernel", [REFERENCE, "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_kernel_equals_masked_attention(
    worker: ModuleType, reference: str, family: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.train.forward.packed._MAX_PAIR_SHARE", 1.0)
    batch = worker.make_data(4, length=21).batch(range(4))
    real = (batch.documents_BT >= 0)[..., None]
    outputs, gradients = [], []
    for attention in ("eager", kernel):
        model = build(family, attention)
        forward = PackedForward(model)
        assert forward.by_document == (attention == "sdpa"), "the test must compare two kernels"
        used = NAME if attention == "sdpa" else attention
        assert model.config._attn_implementation == used, "the check must restore the kernel"
        output_BTX = forward(batch) * real
        assert output_BTX.shape[:2] == (4, 21)
        output_BTX.pow(2).sum().backward()
        outputs.append(output_BTX)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_model_is_checked_on_the_cpu_before_its_kernel_is_used() -> None:
    kernel = "flash_attention_2"
    model = build("llama", kernel)
    assert make_forward(model).weight_VD() is model.lm_head.weight
    assert model.config._attn_implementation == kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_real_kernels_equal_masked_attention(worker: ModuleType, family: str) -> None:
    pytest.importorskip("flash_attn")
    kernel = "flash_attention_2"
    batch = worker.make_data(3, length=40).batch(range(3)).to("cuda")
    width = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64}
    width |= {"head_dim": 32} if family == "llama" else {}
    outputs = []
    for attention in ("eager", kernel):
        forward = PackedForward(build(family, attention, **width).to("cuda", torch.bfloat16))
        outputs.append(forward(batch)[batch.documents_BT >= 0].float())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.1, atol=0.1 * float(outputs[0].detach().abs().max()))


def test_a_model_that_passes_no_arguments_to_attention_is_refused(reference: str) -> None:
    model = build("llama", reference)
    forward = model.model.forward

    def without(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, use_cache: bool = True) -> Any:
        return forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)

    model.model.forward = without
    with pytest.raises(ValueError, match="passes no arguments to its attention, so flash_reference"):
        make_forward(model)


@pytest.mark.parametrize("family", ["opt", "gpt_neox"])
def test_a_model_with_a_flash_kernel_decodes_with_masks(reference: str, family: str) -> None:
    prompt = torch.tensor([[5, 9, 2, 7]])
    logits = []
    for attention in ("eager", reference):
        model = build(family, attention)
        scorer = wrap_model(model, check=False)
        cache = scorer.new_cache(1, 8)
        with torch.inference_mode():
            logits.append(scorer.logits(scorer.extend(cache, prompt)))
        assert model.config._attn_implementation == attention
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_model_may_be_wrapped_by_peft(worker: ModuleType) -> None:
    peft = pytest.importorskip("peft")
    wrapper = peft.get_peft_model(
        build("llama", "sdpa"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    batch = worker.make_data(3).batch(range(3))
    forward = make_forward(wrapper)
    assert forward.weight_VD() is wrapper.get_base_model().lm_head.weight
    real = batch.documents_BT >= 0
    expected = wrapper.base_model.model.model(
        batch.tokens_BT, attention_mask=batch.attention_mask_B1TT(), position_ids=batch.positions_BT
    ).last_hidden_state
    torch.testing.assert_close(forward(batch)[real], expected[real], rtol=1e-4, atol=1e-4)
    before = PackedForward(wrapper, "before-norm")
    torch.testing.assert_close(before.after_norm(before.hidden(batch))[real], expected[real], rtol=1e-4, atol=1e-4)
    wrapper.disable_adapter_layers()
    assert not torch.allclose(forward(batch)[real], expected[real], atol=1e-2), "the adapter had no effect"


WITH_NORM = {family: {} for family in FAMILIES} | {"opt": {"word_embed_proj_dim": 16}}


def entering(norm: torch.nn.Module, model: Any, **inputs: Any) -> torch.Tensor:
    """Run the forward pass of a model and return the input of a norm."""
    inputs_of_norm: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda module, args: inputs_of_norm.append(args[0]))
    model(**inputs, use_cache=False)
    handle.remove()
    return inputs_of_norm[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager", REFERENCE])
@pytest.mark.parametrize("family", WITH_NORM)
def test_pre_norm_states_equal_the_input_of_the_norm(
    worker: ModuleType, reference: str, family: str, attention: str
) -> None:
    assert reference == REFERENCE
    batch = worker.make_data(4, length=21).batch(range(4))
    model = build(family, attention, **WITH_NORM[family])
    forward, after = PackedForward(model, "before-norm"), PackedForward(model)
    assert forward.by_document == (attention == "sdpa")
    states_BTD = forward.hidden(batch)
    real = batch.documents_BT >= 0
    torch.testing.assert_close(forward.after_norm(states_BTD)[real], after.hidden(batch)[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(forward(batch)[real], after(batch)[real], rtol=1e-4, atol=1e-4)
    assert after.after_norm(states_BTD) is states_BTD
    norm = final_norm(model.base_model)
    assert not norm._forward_pre_hooks
    model.config._attn_implementation = "eager"
    for row, documents_T in enumerate(batch.documents_BT):
        for document in documents_T[documents_T >= 0].unique():
            inside = documents_T == document
            alone_1TD = entering(norm, model, input_ids=batch.tokens_BT[row : row + 1, inside])
            torch.testing.assert_close(states_BTD[row, inside], alone_1TD[0], rtol=1e-3, atol=1e-3)


def test_states_are_normed_in_the_dtype_of_the_model(worker: ModuleType) -> None:
    batch = worker.make_data(2).batch(range(2))
    forward = PackedForward(build("gpt_neox", "sdpa"), "before-norm")
    with torch.no_grad():
        states_BTD = forward.hidden(batch)
        normed_BTD = forward.after_norm(states_BTD.bfloat16())  # the dtype of a cache
        torch.testing.assert_close(normed_BTD, forward.after_norm(states_BTD), rtol=0.05, atol=0.05)


def test_other_calls_of_the_model_are_unaffected(worker: ModuleType) -> None:
    model = worker.make_model().eval()
    tokens_BT = torch.arange(20).reshape(2, 10)
    padding_BT = torch.ones(2, 10, dtype=torch.long)
    padding_BT[1, :4] = 0
    with torch.no_grad():
        before = [model(tokens_BT).logits, model(tokens_BT, attention_mask=padding_BT).logits]
        before.append(model.generate(tokens_BT, max_new_tokens=6, do_sample=False))
        PackedForward(model)
        assert model.config._attn_implementation == NAME
        after = [model(tokens_BT).logits, model(tokens_BT, attention_mask=padding_BT).logits]
        after.append(model.generate(tokens_BT, max_new_tokens=6, do_sample=False))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)
    assert "attn_implementation" not in model.config.to_json_string()


def test_unsupported_models_are_unchanged() -> None:
    for model in (build("qwen2", "sdpa", use_sliding_window=True, sliding_window=8), build("llama", "eager")):
        implementation = model.config._attn_implementation
        forward = PackedForward(model)
        assert not forward.by_document
        assert model.config._attn_implementation == implementation


def documents_alone(model: Any, batch: Batch) -> list[tuple[int, torch.Tensor, list[int]]]:
    """Run each document separately; return its row, logits [T, V] and labels."""
    results = []
    for row in range(batch.tokens_BT.shape[0]):
        for number in batch.documents_BT[row].unique().tolist():
            inside = batch.documents_BT[row] == number
            if number >= 0:
                logits = model(batch.tokens_BT[row][inside][None]).logits[0]
                results.append((row, logits, batch.labels_BT[row][inside].tolist()))
    return results


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_packed_documents_have_the_loss_of_separate_ones(worker: ModuleType, family: str, attention: str) -> None:
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("Gemma 2's capped attention has no sdpa kernel")
    model = build(family, attention)
    batch = worker.make_data(3, length=24).batch(range(3))
    assert has_plain_head(model) == (family not in ("gemma2", "phi", "cohere"))
    task = DrafterTask(model, None)
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = 0.0, 0
    with torch.no_grad():
        for _, logits_TV, labels in documents_alone(model, batch):
            for position, label in enumerate(labels[1:]):
                if label != -100:
                    expected -= float(logits_TV[position].log_softmax(-1)[label])
                    items += 1
    assert int(count) == items == int(task.count(batch))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_blocks_but_not_documents_may_exceed_the_learned_positions(worker: ModuleType, family: str) -> None:
    limit = {"max_position_embeddings": 8} if family == "opt" else {"n_positions": 8}
    model = build(family, "sdpa", **limit)
    rows = torch.arange(32).reshape(2, 16) % 32
    documents = torch.tensor([[0] * 7 + [1] * 8 + [-1], [2] * 6 + [-1] * 10])
    positions = torch.tensor([[*range(7), *range(8), 0], [*range(6), *range(10)]])
    labels = torch.where(documents >= 0, rows, -100)
    for chosen in ([0, 1], [1]):  # with several documents per row, and with one
        batch = Batch(rows, labels, positions, documents).rows(np.array(chosen))
        output = PackedForward(model)(batch)
        assert output.isfinite().all()
        for row, logits, _ in documents_alone(model, batch):
            head = model.get_output_embeddings()
            inside = batch.documents_BT[row]
            number = next(n for n in inside.unique().tolist() if n >= 0 and int((inside == n).sum()) == len(logits))
            torch.testing.assert_close(head(output[row][inside == number]), logits, atol=1e-4, rtol=1e-4)
    too_long = Batch(rows[:1], rows[:1], torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"a document has 16 tokens, but .* 8 positions"):
        PackedForward(model)(too_long)
