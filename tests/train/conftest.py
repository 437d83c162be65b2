"""What the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def worker(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """`worker.py` of this folder, which is also run as a process of its own."""
    return load_script(Path(__file__).with_name("worker.py"))


@pytest.fixture
def logged() -> Callable[..., list[Any]]:
    """`logged(state_dir, "loss")`: the values of a key in `log.jsonl`, in order."""

    def read(state_dir: Path, key: str = "loss") -> list[Any]:
        lines = [json.loads(line) for line in (state_dir / "log.jsonl").read_text().splitlines()]
        return [line[key] for line in lines if key in line]

    return read
