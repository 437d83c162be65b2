"""What the user typed: kept in manifests, without secrets."""

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
    """The command line of this process as one would type it, with the launch of several processes and without secrets.
    None where it is not draftsmith's, as in a library's use.

    Args:
        arguments: by default this process's.
        environment: the same.
    """
    program, *words = sys.argv if arguments is None else arguments
    environment = os.environ if environment is None else environment
    place = Path(program)
    is_module = place.name == "__main__.py" and place.resolve().parent == Path(__file__).resolve().parents[2]
    if place.name != _PROGRAM and not is_module:
        return None
    return shlex.join([*_launch(environment), *_redacted(words)])


def _launch(environment: Mapping[str, str]) -> list[str]:
    """What comes before the command's own words, as accelerate and torchrun tell it by the environment."""
    processes, of_machine = (_number(environment.get(key)) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    zero = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") if environment.get("ACCELERATE_USE_DEEPSPEED") else None
    if processes == 1 and zero is None:
        return [_PROGRAM]
    machines = max(1, processes // max(1, of_machine))
    if "ACCELERATE_MIXED_PRECISION" in environment:
        words = ["accelerate", "launch", "--num_processes", str(processes), "--num_machines", str(machines)]
        words += [] if zero is None else ["--use_deepspeed", "--zero_stage", zero]
    else:
        words = ["torchrun", "--nproc_per_node", str(processes // machines), "--nnodes", str(machines)]
    return [*words, "-m", _PROGRAM]


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and int(text) else 1


def _redacted(words: Sequence[str]) -> list[str]:
    """`key=value`, `--key=value` and `--key value` with secrets left out, in values that are YAML mappings as well."""
    told, hide_next = list[str](), False
    for word in words:
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if hide_next and not word.startswith("-"):
            told.append(REDACTED)
        elif equals:
            told.append(f"{key}={REDACTED if is_secret(name) and value else _value(value)}")
        else:
            told.append(str(to_json_safe(word)))
        hide_next = word.startswith("-") and not equals and is_secret(name)
    return told


def _value(text: str) -> str:
    """A value as it was typed, but for secrets in it."""
    try:
        parsed = yaml.safe_load(text)
        cleaned = to_json_safe(parsed)
    except (yaml.YAMLError, ValueError):  # dates, and words that are no YAML
        return str(to_json_safe(text))
    cleaned = json.dumps(cleaned, ensure_ascii=False)
    return cleaned if isinstance(parsed, dict | list) and REDACTED in cleaned else str(to_json_safe(text))
