"""Rows of hub datasets, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ...checkpoints.storage.messages import first_line
from .files import INSTALL, Columns, Row, Selection

_BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}


def hub_rows(
    hub: str | None,
    selection: Selection,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    file: str | None = None,
    streaming: bool = False,
    columns: Columns = lambda names: names,
    missing: str = "",
) -> Iterator[Row]:
    """The wanted rows of a dataset of the hub, or of a `file` with an address of its own (https://…).

    Rows are read as they arrive with `streaming`, else from a copy in the cache of `datasets`, mapped into memory.
    `missing` says in errors what else was looked for.

    Raises:
        ValueError: `datasets` is not installed; the hub cannot be reached, or has no such set, config, split or file.
            While iterating: the connection breaks, or a file is damaged.
    """
    address = file if file is not None and "://" in file else None
    label = address or hub
    assert label is not None
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(f"{missing or label}; to load it from the hub: {INSTALL}") from error
    source, files = (hub, file) if address is None else (_builder(address), address)
    try:
        loaded = datasets.load_dataset(
            source, config, split=split, revision=revision, data_files=files, streaming=streaming
        )
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:  # offline, unknown, gated, no such split: all
        help_line = f"; {_help(hub)}" if address is None else ""
        lead = f"{missing}, and the hub could not be reached for it" if missing else f"{label} could not be loaded"
        raise ValueError(f"{lead}: {first_line(error)}{help_line}") from error
    rows = _numbered(loaded, selection, columns, streaming)
    place = f"{label} ({split})"
    name = label.rsplit("/", 1)[-1] if address else label

    def stream() -> Iterator[Row]:
        number = -1
        try:
            for number, value in rows:
                yield Row(value, f"{place}, row {number + 1}", f"{name}-{number + 1}", number)
        except (OSError, RuntimeError, ValueError, DatasetsError) as error:
            raise ValueError(f"{place}, after row {number + 1}: {first_line(error)}") from error

    return stream()


def _builder(address: str) -> str:
    suffix = PurePosixPath(address.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
    if suffix not in _BUILDERS:
        raise ValueError(f"{address}: expected an address ending in {', '.join(_BUILDERS)}, found {suffix or 'none'}")
    return _BUILDERS[suffix]


def _help(hub: str | None) -> str:
    return (
        f"without a network give a local copy as path; for a gated set accept its terms at "
        f"https://huggingface.co/datasets/{hub} and run `hf auth login`"
    )


def _numbered(loaded: Any, selection: Selection, columns: Columns, streaming: bool) -> Iterator[tuple[int, Any]]:
    if loaded.column_names:  # a stream may not know them
        loaded = loaded.select_columns(list(columns(loaded.column_names)))
    if not streaming:
        numbers = selection.wanted(0, len(loaded))
        return zip(numbers, loaded.select(numbers), strict=True)
    numbered = enumerate(loaded.skip(selection.start), start=selection.start)
    return ((number, value) for number, value in numbered if selection.wants(number))
