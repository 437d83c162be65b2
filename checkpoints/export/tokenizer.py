"""A target's tokenizer beside what is exported for it, for engines that look for it there."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..artifact.compat import CONFIG_FILE, TEMPLATE_FILE, patch_tokenizer, read_config, write_config
from ..artifact.locate import settings_of
from .drafter import compare_tokenizers, has_tokenizer
from .target import load_tokenizer

_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", CONFIG_FILE, TEMPLATE_FILE),
)


def write_tokenizer(target: str, folder: Path) -> None:
    """Copy a target's tokenizer to a folder, if it can be had: of `user/name[@revision]` from the hub or its cache.

    Raises:
        ValueError: a `tokenizer_config.json` or a tokenizer that cannot be read.
    """
    place = settings_of(target)
    if place is None or not has_tokenizer(place):
        return
    for name in _FILES:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)
    config = read_config(place / CONFIG_FILE) if (place / CONFIG_FILE).is_file() else {}
    # else its class is that of the model beside it, and beside the copy there is another
    config.setdefault("tokenizer_class", type(load_tokenizer(str(place))).__name__)
    write_config(folder / CONFIG_FILE, config)
    patch_tokenizer(folder)


def compare_tokenizer(target: str, folder: Path) -> list[str]:
    """What was found equal of a copy read back and the target's tokenizer, a line each; where there is none, that.

    Raises:
        ValueError: they differ.
    """
    place = settings_of(target)
    if place is None:
        return [f"not compared: the tokenizer, as that of the target {target} is neither here nor to be had"]
    return [f"of the target {line}" for line in compare_tokenizers(place, folder)]
