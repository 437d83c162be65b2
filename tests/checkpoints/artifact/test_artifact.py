"""Artifacts are saved completely or not at all, their files are verified, and secrets are redacted."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import check_target, load_manifest, save_artifact, verify_artifact
from draftsmith.checkpoints.artifact.manifest import Manifest, to_json_safe


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
        "target": {"id": "some/model", "revision": "1234", "sha256": "cd"},
        "shapes": {"entries": 3},
        "recipe": {"kind": "table", "data": {"block_tokens": 512, "source": Path("x.jsonl")}},
        "data": {"rows": 2, "sha256": {"tokens": "00"}},
        "training": {"loss": 1.5, "best": float("nan")},
    }
    return save_artifact(out, **(settings | overrides))


def test_an_artifact_survives_a_round_trip(tmp_path: Path) -> None:
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
    (out / "README.md").write_text("Edited before publishing.")
    assert verify_artifact(out) == saved
    (out / "README.md").unlink()
    assert verify_artifact(out) == saved


def test_an_export_is_not_loaded_as_an_artifact(tmp_path: Path) -> None:
    save(tmp_path / "npz", export={"format": "npz", "native": False})
    save(tmp_path / "own", export={"format": "own", "native": True})
    for read in (load_manifest, verify_artifact):
        read(tmp_path / "npz")
        read(tmp_path / "own", "table")
        for kind, parts in (("table", "npz.*table"), ("heads", "'table'.*'heads'")):
            with pytest.raises(ValueError, match=parts):
                read(tmp_path / "npz", kind)


def test_only_secrets_are_redacted() -> None:
    secret = "correct horse"
    hidden = ("token", "hf_token", "HF_TOKEN", "access-token", "api_key", "openai_api_key", "password", "client_secret")
    public = ("tokenizer", "block_tokens", "eos_token", "max_new_tokens", "stop_tokens", "monkey", "tokens")
    result = to_json_safe(
        dict.fromkeys((*hidden, *public), secret) | {"hub": {"credentials": {"user": secret, "ids": [secret]}}}
    )
    assert {key for key in (*hidden, *public) if result[key] == secret} == set(public)
    assert secret not in json.dumps(result["hub"])
    assert to_json_safe({"token": None, "password": ""}) == {"token": None, "password": ""}
    assert to_json_safe("see hf_" + "a1B2" * 8 + " there") == "see <redacted> there"
    assert to_json_safe("https://me:pass@example.org/x@y") == "https://<redacted>@example.org/x@y"
    address = "https://b.example/x?X-Amz-Signature=abc123&part=1&X-Amz-Security-Token=FQoG&sig=xyz#top"
    assert to_json_safe(address) == (
        "https://b.example/x?X-Amz-Signature=<redacted>&part=1&X-Amz-Security-Token=<redacted>&sig=<redacted>#top"
    )
    for secret in ("sk-" + "a1" * 20, "ghp_" + "b2" * 18, "github_pat_" + "c3" * 20, "AKIA" + "D4" * 8):
        assert secret not in to_json_safe(f"say {secret}.")


ENTRY = {"sha256": "0" * 64, "bytes": 1}


def save_plain(out: Path, **changes: Any) -> Manifest:
    return save(out, **({"write": lambda folder: (folder / "a.bin").write_text("weights")} | changes))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    save_plain(tmp_path / "t")
    return tmp_path / "t"


RECORDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a later schema": ({"schema": 3}, ("schema", "3", "2")),
    "an unknown kind": ({"kind": "poem"}, ("'poem'", "drafter")),
    "a vocabulary that is text": ({"vocab_size": "8"}, ("vocab_size", "8")),
    "a field too many": ({"colour": "red"}, ("colour",)),
}
RECORDS |= {f"the name {name!a}": ({"files": {name: ENTRY}}, (ascii(name),)) for name in ("../../etc/passwd", "a\\b")}
RECORDS |= {
    f"the entry {entry}": ({"files": {"a": entry}}, ("'a'", "sha256", "bytes")) for entry in ({"bytes": 1}, None)
}


def refused(act: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(part)})" for part in parts)) as caught:
        act()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("change", "parts"), RECORDS.values(), ids=RECORDS)
def test_records_of_other_schemas(table: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    path = table / "artifact.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(lambda: load_manifest(table), parts)


def test_invalid_records_are_refused(table: Path) -> None:
    (table / "artifact.json").write_bytes(b"\xff\xfe")
    for read in (load_manifest, verify_artifact):
        refused(lambda read=read: read(table), (f"{table / 'artifact.json'}", "UTF-8"))


def _thesis(folder: Path) -> Path:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no such folder": (lambda tmp: load_manifest(tmp / "nowhere"), ("nowhere",)),
    "no record": (lambda tmp: load_manifest(_thesis(tmp / "mine")), ("mine", "artifact.json")),
    "another kind": (lambda tmp: load_manifest(tmp / "t", kind="heads"), ("'table'", "'heads'")),
    "over other files": (lambda tmp: save_plain(_thesis(tmp / "mine")), ("mine",)),
    "over a file": (lambda tmp: save_plain(_thesis(tmp / "mine") / "thesis.txt"), ("thesis.txt",)),
    "an odd name": (lambda tmp: save_plain(tmp / "x", write=lambda f: (f / "a\\b").write_text("")), ("a\\b",)),
    "another vocabulary": (
        lambda tmp: check_target(load_manifest(tmp / "t"), vocab_size=65, tokenizer_fingerprint=None, name="it"),
        ("64", "65"),
    ),
    "another tokenizer": (
        lambda tmp: check_target(load_manifest(tmp / "t"), vocab_size=64, tokenizer_fingerprint="ef" * 32, name="it"),
        ("ab" * 8, "ef" * 8),
    ),
}


@pytest.mark.parametrize(("act", "parts"), REFUSED.values(), ids=REFUSED)
def test_refused(table: Path, tmp_path: Path, act: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    refused(lambda: act(tmp_path), parts)
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob(".*"))
