"""Fixtures of the engine tests."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def serving(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(Path(__file__).with_name("serving.py"))
