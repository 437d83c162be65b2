"""Methods saved and loaded: the same text, whole or not at all, and nothing believed that does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode import CustomGenerate, method
from draftsmith.decode.custom_generate import saved as method_files
from draftsmith.decode.custom_generate.method import ATTACHED_FORMATS
from draftsmith.decode.methods import METHODS
from transformers import AutoModelForCausalLM, LlamaForCausalLM

VOCAB, HIDDEN = 64, 32
ONE = torch.tensor([[1, 2, 3]])
OPTIONS: dict[str, dict[str, Any]] = {
    "speculative": {"gamma": 3},
    "multi-candidate": {"k_config": "2x2", "replacement": True},
    "bigram": {"gamma": 3, "add_k": 0.5},
    "medusa": {"tree": "2x2x1", "acceptance": "typical", "epsilon": 0.2},
    "slim-s": {"num_sequences": 5, "unseen_correlation": 0.5, "lengths": "full"},
    "adaptive": {"policy": "oracle", "token_cost": 0.25},
}
FORMATS = {form.name: form for form in ATTACHED_FORMATS}
SETTINGS = "custom_generate.json"
REPO = "somebody/method"


def some_heads(projection: str = "own", **settings: Any) -> PredictionHeads:
    torch.manual_seed(4)
    heads = PredictionHeads(3, 1, HIDDEN, VOCAB, projection, 4 if projection == "low-rank" else 0, **settings)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0.0, 0.2)
    return heads.eval()


def some_table(vocab_size: int = VOCAB) -> BigramTable:
    return BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB - 4, 3000)], vocab_size)


@pytest.fixture
def parts(drafter: LlamaForCausalLM) -> dict[str, Any]:
    return {"drafter": drafter, "heads": some_heads(), "table": some_table()}


def decode(model: LlamaForCausalLM, custom: Any, **asked: Any) -> list[list[int]]:
    text: list[list[int]] = model.generate(ONE, max_new_tokens=12, custom_generate=custom, **asked).tolist()
    return text


def settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    return settings


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.requires])
def test_every_method_decodes_as_before(
    target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path, name: str
) -> None:
    custom = method(name, **parts, **OPTIONS.get(name, {}))
    custom.save_pretrained(tmp_path / "saved")
    again = CustomGenerate.from_pretrained(tmp_path / "saved")
    assert (again.name, again.options) == (name, custom.options)
    for part in ("heads", "table"):
        assert (getattr(again, part) is None) == (part not in METHODS[name].requires)
    assert decode(target, again) == decode(target, custom)
    sampled = []
    for one in (custom, again):
        torch.manual_seed(7)
        sampled.append(decode(target, one, do_sample=True))
    assert sampled[0] == sampled[1]
    leaves = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert leaves <= {".json", ".safetensors", ".py", ".txt"}


def test_drafters_stay_folders_or_names(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    drafter.save_pretrained(tmp_path / "model")
    second = make_llama(VOCAB, seed=2, num_hidden_layers=1)
    custom = method("specinfer", drafter=tmp_path / "model", more_drafters=[second], gamma=2)
    custom.save_pretrained(tmp_path / "saved")
    (tmp_path / "model").rename(tmp_path / "moved")
    again = CustomGenerate.from_pretrained(tmp_path / "saved")
    assert [type(one.model) for one in again.drafters] == [LlamaForCausalLM] * 2
    torch.manual_seed(0)
    wanted = decode(target, custom, do_sample=True)
    torch.manual_seed(0)
    assert decode(target, again, do_sample=True) == wanted
    assert settings_of(tmp_path / "saved")["drafters"] == [{"folder": "drafter-1"}, {"folder": "drafter-2"}]
    custom.drafters[0].hub_id = "some/drafter"
    custom.save_pretrained(tmp_path / "saved")
    assert settings_of(tmp_path / "saved")["drafters"] == [{"id": "some/drafter"}, {"folder": "drafter-2"}]
    assert sorted(path.name for path in (tmp_path / "saved").glob("drafter*")) == ["drafter-2"]


TRUSTING = """
import sys
import torch
from transformers import AutoModelForCausalLM

target, folder = sys.argv[1:]
ids = torch.tensor([[1, 2, 3]])
asked = dict(inputs=ids, max_new_tokens=12)
model = AutoModelForCausalLM.from_pretrained(target)
plain = model.generate(**asked).tolist()
assert "draftsmith" not in sys.modules
for _ in range(2):
    assert model.generate(**asked, custom_generate=folder, trust_remote_code=True).tolist() == plain
attached = sys.modules["draftsmith.decode.custom_generate.method"]
assert attached._load_once.cache_info()[:2] == (1, 1)
try:
    model.generate(**asked, custom_generate=folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("code was run that nobody trusted")
model.save_pretrained(folder)
both = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert both.generate(ids, max_new_tokens=12).tolist() == plain
assert attached._load_once.cache_info()[:2] == (2, 1)
print(model.generate(ids, max_new_tokens=12, do_sample=True, custom_generate=folder, trust_remote_code=True).shape)
"""


def test_transformers_runs_what_is_saved_if_it_is_trusted(
    target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "target")
    method("slim-ss", **parts).save_pretrained(tmp_path / "my.method")
    command = [sys.executable, "-c", TRUSTING, str(tmp_path / "target"), str(tmp_path / "my.method")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch.Size([1, 15])"


def test_a_model_lies_beside_its_method(target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path) -> None:
    method("medusa", **parts).save_pretrained(tmp_path)
    target.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # not trusted: transformers' own generate
    assert decode(model, CustomGenerate.from_pretrained(tmp_path)) == decode(model, None)
    with pytest.raises(ValueError, match=r"config\.json"):  # it is not written over
        method("medusa", **parts).save_pretrained(tmp_path)


def test_saving_replaces_a_method_and_nothing_else(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    method("speculative", **parts).save_pretrained(folder)
    method("bigram", **parts, gamma=3).save_pretrained(folder)
    assert not list(folder.glob("drafter*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(method_files, "save_heads", full)
    with pytest.raises(OSError, match="no space left"):
        method("medusa", **parts).save_pretrained(folder)
    monkeypatch.undo()
    again = CustomGenerate.from_pretrained(folder)
    assert (again.name, again.options["gamma"]) == ("bigram", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_cannot_be_saved_is_named(
    make_heads: Callable[..., Any], drafter: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="RandomHeads"):
        method("medusa", heads=make_heads(3, HIDDEN, VOCAB)).save_pretrained(tmp_path / "saved")
    peft = pytest.importorskip("peft")
    drafter.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapters"):
        method("speculative", drafter=drafter).save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        method("bigram", table=some_table()).save_pretrained(tmp_path / "file")


def setting(name: str, value: Any) -> Callable[[Path], None]:
    """Return a change of one of the settings."""

    def change(folder: Path) -> None:
        settings = settings_of(folder)
        (folder / SETTINGS).write_text(json.dumps(settings | {name: value}))

    return change


def lose_table(folder: Path) -> None:
    shutil.rmtree(folder / "table")


def write_half(folder: Path) -> None:
    (folder / SETTINGS).write_text("{")


REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no JSON": (write_half, (SETTINGS, "JSON")),
    "an unknown method": (setting("method", "slim-t"), (SETTINGS, "'slim-t'", "'slim-s'")),
    "an option named as an argument": (setting("options", {"heads": "elsewhere"}), (SETTINGS, "'heads'")),
    "no table": (lose_table, ("table",)),
    "a drafter elsewhere": (setting("drafters", [{"folder": "../model"}]), ("../model",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(parts: dict[str, Any], tmp_path: Path, case: str) -> None:
    damage, words = REFUSED[case]
    method("slim-s", **parts).save_pretrained(tmp_path / "saved")
    CustomGenerate.from_pretrained(tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the words are compared below)
        CustomGenerate.from_pretrained(tmp_path / "saved")
    assert all(word in str(refused.value) for word in words), refused.value


def artifact(folder: Path, kind: str, write: Callable[[Path], None]) -> Path:
    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    about |= {"tokenizer_fingerprint": None, "target": {"id": "some/target"}, "vocab_size": VOCAB}
    save_artifact(folder, kind=kind, write=write, **about)
    return folder


def test_a_method_is_loaded_from_the_hub(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    stand_in: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "mine"
    method("speculative", drafter=drafter, gamma=2).save_pretrained(folder)
    with stand_in.running_hub() as hub:
        stand_in.point_client(hub.url, tmp_path / "home", monkeypatch)
        first = hub.repo(REPO, stand_in.files_of(folder)).at("main")
        loaded = [CustomGenerate.from_pretrained(REPO), CustomGenerate.from_pretrained(REPO, revision=first)]
        loaded.append(CustomGenerate.from_pretrained(f"{REPO}@{first}"))
        with pytest.raises(ValueError, match=f"{REPO}s"):
            CustomGenerate.from_pretrained(f"{REPO}s")
    for custom in loaded:
        assert custom.options["gamma"] == 2
        assert decode(target, custom) == decode(target, None)


@pytest.mark.parametrize("projection", ["own", "low-rank", "target"])
def test_heads_are_exported_as_one_file(target: LlamaForCausalLM, tmp_path: Path, projection: str) -> None:
    target.save_pretrained(tmp_path / "target")
    source = artifact(tmp_path / "heads", "heads", lambda place: save_heads(some_heads(projection), place, "target"))
    options = ExportOptions(target=str(tmp_path / "target"))
    found = export_artifact(source, "custom-generate", tmp_path / "out", FORMATS, options)
    assert len(found) == 1
    assert verify_artifact(tmp_path / "out").kind == "heads"
    loaded = CustomGenerate.from_pretrained(tmp_path / "out")
    assert loaded.name == "medusa"
    assert decode(target, loaded) == decode(target, None)
    (tmp_path / "out" / "SERVING.md").write_text("changed")
    with pytest.raises(ValueError, match=r"SERVING\.md"):
        CustomGenerate.from_pretrained(tmp_path / "out")


def test_tables_are_exported_as_one_file(target: LlamaForCausalLM, tmp_path: Path) -> None:
    source = artifact(tmp_path / "table", "table", some_table().save)
    options = ExportOptions(speculative_tokens=5)
    found = export_artifact(source, "custom-generate-bigrams", tmp_path / "out", FORMATS, options)
    assert len(found) == 1
    loaded = CustomGenerate.from_pretrained(tmp_path / "out")
    assert (loaded.name, loaded.options["gamma"]) == ("bigram", 5)
    assert decode(target, loaded) == decode(target, None)
    serving = (tmp_path / "out" / "SERVING.md").read_text()
    assert 'CustomGenerate.from_pretrained("out")' in serving
    assert 'AutoModelForCausalLM.from_pretrained("some/target")' in serving


def test_an_export_that_differs_does_not_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(heads: PredictionHeads, folder: Path, base: str) -> None:
        with torch.no_grad():
            heads.get_parameter("2.1.weight").view(-1)[0] += 1
        save_heads(heads, folder, base)

    source = artifact(tmp_path / "source", "heads", lambda place: save_heads(some_heads(), place, "target"))
    monkeypatch.setattr(method_files, "save_heads", save)
    with pytest.raises(ValueError, match=r"2\.1\.weight.*differs"):
        export_artifact(source, "custom-generate", tmp_path / "out", FORMATS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
