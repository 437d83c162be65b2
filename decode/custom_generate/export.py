"""Heads or a table exported as one file for this engine inside transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoints.export.base import ExportOptions, Source, format_of
from .method import CustomGenerate, method
from .saved import stored_parts, write_method


def _method_of(source: Source, options: ExportOptions) -> CustomGenerate:
    if source.manifest.kind == "heads":
        return method("medusa", heads=source.folder)
    gamma: dict[str, Any] = {} if options.speculative_tokens is None else {"gamma": options.speculative_tokens}
    return method("bigram", table=source.folder, **gamma)


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    write_method(_method_of(source, options).stored(), folder)


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    mine, theirs = _method_of(source, options), CustomGenerate.from_pretrained(folder)
    (known, settings), (found, stored) = stored_parts(mine.stored()), stored_parts(theirs.stored())
    same = known.keys() == found.keys() and all(torch.equal(known[name], found[name]) for name in known)
    if not same or settings != stored or theirs.options != mine.options:
        kind = source.manifest.kind
        raise ValueError(f"the {kind} read back from {folder} differ from those of {source.folder}")
    if mine.table is not None:
        return [f"all {mine.table.entries:,} counts"]
    return [f"all {len(known)} tensors of the heads"]


ATTACHED_FORMATS = (
    format_of("custom-generate", write=_write, compare=_compare),
    format_of("custom-generate-bigrams", write=_write, compare=_compare),
)
