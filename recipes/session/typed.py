"""What the user typed: recorded in manifests, without secrets."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ...checkpoints.artifact.manifest import REDACTED, is_secret, to_json_safe

_PROGRAM = "draftsmith"


def typed_command(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> str | None:
    """The command line (by default this process's, with its environment) as one would type it, with the launch of
    several processes and without secrets. None where it is not draftsmith's, as in a library's use."""
    program, *words = sys.argv if arguments is None else arguments
    environment = os.environ if environment is None else environment
    path = Path(program)
    is_module = path.name == "__main__.py" and path.resolve().parent == Path(__file__).resolve().parents[2]
    if path.name != _PROGRAM and not is_module:
        return None
    processes = environment.get("WORLD_SIZE", "1")
    launch = [] if processes == "1" else ["accelerate", "launch", "--num_processes", processes, "-m"]
    return shlex.join([*launch, _PROGRAM, *_redacted(words)])


def _redacted(words: Sequence[str]) -> list[str]:
    """`key=value`, `--key=value` and `--key value` with secrets left out, in values that are YAML mappings as well."""
    cleaned, hide_next = list[str](), False
    for word in words:
        key, equals, value = word.partition("=")
        secret = is_secret(key.lstrip("-").replace("-", "_"))
        if hide_next and not word.startswith("-"):
            cleaned.append(REDACTED)
        elif equals:
            cleaned.append(f"{key}={REDACTED if secret and value else _value(value)}")
        else:
            cleaned.append(str(to_json_safe(word)))
        hide_next = word.startswith("-") and not equals and secret
    return cleaned


def _value(text: str) -> str:
    """A value as it was typed, but for secrets in it."""
    try:
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # words that are no YAML
        parsed = None
    cleaned = json.dumps(to_json_safe(parsed), ensure_ascii=False) if isinstance(parsed, dict | list) else ""
    return cleaned if REDACTED in cleaned else str(to_json_safe(text))
