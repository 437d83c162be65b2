"""Tokenizers of exports: compared with the artifact's own, or copied from the target for engines that look there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..artifact.compat import CONFIG_FILE, patch_tokenizer, read_config, write_config
from ..artifact.locate import SETTINGS_FILES, find_folder
from ..artifact.model_ref import tokenizer_fingerprint
from ..storage.messages import first_line
from ..storage.names import TOKENIZER_FILES

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_PROBES = (
    *("The quick brown fox", "  indented\n\ttabs\n\n", "naïve Größe 東京 🙂", "1234567890 3.14 x_1 = [a, b];"),
    *("", " "),
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(source: str) -> Any:
    """The tokenizer in a folder or of a hub id; ValueError where it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = first_line(error)
        raise ValueError(
            f"the tokenizer of {source} cannot be read: {reason}; name the target's folder with --target"
        ) from error


def compare_tokenizers(artifact: Path, folder: Path) -> list[str]:
    """What is equal of two folders' tokenizers, a line each; ValueError where they differ."""
    if not has_tokenizer(artifact):
        return []
    mine, made = (AutoTokenizer.from_pretrained(each, trust_remote_code=False) for each in (artifact, folder))
    same = tokenizer_fingerprint(mine) == tokenizer_fingerprint(made) and mine.chat_template == made.chat_template
    for text in (*_PROBES, *mine.all_special_tokens):
        same = same and mine(text)["input_ids"] == made(text)["input_ids"]
    if not same:
        raise ValueError(f"the tokenizer read back from {folder} differs from the artifact's")
    return [
        f"the tokenizer: its vocabulary, special tokens and chat template, and the ids of {len(_PROBES)} texts and "
        "every special token"
    ]


def copy_tokenizer(target: str, folder: Path) -> None:
    """Copy a target's tokenizer to a folder, if it can be had: of `user/name[@revision]` from the hub or its cache."""
    found = _find_tokenizer(target)
    if found is None:
        return
    for name in TOKENIZER_FILES:
        if (found / name).is_file():
            shutil.copyfile(found / name, folder / name)
    config = read_config(found / CONFIG_FILE) if (found / CONFIG_FILE).is_file() else {}
    # else its class is that of the model beside it, and beside the copy there is another
    config.setdefault("tokenizer_class", type(load_tokenizer(str(found))).__name__)
    write_config(folder / CONFIG_FILE, config)
    patch_tokenizer(folder)


def _find_tokenizer(target: str) -> Path | None:
    try:
        folder = find_folder(target, SETTINGS_FILES)
    except ValueError:
        return None
    return folder if has_tokenizer(folder) else None


def compare_copy(target: str, folder: Path) -> list[str]:
    """What was found equal of a copy read back and the target's tokenizer, a line each; where there is none, that."""
    found = _find_tokenizer(target)
    if found is None:
        return [f"not compared: the tokenizer, as that of the target {target} is neither here nor to be had"]
    return [f"of the target {line}" for line in compare_tokenizers(found, folder)]
