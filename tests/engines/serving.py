"""Functions that run scripts in the environments of engines, and send requests to servers."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PATIENCE = 600


def environment(**overrides: str) -> dict[str, str]:
    """Return the environment variables for an engine, without the Python paths of this process."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return variables | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | overrides


def answer_of(python: str, script: str, request: Mapping[str, Any], **more: str) -> dict[str, Any]:
    """Send a JSON object to a script of this folder, run with an engine's Python; return the answer of the script.

    Raises:
        RuntimeError: The script failed; the message has the end of its error output.
    """
    process = subprocess.run(
        [python, str(Path(__file__).with_name(script))],
        input=json.dumps(request),
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if process.returncode:
        raise RuntimeError(process.stderr[-8000:])
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def ask(url: str, **settings: Any) -> dict[str, Any]:
    """Send a JSON object to a server and return its answer."""
    request = Request(url, json.dumps(settings).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
