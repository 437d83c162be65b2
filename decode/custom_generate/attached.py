"""Saved methods where code from their folder is trusted: what `custom_generate/generate.py` of one calls.

Such files lie in folders and repositories that were written long ago: module, function and arguments stay.
"""

from __future__ import annotations

import inspect
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoints.artifact.locate import resolve_at
from .method import CustomGenerate
from .request import calling_generate
from .saved import read_settings


def generate_attached(model: PreTrainedModel, inputs: Tensor | None = None, **asked: Any) -> Any:
    """Decode as `generate` was asked to, with the method that is saved where its `custom_generate` points.

    `custom_generate/generate.py` of a saved method calls this. A model that was loaded with `trust_remote_code` from a
    folder with such a file has it for its `generate`: then the method lies beside the model. Raises ValueError: what
    `CustomGenerate.from_pretrained` raises, and what decoding raises.
    """
    caller = calling_generate(inspect.currentframe())
    revision = asked.pop("revision", None)
    source = None if caller is None else caller.get("custom_generate")
    if not isinstance(source, str):
        source, revision = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
    folder = resolve_at(source, revision)
    custom = _loaded(folder.resolve(), json.dumps(read_settings(folder), sort_keys=True))
    return type(model).generate(model, inputs, custom_generate=custom, **asked)


@lru_cache(maxsize=4)
def _loaded(folder: Path, settings: str) -> CustomGenerate:
    """Loaded once for each state of a folder, which the hashes among its settings tell."""
    del settings
    return CustomGenerate.from_pretrained(folder)
