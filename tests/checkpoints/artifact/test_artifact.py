"""Artifacts: whole or not at all, every file checked, both sides named, no secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact, verify_artifact
from draftsmith.checkpoints.artifact.fingerprints import model_fingerprint, tokenizer_fingerprint
from draftsmith.checkpoints.artifact.manifest import Manifest, to_json_safe
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def save(out: Path, content: str = "weights", **overrides: Any) -> Manifest:
    def write(folder: Path) -> None:
        (folder / "a.bin").write_text(content)
        (folder / "deep").mkdir()
        (folder / "deep" / "b.bin").write_text(content * 2)

    settings: dict[str, Any] = {
        "kind": "table",
        "write": write,
        "vocab_size": 64,
        "tokenizer_fingerprint": "ab" * 32,
        "target": {"id": "some/model", "revision": "1234", "fingerprint": "cd"},
        "shapes": {"entries": 3},
        "recipe": {"kind": "table", "data": {"block_tokens": 512, "source": Path("x.jsonl")}},
        "data": {"rows": 2, "sha256": {"tokens": "00"}},
        "training": {"loss": 1.5, "best": float("nan")},
    }
    return save_artifact(out, **(settings | overrides))


def test_what_is_saved_is_loaded_and_verified(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "table"
    saved = save(out, evaluation={"tau": 2.0})
    assert load_manifest(out, kind="table") == verify_artifact(out) == saved
    assert sorted(saved.files) == ["README.md", "a.bin", "deep/b.bin"]
    assert saved.files["deep/b.bin"]["bytes"] == 14
    assert saved.recipe["data"] == {"block_tokens": 512, "source": "x.jsonl"}
    assert saved.training == {"loss": 1.5, "best": None}
    assert saved.versions["torch"] == torch.__version__
    assert os.listdir(out.parent) == ["table"]
    assert out.stat().st_mode & 0o777 == 0o755
    assert Manifest.from_json(saved.to_json()) == saved


def test_what_is_exported_for_others_is_no_artifact_of_its_kind(tmp_path: Path) -> None:
    save(tmp_path / "npz", export={"format": "npz", "native": False})
    save(tmp_path / "own", export={"format": "own", "native": True})
    for read in (load_manifest, verify_artifact):
        read(tmp_path / "npz")
        read(tmp_path / "own", "table")
        for kind, parts in (("table", "npz.*table"), ("heads", "'table'.*'heads'")):
            with pytest.raises(ValueError, match=parts):
                read(tmp_path / "npz", kind)


def test_secrets_are_redacted_and_only_they() -> None:
    secret = "correct horse"
    hidden = ("token", "hf_token", "HF_TOKEN", "access-token", "api_key", "openai_api_key", "password", "client_secret")
    shown = ("tokenizer", "block_tokens", "eos_token", "max_new_tokens", "stop_tokens", "monkey", "tokens")
    found = to_json_safe(
        dict.fromkeys((*hidden, *shown), secret) | {"hub": {"credentials": {"user": secret, "ids": [secret]}}}
    )
    assert {key for key in (*hidden, *shown) if found[key] == secret} == set(shown)
    assert secret not in json.dumps(found["hub"])
    assert to_json_safe({"token": None, "password": ""}) == {"token": None, "password": ""}
    assert to_json_safe("see hf_" + "a1B2" * 8 + " there") == "see <redacted> there"
    assert to_json_safe("https://me:pass@example.org/x@y") == "https://<redacted>@example.org/x@y"
    address = "https://b.example/x?X-Amz-Signature=abc123&part=1&X-Amz-Security-Token=FQoG&sig=xyz#top"
    assert to_json_safe(address) == (
        "https://b.example/x?X-Amz-Signature=<redacted>&part=1&X-Amz-Security-Token=<redacted>&sig=<redacted>#top"
    )
    for secret in ("sk-" + "a1" * 20, "ghp_" + "b2" * 18, "github_pat_" + "c3" * 20, "AKIA" + "D4" * 8):
        assert secret not in to_json_safe(f"say {secret}.")


def make_tokenizer(order: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(order)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_tokenizer_fingerprints_tell_vocabularies_apart() -> None:
    words = ["<unk>", "</s>", "a", "b"]
    mine = tokenizer_fingerprint(make_tokenizer(words))
    assert mine == tokenizer_fingerprint(make_tokenizer(words))
    assert mine != tokenizer_fingerprint(make_tokenizer(["<unk>", "</s>", "b", "a"]))
    other = make_tokenizer(words)
    other.pad_token = other.eos_token
    assert mine == tokenizer_fingerprint(other)
    other.eos_token = "a"
    assert mine != tokenizer_fingerprint(other)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_and_its_folder_have_one_fingerprint(
    tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM], tied: bool
) -> None:
    model = make_llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    fingerprint = model_fingerprint(model)
    assert len(list((tmp_path / "parts").glob("model-*"))) > 1
    assert fingerprint == model_fingerprint(tmp_path / "whole") == model_fingerprint(tmp_path / "parts")
    assert fingerprint == model_fingerprint(LlamaForCausalLM.from_pretrained(tmp_path / "whole"))
    assert fingerprint != model_fingerprint(make_llama(tie_word_embeddings=tied, seed=1))
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert fingerprint != model_fingerprint(model)
