"""Methods saved and loaded: the same text, whole or not at all, and nothing believed that does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.storage.safe_read import file_hash
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode import CustomGenerate, method
from draftsmith.decode.custom_generate import saved as method_files
from draftsmith.decode.custom_generate.export import ATTACHED_FORMATS
from draftsmith.decode.methods import METHODS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

VOCAB, HIDDEN = 64, 32
ONE = torch.tensor([[1, 2, 3]])
OPTIONS: dict[str, dict[str, Any]] = {
    "speculative": {"gamma": 3},
    "multi-candidate": {"k_config": "2x2", "replacement": True},
    "bigram": {"gamma": 3, "smoothing": "kneser-ney", "strength": 0.5},
    "medusa": {"tree": "2x2x1", "acceptance": "typical", "epsilon": 0.2},
    "slim-s": {"sequences": 5, "unseen": 0.5, "lengths": "full"},
    "adaptive": {"policy": "expected-gain", "threshold": 0.25},
}
FORMATS = {form.name: form for form in ATTACHED_FORMATS}


def some_heads(projection: str = "own", **settings: Any) -> PredictionHeads:
    torch.manual_seed(4)
    rank = 4 if projection == "low-rank" else 0
    heads = PredictionHeads(3, 1, HIDDEN, VOCAB, projection, rank, **settings)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0.0, 0.2)
    return heads.eval()


def some_table() -> BigramTable:
    return BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB - 4, 3000)], VOCAB)


@pytest.fixture
def parts(drafter: LlamaForCausalLM) -> dict[str, Any]:
    return {"drafter": drafter, "heads": some_heads(), "table": some_table()}


def decode(model: LlamaForCausalLM, custom: Any, **asked: Any) -> list[list[int]]:
    text: list[list[int]] = model.generate(ONE, max_new_tokens=12, custom_generate=custom, **asked).tolist()
    return text


def test_what_came_there_during_a_save_stays(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "saved", method_files.write_method

    def slow(stored: method_files.StoredMethod, place: Path) -> None:
        write(stored, place)
        folder.mkdir()
        (folder / "thesis.tex").write_text("years of work")

    monkeypatch.setattr(method_files, "write_method", slow)
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex\)"):
        method("bigram", **parts).save_pretrained(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["saved", "thesis.tex"]


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.needs])
def test_every_method_decodes_as_before(
    target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path, name: str
) -> None:
    custom = method(name, **parts, **OPTIONS.get(name, {}))
    custom.save_pretrained(tmp_path / "saved")
    again = CustomGenerate.from_pretrained(tmp_path / "saved")
    assert (again.name, again.options) == (name, custom.options)
    for part in ("heads", "table"):
        assert (getattr(again, part) is None) == (part not in METHODS[name].needs)
    assert decode(target, again) == decode(target, custom)
    sampled = []
    for one in (custom, again):
        torch.manual_seed(7)
        sampled.append(decode(target, one, do_sample=True))
    assert sampled[0] == sampled[1]
    leaves = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert leaves <= {".json", ".safetensors", ".py", ".txt"}


@pytest.mark.parametrize(
    "heads",
    [
        some_heads("low-rank", scale=0.25),
        some_heads("target"),
        some_heads(states="before-norm").bfloat16(),
        some_heads().double(),
    ],
    ids=["low-rank", "target", "before-norm", "double"],
)
@pytest.mark.parametrize("pruning", [{}, {"min_count": 2}], ids=["whole", "pruned"])
def test_parts_come_back_as_they_were(tmp_path: Path, heads: PredictionHeads, pruning: dict[str, int]) -> None:
    table = some_table().pruned(**pruning) if pruning else some_table()
    method("slim-s", heads=heads, table=table).save_pretrained(tmp_path / "saved")
    again = CustomGenerate.from_pretrained(str(tmp_path / "saved"))
    assert isinstance(again.heads, PredictionHeads)
    assert again.table is not None
    for name in ("num_heads", "num_layers", "hidden_size", "projection_kind", "rank", "states", "scale", "vocab_size"):
        assert getattr(again.heads, name) == getattr(heads, name), name
    assert again.heads.state_dict().keys() == heads.state_dict().keys()
    for name, weight in heads.state_dict().items():
        assert again.heads.state_dict()[name].dtype == weight.dtype
        assert torch.equal(again.heads.state_dict()[name], weight)
    for name in ("row_ptr", "col", "count", "unigram"):
        assert torch.equal(getattr(again.table, name), getattr(table, name))
    assert again.table.pruning == table.pruning
    assert torch.equal(again.table.right_counts(), table.right_counts())
    assert not again.heads.training


def test_loaded_heads_follow_the_targets_dtype(target: LlamaForCausalLM, tmp_path: Path) -> None:
    wanted = decode(target, None)
    with pytest.raises(ValueError, match=r"heads are torch.float64 on cpu, the target is torch.float32"):
        decode(target, method("medusa", heads=some_heads().double()))
    method("medusa", heads=some_heads().double()).save_pretrained(tmp_path / "saved")
    assert decode(target, CustomGenerate.from_pretrained(tmp_path / "saved")) == wanted


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
    settings = json.loads((tmp_path / "saved" / "custom_generate.json").read_text())
    assert settings["drafters"] == [{"folder": "drafter-1"}, {"folder": "drafter-2"}]
    custom.drafters[0].hub_id = "some/drafter"
    custom.save_pretrained(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "custom_generate.json").read_text())
    assert settings["drafters"] == [{"id": "some/drafter"}, {"folder": "drafter-2"}]
    assert sorted(path.name for path in (tmp_path / "saved").glob("drafter*")) == ["drafter-2"]


def test_a_model_of_another_size_is_refused(
    parts: dict[str, Any], make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    for name, what in (("medusa", "heads"), ("bigram", "table")):
        method(name, **parts).save_pretrained(tmp_path / what)
        with pytest.raises(ValueError, match=f"vocab_size of the {what} is 64, of the target 48"):
            decode(make_llama(48), CustomGenerate.from_pretrained(tmp_path / what))
    with pytest.raises(ValueError, match="hidden_size of the heads is 32, of the target 16"):
        decode(make_llama(64, hidden_size=16), CustomGenerate.from_pretrained(tmp_path / "heads"))


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
attached = sys.modules["draftsmith.decode.attached"]
assert attached._loaded.cache_info()[:2] == (1, 1)
try:
    model.generate(**asked, custom_generate=folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("code was run that nobody trusted")
model.save_pretrained(folder)
both = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert both.generate(ids, max_new_tokens=12).tolist() == plain
assert attached._loaded.cache_info()[:2] == (2, 1)
print(model.generate(ids, max_new_tokens=12, do_sample=True, custom_generate=folder, trust_remote_code=True).shape)
"""


def test_transformers_runs_what_is_saved_if_it_is_trusted(
    target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "target")
    method("slim-ss", **parts).save_pretrained(tmp_path / "my.method")
    code = (tmp_path / "my.method" / "custom_generate" / "generate.py").read_text()
    # So it stands in folders that earlier versions saved: what it calls must stay.
    assert "from draftsmith.decode.attached import generate_attached\n" in code
    assert "    return generate_attached(model, inputs, **asked)\n" in code
    command = [sys.executable, "-c", TRUSTING, str(tmp_path / "target"), str(tmp_path / "my.method")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch.Size([1, 15])"


def test_saving_replaces_a_method_and_nothing_else(
    target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    method("speculative", **parts).save_pretrained(folder)
    method("bigram", **parts, gamma=3).save_pretrained(folder)
    assert CustomGenerate.from_pretrained(folder).name == "bigram"
    assert not list(folder.glob("drafter*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(method_files, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        method("medusa", **parts).save_pretrained(folder)
    monkeypatch.undo()
    assert CustomGenerate.from_pretrained(folder).options["gamma"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    target.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"holds other files \(config.json, .*a model that shall lie beside it"):
        method("medusa", **parts).save_pretrained(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        method("medusa", **parts).save_pretrained(tmp_path / "file")


def test_what_cannot_be_saved_is_named(
    make_heads: Callable[..., Any], drafter: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="heads of type RandomHeads cannot be saved"):
        method("medusa", heads=make_heads(3, HIDDEN, VOCAB)).save_pretrained(tmp_path / "saved")
    peft = pytest.importorskip("peft")
    drafter.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="the drafter has adapters"):
        method("speculative", drafter=drafter).save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_places_without_a_method_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"holds no saved method: it has no custom_generate.json"):
        CustomGenerate.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        CustomGenerate.from_pretrained(Path("nowhere"))
    with pytest.raises(ValueError, match=r"there is no folder ./some/where"):
        CustomGenerate.from_pretrained("./some/where")
    with pytest.raises(ValueError, match=r"u0430"):
        CustomGenerate.from_pretrained("d\u0430ta/method")
    with pytest.raises(ValueError, match="is no branch, tag or commit"):
        CustomGenerate.from_pretrained("some/method", revision="../up")
    with pytest.raises(ValueError, match="is here, where it has no revisions: leave out 'main'"):
        CustomGenerate.from_pretrained(tmp_path, revision="main")


def change(settings: dict[str, Any], path: str, value: Any) -> None:
    name, _, inner = path.partition("/")
    if inner:
        settings, name = settings[name], inner
    settings[name] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("method", "slim-t", r"unknown method 'slim-t'. Did you mean 'slim-s'\?"),
        ("options/sequence", 3, r"no option 'sequence'. Did you mean 'sequences'\?"),
        ("options/sequences", "many", "must be int, got 'many'"),
        ("options/heads", "elsewhere", "heads"),
        ("options/drafter", "elsewhere", "multiple values for keyword argument 'drafter'"),
        ("method", "speculative", "method 'speculative' has no option 'sequences'"),
        ("parts", ["heads"], "holds table.col, which is of none of the parts heads"),
        ("parts", [], "'slim-s' needs a heads"),
        ("method", 3, "method is 3, expected a str"),
        ("schema", 2, "its schema is 2, this draftsmith reads 1"),
        ("schema", True, "schema is True, expected a int"),
        ("parts", ["heads", "eyes"], "parts names 'eyes', expected some of heads, table"),
        ("parts", ["table"], "holds heads.0.0.linear.bias, which is of none of the parts table"),
        ("drafters", [{"folder": "../model"}], "expected a folder beside it or a hub id"),
        ("drafters", [{"folder": "/etc"}], "expected a folder beside it or a hub id"),
        ("drafters", [{"id": "../../etc"}], "is no name of a repository"),
        ("drafters", [["drafter"]], "expected a folder beside it or a hub id"),
        ("files/x.json", "00", r"lacks x.json, which"),
        ("files/../x.json", "00", r"files names '../x.json'"),
        ("files/x.bin", "00", r"files names 'x.bin' with '00': it is no file of weights or settings"),
        ("files", {}, r"holds draftsmith.safetensors, which its custom_generate.json does not list"),
        ("files", {"draftsmith.safetensors": 3}, "files names 'draftsmith.safetensors' with 3"),
        ("files/draftsmith.safetensors", "00", "has the hash .*, its custom_generate.json says 00"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(
    parts: dict[str, Any], tmp_path: Path, path: str, value: Any, message: str
) -> None:
    method("slim-s", **parts).save_pretrained(tmp_path)
    file = tmp_path / "custom_generate.json"
    settings = json.loads(file.read_text())
    change(settings, path, value)
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        CustomGenerate.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", "it holds a JSON list"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nests deeper than"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "expected at most 1,048,576"),
        ("{}", "schema is None, expected a int"),
    ],
    ids=["cut", "list", "deep", "large", "empty"],
)
def test_settings_of_no_form_are_refused(parts: dict[str, Any], tmp_path: Path, text: str, message: str) -> None:
    method("slim-s", **parts).save_pretrained(tmp_path)
    (tmp_path / "custom_generate.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        CustomGenerate.from_pretrained(tmp_path)


def rewritten(folder: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """The parts written anew, with a hash that fits: what a hostile sender would do."""
    save_file(tensors, folder / "draftsmith.safetensors", metadata=metadata)
    signed(folder)


def signed(folder: Path) -> None:
    settings = json.loads((folder / "custom_generate.json").read_text())
    settings["files"]["draftsmith.safetensors"] = file_hash(folder / "draftsmith.safetensors")
    (folder / "custom_generate.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("heads.0.0.linear.weight", torch.zeros(3, 3), r"0.0.linear.weight is \[3, 3\], expected \[32, 32\]"),
        ("heads.7.0.linear.weight", torch.zeros(32, 32), "3.0.linear.weight"),
        ("heads.0.0.linear.weight", torch.zeros(32, 32, dtype=torch.int8), "torch.int8, expected float32"),
        ("heads.eval", torch.zeros(1), "eval is not a tensor of prediction heads"),
        ("table.col", torch.zeros(3, dtype=torch.int64), "col is torch.int64"),
        ("table.unigram", torch.zeros(VOCAB + 1, dtype=torch.int64), "row_ptr has 65 entries for 65 tokens"),
        ("other.weight", torch.zeros(1), "holds other.weight, which is of none of the parts heads, table"),
        ("metadata", {"heads": "[1"}, "of the heads in its metadata, it is not JSON"),
        ("metadata", {"heads": "{" * 3}, "of the heads in its metadata, it is not JSON"),
        ("metadata", {"heads": '{"a":' * 9999}, "of the heads in its metadata"),
        ("metadata", {"heads": '{"states": "inside"}'}, "states is 'inside', expected one of"),
        ("metadata", {"heads": '{"scale": -1}'}, "scale is -1, expected a number above 0"),
        ("metadata", {"heads": '{"vocab_size": 65}'}, "says vocab_size 65, the tensors have 64"),
        ("metadata", {"table.vocab_size": "65"}, "65 tokens"),
        ("metadata", {"table.pruning": "[" * 9999}, "draftsmith.safetensors"),
    ],
)
def test_parts_that_contradict_themselves_are_refused(
    parts: dict[str, Any], tmp_path: Path, name: str, value: Any, message: str
) -> None:
    table = some_table().pruned(min_count=2)
    method("slim-s", heads=parts["heads"], table=table).save_pretrained(tmp_path)
    path = tmp_path / "draftsmith.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata())
    rewritten(tmp_path, tensors, metadata)
    CustomGenerate.from_pretrained(tmp_path)
    if name == "metadata":
        rewritten(tmp_path, tensors, metadata | value)
    else:
        rewritten(tmp_path, tensors | {name: value}, metadata)
    with pytest.raises(ValueError, match=message) as refused:
        CustomGenerate.from_pretrained(tmp_path)
    assert "draftsmith.safetensors" in str(refused.value)


def test_files_that_are_damaged_missing_or_too_many_are_named(parts: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            CustomGenerate.from_pretrained(folder)
        shutil.rmtree(folder)
        method("speculative", **parts).save_pretrained(folder)

    method("speculative", **parts).save_pretrained(folder)
    (folder / "drafter-1").rename(folder / "planted")
    (folder / "drafter-1").symlink_to(tmp_path / "saved" / "planted")
    refused("holds drafter-1, which its custom_generate.json does not list")
    (folder / "drafter-1" / "config.json").rename(tmp_path / "config.json")
    (folder / "drafter-1" / "config.json").symlink_to(tmp_path / "config.json")
    refused("drafter-1/config.json is a link to .*, expected a file")
    (folder / "drafter-1" / "pytorch_model.bin").write_bytes(b"planted")
    refused("holds drafter-1/pytorch_model.bin, which its custom_generate.json does not list")
    content = bytearray((folder / "drafter-1" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "drafter-1" / "model.safetensors").write_bytes(content)
    refused("drafter-1/model.safetensors has the hash")
    (folder / "drafter-1" / "generation_config.json").unlink()
    refused("lacks drafter-1/generation_config.json")
    method("bigram", **parts).save_pretrained(folder)
    header = json.dumps({"table.col": {"dtype": "I32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (folder / "draftsmith.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    signed(folder)
    refused("draftsmith.safetensors: it is not a safetensors file")


def artifact(folder: Path, kind: str, write: Callable[[Path], None]) -> Path:
    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    about |= {"tokenizer_fingerprint": None, "target": {"id": "some/target"}, "vocab_size": VOCAB}
    save_artifact(folder, kind=kind, write=write, **about)
    return folder


@pytest.mark.parametrize("projection", ["own", "low-rank", "target"])
def test_heads_are_exported_as_one_file(target: LlamaForCausalLM, tmp_path: Path, projection: str) -> None:
    target.save_pretrained(tmp_path / "target")
    source = artifact(tmp_path / "heads", "heads", lambda place: save_heads(some_heads(projection), place, "target"))
    options = ExportOptions(target=str(tmp_path / "target"))
    found = export_artifact(source, "custom-generate", tmp_path / "out", FORMATS, options)
    assert "all " in found[0]
    assert "logits of 16 hidden states" in found[0]
    assert found[1].startswith("greedy text of")
    assert found[1].endswith("after 3 prompts; 3 of them as without the export")
    assert verify_artifact(tmp_path / "out").kind == "heads"
    loaded = CustomGenerate.from_pretrained(tmp_path / "out")
    assert loaded.name == "medusa"
    assert decode(target, loaded) == decode(target, None)
    (tmp_path / "out" / "SERVING.md").write_text("changed")
    with pytest.raises(ValueError, match=r"SERVING.md has"):
        CustomGenerate.from_pretrained(tmp_path / "out")


def test_tables_are_exported_as_one_file(target: LlamaForCausalLM, tmp_path: Path) -> None:
    source = artifact(tmp_path / "table", "table", some_table().pruned(top=3).save)
    found = export_artifact(
        source, "custom-generate-bigrams", tmp_path / "out", FORMATS, ExportOptions(speculative_tokens=5)
    )
    assert len(found) == 1
    loaded = CustomGenerate.from_pretrained(tmp_path / "out")
    assert (loaded.name, loaded.options["gamma"]) == ("bigram", 5)
    assert decode(target, loaded) == decode(target, None)
    serving = (tmp_path / "out" / "SERVING.md").read_text()
    assert 'CustomGenerate.from_pretrained("out")' in serving
    assert 'AutoModelForCausalLM.from_pretrained("some/target")' in serving
    assert serving.count("```") == 4


def test_an_export_that_differs_does_not_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = artifact(tmp_path / "heads", "heads", lambda place: save_heads(some_heads(), place, "target"))
    table = artifact(tmp_path / "table", "table", some_table().save)

    def other(place: str, change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        def save(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            change(tensors)
            save_file(tensors, path, metadata=metadata)

        return save

    def nudge(tensors: dict[str, Any]) -> None:
        tensors["heads.2.1.weight"][0, 0] += 1e-6

    def miscount(tensors: dict[str, Any]) -> None:
        tensors["table.count"][5] += 1

    for source, form, fault in ((heads, "custom-generate", nudge), (table, "custom-generate-bigrams", miscount)):
        monkeypatch.setattr(method_files, "save_file", other(form, fault))
        with pytest.raises(ValueError, match=r"read back from .* differ"):
            export_artifact(source, form, tmp_path / "out", FORMATS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "table"]


def test_a_model_lies_beside_its_method(target: LlamaForCausalLM, parts: dict[str, Any], tmp_path: Path) -> None:
    method("medusa", **parts).save_pretrained(tmp_path)
    target.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # not trusted: transformers' own generate
    assert decode(model, CustomGenerate.from_pretrained(tmp_path)) == decode(model, None)
