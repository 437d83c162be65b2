"""Loading of rows from datasets on the Hugging Face Hub, and download of files from URLs."""

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
from .files import WHOLE, Columns, Row, Shard

_TIMEOUT = 30  # seconds


def download(address: str) -> Path:
    """Download a file from a URL unless it is cached, and return its path. Raises ValueError on failure."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    path = Path(constants.HF_HOME) / "draftsmith" / digest / Path(urlsplit(address).path).name
    if not path.is_file():
        try:
            if constants.HF_HUB_OFFLINE:
                raise OSError("HF_HUB_OFFLINE is set")
            with urlopen(address, timeout=_TIMEOUT) as answer, atomic_file(path) as out:
                shutil.copyfileobj(answer, out)
        except (OSError, HTTPException) as error:
            raise ValueError(f"{address} cannot be downloaded: {first_line(error)}; pass a local `path`") from error
    return path


def hub_rows(
    hub: str, shard: Shard = WHOLE, *, columns: Columns = lambda names: names, near: str = "", **options: Any
) -> Iterator[Row]:
    """Yield the rows of a shard of a hub dataset. `options` are passed to `datasets.load_dataset`.

    `near` is a hint for error messages.

    Raises ValueError if `datasets` is not installed, or the dataset cannot be loaded.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        hint = install_hint("train")
        raise ValueError(f"file or folder {hub} does not exist.{near} To load it from the hub: {hint}") from error
    offline = out_of_reach()
    location, number = f"{hub} ({options.get('split')})", -1
    try:
        loaded: Any = datasets.load_dataset(hub, **options)
        numbers = range(shard[0], len(loaded), shard[1])
        rows = loaded.select_columns(list(columns(loaded.column_names))).select(numbers)
        for number, value in zip(numbers, rows, strict=True):
            yield Row(value, f"{location}, row {number + 1}", f"{hub}-{number + 1}", number)
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:  # offline, unknown, gated, no such split
        reason = offline or first_line(error)
        if number >= 0:
            raise ValueError(f"{location}, after row {number + 1}: {reason}") from error
        raise ValueError(
            f"file or folder {hub} does not exist, and the hub dataset could not be loaded: {reason}.{near} Pass a "
            f"local copy as `path`. For a gated dataset, accept its terms at https://huggingface.co/datasets/{hub} "
            "and run `hf auth login`"
        ) from error
