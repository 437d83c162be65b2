"""Functions that run scripts in the environments of engines, and send requests to servers."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PATIENCE = 600


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without its Python paths."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def answer_of(python: str, script: str, asked: Mapping[str, Any], **more: str) -> dict[str, Any]:
    """Run a script of this folder with an engine's Python on a JSON object, and return the script's answer.

    Raises:
        RuntimeError: The script failed; the message has the end of its error output.
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
    """Send a JSON object to a server and return its answer."""
    request = Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as answered:
        answer: dict[str, Any] = json.load(answered)
    return answer
