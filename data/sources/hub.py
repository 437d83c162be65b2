"""Rows of hub datasets, through `datasets`, and files with an address of their own."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from huggingface_hub import constants

from ...checkpoints.storage.atomic import atomic_file
from ...checkpoints.storage.messages import first_line, install_hint
from ...checkpoints.storage.places import out_of_reach
from .files import WHOLE, Columns, Row, Shard, chosen

_PATIENCE = 30
"""Seconds for an answer."""


def downloaded(address: str) -> Path:
    """A file by its address (https://…), fetched once and kept in the hub's cache. Raises ValueError: out of reach."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    path = Path(constants.HF_HOME) / "draftsmith" / digest / Path(urlsplit(address).path).name
    if not path.is_file():
        try:
            if constants.HF_HUB_OFFLINE:
                raise OSError("HF_HUB_OFFLINE is set")
            with urlopen(address, timeout=_PATIENCE) as answer, atomic_file(path) as out:
                shutil.copyfileobj(answer, out)
        except (OSError, HTTPException) as error:
            raise ValueError(
                f"{address} could not be loaded: {first_line(error)}; without a network give a local copy as path"
            ) from error
    return path


def hub_rows(
    hub: str,
    shard: Shard = WHOLE,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    file: str | None = None,
    streaming: bool = False,
    columns: Columns = lambda names: names,
    near: str = "",
) -> Iterator[Row]:
    """The rows of a shard of a dataset of the hub, as they arrive with `streaming`, else from the cache of `datasets`.
    `near` is for errors: what else may have been meant. Raises ValueError: `datasets` is not installed; the hub cannot
    be reached, or has no such set, config, split or file."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        hint = install_hint("train")
        raise ValueError(f"{hub} is no file or folder here.{near} To load it from the hub: {hint}") from error
    away = out_of_reach()
    location, number = f"{hub} ({split})", -1
    try:
        loaded = datasets.load_dataset(
            hub, config, split=split, revision=revision, data_files=file, streaming=streaming
        )
        for number, value in _numbered(loaded, shard, columns, streaming):
            yield Row(value, f"{location}, row {number + 1}", f"{hub}-{number + 1}", number)
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:  # offline, unknown, gated, no such split: all
        reason = away or first_line(error)
        if number >= 0:
            raise ValueError(f"{location}, after row {number + 1}: {reason}") from error
        raise ValueError(
            f"{hub} is no file or folder here, and could not be loaded from the hub: {reason}.{near} Without a network "
            f"give a local copy as path; for a gated set accept its terms at https://huggingface.co/datasets/{hub} and "
            "run `hf auth login`"
        ) from error


def _numbered(loaded: Any, shard: Shard, columns: Columns, streaming: bool) -> Iterator[tuple[int, Any]]:
    names, unread = chosen(columns, loaded.column_names or [])  # a stream may not know them
    loaded = loaded.select_columns(names) if names else loaded
    if not streaming:
        numbers = shard.rows(0, len(loaded))
        return ((number, value | unread) for number, value in zip(numbers, loaded.select(numbers), strict=True))
    return ((number, value | unread) for number, value in enumerate(loaded) if number % shard.count == shard.index)
