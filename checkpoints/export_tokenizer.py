"""A target's tokenizer beside what is exported for it, for engines that look for it there.

transformers 5 writes what versions before it refuse: another name of the class, special tokens as a list under another
key, the chat template in a file of its own. The copy is written as both read it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .export_drafter import compare_tokenizers, has_tokenizer
from .export_target import load_tokenizer
from .untrusted import read_json

_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", _CONFIG_FILE, _TEMPLATE_FILE),
)


def write_tokenizer(target: str, folder: Path) -> None:
    """Copy a target's tokenizer to a folder, if the target is a folder that holds one.

    Raises:
        ValueError: a `tokenizer_config.json` or a tokenizer that cannot be read.
    """
    place = Path(target)
    if not has_tokenizer(place):
        return
    for name in _FILES:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)
    config = _read(place / _CONFIG_FILE) if (place / _CONFIG_FILE).is_file() else {}
    # else its class is that of the model beside it, and beside the copy there is another
    config.setdefault("tokenizer_class", type(load_tokenizer(target)).__name__)
    config = _for_older_readers(config, place / _TEMPLATE_FILE)
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def compare_tokenizer(target: str, folder: Path) -> list[str]:
    """What was found equal of a copy read back and the target's tokenizer, a line each; none where there is none.

    Raises:
        ValueError: they differ.
    """
    return [f"of the target {line}" for line in compare_tokenizers(Path(target), folder)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _for_older_readers(config: dict[str, Any], template: Path) -> dict[str, Any]:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        more = config.pop("extra_special_tokens")
        config["additional_special_tokens"] = [*config.get("additional_special_tokens", []), *more]
    if "chat_template" not in config and template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config
