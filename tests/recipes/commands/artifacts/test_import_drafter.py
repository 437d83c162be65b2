"""`draftsmith import` of drafters, and `draftsmith doctor` for LoRA adapters."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.artifacts.imports import import_published
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result


def draftsmith(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def target(tiny_pair: Path) -> Path:
    return tiny_pair / "target"


@pytest.fixture
def plain(tiny_pair: Path, tmp_path: Path) -> Path:
    """Save a drafter without a manifest."""
    folder = tmp_path / "plain"
    AutoModelForCausalLM.from_pretrained(tiny_pair / "drafter").save_pretrained(folder)
    load_tokenizer(str(tiny_pair / "target")).save_pretrained(folder)
    (folder / "LICENSE").write_text("yours")
    return folder


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    """Save a LoRA adapter for this drafter."""
    peft = pytest.importorskip("peft")
    folder = tmp_path / "adapter"
    torch.manual_seed(3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(plain), peft.LoraConfig(r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(plain)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_an_imported_drafter_is_an_artifact(plain: Path, target: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = draftsmith("import", plain, "--target", target, "--out", out)
    assert done.exit_code == 0, (done.output, done.exception)
    manifest = verify_artifact(out, "drafter")
    assert manifest.target == {"id": str(target), "sha256": resolve_model(str(target)).sha256}
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(str(target)))
    assert manifest.training == {"imported_from": str(plain)}
    assert (out / "LICENSE").read_text() == "yours"
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert draftsmith("doctor", target, out).exit_code == 0
    assert draftsmith("export", out, "--to", "transformers", "--out", tmp_path / "export").exit_code == 0
    settings: dict[str, Any] = {"kind": "evaluate", "device": "cpu", "prompts": str(corpus / "rows.json"), "limit": 2}
    settings |= {"template": "chatml", "max_new_tokens": 8, "target": str(target), "out": str(tmp_path / "r.json")}
    settings |= {"methods": [{"method": "autoregressive"}, {"method": "speculative"}], "drafter": str(out)}
    results = run_evaluate(EvaluateRecipe(**settings))
    assert results["artifacts"]["drafter"]["files"]["model.safetensors"]


def test_pickled_weights_are_converted_if_allowed(plain: Path, target: Path, tmp_path: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    torch.save(weights, plain / "pytorch_model.bin")
    command = ("import", plain, "--target", target, "--out", tmp_path / "out")
    assert "--unpickle" in str(draftsmith(*command).exception)
    assert not (tmp_path / "out").exists()
    done = draftsmith(*command, "--unpickle")
    assert done.exit_code == 0, (done.output, done.exception)
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(converted[name], weights[name]) for name in converted)
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize("case", ["no target", "states", "damaged", "there already", "an artifact"])
def test_an_import_is_refused(case: str, plain: Path, target: Path, tiny_pair: Path, tmp_path: Path) -> None:
    source = tiny_pair / "drafter" if case == "an artifact" else plain
    out = plain if case == "there already" else tmp_path / "out"
    options = {"no target": {}, "states": {"target": str(target), "states": "before-norm"}}
    parts = {"no target": "--target", "states": "--states", "damaged": "model.safetensors"}
    if case == "damaged":
        (plain / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ValueError, match=parts.get(case, str(source))):
        import_published(str(source), out, **options.get(case, {"target": str(target)}))
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged(adapter: Path, target: Path, tmp_path: Path) -> None:
    done = draftsmith("import", adapter, "--target", target, "--out", tmp_path / "out")
    assert done.exit_code == 0, (done.output, done.exception)
    verify_artifact(tmp_path / "out", "drafter")
    ids = torch.tensor([[1, 5, 9, 200]])
    merged, adapted = load_model(str(tmp_path / "out"))(ids).logits, load_model(str(adapter))(ids).logits
    assert torch.equal(merged, adapted)
    diagnosis = draftsmith("doctor", target, adapter, "--json")
    assert json.loads(diagnosis.stdout)["verdicts"]["draftsmith"]["outcome"] == "works"
    base = load_model(str(tmp_path / "plain"))(ids).logits
    assert not torch.allclose(merged, base, atol=1e-3), "the adapter has no effect"
    assert (tmp_path / "out" / "tokenizer.json").is_file(), "the tokenizer of the base model"


@pytest.mark.parametrize("form", ["adapter", "pickled"])
def test_files_that_must_be_converted_are_repaired_too(
    form: str, plain: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    wide = AutoModelForCausalLM.from_pretrained(plain)
    wide.resize_token_embeddings(352, mean_resizing=False)
    wide.save_pretrained(plain)
    source = request.getfixturevalue("adapter") if form == "adapter" else plain
    before = load_model(str(source))
    if form == "pickled":
        torch.save(load_file(plain / "model.safetensors"), plain / "pytorch_model.bin")
        (plain / "model.safetensors").unlink()
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="vocab_size: ") as refused:
        import_published(str(source), out, str(target), unpickle=form == "pickled")
    advised = shlex.split(str(refused.value).split("`")[-2])
    if form == "pickled":
        assert "pickled" in str(draftsmith("doctor", target, source, "--fix", out).exception)
        monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    mended = draftsmith(*[str(out) if word == "OUT" else word for word in advised[1:]])
    assert mended.exit_code == 0, (mended.output, mended.exception)
    manifest = verify_artifact(out, "drafter")
    assert (manifest.vocab_size, manifest.training["repaired_from"]) == (320, str(source))
    assert (out / "LICENSE").read_text() == "yours", "the licence of the base model must be copied"
    ids = torch.tensor([[1, 5, 9, 200]])
    assert torch.equal(load_model(str(out))(ids).logits, before(ids).logits[..., :320])
