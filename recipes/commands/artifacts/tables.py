"""Finished tables, merged and pruned."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ....checkpoints.artifact.artifact import open_artifact
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.table.file import write_table
from ....checkpoints.table.table import TABLE_FILE, BigramTable, merged_runs
from ...assemble.table.count import save_table
from ...session.terminal import log
from .import_heads import check_new
from .table_show import table_tokenizer

_SUMS = ("conversations", "held_out", "documents", "tokens")


def merge_tables(folders: Sequence[Path], out: Path, *, again: bool = False) -> None:
    """The table of all the tables' documents together, as an artifact whose manifest names its parts; the counts are
    streamed. With `again` tables may be counted from the same data."""
    if len(folders) < 2:
        raise ValueError(f"merging takes two tables or more, got {len(folders)}")
    check_new(out)
    opened = [open_artifact(folder, BigramTable.load, "table") for folder in folders]
    manifests, tables = [manifest for manifest, _ in opened], [table for _, table in opened]
    parts = [part for folder, manifest in zip(folders, manifests, strict=True) for part in _parts_of(folder, manifest)]
    _check_alike(folders, manifests, tables, parts)
    if not again:
        _check_once(parts)
    unfinished = out.with_name(f".{out.name}.merging")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a merge that was killed
    unfinished.mkdir(parents=True)
    file = unfinished / TABLE_FILE

    def move(folder: Path) -> None:
        file.rename(folder / TABLE_FILE)

    try:
        unigram_V = np.sum([table.unigram.numpy() for table in tables], axis=0)
        write_table(file, tables[0].vocab_size, merged_runs(tables), unigram_V)
        log(f"table: merged {len(tables)} tables")
        recipe = {"kind": "table", "tokenizer": manifests[0].recipe.get("tokenizer"), "out": str(out)}
        save_table(
            out,
            move,
            BigramTable.load(unfinished),
            table_tokenizer(folders[0], manifests[0], None),
            recipe=recipe | {"merged": [str(folder) for folder in folders]},
            fingerprint=next(filter(None, (manifest.tokenizer_fingerprint for manifest in manifests)), None),
            data={key: sum(part.get(key, 0) for part in parts) for key in _SUMS} | {"parts": parts},
        )
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def prune_table(folder: Path, out: Path, *, min_count: int = 1, top: int = 0, megabytes: float | None = None) -> None:
    """A smaller table of a whole one, which stays as it is; r of the pairs that are kept does not change."""
    check_new(out)
    if min_count == 1 and not top and megabytes is None:
        raise ValueError("this leaves nothing out: give --min-count above 1, --top or --megabytes")
    manifest, whole = open_artifact(folder, BigramTable.load, "table")
    options: dict[str, Any] = {"min_count": min_count, "top": top, "megabytes": megabytes}
    pruned = whole.pruned(**options)
    save_table(
        out,
        pruned.save,
        pruned,
        table_tokenizer(folder, manifest, None),
        recipe=manifest.recipe | {"out": str(out), "prune": options, "whole": str(folder)},
        fingerprint=manifest.tokenizer_fingerprint,
        data=manifest.data,
    )


def _check_alike(
    folders: Sequence[Path],
    manifests: Sequence[Manifest],
    tables: Sequence[BigramTable],
    parts: Sequence[dict[str, Any]],
) -> None:
    """Raises ValueError naming both sides of what cannot be added up; what a manifest does not say is not compared."""
    for folder, table in zip(folders, tables, strict=True):
        if table.pruning is not None:
            raise ValueError(f"{folder} is a pruned table, whose counts are not whole: merge whole ones, prune the sum")
    sources = [(part["table"], part["source"]) for part in parts if isinstance(part.get("source"), dict)]
    marks = [(folder, manifest.tokenizer_fingerprint) for folder, manifest in zip(folders, manifests, strict=True)]
    compared: dict[str, list[tuple[Any, Any]]] = {
        "the number of tokens": [(folder, table.vocab_size) for folder, table in zip(folders, tables, strict=True)],
        "the tokenizer's fingerprint": [(folder, mark) for folder, mark in marks if mark is not None],
        "`count.pairs`": [(name, source.get("pairs")) for name, source in sources],
        "`count.roles`": [(name, source.get("roles")) for name, source in sources],
    }
    for what, values in compared.items():
        for folder, value in values[1:]:
            first, known = values[0]
            if value != known:
                raise ValueError(f"{first} and {folder} cannot be merged: {what} is {known} there and {value} here")


def _parts_of(folder: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """What a table was counted from: itself, or, if it was merged, its parts."""
    if "parts" in manifest.data:
        return list(manifest.data["parts"])
    return [{"table": str(folder), "sha256": manifest.files[TABLE_FILE]["sha256"]} | manifest.data]


def _check_once(parts: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError naming two parts that were counted from the same data, all of it or a file."""
    for one, other in combinations(parts, 2):
        these, those = _files(one), _files(other)
        shared = [name for sha256, name in these.items() if sha256 in those]
        same = one.get("source") is not None and one["source"] == other.get("source")
        if shared or same or one["sha256"] == other["sha256"]:
            data = ", ".join(shared[:3]) + f" and {len(shared) - 3} more" * (len(shared) > 3)
            raise ValueError(
                f"{one['table']} and {other['table']} were counted from the same data ({data or 'all'}), "
                "which would count twice; --again merges them all the same"
            )


def _files(part: dict[str, Any]) -> dict[str, str]:
    """Local files that a part was counted from, by their hashes, as far as its manifest says."""
    source = part.get("source")
    sources = source.get("sources", []) if isinstance(source, dict) else []
    return {sha256: name for each in sources for name, sha256 in each.get("files", {}).items()}
