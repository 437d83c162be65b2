"""The frame of all exports: what an export is, and that nothing half-written stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.checkpoints.export.base import SERVING_FILE, export_artifact
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
