"""The hub's client of this process, or of another, pointed at the stand-in, with everything in a folder of a test."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.hub.client import Hub
from draftsmith.checkpoints.hub.push_pull import plan_push, pull, push
from huggingface_hub import constants
from safetensors.torch import save_file

REPO = "somebody/drafts"
LARGE = ("first.safetensors", "second.safetensors")


def environment(url: str, home: Path) -> dict[str, str]:
    """Variables for a process. What the hub stand-in does not speak (Xet) is turned off."""
    places = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN_PATH": str(home / "token")}
    return places | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def point_client(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the client of this process, which has read the variables when it was imported."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    places = {"HF_TOKEN_PATH": "token", "AGENT_HARNESSES_PATH": "agents", "HF_HUB_CACHE": "hub"}
    settings: dict[str, Any] = {name: str(home / place) for name, place in places.items()}
    settings |= {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}"}
    settings |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)


def log_in(home: Path, token: str) -> None:
    """Store a token, as `hf auth login` does."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "token").write_text(token)


@dataclass
class Client:
    """This process as somebody with a token: what it was told, and what it slept."""

    home: Path
    hub: Any
    told: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def push(self, artifact: Path, **settings: Any) -> str:
        here = Hub(self.told.append)
        return push(here, plan_push(here, artifact, REPO, lambda _: "a card", **settings))

    def pull(self, out: Path, revision: str | None = None, **settings: Any) -> str:
        return pull(Hub(self.told.append), REPO, out, revision, **settings).commit


def make_artifact(folder: Path, seed: int = 0, **extra: bytes) -> Path:
    """Two files that are large on a hub, and small ones."""

    def write(place: Path) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in LARGE:
            save_file({"weight": torch.randn(32, 48, generator=generator)}, place / name)
        (place / "deep").mkdir()
        (place / "deep" / "few.json").write_text(json.dumps({"seed": seed}))
        for name, content in extra.items():
            (place / name).write_bytes(content)

    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    save_artifact(folder, kind="table", write=write, vocab_size=8, tokenizer_fingerprint=None, target=None, **about)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights_of(folder: Path) -> dict[str, bytes]:
    """All but the card and the manifest, which has the card's hash."""
    return {name: content for name, content in files_of(folder).items() if name not in ("README.md", "artifact.json")}


def kill_when_hanging(client: Client, act: Callable[[Path], Any], place: Path) -> None:
    """Run it in a process of its own, which is killed when the hub keeps it waiting."""
    process = multiprocessing.get_context("fork").Process(target=act, args=(place,))
    process.start()
    assert client.hub.hanging.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    client.hub.let_go.set()
