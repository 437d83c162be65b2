"""Fixtures that send signals to a running command, and a stand-in for vLLM."""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from draftsmith.train.parallel.processes import Interrupted


@pytest.fixture
def interrupted_when() -> Callable[..., Any]:
    """Return a context manager that sends SIGINT to this process when a condition holds."""

    @contextmanager
    def interrupted(ready: Callable[[], bool]) -> Iterator[None]:
        ended = threading.Event()

        def watch() -> None:
            while not ready():
                if ended.wait(0.002):
                    return
            os.kill(os.getpid(), signal.SIGINT)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with pytest.raises(Interrupted) as stopped:
                yield
        finally:
            ended.set()
            watching.join()
        assert stopped.value.signal_number == signal.SIGINT

    return interrupted


@pytest.fixture
def stop(launcher: Any) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command and sends a signal when its journal has more than `lines` lines.

    The function returns the exit code and standard error.
    """

    def run(journal: Path, lines: int, number: int, *arguments: str) -> tuple[int, str]:
        child = launcher.start(*arguments)
        deadline = time.monotonic() + 120
        while not journal.is_file() or journal.read_text().count("\n") <= lines:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(number)
        code, errors = child.ended()
        return code, errors

    return run


VLLM = f"""#!{sys.executable}
import http.server, json, os, subprocess, sys, threading
from collections import Counter
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from helpers.server import Engine, Handler
given = dict(zip(sys.argv, sys.argv[1:]))
drafts = "--speculative-config" in given
if given.get("--dies") == ("with drafts" if drafts else "without"):
    sys.exit("no kernel image, says the engine")
if not drafts and "--ends-the-other" in given:
    import time, urllib.request
    other = f"http://127.0.0.1:{{int(given['--port']) - 1}}"
    try:
        urllib.request.urlopen(urllib.request.Request(other, method="DELETE"))
    except OSError:
        time.sleep(0.5)
class Ready(Handler):
    def do_DELETE(self):
        print("out of memory, says the engine", flush=True)
        worker.kill()
        os._exit(9)
    def do_GET(self):
        return self._send(200, "text/plain", b"") if self.path == "/health" else super().do_GET()
Engine.allow_reuse_address = True
worker = subprocess.Popen(["sleep", "600"])
print("worker", worker.pid, flush=True)
engine = Engine.__new__(Engine)
http.server.ThreadingHTTPServer.__init__(engine, (given["--host"], int(given["--port"])), Ready)
engine.kept = 3 if "--speculative-config" in given else 1
engine.name, engine.says, engine.metrics = given["serve"], "", "--speculative-config" in given
engine.faults, engine.asked, engine.counted, engine.guard = {{}}, [], Counter(), threading.Lock()
engine.serve_forever()
"""
"""Stand-in for vLLM that answers like `helpers.server.Engine`, with three tokens per step if it has a drafter."""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program that imitates vLLM on the PATH."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(VLLM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
