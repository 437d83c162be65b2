"""What a drafter's `generation_config.json` says of how transformers shall draft with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..storage.safe_read import read_json
from ..verify.model_files import load_config

SPECULATIVE_TOKENS = 4
"""Tokens to draft a step by default: what this engine's methods draft by default, too."""


def speculation(tokens: int = SPECULATIVE_TOKENS) -> dict[str, Any]:
    """The settings: a constant count (transformers would add 2 to it or take 1 away after each step), and no threshold
    (by default drafting stops below a confidence of 0.4, which is then tuned while decoding)."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def generation_settings(generation: GenerationConfig) -> dict[str, Any]:
    """What its file says. transformers loads settings that do not fit each other (a temperature, and no sampling; many
    models are published so), and refuses to save them changed: hence `write_settings`."""
    return {name: value for name, value in generation.to_diff_dict().items() if not name.startswith("_")}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """A file of settings, config.json or generation_config.json."""
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_speculation(folder: Path, tokens: int = SPECULATIVE_TOKENS) -> None:
    """Add `speculation` to a drafter's generation settings, or to those of its configuration."""
    path = folder / "generation_config.json"
    if path.is_file():
        settings = read_json(path)
    else:
        settings = generation_settings(GenerationConfig.from_model_config(load_config(folder)))
    write_settings(path, settings | speculation(tokens))
