"""Models to train: pruned, copied, frozen or with adapters as configured; saved models equal the trained ones."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from draftsmith.checkpoints.export.target import output_projection
from draftsmith.checkpoints.heads.eagle import EagleHeads
from draftsmith.data.blocks.packing import Batch
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.artifact import check_target
from draftsmith.recipes.assemble.heads import _new_heads
from draftsmith.recipes.assemble.models import TrainableModel, build_model, check_vocabulary, cut_layers, load_trainable
from draftsmith.recipes.schema.loading import parse_recipe
from draftsmith.recipes.schema.training import ModelSection
from draftsmith.train.forward.packed import make_forward
from draftsmith.train.losses.drafter import shifted_labels
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

COMMON = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
LLAMA = COMMON | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
KINDS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "opt": COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "gpt_neox": COMMON | {"intermediate_size": 24, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 40, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64},
    "qwen2": LLAMA | {"layer_types": KINDS, "sliding_window": 3, "use_sliding_window": True},
    "gpt_neo": {
        "vocab_size": 40, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "max_position_embeddings": 64,
        "attention_types": [[["global"], 4]],
    },
    "qwen2_moe": LLAMA | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "t5": T5,
    "umt5": T5 | {"num_decoder_layers": 3},
    "granite": LLAMA | {"logits_scaling": 5.0},
    "phi": COMMON | {"intermediate_size": 24, "max_position_embeddings": 64},
}  # fmt: skip
TOKENS = torch.tensor([[5, 9, 2, 7, 1, 30, 11, 4]])


def random_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **(FAMILIES[family] | overrides))
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    torch.manual_seed(seed)
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = maker.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Return a function that saves a random model and returns its folder."""

    def save(family: str, seed: int = 0, **overrides: Any) -> str:
        folder = tmp_path / f"{family}-{seed}-{len(list(tmp_path.iterdir()))}"
        random_model(family, seed, **overrides).save_pretrained(folder)
        return str(folder)

    return save


def section(**fields: Any) -> ModelSection:
    return ModelSection.model_validate(fields)


def test_a_model_that_exceeds_the_memory_is_refused_before_it_is_built() -> None:
    """The model has 6.6 trillion parameters; none of them is allocated."""
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 96, "num_attention_heads": 512}
    with pytest.raises(ValueError, match=r"[\d,]{17} parameters of .* are free"):
        build_model(section(config={"model_type": "llama", **sizes}), 0)


def test_a_different_vocabulary_names_the_command_that_converts_it() -> None:
    target, model = random_model("llama"), random_model("llama", vocab_size=36)
    for source, message in (
        ("my drafter", "`draftsmith doctor T 'my drafter' --fix OUT`"),
        (None, "`vocab_size: 40` in"),
    ):
        with pytest.raises(ValueError, match=f"36 tokens, but the target T has 40: .*{message}"):
            check_target(target, model, "T", source)


def test_files_that_exceed_the_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model("llama").bfloat16().save_pretrained(tmp_path)
    count = random_model("llama").num_parameters()
    for free, dtype, fits in ((2 * count, "auto", True), (4 * count, "float32", True), (3 * count, "float32", False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        if fits:
            assert load_model(str(tmp_path), dtype=dtype).num_parameters() == count
            continue
        with pytest.raises(ValueError, match=f"{count:,} parameters of 4 bytes require .* are free: .*bfloat16"):
            load_model(str(tmp_path), dtype=dtype)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        masks = {"attention_mask": torch.ones_like(TOKENS), "decoder_attention_mask": torch.ones_like(TOKENS)}
        return model.eval()(TOKENS, decoder_input_ids=TOKENS, **masks).logits
    return model.eval()(TOKENS).logits


@torch.no_grad()
def generate_ids(model: Any, count: int = 10) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **options)[0]
    return ids[1 if model.config.is_encoder_decoder else TOKENS.shape[1] :].tolist()


def decoded(target: Any, name: str, drafter: Any = None, **options: Any) -> list[int]:
    """Decode ten tokens greedily with a method."""
    method = build_method(name, Parts(drafter=drafter), Sampling(), **options)
    steps = generate(target, *method, TOKENS.tolist(), Limits(10), Sampling(), Rng.for_rows(0, 1))
    return [token for step in steps for token in step.new_ids[0]][:10]


def train_some_steps(trainable: TrainableModel, recompute: bool = False) -> list[float]:
    """Train a few steps on one block of two documents, and return the losses."""
    model = trainable.model.train()
    documents = torch.tensor([[0] * 5 + [1] * 3])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    labels = torch.where(positions > 1, TOKENS, -100)
    batch = Batch(TOKENS, labels, positions, documents)
    forward = make_forward(model)
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(6):
        weight_VD = forward.weight_VD()
        flat = forward(batch).flatten(0, 1)
        logits_XV = flat if weight_VD is None else flat @ weight_VD.T
        expected_X = shifted_labels(labels, documents, 1).flatten()
        loss = torch.nn.functional.cross_entropy(logits_XV.float(), expected_X, ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def _nothing(hidden: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return hidden


def _nothing_in_a_tuple(hidden: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor]:
    return (hidden,)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_equals_the_source_without_other_layers(family: str, saved: Any, tmp_path: Path) -> None:
    source = saved(family)
    layers = [0, 2] if family == "umt5" else [1, 3]
    trainable = build_model(section(source=source, layers=layers), 0)
    model: Any = trainable.model
    assert model.config.num_hidden_layers == 2
    trainable.save(tmp_path / "cut")
    again = load_model(str(tmp_path / "cut"))
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert generate_ids(again) == generate_ids(model)
    whole: Any = load_model(source)
    if not whole.config.is_encoder_decoder:  # compare with the source, whose other layers are replaced by the identity
        found = next(part for part in whole.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 4)
        for number in {0, 1, 2, 3} - set(layers):
            found[number].forward = _nothing_in_a_tuple if family == "gpt_neo" else _nothing
        torch.testing.assert_close(logits(model), logits(whole), rtol=1e-6, atol=1e-6)
    if family == "gpt_neo":
        assert model.config.attention_layers == ["global"] * 2
    if family == "qwen2":
        assert model.config.layer_types == ["sliding_attention"] * 2
        return  # decoding beyond such a short sliding window is not supported
    found = decoded(wrap_model(load_model(source)), "speculative", wrap_model(model), gamma=3)
    assert found == generate_ids(load_model(source))


def test_a_pruned_t5_keeps_positions_and_both_stacks(saved: Any) -> None:
    source: Any = load_model(saved("t5"))
    cut: Any = cut_layers(source, [1, 2], "t5")
    for stack in ("encoder", "decoder"):
        pruned, original = getattr(cut, stack).block, getattr(source, stack).block
        first = original[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert torch.equal(pruned[0].layer[0].SelfAttention.relative_attention_bias.weight, first)
        assert torch.equal(pruned[1].layer[0].SelfAttention.q.weight, original[2].layer[0].SelfAttention.q.weight)
        assert [block.layer[0].SelfAttention.layer_idx for block in pruned] == [0, 1]
    assert cut.config.num_layers == cut.config.num_decoder_layers == 2


@pytest.mark.parametrize(("family", "recompute"), [("llama", True), ("gpt2", False), ("t5", True)])
def test_frozen_embeddings_are_unchanged(family: str, recompute: bool, saved: Any) -> None:
    trainable = build_model(section(source=saved(family), freeze_embeddings=True), 0)
    model: Any = trainable.model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses = train_some_steps(trainable, recompute)
    assert losses[-1] < losses[0]
    frozen = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) == (id(weight) in frozen), name
    assert trainable.shapes()["trained_parameters"] < trainable.shapes()["parameters"]


@pytest.mark.parametrize(("family", "recompute"), [("llama", False), ("gpt_neox", True), ("gpt2", False), ("t5", True)])
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_lora_files_give_the_trained_model(
    family: str, export: str, recompute: bool, saved: Any, tmp_path: Path
) -> None:
    source = saved(family)
    lora = {"rank": 3, "alpha": 5.0, "dropout": 0.1, "export": export}
    trainable = build_model(section(source=source, lora=lora), 1)
    start = logits(load_model(source))
    torch.testing.assert_close(logits(trainable.model), start, rtol=0, atol=0)  # a new adapter has no effect
    losses = train_some_steps(trainable, recompute)
    assert losses[-1] < losses[0]
    trained, shapes = logits(trainable.model), trainable.shapes()
    assert (trained - start).abs().max() > 0.1
    trainable.save(tmp_path / "out")
    maker = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    for loaded in (load_model(str(tmp_path / "out")), maker.from_pretrained(tmp_path / "out")):
        torch.testing.assert_close(logits(loaded), trained, rtol=2e-5, atol=2e-5)
    ours = load_model(str(tmp_path / "out"))
    assert not any("lora" in name for name, _ in ours.named_parameters())
    assert LeanDecoder.covers(ours) == (family in ("llama", "gpt_neox", "gpt2"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    if export == "merged":
        assert {"config.json", "model.safetensors"} <= names
        assert shapes["parameters"] == sum(p.numel() for p in ours.parameters())
    else:
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == source
        assert shapes["parameters"] == shapes["trained_parameters"]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_decoding_during_lora_training_equals_transformers(family: str, saved: Any) -> None:
    target = load_model(saved(family, 5))
    trainable = build_model(section(source=saved(family, 6), lora={"rank": 3, "dropout": 0.2}), 1)
    plain = generate_ids(trainable.model)
    train_some_steps(trainable)
    trainable.model.train()  # like the training loop
    drafter = wrap_model(trainable.model, check=False)
    expected = generate_ids(trainable.model)
    assert expected != plain, "the adapter had no effect"
    for model in (drafter, wrap_model(trainable.adapter)):
        assert decoded(model, "autoregressive") == expected
    assert decoded(wrap_model(target), "speculative", drafter, gamma=3) == generate_ids(target)


def test_a_changed_output_projection_is_trained_and_merged(saved: Any, tmp_path: Path) -> None:
    trainable = build_model(section(source=saved("llama"), lora={"targets": ["lm_head"]}), 0)
    assert make_forward(trainable.model).weight_VD() is None, "the output layer has an adapter besides its weight"
    losses = train_some_steps(trainable)
    assert losses[-1] < losses[0]
    trained = logits(trainable.model)
    trainable.save(tmp_path / "out")
    torch.testing.assert_close(logits(load_model(str(tmp_path / "out"))), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [None, "wide"])
def test_an_adapter_of_another_model_is_refused(saved: Any, tmp_path: Path, base: str | None) -> None:
    build_model(section(source=saved("llama"), lora={"export": "adapter"}), 0).save(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = base and saved("llama", 0, hidden_size=24)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="None" if base is None else "adapter"):
        load_model(str(tmp_path))


def test_new_models_depend_on_the_seed_only() -> None:
    model_section = section(config={"model_type": "llama", **LLAMA}, dtype="bfloat16")
    first, same, other = (build_model(model_section, seed).model for seed in (1, 1, 2))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_new_t5_starts_its_decoder_with_padding(tmp_path: Path) -> None:
    trainable = build_model(section(config={"model_type": "t5", **T5}), 0)
    assert make_forward(trainable.model).start_id == 0
    trainable.save(tmp_path)
    assert wrap_model(load_model(str(tmp_path))).start_id == 0


def test_attention_kernels_are_used_or_reported_as_missing(saved: Any) -> None:
    values = {"config": {"model_type": "llama", **LLAMA}}
    for fields, attention in (({"source": saved("llama")}, "eager"), (values, "eager"), (values, "auto")):
        model = build_model(section(**fields, attention=attention), 0).model
        assert model.config._attn_implementation == ("sdpa" if attention == "auto" else attention)
    if find_spec("flash_attn") is None:
        with pytest.raises(ValueError, match="FlashAttention2"):
            build_model(section(**values, attention="flash_attention_2"), 0)


def test_lora_without_peft_names_what_to_install(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install .*\[train\]"):
        build_model(section(source=saved("llama"), lora={}), 0)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"source": "llama", "layers": [0, 4]}, "0 and 3.*llama.*4"),
    "decoder's layer": ({"source": "umt5", "layers": [0, 3]}, "0 and 2.*3"),
    "lora target": ({"source": "llama", "lora": {"targets": ["q_proj", "query_proj"]}}, "'query_proj'.*q_proj"),
    "no linear layer": ({"source": "llama", "lora": {"targets": ["layers"]}}, "'layers'"),
    "tied projection": ({"source": "gpt2", "lora": {"targets": ["lm_head"]}}, "'lm_head'"),
    "adapter": ({"source": "llama", "layers": [0], "lora": {"export": "adapter"}}, "export: merged"),
    "type": ({"config": {"model_type": "lama"}}, "lama"),
    "field": ({"config": {"model_type": "llama", "hiden_size": 16}}, "'hiden_size'.*hidden_size"),
    "numbers": ({"config": {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 3}}, "16"),
    "family": ({"config": {"model_type": "bart", "vocab_size": 40, "d_model": 16}}, "'bart'"),
    "source": ({"source": "runs/nowhere"}, "runs/nowhere"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, saved: Any) -> None:
    fields, named = REFUSALS[case]
    if fields.get("source") in FAMILIES:
        fields = fields | {"source": saved(fields["source"])}
    with pytest.raises(ValueError, match=named):
        build_model(section(**fields), 0)


def test_refusals_of_artifacts(saved: Any) -> None:
    # the config lists layers with experts by number, and pruning changes the numbers
    numbered = random_model("qwen2_moe", mlp_only_layers=[1])
    with pytest.raises(ValueError, match=r"qwen2_moe.*\[1, 2\]"):
        cut_layers(numbered, [1, 2], "it")
    model = load_trainable(saved("t5"))
    check_vocabulary(40, model, "it")
    with pytest.raises(ValueError, match=r"41.*40"):
        check_vocabulary(41, model, "it")
    with pytest.raises(ValueError, match="t5"):
        load_trainable(saved("t5"), decoder=True)


@pytest.mark.parametrize("form", ["own", "low-rank", "target"])
def test_heads_start_with_the_scale_of_the_targets_logits(form: str, saved: Any, tmp_path: Path) -> None:
    folder = saved("granite")
    target = load_trainable(folder, decoder=True)
    more = {"rank": 16} if form == "low-rank" else {}
    values = {"kind": "heads", "out": str(tmp_path), "target": folder, "data": {"source": "any"}, "projection": form}
    recipe = parse_recipe(values | more, "the test's recipe")
    with torch.no_grad():
        expected, hidden = target(TOKENS).logits, target.model(TOKENS).last_hidden_state
        head_logits = _new_heads(recipe, target, None)(hidden)  # type: ignore[arg-type]
    torch.testing.assert_close(head_logits[:, :, 0], expected, rtol=1e-3, atol=1e-4)
    if form == "target":
        eagle = EagleHeads.for_target(target.config, [1, 2]).begin_as(target)
        torch.testing.assert_close(eagle.norm.weight, target.model.norm.weight / 5)
        weight = target.lm_head.weight
        torch.testing.assert_close(output_projection(folder), weight / 5)


def test_heads_with_a_biased_projection_are_not_exported(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"has a bias \(lm_head\.bias\)"):
        output_projection(saved("phi"))
