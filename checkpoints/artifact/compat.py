"""Settings of models and tokenizers as transformers 5 and the versions before it read them.

Of a tokenizer that transformers 5 writes, versions before it refuse another name of the class and special tokens as a
list under another key; some look for the chat template in the settings alone. Of a model they pass over the base and
scaling of rotary positions, which lie under another key, and run it with their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..storage.safe_read import read_json, read_text

MODEL_FILE = "config.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def patch_model(folder: Path) -> None:
    """Write rotary positions of `config.json` also where older readers look. Raises ValueError: it cannot be read."""
    path = folder / MODEL_FILE
    if not path.is_file():
        return
    config = read_json(path)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # others have one for each type of layer
        write_config(path, config | _rotary(config.get("model_type"), rope))


def _rotary(model_type: Any, rope: dict[str, Any]) -> dict[str, Any]:
    theta, part = rope["rope_theta"], rope.get("partial_rotary_factor")
    if model_type == "gpt_neox":
        return {"rotary_emb_base": theta} | ({} if part is None else {"rotary_pct": part})
    found = {"rope_theta": theta} | ({} if part is None else {"partial_rotary_factor": part})
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {
            key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
    return found


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """`save_pretrained`, for older readers too."""
    tokenizer.save_pretrained(folder)
    patch_tokenizer(folder)


def patch_tokenizer(folder: Path) -> None:
    """Rewrite the `tokenizer_config.json` beside a `tokenizer.json` where older readers would refuse it; newer ones
    load the same from it. Raises ValueError: a file that cannot be read."""
    path, template = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    if not (folder / "tokenizer.json").is_file() or not path.is_file():
        return
    config = read_json(path)
    mended = dict(config)
    if mended.get("tokenizer_class") == "TokenizersBackend":
        mended["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(mended.get("extra_special_tokens"), list):
        more = mended.pop("extra_special_tokens")
        mended["additional_special_tokens"] = [*mended.get("additional_special_tokens", []), *more]
    if template.is_file():  # which comes first, where both are read
        try:
            mended["chat_template"] = read_text(template)
        except ValueError as error:
            raise ValueError(f"{template}: {error}") from error
    if mended != config:
        write_config(path, mended)


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a JSON file of settings."""
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
