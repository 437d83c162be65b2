"""Settings of a drafter's `generation_config.json` for assisted generation in transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..storage.safe_read import read_json
from ..verify.model_files import load_config

SPECULATIVE_TOKENS = 4
"""Default number of draft tokens per step."""


def speculation(tokens: int = SPECULATIVE_TOKENS) -> dict[str, Any]:
    """Return the generation settings for a constant draft length without a confidence threshold."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write `config.json` or `generation_config.json`, even with values that transformers would not save."""
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_speculation(folder: Path, tokens: int = SPECULATIVE_TOKENS) -> None:
    """Add the settings of `speculation` to a drafter's `generation_config.json`, which is created if necessary."""
    path = folder / "generation_config.json"
    if path.is_file():
        settings = read_json(path)
    else:
        default = GenerationConfig.from_model_config(load_config(folder)).to_diff_dict()
        settings = {name: value for name, value in default.items() if not name.startswith("_")}
    write_settings(path, settings | speculation(tokens))
