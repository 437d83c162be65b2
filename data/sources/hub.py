"""Rows of hub datasets, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ...checkpoints.storage.messages import first_line
from .files import INSTALL, WHOLE, Columns, Row, Shard

_BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}


def hub_rows(
    hub: str | None,
    shard: Shard = WHOLE,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    file: str | None = None,
    streaming: bool = False,
    columns: Columns = lambda names: names,
    missing: str = "",
) -> Iterator[Row]:
    """The rows of a shard of a dataset of the hub, or of a `file` with an address of its own (https://…), as they
    arrive with `streaming`, else from the cache of `datasets`. `missing` says in errors what else was looked for.

    Raises:
        ValueError: `datasets` is not installed; the hub cannot be reached, or has no such set, config, split or file.
    """
    address = file if file is not None and "://" in file else None
    label = address or str(hub)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(f"{missing or label}; to load it from the hub: {INSTALL}") from error
    source, files = (hub, file) if address is None else (_builder(address), address)
    location, number = f"{label} ({split})", -1
    name = label.rsplit("/", 1)[-1] if address else label
    try:
        loaded = datasets.load_dataset(
            source, config, split=split, revision=revision, data_files=files, streaming=streaming
        )
        for number, value in _numbered(loaded, shard, columns, streaming):
            yield Row(value, f"{location}, row {number + 1}", f"{name}-{number + 1}", number)
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:  # offline, unknown, gated, no such split: all
        reason = first_line(error)
        if number >= 0:
            raise ValueError(f"{location}, after row {number + 1}: {reason}") from error
        lead = f"{missing}, and the hub could not be reached for it" if missing else f"{label} could not be loaded"
        advice = (
            f"; without a network give a local copy as path; for a gated set accept its terms at "
            f"https://huggingface.co/datasets/{hub} and run `hf auth login`"
        )
        raise ValueError(f"{lead}: {reason}{advice if address is None else ''}") from error


def _builder(address: str) -> str:
    suffix = PurePosixPath(address.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
    if suffix not in _BUILDERS:
        raise ValueError(f"{address}: expected an address ending in {', '.join(_BUILDERS)}, found {suffix or 'none'}")
    return _BUILDERS[suffix]


def _numbered(loaded: Any, shard: Shard, columns: Columns, streaming: bool) -> Iterator[tuple[int, Any]]:
    if loaded.column_names:  # a stream may not know them
        loaded = loaded.select_columns(list(columns(loaded.column_names)))
    if not streaming:
        numbers = shard.rows(0, len(loaded))
        return zip(numbers, loaded.select(numbers), strict=True)
    return ((number, value) for number, value in enumerate(loaded) if number % shard.count == shard.index)
