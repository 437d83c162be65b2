"""Signals that come in the middle of a command."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from draftsmith.train.parallel.interrupts import Interrupted


@pytest.fixture
def interrupted_when() -> Callable[..., Any]:
    """A context whose body must end by the SIGINT that is sent once a condition holds."""

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
    """Runs a command until its journal has more than so many lines, and sends it a signal: exit code and errors."""

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
