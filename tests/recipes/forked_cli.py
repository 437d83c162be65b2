"""Commands in processes that are forked from a process which has done the slow imports.

Each command has its own environment, working directory, signals and exit code. Run as a script, this file is the
forking process: it reads one request per line and answers each with one line.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 240.0
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Forked:
    """Forked process that runs a command."""

    def __init__(self, launcher: Launcher, arguments: Sequence[str], output: Path, **settings: Any) -> None:
        self._launcher, self._output, self._errors = launcher, output, output.with_suffix(".err")
        self._code: int | None = None
        request = {"arguments": list(arguments), "output": str(output), "errors": str(self._errors)} | settings
        self.pid: int = launcher.ask(request)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is running, like `Popen.poll`."""
        if self._code is None:
            self._code = self._launcher.ask({"pid": self.pid})
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def errors(self) -> str:
        """Text that the process has written to standard error so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    def ended(self) -> tuple[int, str]:
        """Wait until the process ends; return its exit code and standard error."""
        deadline = time.monotonic() + PATIENCE
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"still running after {PATIENCE:.0f} s: {self.errors}")
            time.sleep(0.005)
        return code, self.errors

    def completed(self) -> subprocess.CompletedProcess[str]:
        """Wait until the process ends; return its exit code and both outputs."""
        code, errors = self.ended()
        return subprocess.CompletedProcess([], code, self._output.read_text(), errors)


class Launcher:
    """Launcher of forked processes, which write their output to files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        environment = os.environ | ENVIRONMENT
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, *arguments: str, cwd: Path | None = None, **environment: str) -> Forked:
        """Start `draftsmith ARGUMENTS`, by default in the current directory, with additional environment variables."""
        self._number += 1
        settings = {"cwd": str(cwd or Path.cwd()), "environment": os.environ | ENVIRONMENT | environment}
        return Forked(self, arguments, self._folder / f"output-{self._number}", **settings)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command to completion; return its exit code and standard error."""
        return self.start(*arguments).ended()

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request to the forking process and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def become(arguments: Sequence[str], output: str, errors: str, cwd: str, environment: dict[str, str]) -> None:
    """Set outputs, environment, working directory and arguments of a forked process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, number in ((output, 1), (errors, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by default in shell background jobs
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["draftsmith", *arguments]


def main() -> None:
    import accelerate  # noqa: F401 - imported later by counting and decoding
    import draftsmith.recipes.commands.training.train  # noqa: F401
    from draftsmith.recipes.commands.cli import main as command_line
    from tqdm import tqdm
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    gc.collect()
    gc.freeze()  # keep imported objects in shared memory after forks
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                tqdm.set_lock(threading.RLock())  # the default lock is shared: a killed process would block others
                become(**request)
                command_line()
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
