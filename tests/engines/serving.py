"""Engines in environments of their own: a script that answers once, a server that answers until it is ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@contextmanager
def served(command: Sequence[str], folder: Path, log: Path, known: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address at which a command, run in a folder and given a free port, answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as opened:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=None if known is None else dict(known),
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=opened,
            start_new_session=True,
        )
        try:
            last = time.monotonic() + PATIENCE
            while True:
                if server.poll() is not None or time.monotonic() > last:
                    raise RuntimeError(log.read_text(errors="replace")[-4000:])
                try:
                    urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def ask(url: str, **asked: Any) -> dict[str, Any]:
    """What a server answers to a JSON object."""
    request = Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as answered:
        answer: dict[str, Any] = json.load(answered)
    return answer
