"""Self-checks of forwards: planted faults are found and correct models are accepted, in every number format."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models import loading
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.finite import check_close, relative_rms
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.models.products.product import round_to_int8
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

COMMON = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = COMMON | {"intermediate_size": 48, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_key_value_heads": 2},
    "qwen2": WIDE | {"num_key_value_heads": 2},
    "gpt2": {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "stablelm": WIDE | {"partial_rotary_factor": 0.25, "num_key_value_heads": 4},
    "phi": WIDE | {"partial_rotary_factor": 0.5},
    "falcon": COMMON | {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "bias": False},
    "mixtral": WIDE | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": WIDE,
    "mpt": {"vocab_size": 120, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}
FORMATS = ("float32", "bfloat16", "float16", "int8")


def build(kind: str, form: str = "float32") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind])).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)
    if form == "int8":
        round_to_int8(model)
        return model
    return model.to(getattr(torch, form))


def see(node: int, visible: int, instead_of: int | None = None) -> Callable[[Any], None]:
    """Return a fault that lets a node attend to another node, optionally instead of an ancestor."""

    def plant(patch: Any) -> None:
        original = Tree.bias

        def bias(tree: Tree, start: int, stop: int) -> torch.Tensor:
            bias_BNn = original(tree, start, stop).clone()
            bias_BNn[:, node, visible] = 0.0
            if instead_of is not None:
                bias_BNn[:, node, instead_of] = -torch.inf
            return bias_BNn

        patch.setattr(Tree, "bias", bias)

    return plant


def move(by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a fault that applies `by` to the depths of a tree's nodes, which changes their positions."""

    def plant(patch: Any) -> None:
        original = Tree.from_parents

        def from_parents(parents_BN: torch.Tensor, max_depth: int) -> Tree:
            tree = original(parents_BN, max_depth)
            return Tree(tree.parents_BN, by(tree.depth_BN), tree.line_BNP, max_depth)

        patch.setattr(Tree, "from_parents", from_parents)

    return plant


def swap_slots(patch: Any) -> None:
    original = KVCache.write

    def write(cache: KVCache, layer: int, key: torch.Tensor, value: torch.Tensor, start: int) -> None:
        order = [0, 2, 1, 3] if key.shape[2] == 4 and swapping else slice(None)
        original(cache, layer, key[:, :, order], value[:, :, order], start)

    swapping: list[bool] = []
    extend = LanguageModel.extend

    def in_trees(model: Any, cache: Any, tokens: Any, tree: Any = None, *options: Any) -> Any:
        swapping[:] = [True] * (tree is not None)
        return extend(model, cache, tokens, tree, *options)

    patch.setattr(KVCache, "write", write)
    patch.setattr(LanguageModel, "extend", in_trees)


FAULTS: dict[str, Callable[[Any], None]] = {
    "a sibling is seen": see(2, 1),
    "a cousin is seen": see(3, 2),
    "another parent": see(3, 2, instead_of=1),
    "positions are slots": move(lambda depth_BN: torch.arange(depth_BN.shape[1])[None]),
    "positions off by one": move(lambda depth_BN: depth_BN + (depth_BN > 0)),
    "slots swapped": swap_slots,
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("mpt", "bert")])
def test_planted_faults_are_found_and_correct_models_accepted(kind: str, form: str) -> None:
    model = build(kind, form)
    assert wrap_model(model).tree_fault is None
    assert wrap_model(model, fast=False).tree_fault is None
    for name, plant in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            fault = wrap_model(model, fast=False).tree_fault
            assert fault is not None, name
            assert "do not support tree attention" in fault, name
            if name != "slots swapped" and type(wrap_model(model, check=False)).__name__ == "LeanDecoder":
                with pytest.raises(ValueError, match="do not support tree attention"):
                    wrap_model(model)


@pytest.mark.parametrize("form", FORMATS)
def test_a_chain_that_differs_from_the_model_is_refused(form: str) -> None:
    class Other(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 0.1 * output.logits.roll(1, -1)
            return output

    model = build("llama", form)
    model.__class__ = Other
    for fast in (True, False):
        with pytest.raises(ValueError, match=r"'llama' are not supported: logits .*relative RMS difference"):
            wrap_model(model, fast=fast)


@pytest.mark.parametrize("seed", range(3))
def test_the_tolerance_follows_the_effect_of_rounding(seed: int, make_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Deep models with sharp attention amplify rounding errors beyond any tolerance for shallow ones."""
    model = make_llama(200, seed, 3.0, num_hidden_layers=24, intermediate_size=48).bfloat16()
    wrap_model(model, fast=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_rounding", lambda model, text_1T: 0.0)
        with pytest.raises(ValueError, match="relative RMS difference"):
            wrap_model(model)
    wrap_model(model)


@pytest.mark.parametrize("vocab", [100, 150_000])
def test_the_measured_difference_does_not_grow_with_the_vocabulary(vocab: int) -> None:
    draws = torch.Generator().manual_seed(0)
    wanted_1V = torch.randn(1, vocab, generator=draws) + 30.0
    found_1V = wanted_1V + 0.03 * torch.randn(1, vocab, generator=draws)
    assert relative_rms(found_1V, wanted_1V) == pytest.approx(0.03, rel=0.15)
    hidden_1V = wanted_1V.index_fill(1, torch.arange(0, vocab, 2), -torch.inf)
    assert relative_rms(hidden_1V, hidden_1V) == 0.0
    model: Any = build("llama")
    with pytest.raises(ValueError, match=r"0\.0.*tolerance 0\.02"):
        check_close(found_1V, wanted_1V, model, "x", 0.01, lambda: 0.02)
    check_close(found_1V, wanted_1V, model, "x", 0.01, lambda: 0.05)


def test_a_model_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match="'bert' are not supported: logits "):
        wrap_model(build("bert"))


def test_a_family_without_tree_attention_decodes_chains(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Continuations of prompts of different lengths equal those of `generate`. Methods with trees raise ValueError."""
    model = build("mpt")
    target, mpt_drafter = wrap_model(model), wrap_model(copy.deepcopy(model))
    assert target.tree_fault is not None
    prompts, limits, sampling = [[5, 9, 11, 40, 7], [6, 8]], Limits(12), Sampling()
    expected = []
    for prompt in prompts:
        ids_1T = torch.tensor([prompt])
        output = model.generate(ids_1T, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(output[0, len(prompt) :].tolist())
    for name in ("autoregressive", "speculative", "adaptive", "prompt-lookup"):
        method = build_method(name, Parts(mpt_drafter), sampling)
        assert decode_texts(target, *method, prompts, limits, sampling, Rng.for_rows(0, 2)) == expected
    llama = wrap_model(make_llama(120))
    for model_used, drafter in ((target, llama), (llama, target)):
        method = build_method("dynamic-tree", Parts(drafter), sampling)
        with pytest.raises(ValueError, match=r"'mpt' do not support tree attention.*speculative"):
            decode_texts(model_used, *method, prompts, limits, sampling, Rng.for_rows(0, 2))
