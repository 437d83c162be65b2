"""The frame of all exports: what an export is, and that nothing half-written stands."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, Source, export_artifact
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.recipes.commands.artifacts.export import FORMATS

Make = Callable[..., Path]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_export_is_an_artifact_that_knows_its_source(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads()
    findings = export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    made, known = verify_artifact(tmp_path / "out"), load_manifest(heads)
    for name in ("kind", "vocab_size", "tokenizer_fingerprint", "target", "recipe", "evaluation"):
        assert getattr(made, name) == getattr(known, name)
    assert made.export is not None
    assert made.export["of"] == {name: entry["sha256"] for name, entry in known.files.items()}
    text = (tmp_path / "out" / SERVING_FILE).read_text()
    assert text.startswith("# Serving out\n")
    assert FORMATS["medusa"].readers in text
    assert all(f"- {line}\n" in text for line in findings if "/" not in line)


@pytest.mark.parametrize(("kind", "form"), [("heads", "medusa"), ("table", "npz")])
def test_every_flipped_byte_of_an_export_is_found(
    kind: str, form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    export_artifact(request.getfixturevalue(f"make_{kind}")(), form, tmp_path / "out", FORMATS)
    for path in sorted((tmp_path / "out").iterdir()):
        if path.name == "artifact.json":
            continue
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(ValueError, match=path.name):
                verify_artifact(tmp_path / "out")
        path.write_bytes(good)
    verify_artifact(tmp_path / "out")


def test_an_export_replaces_one_of_its_own_form(make_heads: Make, tmp_path: Path) -> None:
    heads, out = make_heads(), tmp_path / "out"
    export_artifact(heads, "medusa", out, FORMATS)
    export_artifact(heads, "medusa", out, FORMATS, ExportOptions(target="other/name"))
    assert load_heads(out).num_heads == 3
    assert "other/name" in (out / "config.json").read_text()


def test_a_failed_comparison_leaves_what_stood(
    make_heads: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make_heads()
    export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    good = export_heads.save_file

    def err(tensors: dict[str, torch.Tensor], *rest: Any, **named: Any) -> None:
        good({name: tensor + 1e-6 for name, tensor in tensors.items()}, *rest, **named)

    monkeypatch.setattr(export_heads, "save_file", err)
    with pytest.raises(ValueError, match=r"\.weight|\.bias"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert names(tmp_path) == ["artifact", "out", "target"]


def test_a_full_disk_leaves_nothing(make_heads: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, **named: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    heads = make_heads()
    monkeypatch.setattr(export_heads, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert names(tmp_path) == ["artifact", "target"]


def test_a_comparison_must_compare(make_heads: Make, tmp_path: Path) -> None:
    def nothing(source: Source, folder: Path, options: ExportOptions) -> list[str]:
        return []

    idle = replace(FORMATS["medusa"], compare=nothing)
    with pytest.raises(AssertionError, match="medusa"):
        export_artifact(make_heads(), "medusa", tmp_path / "out", {"medusa": idle})
    assert names(tmp_path) == ["artifact", "target"]
