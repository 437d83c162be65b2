"""`draftsmith doctor TARGET DRAFTER`: output, exit code, and SentencePiece tokenizers."""

import json
import os
import shutil
from collections.abc import Callable
from email.message import Message
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.storage.messages import install_hint
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.evaluation import open_recipe
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.session import machine
from transformers import AutoModelForCausalLM, LlamaForCausalLM

TEXT = "The user asks and the assistant answers. USER: the ASSISTANT: hello there, who are you? " * 30
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.fixture
def pair(model_file: Path, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> tuple[Path, Path]:
    """Return two equal models whose tokenizers differ in `legacy` only."""
    model = make_llama(320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, bos_token_id=1, eos_token_id=2)
    folders = tmp_path / "target", tmp_path / "drafter"
    for folder, legacy in zip(folders, (False, True), strict=True):
        model.save_pretrained(folder)
        (folder / "tokenizer.model").write_bytes(model_file.read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL | {"legacy": legacy}))
    return folders


def test_the_legacy_flag_is_reported(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = map(str, pair)
    texts = [load_tokenizer(folder)("</s>hello", add_special_tokens=False).input_ids for folder in (target, drafter)]
    assert texts[0] != texts[1], "the test needs tokenizers that differ"
    assert not check_pair(target, drafter, as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    (finding,) = diagnosis["findings"]
    assert finding["check"] == "encoding"
    assert finding["severity"] == "weakness"
    assert "hello" in finding["what"]
    assert "▁" in finding["drafter"]
    assert {verdict["outcome"] for verdict in diagnosis["verdicts"].values()} == {"works but"}

    assert check_pair(target, drafter, fix=tmp_path / "fixed", as_json=True)
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert (tmp_path / "fixed" / "tokenizer_config.json").read_bytes() == (
        pair[0] / "tokenizer_config.json"
    ).read_bytes()


def test_the_output_is_a_table(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    shutil.copytree(target, drafter.with_name("twin"))
    assert check_pair(str(target), str(drafter.with_name("twin")))
    out = capsys.readouterr().out
    assert "no findings" in out
    assert out.count(" works ") == 5
    model = AutoModelForCausalLM.from_pretrained(drafter)
    model.resize_token_embeddings(352, mean_resizing=False)
    model.save_pretrained(drafter)
    shutil.copyfile(target / "tokenizer_config.json", drafter / "tokenizer_config.json")
    assert not check_pair(str(target), str(drafter))
    out = " ".join(capsys.readouterr().out.split())
    for part in ("vocab_size", "320 (320 tokens)", "352 (320 tokens)", "assistant_tokenizer", "fault", "refused"):
        assert part in out
    assert check_pair(str(target), str(drafter), fix=drafter.with_name("fixed"))
    captured = capsys.readouterr()
    assert "32 dropped" in captured.err
    assert "no findings" in captured.out


def test_a_changed_artifact_is_reported(tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter, fixed = str(tiny_pair / "target"), tmp_path / "drafter", tmp_path / "fixed"
    shutil.copytree(tiny_pair / "drafter", drafter)
    for path in (tiny_pair / "target").glob("token*"):
        shutil.copyfile(path, drafter / path.name)
    assert not check_pair(target, str(drafter), as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    (finding,) = [one for one in diagnosis["findings"] if one["check"] == "changed files"]
    assert "contains tokenizer.json, tokenizer_config.json, which its artifact.json does not list" in finding["drafter"]
    assert {name for name, one in diagnosis["verdicts"].items() if one["outcome"] == "refused"} == {"draftsmith"}
    assert check_pair(str(drafter), str(tiny_pair / "drafter"), as_json=True), "a changed target must be accepted"
    assert "files of the target differ from its artifact.json" in capsys.readouterr().out
    with (drafter / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x07")
    assert not check_pair(target, str(drafter), as_json=True)
    assert "model.safetensors has SHA-256" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        check_pair(target, str(drafter), fix=fixed)
    (drafter / "artifact.json").unlink()
    assert check_pair(target, str(drafter), fix=fixed, as_json=True), "the drafter must be repaired"
    assert "tokenizer.json" in verify_artifact(fixed, "drafter").files


def test_weights_that_cannot_be_loaded_are_refused(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled weights are accepted if DRAFTSMITH_UNPICKLE is set."""
    target, drafter = pair
    torch.save(LlamaForCausalLM.from_pretrained(drafter).state_dict(), drafter / "pytorch_model.bin")
    (drafter / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pickled") as refused:
        load_model(str(drafter))
    assert not check_pair(str(target), str(drafter), as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    (reason,) = diagnosis["verdicts"]["draftsmith"]["reasons"]
    assert diagnosis["verdicts"]["draftsmith"]["outcome"] == "refused"
    assert reason.partition("; ")[2] in str(refused.value)
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    load_model(str(drafter))
    check_pair(str(target), str(drafter), as_json=True)
    assert json.loads(capsys.readouterr().out)["verdicts"]["draftsmith"]["outcome"] == "works but"
    (drafter / "pytorch_model.bin").unlink()
    check_pair(str(target), str(drafter), as_json=True)
    assert json.loads(capsys.readouterr().out)["verdicts"]["draftsmith"]["outcome"] == "refused"


def test_an_evaluation_of_an_unsuitable_drafter_names_the_doctor(pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair[1])
    model.resize_token_embeddings(352, mean_resizing=False)
    model.save_pretrained(pair[1])
    recipe = EvaluateRecipe(
        kind="evaluate", out="results.json", target=str(pair[0]), drafter=str(pair[1]), prompts="spec-bench",
        methods=[{"method": "autoregressive"}, {"method": "speculative"}],
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"has 352 tokens.* 320.*draftsmith doctor {pair[0]} {pair[1]}"):
        open_recipe(recipe)
    with pytest.raises(ValueError, match="'speculative' requires `drafter`"):
        open_recipe(recipe.model_copy(update={"drafter": None}))


def test_the_command_line(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = map(str, pair)
    cases = ((target, "--json"), "options require a target"), ((target, drafter, "--fix", drafter), "already exists")
    for arguments, message in cases:
        monkeypatch.setattr("sys.argv", ["draftsmith", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_packages_are_listed_once_with_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=1", 'some.package; extra == "a"', 'some.package>2; extra == "b"', 'draftsmith[a]; extra == "all"']
    extras = Message()
    for extra in ("a", "b", "all"):
        extras["Provides-Extra"] = extra
    monkeypatch.setattr(machine, "metadata", lambda _: extras)
    monkeypatch.setattr(machine, "requires", lambda _: needed)
    findings = {finding.name: finding for finding in machine.findings()}
    assert findings["some.package"][1:] == ("missing", install_hint("a"))
    assert sum(finding.name == "some.package" for finding in machine.findings()) == 1
    assert findings["numpy"].state == version("numpy")

    def missing(_: str) -> Any:
        raise PackageNotFoundError

    monkeypatch.setattr(machine, "metadata", missing)  # draftsmith is not installed
    assert "numpy" not in {finding.name for finding in machine.findings()}


@pytest.mark.parametrize(("load", "advised"), [(0.2, False), (64.0, True)])
def test_busy_processors_are_reported(load: float, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    (finding,) = (each for each in machine.findings() if each.name.startswith("load"))
    assert finding.state == f"{load:.1f} of 8 cores"
    assert ("OMP_NUM_THREADS=1" in finding.advice) == advised
