"""The frame of all exports: what is refused before anything is written, and that nothing half-written stands."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact, verify_artifact
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, Source, export_artifact
from draftsmith.checkpoints.export.heads import HEADS_FORMATS
from draftsmith.checkpoints.export.table import TABLE_FORMATS
from draftsmith.checkpoints.heads.files import HEADS_FILE, PredictionHeads, load_heads, save_heads
from draftsmith.checkpoints.table.table import BigramTable

FORMATS = {form.name: form for form in (*HEADS_FORMATS, *TABLE_FORMATS)}
ABOUT: dict[str, Any] = {name: {} for name in ("shapes", "data", "training")}
ABOUT |= {"recipe": {"kind": "heads", "steps": 3}, "evaluation": {"tokens_per_step": 2.5}}
ABOUT |= {"tokenizer_fingerprint": "ab" * 32, "target": {"id": "some/target"}}


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    made = PredictionHeads.from_lm_head(torch.randn(12, 8), 3, 1)
    save_artifact(
        tmp_path / "heads", kind="heads", write=lambda place: save_heads(made, place, "t"), vocab_size=12, **ABOUT
    )
    return tmp_path / "heads"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    made = BigramTable.from_documents([[1, 2, 3, 1, 2], [3, 3, 1]], 8)
    save_artifact(tmp_path / "table", kind="table", write=made.save, vocab_size=8, **ABOUT)
    return tmp_path / "table"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_export_is_an_artifact_that_knows_where_it_is_from(heads: Path, tmp_path: Path) -> None:
    findings = export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    made, known = verify_artifact(tmp_path / "out"), load_manifest(heads)
    for name in ("kind", "vocab_size", "tokenizer_fingerprint", "target", "recipe", "evaluation"):
        assert getattr(made, name) == getattr(known, name)
    assert made.export is not None
    assert made.export["format"] == "medusa"
    assert made.export["of"] == {name: entry["sha256"] for name, entry in known.files.items()}
    text = (tmp_path / "out" / SERVING_FILE).read_text()
    assert text.startswith("# Serving out\n")
    assert FORMATS["medusa"].readers in text
    assert all(f"- {line}\n" in text for line in findings)


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in ("medusa-2", "medusa-pt")])
def test_every_flipped_byte_of_an_export_is_found(form: str, heads: Path, table: Path, tmp_path: Path) -> None:
    export_artifact(heads if FORMATS[form].kind == "heads" else table, form, tmp_path / "out", FORMATS)
    for path in sorted((tmp_path / "out").iterdir()):
        if path.name == "artifact.json":
            continue
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(ValueError, match=path.name):
                verify_artifact(tmp_path / "out")
        path.write_bytes(good)
    verify_artifact(tmp_path / "out")


def test_what_is_refused_before_anything_is_written(heads: Path, table: Path, tmp_path: Path) -> None:
    before = names(tmp_path)

    def refused(artifact: Path, form: str, out: Path, match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            export_artifact(artifact, form, out, FORMATS, ExportOptions(**options))
        assert names(tmp_path) == before

    out = tmp_path / "out"
    refused(heads, "medusas", out, r"unknown format 'medusas'\. Did you mean 'medusa'\?.*Known: .*npz")
    refused(heads, "npz", out, r"npz is a format for kind 'table', and .* of kind 'heads'; for that there are: medusa,")
    unknown = r"medusa has no option --merge/--no-merge, --pickle; its options: --target"
    refused(heads, "medusa", out, unknown, merge=True, pickle=True)
    refused(table, "npz", out, r"npz has no option --target; its options: none", target="x")
    refused(heads, "medusa", heads, r"is the artifact itself")
    refused(heads, "medusa", tmp_path / "heads" / ".." / "heads", r"is the artifact itself")
    refused(heads, "medusa", heads / "out", r"lies in it")
    refused(heads, "medusa", table, r"holds an artifact, table, which is not written over")
    refused(tmp_path / "nowhere", "medusa", out, r"there is no artifact at")
    refused(tmp_path, "medusa", out, r"is not an artifact")
    data = (heads / HEADS_FILE).read_bytes()
    (heads / HEADS_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(heads, "medusa", out, rf"{HEADS_FILE} has the hash")


def test_a_folder_of_something_else_is_not_written_over(heads: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert names(tmp_path / "out") == ["notes.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        export_artifact(heads, "medusa", tmp_path / "file", FORMATS)


def test_an_export_replaces_one_of_its_own_form_alone(heads: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_artifact(heads, "medusa", out, FORMATS)
    export_artifact(heads, "medusa", out, FORMATS, ExportOptions(target="other/name"))
    assert load_heads(out).num_heads == 3
    assert "other/name" in (out / "config.json").read_text()
    with pytest.raises(ValueError, match="holds an export in the form medusa, which is not written over"):
        export_artifact(heads, "medusa-vllm", out, FORMATS)
    with pytest.raises(ValueError, match=r"out is an export itself \(medusa\): export its artifact"):
        export_artifact(out, "medusa", tmp_path / "again", FORMATS)
    assert verify_artifact(out).export


def test_a_failed_comparison_leaves_what_stood(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    good = export_heads.save_file

    def err(tensors: dict[str, torch.Tensor], *rest: Any, **named: Any) -> None:
        good({name: tensor + 1e-6 for name, tensor in tensors.items()}, *rest, **named)

    monkeypatch.setattr(export_heads, "save_file", err)
    with pytest.raises(ValueError, match="differs from the artifact's"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert names(tmp_path) == ["heads", "out"]


def test_a_full_disk_leaves_nothing(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, **named: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(export_heads, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert names(tmp_path) == ["heads"]


def test_a_comparison_must_compare(heads: Path, tmp_path: Path) -> None:
    def nothing(source: Source, folder: Path, options: ExportOptions) -> list[str]:
        return []

    idle = replace(FORMATS["medusa"], compare=nothing)
    with pytest.raises(AssertionError, match="compares nothing"):
        export_artifact(heads, "medusa", tmp_path / "out", {"medusa": idle})
    assert names(tmp_path) == ["heads"]


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.export.heads import HEADS_FORMATS
medusa = HEADS_FORMATS[0]
kill = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)
export_artifact(Path(sys.argv[1]), "medusa", Path(sys.argv[2]), {"medusa": replace(medusa, compare=kill)})
"""


def test_a_killed_export_does_not_stand(heads: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(heads), str(tmp_path / "out")], check=False, timeout=120)
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()
    export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    verify_artifact(tmp_path / "out")
