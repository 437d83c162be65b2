"""An inspection reports all faults of an artifact, not only the first one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.verify.inspect import find_faults
from transformers import LlamaForCausalLM

VOCAB = 16
ABOUT: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None}

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


def test_correct_artifacts_have_no_faults(tmp_path: Path, make_llama: Make) -> None:
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
        f"{tmp_path / 'table'} contains an artifact of kind 'table', expected 'heads'"
    ]


def test_every_fault_is_reported(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        BigramTable.from_documents([np.array([1, 2, 3])], VOCAB).save(folder)
        for name in ("flipped", "longer", "gone"):
            (folder / name).write_text(name)

    out = save_table(tmp_path / "t", write=write)
    (out / "flipped").write_text("fliPped")
    (out / "longer").write_text("longer than before")
    (out / "gone").unlink()
    (out / "deep").mkdir()
    (out / "deep" / "extra").write_text("")
    (out / ".hidden").write_text("what a hub adds")
    expected = [
        "lacks gone",
        "contains deep/extra",
        "flipped has SHA-256",
        "longer has 18 bytes",
    ]
    manifest, faults = find_faults(out)
    assert manifest is not None
    assert len(faults) == len(expected)
    with pytest.raises(ValueError, match="lacks gone") as caught:
        verify_artifact(out)
    for part in expected:
        assert sum(part in fault for fault in faults) == 1, part
        assert part in str(caught.value)


def test_a_single_flipped_bit_is_detected(tmp_path: Path) -> None:
    """A bit of every byte of every file is flipped, except in the model card."""
    out = save_table(tmp_path / "t")
    draws = np.random.default_rng(0)
    for path in sorted(set(out.iterdir()) - {out / "artifact.json", out / "README.md"}):
        good = path.read_bytes()
        for position, bit in enumerate(draws.integers(0, 8, len(good))):
            bad = bytearray(good)
            bad[position] ^= 1 << int(bit)
            path.write_bytes(bad)
            assert find_faults(out)[1], (path, position, bit)
        path.write_bytes(good)
    assert find_faults(out)[1] == []


@pytest.mark.parametrize(
    ("kind", "files", "lacking"),
    [
        ("table", ["other"], ["table.safetensors"]),
        ("heads", ["medusa_lm_head.pt"], ["medusa_lm_head.safetensors", "config.json"]),
        ("drafter", ["config.json", "pytorch_model.bin"], ["model.safetensors or model.safetensors.index.json"]),
        ("target", ["model.safetensors"], ["config.json"]),
    ],
)
def test_missing_files_of_a_kind_are_reported(tmp_path: Path, kind: str, files: list[str], lacking: list[str]) -> None:
    def write(folder: Path) -> None:
        for name in files:
            (folder / name).write_text("")

    out = save_table(tmp_path / "t", kind=kind, write=write, target={"id": "a target"})
    missed = [fault for fault in find_faults(out)[1] if "artifact requires" in fault]
    assert missed == [f"{out} lacks {name}, which a {kind} artifact requires" for name in lacking]
    export = {"format": "other", "native": False}
    save_table(out, kind=kind, write=write, export=export)
    assert not any("artifact requires" in fault for fault in find_faults(out)[1])


def test_missing_shards_and_invalid_tensors_are_reported(tmp_path: Path) -> None:
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
