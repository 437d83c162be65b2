"""Push and pull with a stand-in for the hub: atomic commits, verified hashes, and no token in the output."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.hub.push_pull import plan_push, pull, push

REPO = "somebody/drafts"
LARGE = ("first.safetensors", "second.safetensors")
Make = Callable[..., Path]


@pytest.fixture
def artifact(make_artifact: Make, tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "mine")


def pushed(artifact: Path, **settings: Any) -> str:
    return push(plan_push(artifact, REPO, lambda _: "a card", **settings))


def test_push_and_pull_round_trip(hub: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType) -> None:
    commit = pushed(artifact)
    repo = hub.repos[REPO]
    assert (repo.branches["main"], len(repo.commits)) == (commit, 2)  # the first commit of the hub, and the pushed one
    pulled = pull(REPO, tmp_path / "theirs")
    assert pulled[1] == commit
    verify_artifact(tmp_path / "theirs", "table")
    assert stand_in.files_of(tmp_path / "theirs") == repo.head()
    local = stand_in.files_of(artifact)
    assert {name for name in local if local[name] != repo.head()[name]} == {"README.md", "artifact.json"}
    assert (tmp_path / "theirs" / "README.md").read_text() == "a card"
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o755
    assert pushed(artifact) == commit, "an unchanged artifact needs no commit"
    assert len(repo.commits) == 2


def test_a_newer_artifact_replaces_all_files(hub: Any, make_artifact: Make, artifact: Path, tmp_path: Path) -> None:
    pushed(make_artifact(tmp_path / "older", seed=1, **{"gone.bin": b"\0old"}))
    hub.repos[REPO].add("main", hub.repos[REPO].commits[hub.repos[REPO].branches["main"]])
    plan = plan_push(artifact, REPO, lambda _: "a card")
    assert plan.deleted == ("gone.bin",)
    push(plan)
    assert set(hub.repos[REPO].head()) == set(plan.files)


@pytest.mark.parametrize("before", ["new", "standing"])
def test_a_push_that_fails_publishes_nothing(
    hub: Any, artifact: Path, make_artifact: Make, tmp_path: Path, stand_in: ModuleType, before: str
) -> None:
    if before == "standing":
        pushed(make_artifact(tmp_path / "older", seed=1))
    head = hub.repos[REPO].head() if REPO in hub.repos else {}
    hub.failing = {"commit": 403}
    with pytest.raises(ValueError, match=r"403.*<redacted>") as failed:
        pushed(artifact)
    assert stand_in.TOKEN not in str(failed.value)
    assert hub.repos[REPO].head() == head
    hub.failing = {}
    pushed(artifact)
    assert set(hub.repos[REPO].head()) == set(stand_in.files_of(artifact))


def test_a_concurrent_commit_is_not_overwritten(
    hub: Any, artifact: Path, make_artifact: Make, tmp_path: Path, stand_in: ModuleType
) -> None:
    pushed(artifact)
    plan = plan_push(make_artifact(tmp_path / "newer", seed=4), REPO, lambda _: "newer")
    repo = hub.repos[REPO]
    concurrent = repo.add("main", repo.commits[repo.branches["main"]] | {"LICENSE": stand_in.Blob(b"mine")})
    with pytest.raises(ValueError, match=rf"{REPO}.*412"):
        push(plan)
    assert repo.branches["main"] == concurrent


def test_a_concurrently_created_repository_is_not_used(hub: Any, artifact: Path) -> None:
    plan = plan_push(artifact, REPO, lambda _: "")
    hub.repo(REPO, {"LICENSE": b"mine"})
    with pytest.raises(ValueError, match=rf"{REPO}.*409"):
        push(plan)
    assert hub.repos[REPO].head() == {"LICENSE": b"mine"}


def test_pulling_an_earlier_commit(hub: Any, artifact: Path, make_artifact: Make, tmp_path: Path) -> None:
    newer = make_artifact(tmp_path / "newer", seed=3)
    for revision, source in [(pushed(artifact), artifact), (pushed(newer), newer)]:
        pull(f"{REPO}@{revision}", tmp_path / revision)
        assert (tmp_path / revision / LARGE[0]).read_bytes() == (source / LARGE[0]).read_bytes()


def test_a_download_does_not_replace_files(hub: Any, artifact: Path, make_artifact: Make, tmp_path: Path) -> None:
    pushed(artifact)
    with pytest.raises(ValueError, match="trained already exists"):
        pull(REPO, make_artifact(tmp_path / "trained", seed=9))
    assert not set(LARGE) & set(hub.got), "large files were downloaded for a refused pull"


def _private(hub: Any, home: Path) -> None:
    hub.repos[REPO].private = True
    (home / "token").unlink()


UNREACHABLE: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "missing": (lambda hub, home: hub.repos.clear(), f"{REPO}.*hf auth login"),
    "gated": (lambda hub, home: setattr(hub.repos[REPO], "gated", True), f"127.0.0.1.*{REPO}.*hf auth login"),
    "private": (_private, f"{REPO}.*hf auth login"),
    "hub down": (lambda hub, home: hub.failing.update(info=500), "500"),
}


@pytest.mark.parametrize(("act", "message"), UNREACHABLE.values(), ids=UNREACHABLE)
def test_inaccessible_repositories(
    hub: Any, artifact: Path, tmp_path: Path, act: Callable[[Any, Path], Any], message: str
) -> None:
    pushed(artifact)
    act(hub, tmp_path / "home")
    with pytest.raises(ValueError, match=message):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if act is _private:
        with pytest.raises(ValueError, match="hf auth login"):
            pushed(artifact)


def test_repositories_without_a_complete_artifact(
    hub: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType
) -> None:
    whole = stand_in.files_of(artifact)
    manifest = json.loads(whole["artifact.json"])
    manifest["files"]["../outside.txt"] = manifest["files"]["README.md"]
    cases: list[tuple[dict[str, bytes], str]] = [
        ({"config.json": b"{}"}, r"artifact\.json.*draftsmith import"),
        ({name: content for name, content in whole.items() if name != LARGE[1]}, LARGE[1]),
        (whole | {LARGE[1]: whole[LARGE[0]]}, LARGE[1]),
        (whole | {"artifact.json": json.dumps(manifest).encode()}, r"\.\./outside\.txt"),
        (whole | {"deep/few.json": b'{"seed": 9}'}, r"deep/few\.json"),
    ]
    for number, (files, message) in enumerate(cases):
        hub.repo(f"somebody/{number}", files)
        with pytest.raises(ValueError, match=message):
            pull(f"somebody/{number}", tmp_path / "pulled" / "out")
        assert list(tmp_path.glob("pulled/*")) == list(tmp_path.glob("outside*")) == []


def test_pushes_that_are_refused_before_uploading(
    hub: Any, artifact: Path, make_artifact: Make, tmp_path: Path, stand_in: ModuleType
) -> None:
    hub.repo("somebody/public", {})
    damaged = make_artifact(tmp_path / "damaged")
    (damaged / LARGE[0]).write_bytes(b"x" + (damaged / LARGE[0]).read_bytes()[1:])
    leaky = (stand_in.TOKEN, "hf_" + "A" * 30)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: plan_push(artifact, "somebody/public", lambda _: "", private=True), "--private"),
        (lambda: plan_push(damaged, REPO, lambda _: ""), LARGE[0]),
    ]
    for token in leaky:
        noted = make_artifact(tmp_path / token, **{"notes.txt": f"my token is {token}".encode()})
        cases.append((lambda noted=noted: plan_push(noted, REPO, lambda _: ""), r"notes\.txt"))
    for act, message in cases:
        with pytest.raises(ValueError, match=message) as refused:
            act()
        assert not any(token in str(refused.value) for token in leaky)
    assert not {"create", "preupload", "commit"} & set(hub.requests)
