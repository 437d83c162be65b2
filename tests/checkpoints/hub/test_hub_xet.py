"""Push and pull as the client does by default: large files through Xet, with that protocol's own faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from draftsmith.checkpoints.hub.client import HubError
from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session

HERE = Path(__file__).parents[1]


@pytest.fixture
def xet_client(
    make_client: Callable[..., Any],
    load_script: Callable[[Path], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """Somebody whose hub stores large files by chunks."""
    store = load_script(HERE / "hub_xet.py").XetStore()
    monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")  # the store does not unpack
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    client = make_client(xet=store)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    abort_xet_session()  # a new one reads the variables
    yield client
    abort_xet_session()


def test_what_is_pushed_is_pulled(xet_client: Any, artifact: Path, tmp_path: Path, kit: ModuleType) -> None:
    xet_client.push(artifact)
    assert [xet_client.hub.count(kind) for kind in ("xorbs", "shards", "put")] == [1, 1, 0]
    xet_client.pull(tmp_path / "theirs")
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)
    assert xet_client.hub.count("fetch") == 2
    assert xet_client.hub.count("store") == 0
    assert not any(request.authorized for request in xet_client.hub.requests if request.kind == "put")


@pytest.mark.parametrize("kind", ["token", "xorbs", "shards"])
@pytest.mark.parametrize("what", ["status", "drop"])
def test_a_push_gets_through(
    xet_client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType, kind: str, what: str
) -> None:
    xet_client.hub.faults = [stand_in.Fault(kind, what)]
    xet_client.push(artifact)
    assert xet_client.hub.count(kind) > 1
    xet_client.pull(tmp_path / "theirs")
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)


@pytest.mark.parametrize(("kind", "status"), [("token", 401), ("token", 403), ("xorbs", 403), ("shards", 400)])
def test_a_push_that_fails_publishes_nothing(
    xet_client: Any, artifact: Path, stand_in: ModuleType, kit: ModuleType, kind: str, status: int
) -> None:
    xet_client.hub.faults = [stand_in.Fault(kind, "status", status=status, times=99)]
    with pytest.raises(HubError, match=r"somebody/drafts: .*; nothing was published") as failed:
        xet_client.push(artifact)
    assert stand_in.TOKEN not in str(failed.value)
    repo = xet_client.hub.repos.get(kit.REPO)
    assert repo is None or repo.head() == {}
    xet_client.hub.faults = []
    xet_client.push(artifact)
    assert kit.weights_of(artifact).items() <= xet_client.hub.repos[kit.REPO].head().items()


@pytest.mark.parametrize("what", ["status", "drop", "cut", "flip"])
def test_a_pull_gets_through(
    xet_client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType, what: str
) -> None:
    xet_client.push(artifact)
    xet_client.hub.faults = [stand_in.Fault("fetch", what)]
    xet_client.pull(tmp_path / "theirs")
    assert xet_client.hub.count("fetch") > 2
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)


@pytest.mark.parametrize("fault", [("fetch", "status", 403), ("fetch", "flip", 0), ("reconstructions", "status", 404)])
def test_a_pull_that_fails_writes_nothing(
    xet_client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType, fault: tuple[str, str, int]
) -> None:
    xet_client.push(artifact)
    kind, what, status = fault
    xet_client.hub.faults = [stand_in.Fault(kind, what, status=status, times=999)]
    with pytest.raises(HubError, match=r"first\.safetensors"):
        xet_client.pull(tmp_path / "out" / "theirs")
    assert list((tmp_path / "out").iterdir()) == []
    xet_client.hub.faults = []
    xet_client.pull(tmp_path / "out" / "theirs")
    assert kit.weights_of(tmp_path / "out" / "theirs") == kit.weights_of(artifact)
