"""Artifacts looked into: every fault is found, not the first alone, and every difference is named with both sides."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import (
    model_fingerprint,
    save_artifact,
    tokenizer_fingerprint,
    verify_artifact,
)
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.verify.inspect import differences, find_faults, target_faults
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 16
ABOUT: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None, "shapes": {}}
ABOUT |= {"recipe": {}, "data": {}, "training": {}}

Make = Callable[..., LlamaForCausalLM]


def save_table(out: Path, seed: int = 0, **settings: Any) -> Path:
    table = BigramTable.from_documents(list(np.random.default_rng(seed).integers(0, VOCAB, (4, 30))), VOCAB)
    save_artifact(out, **({"kind": "table", "write": table.save} | ABOUT | settings))
    return out


def save_model(out: Path, model: LlamaForCausalLM, kind: str = "drafter", shards: str = "1GB", **settings: Any) -> Path:
    def write(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size=shards)

    save_artifact(out, kind=kind, write=write, **(ABOUT | settings))
    return out


def make_tokenizer(words: str = "abcdefghijklmn") -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["<unk>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_good_artifacts_have_no_faults(tmp_path: Path, make_llama: Make) -> None:
    heads = PredictionHeads(2, 1, 8, VOCAB)
    save_artifact(tmp_path / "heads", kind="heads", write=lambda folder: save_heads(heads, folder, "t"), **ABOUT)
    save_table(tmp_path / "table")
    model = make_llama(vocab_size=VOCAB)
    save_model(tmp_path / "drafter", model)
    save_model(tmp_path / "target", model, "target", shards="20KB")
    for name in ("heads", "table", "drafter", "target"):
        manifest, faults = find_faults(tmp_path / name)
        assert faults == []
        assert manifest == verify_artifact(tmp_path / name)
    assert find_faults(tmp_path / "table", "heads")[1] == [
        f"{tmp_path / 'table'} holds an artifact of kind 'table', expected 'heads'"
    ]


def test_every_fault_is_told(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        BigramTable.from_documents([np.array([1, 2, 3])], VOCAB).save(folder)
        for name in ("flipped", "longer", "gone", "link", "pipe"):
            (folder / name).write_text(name)

    out = save_table(tmp_path / "t", write=write)
    (out / "flipped").write_text("fliPped")
    (out / "longer").write_text("longer than before")
    for name in ("gone", "link", "pipe"):
        (out / name).unlink()
    (out / "link").symlink_to("flipped")
    os.mkfifo(out / "pipe")
    (out / "deep").mkdir()
    (out / "deep" / "extra").write_text("")
    (out / ".hidden").write_text("what a hub adds")
    wanted = [
        "lacks gone",
        "holds deep/extra",
        "flipped has the hash",
        "longer has 18 bytes",
        "link is a link",
        "pipe is a pipe",
    ]
    manifest, faults = find_faults(out)
    assert manifest is not None
    assert len(faults) == len(wanted)
    with pytest.raises(ValueError, match="lacks gone") as caught:
        verify_artifact(out)
    for part in wanted:
        assert sum(part in fault for fault in faults) == 1, part
        assert part in str(caught.value)


def test_a_single_flipped_bit_is_found_wherever_it_lies(tmp_path: Path) -> None:
    """A bit of every byte of every file, the record itself among them."""
    out = save_table(tmp_path / "t")
    draws = np.random.default_rng(0)
    for path in sorted(out.iterdir()):
        good = path.read_bytes()
        for place, bit in enumerate(draws.integers(0, 8, len(good))):
            bad = bytearray(good)
            bad[place] ^= 1 << int(bit)
            path.write_bytes(bad)
            assert find_faults(out)[1], (path, place, bit)
        path.write_bytes(good)
    assert find_faults(out)[1] == []


def test_what_git_makes_of_files_is_told(tmp_path: Path) -> None:
    out = save_table(tmp_path / "t")
    card, table = out / "README.md", out / "table.safetensors"
    text, weights = card.read_bytes(), table.read_bytes()
    card.write_bytes(text.replace(b"\n", b"\r\n"))
    table.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    faults = find_faults(out)[1]
    assert any("git changed its ends of lines (core.autocrlf)" in fault for fault in faults)
    assert any("it is git's pointer to the file, which `git lfs pull` fetches" in fault for fault in faults)
    card.write_bytes(text.replace(b"\n", b"\r\n") + b"more")
    table.write_bytes(weights)
    (fault,) = find_faults(out)[1]
    assert "ends of lines" not in fault


@pytest.mark.parametrize(
    ("kind", "files", "lacking"),
    [
        ("table", ["other"], ["table.safetensors"]),
        ("heads", ["medusa_lm_head.safetensors"], ["config.json"]),
        ("heads", ["medusa_lm_head.pt"], ["medusa_lm_head.safetensors", "config.json"]),
        ("drafter", ["config.json", "pytorch_model.bin"], ["model.safetensors or model.safetensors.index.json"]),
        ("drafter", ["adapter_config.json", "adapter_model.bin"], ["adapter_model.safetensors"]),
        ("target", ["model.safetensors"], ["config.json"]),
    ],
)
def test_files_that_a_kind_needs_are_missed(tmp_path: Path, kind: str, files: list[str], lacking: list[str]) -> None:
    def write(folder: Path) -> None:
        for name in files:
            (folder / name).write_text("")

    out = save_table(tmp_path / "t", kind=kind, write=write)
    missed = [fault for fault in find_faults(out)[1] if "artifact needs" in fault]
    assert missed == [f"{out} lacks {name}, which a {kind} artifact needs" for name in lacking]
    export = {"format": "other", "native": False}
    save_table(out, kind=kind, write=write, export=export)
    assert not any("artifact needs" in fault for fault in find_faults(out)[1])


def test_shards_that_an_index_names_and_tensors_that_are_none_are_found(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "bad.safetensors").write_bytes(b"no tensors, though the hash is right")
        places = {"a": "model-1.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    out = save_table(tmp_path / "t", kind="drafter", write=write)
    faults = find_faults(out)[1]
    assert len(faults) == 2
    for part in ("bad.safetensors", "model-1.safetensors"):
        assert any(part in fault for fault in faults)


def test_an_artifact_for_another_target_is_told_with_both_sides(tmp_path: Path, make_llama: Make) -> None:
    mine, tokenizer = make_llama(vocab_size=VOCAB), make_tokenizer()
    mine.save_pretrained(tmp_path / "target")
    make_llama(vocab_size=VOCAB, seed=1).save_pretrained(tmp_path / "other")
    make_llama(vocab_size=32).save_pretrained(tmp_path / "larger")
    made_for = {"id": "me/target", "fingerprint": model_fingerprint(mine)}
    about = {"target": made_for, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    manifest = find_faults(save_table(tmp_path / "t", **about))[0]
    assert manifest is not None

    def faults(target: str, words: str = "abcdefghijklmn") -> list[str]:
        return target_faults(tmp_path / "t", manifest, tmp_path / target, make_tokenizer(words))

    assert faults("target") == []
    (other,) = faults("other")
    for part in ("was made for another model than", "me/target", made_for["fingerprint"][:16]):
        assert part in other
    assert "a vocabulary of 16 tokens, the target of 32" in faults("larger")[0]
    assert "was made with another tokenizer" in faults("target", "bacdefghijklmn")[0]


def test_equal_artifacts_do_not_differ_however_they_are_cut(tmp_path: Path, make_llama: Make) -> None:
    model = make_llama(vocab_size=VOCAB)
    one, other = save_model(tmp_path / "one", model), save_model(tmp_path / "other", model, shards="20KB")
    assert differences(one, one) == []
    lines = [line for line in differences(one, other) if not line.startswith(("created", "README.md"))]
    assert sorted(line.split(": in ")[0] for line in lines) == sorted(
        ["model.safetensors", "model.safetensors.index.json"]
        + [path.name for path in other.glob("model-*.safetensors")]
    )


def test_differences_are_named_with_both_values(tmp_path: Path, make_llama: Make) -> None:
    model = make_llama(vocab_size=VOCAB)
    one = save_model(tmp_path / "one", model, recipe={"train": {"steps": 3, "seed": 1}}, command="draftsmith train x")
    with torch.no_grad():
        model.model.norm.weight[3] += 0.25
        model.model.norm.weight[5] -= 0.5
    other = save_model(tmp_path / "other", model, recipe={"train": {"steps": 4, "seed": 1}})
    lines = differences(one, other)
    assert "recipe.train.steps: 3 and 4" in lines
    assert "command: 'draftsmith train x' and None" in lines
    assert not any("seed" in line for line in lines)
    assert [line for line in lines if line.startswith("tensor")] == [
        "tensor model.norm.weight: 2 values differ, by at most 0.5"
    ]


def test_tensors_of_other_names_shapes_and_types_are_told(tmp_path: Path) -> None:
    def save(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        return save_table(tmp_path / name, write=lambda folder: save_file(tensors, folder / "x.safetensors"))

    nan = float("nan")
    same = torch.tensor([1.0, nan, float("inf")])
    one = save("one", {
        "a/b": torch.zeros(2, 3), "shape": torch.zeros(4), "type": torch.zeros(2), "gone": torch.zeros(1), "same": same,
        "nan": torch.tensor([1.0, nan]), "int": torch.tensor([2**62, 5]), "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 3), "half": torch.ones(3, dtype=torch.bfloat16), "flags": torch.tensor([True, False]),
    })  # fmt: skip
    other = save("other", {
        "a/b": torch.full((2, 3), 1e-3), "shape": torch.zeros(5), "type": torch.zeros(2, dtype=torch.float64),
        "new": torch.zeros(1), "same": same.clone(), "nan": torch.tensor([1.0, 2.0]),
        "int": torch.tensor([2**62 + 1, 5]), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16), "flags": torch.tensor([True, True]),
    })  # fmt: skip
    lines = [line for line in differences(one, other) if line.startswith("tensor")]
    assert lines == [
        "tensor a/b: 6 values differ, by at most 0.001",
        "tensor flags: 1 values differ, by at most 1",
        "tensor gone: in " + f"{one} alone",
        "tensor half: 3 values differ, by at most 1",
        "tensor int: 1 values differ, by at most 1",
        "tensor nan: 1 values differ, by at most inf",
        "tensor new: in " + f"{other} alone",
        "tensor scalar: 1 values differ, by at most 2",
        "tensor shape: F32 [4] and F32 [5]",
        "tensor type: F32 [2] and F64 [2]",
    ]


def test_large_tensors_are_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.checkpoints.verify.inspect._CHUNK", 10)
    values = torch.randn(33, 7, generator=torch.Generator().manual_seed(0))
    changed = values.clone()
    changed[[0, 16, 32], [1, 2, 6]] += torch.tensor([1.0, -3.0, 2.0])
    for name, tensor in (("one", values), ("other", changed)):
        save_table(
            tmp_path / name, write=lambda folder, tensor=tensor: save_file({"x": tensor}, folder / "x.safetensors")
        )
    lines = [line for line in differences(tmp_path / "one", tmp_path / "other") if line.startswith("tensor")]
    assert lines == ["tensor x: 3 values differ, by at most 3"]
    assert load_file(tmp_path / "one" / "x.safetensors")["x"].shape == (33, 7)


def test_a_damaged_artifact_is_not_compared(tmp_path: Path) -> None:
    """Its record says what it should hold, and so would tell no difference."""
    first, second = save_table(tmp_path / "a"), save_table(tmp_path / "b")
    path = second / "table.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"b/table\.safetensors has \d+ bytes"):
        differences(first, second)
