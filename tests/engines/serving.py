"""Engines in environments of their own: a script that answers once, and what a server answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PATIENCE = 600


def environment(**more: str) -> dict[str, str]:
    """This process's, without the paths to its own packages."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def answer_of(python: str, script: str, asked: Mapping[str, Any], **more: str) -> dict[str, Any]:
    """What a script of this folder makes of one JSON object, run by an engine's own Python.

    Raises:
        RuntimeError: with the engine's own words, where it refuses.
    """
    done = subprocess.run(
        [python, str(Path(__file__).with_name(script))],
        input=json.dumps(asked),
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-8000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def ask(url: str, **asked: Any) -> dict[str, Any]:
    """What a server answers to a JSON object."""
    request = Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as answered:
        answer: dict[str, Any] = json.load(answered)
    return answer
