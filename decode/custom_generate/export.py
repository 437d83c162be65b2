"""Heads or a table exported for this engine inside transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoints.export.base import ExportOptions, Format, Source, check_same_tensors
from .method import CustomGenerate, method


def _method_of(source: Source, options: ExportOptions) -> CustomGenerate:
    if source.manifest.kind == "heads":
        return method("medusa", heads=source.folder)
    gamma: dict[str, Any] = {} if options.speculative_tokens is None else {"gamma": options.speculative_tokens}
    return method("bigram", table=source.folder, **gamma)


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    _method_of(source, options).write(folder)


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    expected, found = _method_of(source, options), CustomGenerate.from_pretrained(folder)
    check_same_tensors(_tensors(found), _tensors(expected), folder)
    if expected.table is not None:
        return [f"all {expected.table.entries:,} counts"]
    return [f"all {len(_tensors(expected))} tensors of the heads"]


def _tensors(custom: CustomGenerate) -> dict[str, torch.Tensor]:
    if custom.table is None:
        return custom.heads.state_dict()  # type: ignore[union-attr]
    return {name: getattr(custom.table, name) for name in ("row_ptr", "col", "count", "unigram")}


_READERS = "draftsmith, inside generate of transformers ≥ 5.17"
ATTACHED_FORMATS = (
    Format(
        "custom-generate",
        "heads",
        "Heads with the method medusa, for `generate(custom_generate=…)`",
        _READERS,
        _write,
        _compare,
        options=("target",),
    ),
    Format(
        "custom-generate-bigrams",
        "table",
        "A table with the method bigram, for `generate(custom_generate=…)`",
        _READERS,
        _write,
        _compare,
        options=("target", "speculative_tokens"),
    ),
)
