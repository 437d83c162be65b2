"""What is refused as an artifact, and the names and numbers that the message must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import check_target, load_manifest, save_artifact, verify_artifact
from draftsmith.checkpoints.storage.safe_read import MAX_JSON_BYTES

ENTRY = {"sha256": "0" * 64, "bytes": 1}


def save(out: Path, **changes: Any) -> Any:
    about: dict[str, Any] = {"kind": "table", "vocab_size": 64, "tokenizer_fingerprint": "ab" * 32, "target": None}
    return save_artifact(out, **(about | {"write": lambda folder: (folder / "a.bin").write_text("weights")} | changes))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    save(tmp_path / "t")
    return tmp_path / "t"


def of_files(names: tuple[str, ...], *entries: Any) -> dict[str, Any]:
    return {"files": dict(zip(names, entries or [ENTRY] * len(names), strict=True))}


RECORDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a later schema": ({"schema": 3}, ("schema", "3", "2")),
    "an unknown kind": ({"kind": "poem"}, ("'poem'", "drafter")),
    "a vocabulary that is true": ({"vocab_size": True}, ("vocab_size", "True")),
    "no recipe": ({"recipe": None}, ("recipe", "None", "dict")),
    "an export that says half": ({"export": {"format": "npz"}}, ("export", "npz")),
    "a loss that is no number": ({"training": {"loss": float("nan")}}, ("training", "JSON")),
    "half a character": ({"recipe": {"name": "\ud800"}}, ("recipe", "\\ud800")),
    "a field too many": ({"colour": "red"}, ("colour",)),
}
RECORDS |= {
    f"the name {name!a}": (of_files((name,)), (ascii(name),))
    for name in (
        "../../etc/passwd", "/etc/passwd", "a//b", "", "C:a", "a\\..\\b", "a\0b", "abc\u202egnp", "a\ud800",
        "artifact.json",
    )
}  # fmt: skip
RECORDS |= {
    f"the entry {entry}": (of_files(("a",), entry), ("'a'", "sha256", "bytes"))
    for entry in (
        ENTRY | {"bytes": -1}, ENTRY | {"bytes": True}, ENTRY | {"sha256": "Z" * 64}, {}, None,
    )
}  # fmt: skip
TEXTS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "a number too long": ('{"schema": ' + "9" * 5000 + "}", ()),
    "no text": (b"\xff\xfe", ("UTF-8",)),
    "too much": (b" " * (MAX_JSON_BYTES + 1), (f"{MAX_JSON_BYTES:,}", f"{MAX_JSON_BYTES + 1:,}")),
}


def refused(act: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(part)})" for part in parts)) as caught:
        act()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("change", "parts"), RECORDS.values(), ids=RECORDS)
def test_records_of_another_form(table: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    path = table / "artifact.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(lambda: load_manifest(table), parts)


@pytest.mark.parametrize(("content", "parts"), TEXTS.values(), ids=TEXTS)
def test_texts_that_are_no_record(table: Path, content: str | bytes, parts: tuple[str, ...]) -> None:
    (table / "artifact.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (load_manifest, verify_artifact):
        refused(lambda read=read: read(table), (f"{table / 'artifact.json'}", *parts))


def _thesis(folder: Path) -> Path:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no such folder": (lambda tmp: load_manifest(tmp / "nowhere"), ("nowhere",)),
    "no record": (lambda tmp: load_manifest(_thesis(tmp / "mine")), ("mine", "artifact.json")),
    "a folder above": (lambda tmp: load_manifest(tmp), ("artifact.json", "/t")),
    "another kind": (lambda tmp: load_manifest(tmp / "t", kind="heads"), ("'table'", "'heads'")),
    "over other files": (lambda tmp: save(_thesis(tmp / "mine")), ("mine",)),
    "over a file": (lambda tmp: save(_thesis(tmp / "mine") / "thesis.txt"), ("thesis.txt",)),
    "an unknown kind": (lambda tmp: save(tmp / "x", kind="tables"), ("'tables'", "table")),
    "an odd name": (lambda tmp: save(tmp / "x", write=lambda f: (f / "a\\b").write_text("")), ("a\\b",)),
    "another vocabulary": (
        lambda tmp: check_target(load_manifest(tmp / "t"), vocab_size=65, tokenizer_fingerprint=None, what="it"),
        ("64", "65", "vocab_size: 65"),
    ),
    "another tokenizer": (
        lambda tmp: check_target(load_manifest(tmp / "t"), vocab_size=64, tokenizer_fingerprint="ef" * 32, what="it"),
        ("ab" * 8, "ef" * 8),
    ),
}


@pytest.mark.parametrize(("act", "parts"), REFUSED.values(), ids=REFUSED)
def test_refused(table: Path, tmp_path: Path, act: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    refused(lambda: act(tmp_path), parts)
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob(".*"))
