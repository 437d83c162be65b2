"""A stand-in of the hub, and this process's client pointed at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def stand_in(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """The module of the hub."""
    return load_script(HERE / "hub_stand_in.py")


@pytest.fixture(scope="session")
def kit(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """The module of its client."""
    return load_script(HERE / "hub_client.py")


@pytest.fixture
def make_client(
    stand_in: ModuleType, kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """A function that starts a hub and points the client at it. Waits are noted and, unless `quick` is false, made
    short."""
    hubs = []

    def make(quick: bool = True, **settings: Any) -> Any:
        hub = stand_in.Hub(**settings)
        hubs.append(hub)
        client = kit.Client(tmp_path / "home", hub)
        kit.point_client(hub.url, client.home, monkeypatch)
        kit.log_in(client.home, stand_in.TOKEN)
        real = time.sleep

        def sleep(seconds: float) -> None:
            client.slept.append(seconds)
            real(min(seconds, 0.01) if quick else seconds)

        monkeypatch.setattr(time, "sleep", sleep)
        return client

    yield make
    for hub in hubs:
        hub.close()


@pytest.fixture
def client(make_client: Callable[..., Any]) -> Any:
    """Somebody who is logged in."""
    return make_client()


@pytest.fixture
def artifact(kit: ModuleType, tmp_path: Path) -> Any:
    """A table's folder, by its files."""
    return kit.make_artifact(tmp_path / "mine")
