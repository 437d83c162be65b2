"""DFlash drafters: published formats and exports give the same states as ours, and the doctor finds faults in them."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact
from draftsmith.checkpoints.artifact.card import model_card
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.heads.dflash import DFlashHeads, load_dflash, save_dflash
from draftsmith.checkpoints.heads.dspark import DSparkHeads, load_block_drafter
from draftsmith.checkpoints.heads.published import read_published_dflash
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.artifacts.imports import import_published
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

INPUTS, IDS, MASK, BLOCK = [2, 4, 6], [1, 3, 5], 5, 4
KEPT = torch.arange(3, 60, 3)
Config, Weights = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Config, Weights], object]
ALL = {"vllm", "sglang", "tensorrt-llm", "transformers", "draftsmith"}


class Case:
    """Target of eight layers and a random drafter for it, as an artifact."""

    def __init__(self, folder: Path, model: LlamaForCausalLM, pair: Path) -> None:
        self.folder, self.target = folder, folder / "target"
        model.save_pretrained(self.target)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pair / "target" / name, self.target / name)
        self.model = model

    def heads(self, kept: torch.Tensor | None = None, form: str = "dflash") -> DFlashHeads:
        torch.manual_seed(2)
        kind = DSparkHeads if form == "dspark" else DFlashHeads
        heads = kind.for_target(self.model.config, MASK, BLOCK, 2, INPUTS, kept)
        for name, weight in heads.named_parameters():
            torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.4)
        return heads.attach(self.model.get_input_embeddings().weight, self.model.lm_head.weight).eval()

    def artifact(self, heads: DFlashHeads) -> Path:
        shapes: dict[str, Any] = {"architecture": "dflash", "num_heads": heads.num_heads, "states": heads.states}
        shapes |= heads.facts
        if heads.proposed is not None:
            shapes["proposed_tokens"] = len(heads.proposed)
        about: dict[str, Any] = {"recipe": {}, "data": {}, "training": {}, "shapes": shapes}
        about |= {"vocab_size": heads.vocab_size, "tokenizer_fingerprint": None, "target": {"id": str(self.target)}}
        save_artifact(self.folder / "artifact", kind="heads", write=partial(save_dflash, heads), **about)
        return self.folder / "artifact"

    def export(self, form: str, kept: torch.Tensor | None = None, **options: Any) -> tuple[Path, list[str]]:
        out = self.folder / form
        return out, export_artifact(self.artifact(self.heads(kept, form)), form, out, FORMATS, ExportOptions(**options))


def case_in(folder: Path, make_llama: Any, tiny_pair: Path) -> Case:
    vocab = json.loads((tiny_pair / "target" / "config.json").read_text())["vocab_size"]
    return Case(folder, make_llama(vocab, num_hidden_layers=8), tiny_pair)


@pytest.fixture
def case(make_llama: Any, tiny_pair: Path, tmp_path: Path) -> Case:
    return case_in(tmp_path, make_llama, tiny_pair)


@pytest.fixture(scope="module")
def exported(make_llama: Any, tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target and of an exported drafter."""
    case = case_in(tmp_path_factory.mktemp("exported"), make_llama, tiny_pair)
    return case.target, case.export("dflash")[0]


def edit(folder: Path, change: Change) -> None:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")


def rename(weights: Weights, change: Callable[[str], str]) -> None:
    weights |= {change(name): weights.pop(name) for name in [*weights]}


def older(config: Config, weights: Weights) -> None:
    """Store settings at the top level and names with a prefix, in a config without the target's size."""
    section = config.pop("dflash_config")
    config |= {"target_layer_ids": section["target_layer_ids"], "mask_token_id": section["mask_token_id"]}
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "auto_map": {}}
    del config["num_target_layers"]
    rename(weights, "model.{}".format)


def speculators(config: Config, weights: Weights) -> None:
    section = config.pop("dflash_config")
    inner = {name: config.pop(name) for name in [*config] if name not in ("block_size", "draft_vocab_size")}
    config |= {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}
    config |= {"transformer_layer_config": inner, "mask_token_id": section["mask_token_id"]}
    config |= {"aux_hidden_state_layer_ids": INPUTS, "sliding_window_non_causal": False, "sample_from_anchor": False}
    weights["verifier_norm.weight"] = torch.ones(3)


def states_of(heads: DFlashHeads) -> torch.Tensor:
    aux_1TG = torch.randn(1, 7, 3 * heads.hidden_size, generator=torch.Generator().manual_seed(0))
    block_1S, places = torch.tensor([[9, *[heads.mask] * (heads.block_size - 1)]]), torch.arange(7 + BLOCK)[None]
    hidden_1SD = torch.nn.functional.embedding(block_1S, heads.embedding)
    return heads.through_layers(hidden_1SD, heads.context(aux_1TG), places[:, 7:], places[:, :7], None)


@pytest.mark.parametrize("form", [older, speculators, None])
@torch.no_grad()
def test_other_formats_are_imported(form: Change | None, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    kept = None if form is None else KEPT
    heads, folder = case.heads(kept), case.folder / "theirs"
    if form is None:  # that of transformers
        case.export("dflash-transformers")[0].rename(folder)
        (folder / "artifact.json").unlink()
    else:
        save_dflash(heads, folder)
        edit(folder, form)
    import_published(str(folder), out := case.folder / "ours", str(case.target))
    loaded = load_dflash(out).attach(heads.embedding, case.model.lm_head.weight)
    assert (list(loaded.layers), loaded.mask, loaded.block_size) == (INPUTS, MASK, BLOCK)
    assert torch.equal(states_of(loaded), states_of(heads))
    assert torch.equal(loaded.projection(), heads.projection())
    assert find_faults(out)[1] == []
    assert check_pair(str(case.target), str(out)) == (form is None), "the draft vocabulary limits engines"
    card = model_card(load_manifest(out), "ours")
    assert "a DFlash drafter" in card
    assert "- mask token: 5" in card
    config = json.loads((out / "config.json").read_text())
    assert (config["num_target_layers"], config["rope_parameters"]["rope_theta"]) == (8, 10_000)


@pytest.mark.parametrize("trimmed", [False, True])
def test_exports_are_checked(trimmed: bool, case: Case) -> None:
    kept = KEPT if trimmed else None
    out, lines = case.export("dflash", kept, speculative_tokens=2)
    assert [line.partition(": ")[2].partition(" (")[0] for line in lines[2:]] == [
        "works", "works but" if trimmed else "works", "works",
    ]  # fmt: skip
    assert (out / "model.safetensors").read_bytes() == (case.folder / "artifact" / "model.safetensors").read_bytes()
    text = (out / SERVING_FILE).read_text()
    assert '"num_speculative_tokens": 2' in text
    assert "--speculative-num-draft-tokens 3" in text
    assert ("ignores the draft vocabulary of" in text) == trimmed
    out, lines = case.export("dspark", kept)
    assert [line.partition(": ")[2].split()[0] for line in lines[2:]] == ["works", "refused" if trimmed else "works"]
    assert ("--speculative-algorithm DSPARK" in (out / SERVING_FILE).read_text()) != trimmed
    out, lines = case.export("dflash-transformers", kept)
    assert lines[0].endswith("two under other names")
    assert not {"lm_head.weight", "d2t", "fc.weight"} & set(load_file(out / "model.safetensors"))
    assert json.loads((out / "config.json").read_text())["target_layer_ids"] == IDS


@pytest.mark.parametrize("form", ["dflash", "dspark", "dflash-transformers"])
def test_a_lost_setting_is_found(form: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are equal, but the config of the export has another epsilon."""

    def load(folder: Path, *target: Any) -> DFlashHeads:
        edit(folder, lambda config, weights: config.update(rms_norm_eps=0.1))
        return read_published_dflash(folder, *target) if target else load_block_drafter(folder)

    heads = case.heads(None, form)
    artifact = case.artifact(heads)
    module = "draftsmith.checkpoints.export.dflash"
    monkeypatch.setattr(f"{module}._load", lambda source, kind: heads)
    monkeypatch.setattr(f"{module}.load_block_drafter", load)
    monkeypatch.setattr(f"{module}.read_published_dflash", load)
    with pytest.raises(ValueError, match="the states of a block computed from"):
        export_artifact(artifact, form, case.folder / form, FORMATS)


@pytest.mark.parametrize("form", ["dflash", "dflash-transformers", "eagle3", "medusa"])
def test_impossible_exports_are_refused(form: str, case: Case) -> None:
    options = {"speculative_tokens": BLOCK} if form.startswith("dflash") else {}
    message = {
        "dflash": "at most 3.*got 4", "dflash-transformers": "does not support --speculative-tokens",
        "eagle3": "export it with --to dflash", "medusa": "contains a DFlash or DSpark drafter",
    }[form]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        case.export(form, **options)


def test_targets_that_an_engine_lacks_are_named(case: Case) -> None:
    config = json.loads((case.target / "config.json").read_text()) | {"model_type": "qwen2"}
    (case.target / "config.json").write_text(json.dumps(config))
    out, lines = case.export("dflash")
    assert "refused (it does not return hidden states of qwen2 targets" in lines[3]
    text = (out / SERVING_FILE).read_text()
    assert "SGLang does not support this pair" in text
    assert "sglang.launch_server" not in text


def setting(**values: Any) -> Change:
    return lambda config, weights: config["dflash_config"].update(values)


def top(**values: Any) -> Change:
    return lambda config, weights: config.update(values)


def rope(**values: Any) -> Change:
    return lambda config, weights: config["rope_parameters"].update(values)


PLANTED: dict[str, tuple[Change, str, set[str]]] = {
    "nothing": (top(), "", set()),
    "layer ids count inputs": (setting(target_layer_ids=INPUTS), "layers", ALL),
    "layer ids of vLLM count outputs": (top(eagle_aux_hidden_state_layer_ids=IDS), "layers", {"vllm"}),
    "last layer": (setting(target_layer_ids=[1, 3, 7]), "last layer,layers", ALL),
    "no such layer": (setting(target_layer_ids=[1, 3, 8]), "layers", ALL),
    "mask outside of the vocabulary": (setting(mask_token_id=9999), "mask token", ALL),
    "another mask": (setting(mask_token_id=6), "mask token", ALL),
    "mask with another text": (setting(mask_token="a"), "mask token", {"sglang"}),
    "no block size at the top level": (
        lambda config, weights: config.pop("block_size"), "block size", {"tensorrt-llm"},
    ),
    "block size at the top level differs": (top(block_size=8), "block size", {"tensorrt-llm"}),
    "block size in the section differs": (
        setting(block_size=8), "block size", {"sglang", "transformers", "draftsmith"},
    ),
    "partial_rotary_factor": (rope(partial_rotary_factor=0.25), "partial rotary positions", ALL),
    "mrope": (rope(mrope_section=[1, 1, 2]), "multimodal rotary positions", ALL),
    "causal": (top(is_causal=True), "causal attention", ALL),
    "causal in the section": (setting(causal=True), "causal attention", ALL),
    "sliding": (top(layer_types=["full_attention", "sliding_attention"]), "sliding layers", ALL),
    "anchor": (setting(sample_from_anchor=True), "predicting anchor", ALL),
    "mask_hidden": (
        lambda config, weights: weights.update(mask_hidden=torch.ones(2)), "tensors",
        {"vllm", "transformers", "draftsmith"},
    ),
    "missing norm": (lambda config, weights: weights.pop("norm.weight"), "tensors", ALL),
    "embeddings": (
        lambda config, weights: weights.update({"embed_tokens.weight": torch.ones(2, 2)}), "tensors",
        {"transformers", "draftsmith"},
    ),
    "another width": (top(hidden_size=64), "hidden_size", ALL),
    "states of another width": (
        lambda config, weights: weights.update({"fc.weight": torch.ones(32, 3 * 48)}), "target width", ALL,
    ),
    "draft vocabulary": (
        lambda config, weights: (
            weights.update({"lm_head.weight": torch.ones(4, 32), "d2t": torch.arange(4)}),
            config.update(draft_vocab_size=4),
        ), "draft vocabulary", {"sglang", "transformers"},
    ),
    "draft vocabulary without tokens": (
        lambda config, weights: (
            weights.update({"lm_head.weight": torch.ones(4, 32)}), config.update(draft_vocab_size=4),
        ), "draft vocabulary", {"vllm", "sglang", "transformers", "draftsmith"},
    ),
    "no section": (
        lambda config, weights: config.update(config.pop("dflash_config")), "form",
        {"vllm", "transformers", "draftsmith"},
    ),
}  # fmt: skip
"""By name: change of an export, checks that name it, and affected engines."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_named(
    name: str, exported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, checks, affected = PLANTED[name]
    target, folder = exported[0], tmp_path / "draft"
    shutil.copytree(exported[1], folder)
    edit(folder, change)
    assert check_pair(str(target), str(folder), as_json=True) == (not affected)
    diagnosis = json.loads(capsys.readouterr().out)
    assert ",".join(sorted({one["check"] for one in diagnosis["findings"]})) == checks
    assert {reader for reader, verdict in diagnosis["verdicts"].items() if verdict["outcome"] != "works"} == affected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting(target_layer_ids=[1, 3, 7]), r"in 0 to 6.*7"),
        (setting(target_layer_ids=None), r"target_layer_ids must be a list.*None"),
        (setting(target_layer_ids=[1, 3]), r"size mismatch for fc.weight.*\n?.*96"),
        (top(eagle_aux_hidden_state_layer_ids=IDS), r"\[1, 3, 5\] \(inputs\).*different layers"),
        (top(vocab_size=99), r"vocab_size.*99"),
        (setting(mask_token_id=None), r"mask_token_id must be an integer"),
        (top(is_causal=True), r"the block is causal, which is not supported"),
        (lambda config, weights: weights.pop("norm.weight"), r"norm.weight"),
        (lambda config, weights: weights.update({"markov_head.w": torch.ones(2)}), r"Unexpected key.*markov_head"),
        (lambda config, weights: weights.update({"embed_tokens.weight": torch.ones(5, 5)}), r"embed_tokens.*\[5, 5\]"),
    ],
)
def test_unsupported_formats_are_refused(change: Change, message: str, case: Case) -> None:
    save_dflash(case.heads(), folder := case.folder / "theirs")
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        read_published_dflash(folder, AutoConfig.from_pretrained(case.target), torch.zeros(7, 7))
