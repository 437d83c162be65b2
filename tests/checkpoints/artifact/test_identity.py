"""What was loaded has the hash of the files that it was loaded from, whatever is written meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import open_artifact, save_artifact
from draftsmith.checkpoints.artifact.fingerprints import model_fingerprint
from draftsmith.checkpoints.artifact.identity import identify, is_unchanged, load_identified
from draftsmith.checkpoints.storage.draft_vocabulary import write_vocabulary
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.checkpoints.storage.safe_read import file_hash
from transformers import LlamaForCausalLM

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """A folder with a model and things beside it."""
    make_llama(320).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "README.md", "results.json"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def flip(path: Path, places: Any = (-1,)) -> None:
    """Change bytes in place, and let nothing tell but the bytes, and the time that cannot be set."""
    before = path.stat()
    with path.open("r+b") as file:
        for place in places:
            file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_files_that_decide_what_a_model_computes_decide_its_hash(model: Path) -> None:
    write_vocabulary({"d2t": torch.arange(4)}, model)
    first = identify(str(model))
    assert {WEIGHTS, "config.json", "tokenizer.json", DRAFT_VOCABULARY} <= set(first.files)
    assert first.files[WEIGHTS] == file_hash(model / WEIGHTS)
    for name in ("README.md", "results.json"):
        flip(model / name)
    assert identify(str(model)) == first
    for name in (WEIGHTS, "config.json", "tokenizer.json", DRAFT_VOCABULARY):
        flip(model / name)
        changed = identify(str(model))
        assert {file for file in first.files if first.files[file] != changed.files[file]} == {name}
        assert changed.hash != first.hash
        assert not is_unchanged(first.as_dict())
        flip(model / name)
        assert is_unchanged(first.as_dict())
    older = {"source": str(model), "hash": model_fingerprint(model), "files": {}}  # of 0.1
    assert is_unchanged(older)
    assert not is_unchanged(older | {"hash": "0" * 64})
    assert is_unchanged(first.as_dict() | {"source": "user/name"})


def test_an_adapter_is_its_model_too(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    first = identify(str(adapter))
    assert first.files[f"base/{WEIGHTS}"] == file_hash(model / WEIGHTS)
    flip(model / WEIGHTS)
    assert identify(str(adapter)).hash != first.hash


@pytest.mark.parametrize("replaced", ["in place", "by another file", "by another folder"])
def test_what_changes_while_it_is_loaded_is_loaded_again(model: Path, tmp_path: Path, replaced: str) -> None:
    loads: list[bytes] = []

    def load(always: bool = False) -> bytes:
        loads.append((model / WEIGHTS).read_bytes())
        if always or len(loads) == 1:
            if replaced == "in place":
                flip(model / WEIGHTS)
            elif replaced == "by another file":
                (tmp_path / "new").write_bytes(loads[0][::-1])
                (tmp_path / "new").replace(model / WEIGHTS)
            else:
                model.rename(tmp_path / f"former{len(loads)}")
                model.mkdir()
                (model / WEIGHTS).write_bytes(loads[0][::-1])
        return loads[-1]

    identity, loaded = load_identified(str(model), load)
    assert len(loads) == 2
    assert loads[0] != loads[1] == loaded
    assert identity.files[WEIGHTS] == file_hash(model / WEIGHTS)
    with pytest.raises(ValueError, match="100 times"):
        load_identified(str(model), lambda: load(always=True))


def test_an_artifact_is_known_by_its_manifest_and_a_target_by_its_files(
    tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    about: dict[str, Any] = {"vocab_size": 320, "tokenizer_fingerprint": None, "target": None}
    folder = tmp_path / "artifact"
    save_artifact(folder, kind="drafter", write=make_llama(320).save_pretrained, **about)
    identity, (manifest, _) = load_identified(str(folder), lambda: open_artifact(folder, Path.stat))
    assert identity.hash == file_hash(folder / "artifact.json")
    assert identity.files == {name: entry["sha256"] for name, entry in manifest.files.items()}
    target = identify(str(folder), content=True)
    save_artifact(folder, kind="drafter", write=make_llama(320).save_pretrained, command="again", **about)
    assert identify(str(folder)).hash != identity.hash
    assert identify(str(folder), content=True) == target, "the same weights"
    flip(folder / WEIGHTS)
    for content in (False, True):
        with pytest.raises(ValueError, match=rf"{WEIGHTS} has the hash .*{target.files[WEIGHTS]}"):
            identify(str(folder), content=content)
