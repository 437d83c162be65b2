"""Pre-norm hidden states: values, unchanged logits and tokens, and unsupported models.

Shape letters: B batch, M and N tokens, K heads, D hidden, V vocabulary.
"""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode import method
from draftsmith.decode.custom_generate import method as drop_in
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel, TransformersModel
from draftsmith.decode.models.final_norm import final_norm, module_inputs
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.head_trees import attach_projection
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VOCAB = 50
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = COMMON | {"intermediate_size": 48, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY | {"num_key_value_heads": 2},
    "opt": COMMON | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "gpt_neox": ROTARY,
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma2": ROTARY | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64},
}
NORMS = {
    "llama": "norm",
    "opt": "decoder.final_layer_norm",
    "gpt_neox": "final_layer_norm",
    "gpt2": "ln_f",
    "gemma2": "norm",
}
SCORERS = [("llama", True), *((family, False) for family in FAMILIES)]
PROMPTS = [[5, 9, 3, 7, 1], [8], [0, 11, 0, 39, 2, 4, 17, 1]]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def build(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a random model with peaked logits, whose norms have random weights and biases."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(FAMILIES[family] | overrides))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config.eos_token_id = None
    return model


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@torch.inference_mode()
def tree_states(scorer: LanguageModel) -> tuple[Tensor, Tensor]:
    """Return the hidden states and the logits of a ragged batch of two trees."""
    tree = Tree.k_ary((2, 2, 1))
    tokens_BN = torch.randint(1, VOCAB, (2, tree.nodes), generator=torch.Generator().manual_seed(1))
    cache = scorer.new_cache(2, 32)
    scorer.extend(cache, torch.tensor([[5, 9, 3], [8, 0, 0]]))
    cache.set_lengths([3, 1])
    hidden_BND = scorer.extend(cache, tokens_BN, tree)
    return hidden_BND, scorer.logits(hidden_BND)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("family", "fast"), SCORERS)
@torch.inference_mode()
def test_the_norm_maps_pre_norm_to_post_norm_states(family: str, fast: bool, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    before, after = (wrap_model(model, fast=fast, states=f"{position}-norm") for position in ("before", "after"))
    assert (before.states, after.states) == ("before-norm", "after-norm")
    assert isinstance(before, LeanDecoder if fast else TransformersModel)
    (before_BND, logits_BNV), (after_BND, wanted_BNV) = tree_states(before), tree_states(after)
    norm = final_norm(model.base_model)
    assert norm is model.base_model.get_submodule(NORMS[family])
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(norm(before_BND), after_BND, **tolerance)
    torch.testing.assert_close(logits_BNV, wanted_BNV, **tolerance)
    assert (before_BND - after_BND).abs().max() > 0.3
    assert hooks(model) == 0


def run(target: LanguageModel, name: str, parts: Parts, temperature: float = 0.0, **options: Any) -> list[list[int]]:
    sampling = Sampling(temperature)
    rng = Rng.for_rows(3, len(PROMPTS), target.device)
    chosen = build_method(name, parts, sampling, **options)
    return decode_texts(target, *chosen, PROMPTS, Limits(20), sampling, rng)


@pytest.mark.parametrize(("family", "fast"), SCORERS)
def test_medusa_on_pre_norm_states_is_lossless(family: str, fast: bool) -> None:
    model = build(family)
    residuals: list[Tensor] = []
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    handle = layers[-1].register_forward_hook(
        lambda module, args, output: residuals.append(output if isinstance(output, Tensor) else output[0])
    )
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[0][:-1]]))
    handle.remove()
    weight_VD = model.get_output_embeddings().weight.detach()
    heads, inputs = PredictionHeads.from_lm_head(weight_VD, 3, 1, states="before-norm").eval(), list[Tensor]()
    heads.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    target = wrap_model(model, fast=fast, states="before-norm")
    expected = run(wrap_model(model, fast=fast), "autoregressive", Parts())
    assert run(target, "medusa", Parts(heads=heads), tree="2x2x1") == expected
    torch.testing.assert_close(inputs[0][0], residuals[0][0, -1], rtol=1e-4, atol=1e-4)


def test_calls_of_other_threads_are_ignored() -> None:
    norm = torch.nn.LayerNorm(4)
    own_input, other_input = torch.randn(2, 4), torch.randn(3, 4)
    with module_inputs([norm]) as captured:
        norm(own_input)
        thread = threading.Thread(target=norm, args=(other_input,))
        thread.start()
        thread.join()
        assert captured[0] is own_input
        with module_inputs([norm]) as inner:
            norm(other_input)
        assert inner[0] is other_input
    assert hooks(norm) == 0


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "a projection behind the norm": ("opt", {"word_embed_proj_dim": 16}),
    "no norm": ("opt", {"_remove_final_layer_norm": True}),
    "norms behind the layers": ("opt", {"do_layer_norm_before": False}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_models_without_a_final_norm_are_refused(case: str) -> None:
    family, overrides = REFUSALS[case]
    model = build(family, **overrides)
    with pytest.raises(ValueError, match=f"'{family}'"):
        wrap_model(model, fast=False, states="before-norm")
    with pytest.raises(ValueError, match=f"'{family}'"):
        final_norm(model.base_model)
    assert wrap_model(model, fast=False).states == "after-norm"
    assert hooks(model) == 0


def test_unknown_states_and_encoder_decoders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'before'.*after-norm, before-norm"):
        wrap_model(build("llama"), states="before")
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="'t5'"):
        wrap_model(AutoModelForSeq2SeqLM.from_config(config), states="before-norm")


@pytest.mark.parametrize("name", ["medusa", "slim-s"])
def test_heads_refuse_a_target_with_other_states(name: str) -> None:
    model = build("llama")
    heads = PredictionHeads.from_lm_head(model.lm_head.weight.detach(), 4, 0, states="before-norm")
    table = BigramTable.from_documents([torch.arange(VOCAB).numpy()], VOCAB)
    with pytest.raises(ValueError, match=r"before-norm.*after-norm"):
        run(wrap_model(model), name, Parts(heads=heads, table=table))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate_wraps_the_target_with_the_heads_states(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    settings = {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": 20}
    expected = model.generate(**settings).tolist()
    weight_VD = model.get_output_embeddings().weight.detach()
    save_heads(PredictionHeads.from_lm_head(weight_VD, 3, 1, states="before-norm"), tmp_path / "before", "target")
    save_heads(PredictionHeads.from_lm_head(weight_VD, 3, 1), tmp_path / "after", "target")
    wrapped: list[str] = []
    wrap = drop_in.wrap_model

    def record_and_wrap(model: PreTrainedModel, **options: Any) -> LanguageModel:
        if options.get("check", True):
            wrapped.append(options["states"])
        return wrap(model, **options)

    monkeypatch.setattr(drop_in, "wrap_model", record_and_wrap)
    before, after = (method("medusa", heads=tmp_path / name, tree="2x1") for name in ("before", "after"))
    for custom, states in (
        (method("prompt-lookup"), ["after-norm"]),
        (after, []),
        (before, ["before-norm"]),
        (method("prompt-lookup"), []),  # only uses logits
        (before, []),
        (after, ["after-norm"]),
    ):
        wrapped.clear()
        assert model.generate(custom_generate=custom, **settings).tolist() == expected
        assert wrapped == states
    assert hooks(model) == 0
    model.generate(custom_generate=before, **settings)
    reference = weakref.ref(model)
    del model, weight_VD
    gc.collect()
    assert reference() is None


def test_heads_without_a_projection_use_the_targets() -> None:
    model = build("llama")
    settings = {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": 20}
    heads = PredictionHeads(3, 1, 32, None, projection="target").eval()
    custom = method("medusa", heads=heads, tree="2x1")
    assert model.generate(custom_generate=custom, **settings).tolist() == model.generate(**settings).tolist()
    assert heads.projection(0).data_ptr() == model.lm_head.weight.data_ptr()
    other = build("llama", vocab_size=40)
    with pytest.raises(ValueError, match=r"\[50, 32\].*\[40, 32\]"):
        other.generate(custom_generate=custom, **settings)
    complete = PredictionHeads(3, 1, 32, VOCAB).eval()
    attach_projection(complete, model, model.device)
    attach_projection(None, model, model.device)
    with pytest.raises(ValueError, match="offloaded"):
        attach_projection(heads, build("llama").to("meta"), model.device)
