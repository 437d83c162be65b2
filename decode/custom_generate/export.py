"""Heads or a table exported as one file for this engine inside transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoints.export.base import ExportOptions, Source, format_of
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.table.table import BigramTable
from .method import CustomGenerate, method
from .saved import write_method


def _method_of(source: Source, options: ExportOptions) -> CustomGenerate:
    if source.manifest.kind == "heads":
        return method("medusa", heads=source.folder)
    gamma: dict[str, Any] = {} if options.speculative_tokens is None else {"gamma": options.speculative_tokens}
    return method("bigram", table=source.folder, **gamma)


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    write_method(_method_of(source, options).stored(), folder)


def _compare_heads(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    mine, theirs = (one.heads for one in (_method_of(source, options), CustomGenerate.from_pretrained(folder)))
    assert isinstance(mine, PredictionHeads)
    assert isinstance(theirs, PredictionHeads)
    known, found = mine.state_dict(), theirs.state_dict()
    sizes = ("num_heads", "num_layers", "hidden_size", "projection_kind", "rank", "states", "scale")
    same = all(getattr(mine, name) == getattr(theirs, name) for name in sizes)
    if not same or list(known) != list(found) or not all(torch.equal(known[name], found[name]) for name in known):
        raise ValueError(f"the heads read back from {folder} differ from those of {source.folder}")
    return [f"all {len(known)} tensors of the heads"]


def _compare_table(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    mine, theirs = _method_of(source, options), CustomGenerate.from_pretrained(folder)
    known, found = mine.table, theirs.table
    assert isinstance(known, BigramTable)
    assert isinstance(found, BigramTable)
    names = ("row_ptr", "col", "count", "unigram")
    same = all(torch.equal(getattr(known, name), getattr(found, name)) for name in names)
    same = same and torch.equal(known.left_counts(), found.left_counts())
    same = same and torch.equal(known.right_counts(), found.right_counts()) and known.pruning == found.pruning
    if not same or theirs.options != mine.options:
        raise ValueError(f"the table read back from {folder} differs from that of {source.folder}")
    return [f"all {known.entries:,} counts"]


ATTACHED_FORMATS = (
    format_of("custom-generate", write=_write, compare=_compare_heads),
    format_of("custom-generate-bigrams", write=_write, compare=_compare_table),
)
