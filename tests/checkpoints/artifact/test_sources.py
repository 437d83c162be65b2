"""Artifacts named by a folder or a hub id are downloaded and verified; errors say how to fix the name."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.locate import model_source, resolve
from draftsmith.checkpoints.table.table import BigramTable
from huggingface_hub import constants
from transformers import LlamaForCausalLM

VOCAB = 16
COMMIT = "a" * 40


def save_table(out: Path, seed: int = 0, **settings: Any) -> None:
    table = BigramTable.from_documents(list(np.random.default_rng(seed).integers(0, VOCAB, (3, 20))), VOCAB)
    about: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None}
    save_artifact(out, **({"kind": "table", "write": table.save} | about | settings))


def publish(folder: Path, cache: Path, name: str, revision: str = "main", commit: str = COMMIT) -> Path:
    """Copy a folder into the hub cache, with the layout of a downloaded repository."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    (repo / "blobs").mkdir(exist_ok=True)
    snapshot = repo / "snapshots" / commit
    for path in folder.rglob("*"):
        if path.is_file():
            blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            blob.write_bytes(path.read_bytes())
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty hub cache and disable network access."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_an_existing_folder_takes_precedence(cache: Path, tmp_path: Path) -> None:
    save_table(tmp_path / "me" / "table")
    publish(tmp_path / "me" / "table", cache, "me/table")
    assert resolve("me/table", "table") == Path("me/table")
    assert resolve(tmp_path / "me" / "table") == tmp_path / "me" / "table"
    with pytest.raises(ValueError, match=r"me/table .*'main'"):
        resolve("me/table", revision="main")


def test_cached_artifacts_need_no_network(cache: Path, tmp_path: Path) -> None:
    save_table(tmp_path / "one", 1)
    save_table(tmp_path / "two", 2)
    first = publish(tmp_path / "one", cache, "me/table")
    second = publish(tmp_path / "two", cache, "me/table", "tuned", "b" * 40)
    assert resolve("me/table", "table").resolve() == first.resolve()
    for revision in ("tuned", "b" * 40):
        assert resolve(f"me/table@{revision}", "table").resolve() == second.resolve()
    loaded = BigramTable.load(resolve("me/table@tuned"))
    assert loaded.unigram.tolist() == BigramTable.load(tmp_path / "two").unigram.tolist()


def test_cached_artifacts_are_verified(cache: Path, tmp_path: Path) -> None:
    save_table(tmp_path / "table")
    snapshot = publish(tmp_path / "table", cache, "me/table")
    with pytest.raises(ValueError, match="kind 'table', expected 'heads'"):
        resolve("me/table", "heads")
    (snapshot / "table.safetensors").resolve().write_bytes(b"other")
    with pytest.raises(ValueError, match=r"the cached copy of me/table differs from the published.*bytes.*del"):
        resolve("me/table", "table")


@pytest.mark.parametrize(
    "source",
    [
        "nowhere", "~nobody-of-this-name/x", "me/table/more", "me/-table", "m\u0435/table", "me/table@../../x",
    ],
)  # fmt: skip
def test_invalid_names_are_shown(cache: Path, source: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(source)}|{re.escape(ascii(source))}"):
        resolve(source)


def test_models_are_left_to_transformers_and_artifacts_are_verified(
    cache: Path, tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model = make_llama(vocab_size=VOCAB)
    model.save_pretrained(tmp_path / "plain")
    publish(tmp_path / "plain", cache, "me/plain")
    save_table(tmp_path / "drafter", kind="drafter", write=model.save_pretrained)
    snapshot = publish(tmp_path / "drafter", cache, "me/drafter")
    for unchanged in ("me/plain", "me/nowhere", "gpt2", str(tmp_path / "plain")):
        assert model_source(unchanged) == unchanged
    assert Path(model_source("me/drafter")).resolve() == snapshot.resolve()
    assert Path(model_source("me/plain@main")).name == COMMIT
    (snapshot / "model.safetensors").resolve().write_bytes(b"")
    model_source.cache_clear()
    with pytest.raises(ValueError, match="differs from the published"):
        model_source("me/drafter")


def resolved(source: str, kind: str) -> str:
    """Resolve the source of an artifact; return the names of its files, or the error message."""
    try:
        return str(sorted(path.name for path in resolve(source, kind).iterdir()))
    except ValueError as error:
        return " ".join(str(error).split())


def test_only_the_files_of_an_artifact_are_downloaded(
    hub: Any, tmp_path: Path, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_table(tmp_path / "table")
    files = ["README.md", "artifact.json", "table.safetensors"]
    whole = stand_in.files_of(tmp_path / "table")
    hub.repo("me/table", whole | {"huge.bin": b"not listed"})
    hub.repo("me/damaged", whole | {"table.safetensors": b"other"})
    published = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "config.json", "tokenizer.json")
    hub.repo("me/heads", {name: name.encode() for name in published})
    heads = ["config.json", "medusa_lm_head.safetensors"]
    cases: list[tuple[str, str, str, list[str]]] = [
        ("me/table", "table", str(files), files),
        ("me/table", "table", str(files), []),
        (
            "me/table@v9",
            "table",
            "me/table does not exist, and me/table at v9 on the hub has no such branch",
            [],
        ),
        ("me/damaged", "table", "differs from the published", files),
        ("me/heads", "heads", str(heads), heads),
    ]
    monkeypatch.chdir(tmp_path)
    for source, kind, message, downloaded in cases:
        hub.got.clear()
        assert message in resolved(source, kind), source
        assert sorted(hub.got) == downloaded, source
    hub.shutdown()
    hub.server_close()
    assert resolved("me/table", "table") == str(files), "a cached artifact needs no network"
    assert "cannot be reached" in resolved("me/other", "table")
