"""Failures that public threads describe are named, and a corrected config restores the acceptance length.

Each fixture is written from the description in the thread. The drafters overfit the answers of a tiny target.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.heads.auxiliary import AuxiliaryHeads
from draftsmith.checkpoints.heads.dflash import DFlashHeads, save_dflash
from draftsmith.checkpoints.heads.dspark import DSparkHeads
from draftsmith.checkpoints.heads.eagle import EagleHeads, save_eagle
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.pairs.multi_token import examine_mtp
from draftsmith.checkpoints.pairs.sides import read_model_info
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.artifacts.imports import import_heads
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.commands.diagnosis.variants import ConfigFit
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

VOCAB, LAYERS, BLOCK, PAD, ROPE, DFLASH = 336, [2, 4, 6], 5, 3, "rope_parameters", "dflash_config"
SETTINGS = ("limit=4", "max_prompt_tokens=40", "max_new_tokens=24", "device=cpu", "template=plain")
Config, Weights = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Config, Weights], object]


@dataclass(frozen=True)
class Bench:
    """Target with a mask token, and trained drafters of each kind."""

    folder: Path
    prompts: Path

    def copy(self, kind: str, change: Change, out: Path) -> Path:
        """Copy a drafter and change its config and tensors."""
        shutil.copytree(self.folder / kind, out)
        config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
        change(config, weights)
        (out / "config.json").write_text(json.dumps(config))
        (out / "model.safetensors").unlink()
        save_file(weights, out / "model.safetensors")
        return out

    def acceptance(self, folder: Path) -> float:
        """Measure the acceptance length of a drafter with its stored config."""
        fit = ConfigFit(read_model_info(str(self.folder / "target"), load_tokenizer), folder)
        fit.measure(evaluate_recipe(None, SETTINGS, {"target": fit.target.source, "prompts": str(self.prompts)}))
        return fit.variants[0].acceptance_length


def rows_of(bench: Bench, model: LlamaForCausalLM, tokenizer: Any) -> list[torch.Tensor]:
    """Return prompts with the target's greedy answers, which the drafters learn."""
    from draftsmith.recipes.assemble.evaluation import prompts_of

    target = str(bench.folder / "target")
    recipe = evaluate_recipe(None, SETTINGS, {"target": target, "prompts": str(bench.prompts)})
    ids = [torch.tensor([ids]) for _, ids in prompts_of(recipe, tokenizer)]
    return [model.generate(each, max_new_tokens=32, do_sample=False, pad_token_id=PAD) for each in ids]


def train(heads: AuxiliaryHeads, model: LlamaForCausalLM, rows: list[torch.Tensor], steps: int) -> None:
    heads.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    optimizer, examples = torch.optim.AdamW(heads.parameters(), lr=5e-3), []
    for ids_1T in rows:
        hidden_states = model.model(ids_1T, output_hidden_states=True).hidden_states
        examples.append((torch.cat([hidden_states[layer] for layer in heads.layers], -1), ids_1T))
    for _ in range(steps):
        loss = torch.stack([loss_of(heads, *each) for each in examples]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads.requires_grad_(False).eval()


def loss_of(heads: AuxiliaryHeads, aux_1TG: torch.Tensor, ids_1T: torch.Tensor) -> torch.Tensor:
    count, depth = ids_1T.shape[1], heads.num_heads
    anchor_X, step_K = torch.arange(1, count - depth), torch.arange(depth)
    positions_1T = torch.arange(count)[None]
    if isinstance(heads, EagleHeads):
        mask_11TT = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
        features_XKD = heads.features(aux_1TG, ids_1T, positions_1T, mask_11TT)[0, anchor_X - 1]
    else:
        assert isinstance(heads, DFlashHeads)
        documents_1T = torch.zeros(1, count, dtype=torch.int64)
        features_XKD = heads.features(aux_1TG, ids_1T, positions_1T, documents_1T, anchor_X - 1)
    logits_XKV = features_XKD @ heads.projection().T
    if isinstance(heads, DSparkHeads):
        logits_XKV = logits_XKV + heads.markov_factors(ids_1T[0, anchor_X[:, None] + step_K]) @ heads.markov_weight.T
    label_XK = ids_1T[0, anchor_X[:, None] + 1 + step_K]
    return F.cross_entropy(logits_XKV.flatten(0, 1), label_XK.flatten())


@pytest.fixture(scope="module")
def bench(corpus: Path, make_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    model = make_llama(VOCAB, seed=3, sharpness=1.6, num_hidden_layers=8).requires_grad_(False)
    model.generation_config.eos_token_id = None
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    tokenizer.add_tokens(["<|MASK|>"])
    for each in (model, tokenizer):
        each.save_pretrained(folder / "target")
    (folder / "rows.json").write_text(json.dumps(json.loads((corpus / "rows.json").read_text())[:4]))
    bench, mask = Bench(folder, folder / "rows.json"), tokenizer.convert_tokens_to_ids("<|MASK|>")
    rows = rows_of(bench, model, tokenizer)
    torch.manual_seed(0)
    eagle = EagleHeads.for_target(
        model.config, LAYERS, torch.arange(VOCAB - 6), num_heads=3, norms=("norm_before_fc", "norm_output")
    )
    block = DFlashHeads.for_target(model.config, mask, BLOCK, 1, LAYERS)
    spark = DSparkHeads.for_target(model.config, mask, BLOCK, 1, LAYERS, rank=8, from_anchor=False)
    for name, heads in (("eagle", eagle), ("dflash", block), ("dspark", spark)):
        train(heads, model, rows, 150 if name == "eagle" else 80)
        save_eagle(heads, folder / name) if name == "eagle" else save_dflash(heads, folder / name)
    return bench


def put(part: str = "", /, **values: Any) -> Change:
    return lambda config, weights: (config[part] if part else config).update(values)


def without(*names: str) -> Change:
    return lambda config, weights: [config.pop(name, weights.pop(name, None)) for name in names] and None


def absolute_ids(config: Config, weights: Weights) -> None:
    """Store ids that are not the first ones, where offsets are expected."""
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))


def speculators(config: Config, weights: Weights) -> None:
    inner = {name: config.pop(name) for name in [*config] if name not in ("block_size", "sample_from_anchor")}
    config |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    config |= {"transformer_layer_config": inner, "mask_token_id": inner["mask_token_id"]}
    config["aux_hidden_state_layer_ids"] = LAYERS


EVERY = {"vllm", "vllm, runner V1", "sglang", "llama.cpp", "draftsmith", "transformers", "tensorrt-llm"}
MEASURED: dict[str, tuple[str, Change, str]] = {
    "Avarok-Cybersecurity/atlas#394": ("dflash", put(DFLASH, target_layer_ids=[0, 2, 4]), "layer_ids: [1, 3, 5]"),
    "NVIDIA-NeMo/Automodel#2461": ("dflash", put(DFLASH, mask_token_id=PAD), "mask_token_id: 320"),
    "vllm-project/speculators#613": ("dflash", put(ROPE, partial_rotary_factor=0.25), "partial_rotary_factor: 1"),
    "vllm-project/speculators#733": ("dflash", put(ROPE, mrope_section=[1, 1, 2]), "without mrope_section"),
    "vllm-project/vllm#43445": ("dflash", put(is_causal=True), "is_causal: false"),
    "sgl-project/SpecForge#265": ("dflash", put(ROPE, rope_theta=50.0), "rope_theta: 10000.0"),
    "vllm-project/vllm#56792": ("dspark", without("sample_from_anchor"), "sample_from_anchor: false"),
    "lightseekorg/tokenspeed#526": ("eagle", put(eagle_aux_hidden_state_layer_ids=[3, 5, 7]), "layer_ids: [2, 4, 6]"),
    "vllm-project/vllm#38111": ("eagle", without("norm_before_fc"), "norm_before_fc: true"),
    "vllm-project/vllm#46488": ("eagle", without("norm_output"), "norm_output: true"),
    "verl-project/verl-SpeCo#67": ("eagle", absolute_ids, "d2t: offsets of 330 draft tokens"),
    "NVIDIA-NeMo/Automodel#2447": ("eagle", without("d2t"), "d2t: offsets of 330 draft tokens"),
}
"""By thread: kind of the drafter, change of its files, and the correction."""
STATED: dict[str, tuple[str, Change, str, set[str]]] = {
    "vllm-project/vllm#48894": ("eagle", put(max_position_embeddings=64), "context length", {"vllm", "sglang"}),
    "vllm-project/vllm#56792": ("dspark", without("sample_from_anchor"), "anchor", {"vllm", "sglang", "draftsmith"}),
    "sgl-project/sglang#31047": ("dspark", speculators, "form", {"sglang", "draftsmith"}),
    "sgl-project/SpecForge#140": ("eagle", put(tie_word_embeddings=True), "tied", {"sglang"}),
    "sgl-project/sglang#32334": ("eagle", without("eagle_aux_hidden_state_layer_ids"), "layers", EVERY - {"sglang"}),
    "sgl-project/SpecForge#534": ("eagle", absolute_ids, "draft vocabulary", EVERY),
    "z-lab/dflash#126": ("dflash", put(layer_types=["sliding_attention"]), "sliding layers", EVERY),
    "vllm-project/speculators#613": ("dflash", put(ROPE, partial_rotary_factor=0.5), "partial rotary positions", EVERY),
}
"""By thread: kind of the drafter, change of its files, check that names it, and affected engines."""


def test_a_better_config_is_a_finding(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, overrides = str(bench.folder / "target"), SETTINGS
    assert check_pair(target, str(bench.folder / "dflash"), prompts=str(bench.prompts), overrides=overrides)
    broken = bench.copy("dflash", put(DFLASH, mask_token_id=PAD), tmp_path / "broken")
    assert not check_pair(target, str(broken), prompts=str(bench.prompts), overrides=overrides)
    text = " ".join(capsys.readouterr().out.split())
    assert "acceptance length by config" in text
    assert re.search(r"acceptance length is [45]\.\d+ instead of [12]\.\d+ with mask_token_id: 320", text)


@pytest.mark.parametrize("thread", STATED)
def test_a_documented_failure_is_named(
    thread: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, change, check, engines = STATED[thread]
    target, broken = str(bench.folder / "target"), bench.copy(kind, change, tmp_path / "broken")
    capsys.readouterr()
    assert not check_pair(target, str(broken), as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    effects = {name for one in diagnosis["findings"] if one["check"] == check for name in one["effects"]}
    assert effects == engines & set(diagnosis["verdicts"])


@pytest.mark.parametrize("kind", ["eagle", "dflash", "dspark"])
def test_sound_drafters_have_no_findings(kind: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    check_pair(str(bench.folder / "target"), str(bench.folder / kind), as_json=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [one["check"] for one in findings] == (["norms of EAGLE-3.1"] if kind == "eagle" else [])


def test_medusa_heads_without_their_number(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FasterDecoding/Medusa#76: the config has no `medusa_num_heads`, so that vLLM creates five heads."""
    target, folder = str(bench.folder / "target"), tmp_path / "medusa"
    heads = PredictionHeads(3, 1, 32, VOCAB, "own")
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    save_heads(heads, folder, target)
    assert check_pair(target, str(folder)), "sound heads have no findings"
    config = json.loads((folder / "config.json").read_text())
    for name in ("medusa_num_heads", "num_medusa_heads", "medusa_fc_bias"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_layers": 2}))
    capsys.readouterr()
    check_pair(target, str(folder), as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in diagnosis["findings"]] == ["number of heads", "config", "biases"]
    assert diagnosis["verdicts"]["vllm"]["outcome"] == "works but"
    assert check_pair(target, str(folder), fix=tmp_path / "fixed")
    assert json.loads((tmp_path / "fixed" / "config.json").read_text())["medusa_num_heads"] == 3


def test_mtp_layers_that_nothing_is_accepted_of(bench: Bench, tmp_path: Path) -> None:
    """vllm#35548: a quantization dropped the tensors. sglang#35797: the tensors are not quantized like the target."""
    shutil.copytree(bench.folder / "target", folder := tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights, target = load_file(folder / "model.safetensors"), read_model_info(str(folder), load_tokenizer)
    checks = lambda: [one.check for one in examine_mtp(target, str(folder), folder).findings]  # noqa: E731
    assert checks() == ["MTP tensors"]
    assert not check_pair(str(folder), str(folder))
    save_file(weights | {"mtp.fc.weight": torch.ones(2)}, folder / "model.safetensors")
    assert checks() == []
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert checks() == ["MTP quantization"]


FAST = "vllm-project/vllm#56792"


@pytest.mark.parametrize(
    "thread", [pytest.param(each, marks=() if each == FAST else pytest.mark.slow) for each in MEASURED]
)
def test_a_corrected_config_restores_the_acceptance_length(thread: str, bench: Bench, tmp_path: Path) -> None:
    kind, change, correction = MEASURED[thread]
    target, out, report = str(bench.folder / "target"), tmp_path / "fixed", tmp_path / "report.json"
    broken = bench.copy(kind, change, tmp_path / "broken")
    contents = {path.name: path.read_bytes() for path in broken.iterdir()}
    check_pair(target, str(broken), fix=out, prompts=str(bench.prompts), out=report, overrides=SETTINGS)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == contents
    before, *_ = json.loads(report.read_text())["variants"]
    sound = bench.acceptance(bench.folder / kind)
    assert sound > 2.5
    assert (before["acceptance_length"] or 0) < 0.9 * sound
    assert bench.acceptance(out) == pytest.approx(sound, rel=0.02)
    assert correction in "; ".join(load_manifest(out).training["repairs"])
    with pytest.raises(ValueError, match=r"fixed.*not empty"):
        check_pair(target, str(broken), fix=out)


def test_formats_that_cannot_be_repaired(bench: Bench, tmp_path: Path) -> None:
    target, folder = str(bench.folder / "target"), bench.copy("dspark", speculators, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"broken: DSpark drafters of speculators.*--fix"):
        check_pair(target, str(folder), fix=tmp_path / "fixed")
    import_heads(str(bench.folder / "dspark"), tmp_path / "own", target)
    assert load_manifest(tmp_path / "own").shapes["architecture"] == "dspark"
    shutil.copytree(bench.folder / "dflash", folder := tmp_path / "sharded")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"sharded has no model.safetensors.*import"):
        check_pair(target, str(folder), fix=tmp_path / "fixed")
