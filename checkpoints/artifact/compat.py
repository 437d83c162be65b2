"""Conversion of model and tokenizer configurations for transformers versions before 5.

These versions reject the class name and the list of special tokens that transformers 5 writes to tokenizer configs.
Some of them load the chat template from `tokenizer_config.json` only. They also ignore the RoPE base and scaling, which
transformers 5 stores under `rope_parameters`, and use defaults.
"""

import json
from pathlib import Path
from typing import Any

from ..storage.safe_read import read_json, read_text

MODEL_FILE = "config.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def patch_model(folder: Path) -> None:
    """Add RoPE settings for transformers 4 to `config.json`. Raises ValueError if the file is invalid."""
    path = folder / MODEL_FILE
    if not path.is_file():
        return
    config = read_json(path)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # other models have settings per layer type
        write_config(path, config | _rotary(config.get("model_type"), rope))


def _rotary(model_type: Any, rope: dict[str, Any]) -> dict[str, Any]:
    theta, part = rope["rope_theta"], rope.get("partial_rotary_factor")
    if model_type == "gpt_neox":
        return {"rotary_emb_base": theta} | ({} if part is None else {"rotary_pct": part})
    settings = {"rope_theta": theta} | ({} if part is None else {"partial_rotary_factor": part})
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {
            key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
    return settings


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer in a form that transformers versions before 5 can load (see `patch_tokenizer`)."""
    tokenizer.save_pretrained(folder)
    patch_tokenizer(folder)


def patch_tokenizer(folder: Path) -> None:
    """Make a saved tokenizer loadable in transformers versions before 5. Raises ValueError if a file cannot be read."""
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
    if template.is_file():  # takes precedence if both exist
        try:
            mended["chat_template"] = read_text(template)
        except ValueError as error:
            raise ValueError(f"{template}: {error}") from error
    if mended != config:
        write_config(path, mended)


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a configuration as a JSON file."""
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
