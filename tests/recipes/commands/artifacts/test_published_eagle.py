"""Published formats of EAGLE-3 heads give the same logits as ours, and the doctor finds faults in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.eagle import NORMS, EagleHeads, load_eagle, save_eagle
from draftsmith.checkpoints.heads.published import read_published
from draftsmith.checkpoints.pairs.eagle import examine_eagle, rotary_base
from draftsmith.checkpoints.pairs.sides import read_model_info
from draftsmith.checkpoints.pairs.variants import describe_changes, list_variants
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.artifacts.imports import import_published
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from safetensors.torch import load_file, save_file

LAYERS, TOP = [1, 3, 6], "eagle_aux_hidden_state_layer_ids"
KEPT = torch.arange(3, 60, 3)
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture
def target(make_llama: Any, tiny_pair: Path, tmp_path: Path) -> Path:
    """Save a target of eight layers."""
    vocab = json.loads((tiny_pair / "target" / "config.json").read_text())["vocab_size"]
    folder = tmp_path / "target"
    make_llama(vocab, num_hidden_layers=8).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_pair / "target" / name, folder / name)
    return folder


def heads_of(target: Path, layers: list[int], normed: bool = False, norms: tuple[str, ...] = ()) -> EagleHeads:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(2)
    heads = EagleHeads.for_target(model.config, layers, KEPT, norms=norms)
    heads.normed = normed
    for name, weight in heads.named_parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.4)
    return heads.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight).eval()


def edit_heads(folder: Path, change: Change, *, pickled: bool = False) -> Path:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def speculators(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    outer = (TOP, "draft_vocab_size", "eagle_config", *NORMS)
    inner = {name: config.pop(name) for name in [*config] if name not in outer}
    inner.pop("norm_before_residual")
    config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    config["transformer_layer_config"] = inner
    del config["eagle_config"]
    renamed = {name.replace("midlayer.", "layers.0."): weights.pop(name) for name in [*weights]}
    weights |= renamed


def nested_alone(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    del config[TOP]
    weights |= {f"model.{name}": weights.pop(name) for name in [*weights] if name.startswith("midlayer")}


def default_layers(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    del config[TOP], config["eagle_config"], config["norm_before_residual"]


@pytest.mark.parametrize(
    ("form", "layers", "normed"),
    [(speculators, LAYERS, True), (nested_alone, LAYERS, False), (default_layers, [2, 4, 5], False)],
    ids=["speculators", "pickled", "plain"],
)
def test_other_formats_give_the_same_logits(form: Change, layers: list[int], normed: bool, target: Path) -> None:
    heads = heads_of(target, layers, normed)
    save_eagle(heads, folder := target.with_name("theirs"))
    edit_heads(folder, form, pickled=form is nested_alone)
    out = target.with_name("mine")
    import_published(str(folder), out, str(target), unpickle=form is nested_alone)
    loaded = load_eagle(out).attach(heads.embedding, torch.zeros(heads.vocab_size, heads.hidden_size))
    assert (list(loaded.layers), loaded.normed) == (layers, normed)
    _, faults = find_faults(out)
    assert faults == []
    input_BTG = torch.randn(2, 6, 3 * heads.hidden_size)
    tokens_BT, places_BT = torch.randint(60, (2, 6)), torch.arange(6).expand(2, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    logits = [each.features(input_BTG, tokens_BT, places_BT, mask) @ each.projection().T for each in (heads, loaded)]
    assert torch.equal(*logits)
    assert loaded.proposed is not None
    assert loaded.proposed.tolist() == KEPT.tolist()
    assert check_pair(str(target), str(out)) == (not normed), "only SGLang does not support this norm"
    lines = export_artifact(out, "eagle3", target.with_name("served"), FORMATS)
    assert [line.partition(": ")[2].partition(" ")[0] for line in lines[1:]] == (["works", "works", "works", "works"])
    assert sum("works but" in line for line in lines) == normed


def nested_norm(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["eagle_config"]["norm_before_fc"] = config.pop("norm_before_fc")


def other_names(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Rename `fc_norm` to the names that only SGLang reads."""
    config["use_aux_norm"] = config.pop("fc_norm")
    for number, name in enumerate(("low", "mid", "high")):
        weights[f"aux_norm_{name}.weight"] = weights.pop(f"fc_norm.{number}.weight")


def unchanged(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    pass


@pytest.mark.parametrize(
    ("form", "norms", "llama_cpp"),
    [
        (speculators, ("norm_before_fc", "norm_output"), "works but"),
        (nested_norm, ("norm_before_fc",), "works but"),
        (other_names, ("fc_norm",), "refused"),
        (unchanged, ("fc_norm", "norm_output"), "refused"),
    ],
)
def test_heads_with_norms_are_imported_and_exported(
    form: Change, norms: tuple[str, ...], llama_cpp: str, target: Path
) -> None:
    heads = heads_of(target, LAYERS, form is speculators, norms)
    save_eagle(heads, folder := target.with_name("theirs"))
    edit_heads(folder, form)
    import_published(str(folder), out := target.with_name("mine"), str(target))
    export_artifact(out, "eagle3", served := target.with_name("served"), FORMATS)
    assert {name for name in NORMS if json.loads((served / "config.json").read_text()).get(name)} == {*norms}
    loaded, expected = load_eagle(served), heads.state_dict()
    assert loaded.norms == norms
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    serving = (served / "SERVING.md").read_text()
    assert all(f"`{name}`" in serving for name in norms)
    assert "vLLM 0.32" in serving
    diagnosis = examine_eagle(read_model_info(str(target), load_tokenizer), str(out), out)
    (finding,) = [each for each in diagnosis.findings if each.check == "norms of EAGLE-3.1"]
    assert finding.drafter == ", ".join(norms)
    assert "vLLM 0.32" in finding.advice
    outcomes = {name: verdict.outcome for name, verdict in diagnosis.verdicts.items()}
    assert outcomes.pop("llama.cpp") == llama_cpp
    assert outcomes.pop("sglang") == ("works but" if heads.normed else "works")
    assert {*outcomes.values()} == {"works"}
    original = examine_eagle(read_model_info(str(target), load_tokenizer), str(folder), folder).verdicts
    assert (original["draftsmith"].outcome == "refused") == (form is not unchanged)
    assert (original["vllm"].outcome == "refused") == (form is other_names)
    if llama_cpp == "refused":
        converter = target.with_name("llama.cpp") / "convert_hf_to_gguf.py"
        converter.parent.mkdir()
        converter.touch()
        options = ExportOptions(llama_cpp=converter.parent)
        with pytest.raises(ValueError, match=r"llama\.cpp: fc_norm is not supported"):
            export_artifact(out, "eagle3-gguf", target.with_name("gguf"), FORMATS, options)


def without_rows(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["draft_vocab_size"] = config["vocab_size"]
    for name in ("lm_head.weight", "d2t", "t2d"):
        del weights[name]


PLANTED: dict[str, tuple[Change, str, set[str]]] = {
    "nothing": (lambda config, weights: None, "", set()),
    "ids numbered as in SGLang": (
        lambda config, weights: config.update({TOP: [0, 2, 5]}), "layers", {"sglang"},
    ),
    "nested ids numbered as in vLLM": (
        lambda config, weights: config["eagle_config"].update({TOP: LAYERS}), "layers", {"sglang"},
    ),
    "ids only in the nested config": (
        lambda config, weights: config.pop(TOP), "layers",
        {"vllm", "vllm, runner V1", "draftsmith", "llama.cpp"},
    ),
    "tied": (lambda config, weights: config.update(tie_word_embeddings=True), "tied", {"sglang"}),
    "normed": (lambda config, weights: config.update(norm_before_residual=True), "norm", {"sglang"}),
    "ids instead of offsets": (
        lambda config, weights: weights.update(d2t=KEPT.clone()), "draft vocabulary",
        {"vllm", "vllm, runner V1", "sglang", "draftsmith", "llama.cpp"},
    ),
    "another size": (
        lambda config, weights: config.update(draft_vocab_size=7), "draft vocabulary",
        {"vllm", "vllm, runner V1", "sglang", "draftsmith", "llama.cpp"},
    ),
    "no output rows": (
        without_rows, "output layer", {"sglang"},
    ),
    "another target": (
        lambda config, weights: config.update(hidden_size=64), "hidden_size",
        {"vllm", "vllm, runner V1", "sglang", "draftsmith", "llama.cpp"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_named_with_the_affected_engines(
    name: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, check, affected = PLANTED[name]
    save_eagle(heads_of(target, LAYERS), folder := target.with_name("theirs"))
    edit_heads(folder, change)
    assert check_pair(str(target), str(folder), as_json=True) == (not affected)
    diagnosis = json.loads(capsys.readouterr().out)
    assert {one["check"] for one in diagnosis["findings"]} == ({check} if check else set())
    assert {reader for reader, verdict in diagnosis["verdicts"].items() if verdict["outcome"] != "works"} == affected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, weights: config.update({TOP: [1, 3, 8]}), r"between 0 and 7.*8"),
        (lambda config, weights: config.update({TOP: [1, 3]}), r"fc.weight has 96 columns.*2 layers of 32"),
        (lambda config, weights: config.update(vocab_size=99), r"vocab_size.*99"),
        (lambda config, weights: weights.pop("lm_head.weight"), r"lm_head.weight"),
        (lambda config, weights: weights.pop("norm.weight"), r"norm.weight"),
        (lambda config, weights: weights.update({"mask_hidden": torch.ones(2)}), r"mask_hidden.*one Llama layer"),
        (lambda config, weights: weights.update({"fc_norm.0.weight": torch.ones(32)}), r"no fc_norm: set.*true"),
        (lambda config, weights: config.update(norm_before_fc=True), r"input_norm.weight is missing.*norm_before_fc"),
        (lambda config, weights: weights.update({"embed_tokens.weight": torch.ones(5, 5)}), r"embed_tokens.*\[5, 5\]"),
    ],
)
def test_unsupported_formats_are_refused(change: Change, message: str, target: Path) -> None:
    from transformers import AutoConfig

    save_eagle(heads_of(target, LAYERS), folder := target.with_name("theirs"))
    edit_heads(folder, change)
    with pytest.raises(ValueError, match=message):
        read_published(folder, AutoConfig.from_pretrained(target), torch.zeros(7, 7))


def test_variants_of_a_config_are_listed(target: Path) -> None:
    """Interpretations of engines and common mistakes are listed once, also if the ids are in a nested section."""
    save_eagle(heads_of(target, LAYERS), folder := target.with_name("theirs"))
    edit_heads(folder, lambda config, weights: config.update(eagle_config={TOP: LAYERS}))
    config = json.loads((folder / "config.json").read_text())
    variants = list_variants(config, read_model_info(str(target), load_tokenizer))
    names = [*(f"{TOP}: {ids}" for ids in ([2, 4, 7], [0, 2, 5], [2, 4, 5])), "norm_before_residual: true"]
    assert [describe_changes(config, each) for each in variants] == [[name] for name in (*names, "norm_output: true")]


@pytest.mark.parametrize(("base", "named"), [(50.0, ["rotary positions"]), (10_000.0, [])])
def test_other_rotary_bases_are_reported(target: Path, base: float, named: list[str]) -> None:
    save_eagle(heads_of(target, LAYERS), folder := target.with_name("theirs"))
    config = json.loads((target / "config.json").read_text())
    assert rotary_base(config) == 10_000
    edit_heads(folder, lambda config, weights: config["rope_parameters"].update(rope_theta=base))
    findings = examine_eagle(read_model_info(str(target), load_tokenizer), str(folder), folder).findings
    assert [each.check for each in findings if each.check == "rotary positions"] == named
