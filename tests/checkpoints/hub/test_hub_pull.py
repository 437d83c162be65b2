"""Pull from a stand-in of the hub, through every fault: the whole artifact, or what stood there before."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from draftsmith.checkpoints.hub.client import Hub, HubError
from draftsmith.checkpoints.hub.push_pull import plan_push, pull

QUICK = {"headers": {"Retry-After": "0"}}
FOREVER = {"times": 99, **QUICK}
PASSING_PULLS = {
    **{f"{kind} {status}": {"kind": kind, "what": "status", "status": status, **QUICK}
       for kind in ("info", "tree", "head", "get", "store") for status in (429, 503)},
    **{f"{kind} dropped": {"kind": kind, "what": "drop"} for kind in ("info", "tree", "head", "get", "store")},
    **{f"{kind} cut in the middle": {"kind": kind, "what": "cut", "nth": 2} for kind in ("get", "store")},
    **{f"{kind} with another bit": {"kind": kind, "what": "flip", "nth": 2} for kind in ("get", "store")},
}  # fmt: skip
FAILING_PULLS = {
    "hub down": ({"kind": "info", "what": "status", **FOREVER}, "answers with 503"),
    "hub gone": ({"kind": "tree", "what": "drop", "times": 99}, "the connection to"),
    "token refused": ({"kind": "info", "what": "status", "status": 401}, "does not accept the stored token"),
    "a file away": ({"kind": "head", "what": "status", "nth": 2, **FOREVER}, r"somebody/drafts: .*: the hub answers"),
    "store down": ({"kind": "store", "what": "status", **FOREVER}, r"first\.safetensors: the hub answers with 503"),
    "store always cut": ({"kind": "store", "what": "cut", "times": 99, "nth": 1}, r"first\.safetensors"),
    "store damaged": ({"kind": "store", "what": "flip", "times": 99}, r"first\.safetensors of .* has the hash"),
    "small file damaged": ({"kind": "get", "what": "flip", "times": 99, "nth": 2}, r"of .* has the hash"),
}  # fmt: skip


@pytest.fixture(params=["nothing", "an older one"])
def there(request: pytest.FixtureRequest, tmp_path: Path, kit: ModuleType) -> dict[str, bytes] | None:
    """What stands where a pull writes."""
    return None if request.param == "nothing" else kit.files_of(kit.make_artifact(tmp_path / "pulled" / "out", seed=7))


def check_unwritten(tmp_path: Path, there: dict[str, bytes] | None, kit: ModuleType) -> None:
    out = tmp_path / "pulled" / "out"
    assert (kit.files_of(out) if out.exists() else None) == there
    assert [path for path in (tmp_path / "pulled").glob("*") if path != out] == []


@pytest.mark.parametrize("fault", PASSING_PULLS.values(), ids=PASSING_PULLS)
def test_a_pull_gets_through(
    client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, fault: dict[str, Any], kit: ModuleType
) -> None:
    client.push(artifact)
    client.hub.requests.clear()
    client.hub.faults = [stand_in.Fault(**fault)]
    client.pull(tmp_path / "theirs")
    assert client.hub.count(fault["kind"]) > client.hub.faults[0].nth, "the fault was not met"
    assert kit.files_of(tmp_path / "theirs") == client.hub.repos[kit.REPO].head()


@pytest.mark.parametrize(("fault", "message"), FAILING_PULLS.values(), ids=FAILING_PULLS)
def test_a_pull_that_fails_leaves_what_stood_there(
    client: Any,
    artifact: Path,
    tmp_path: Path,
    stand_in: ModuleType,
    there: dict[str, bytes] | None,
    fault: dict[str, Any],
    message: str,
    kit: ModuleType,
) -> None:
    client.push(artifact)
    client.hub.requests.clear()
    client.hub.faults = [stand_in.Fault(**fault)]
    out = tmp_path / "pulled" / "out"
    with pytest.raises(HubError, match=message) as failed:
        client.pull(out, replace_other=True)
    assert stand_in.TOKEN not in f"{failed.value}{client.told}"
    check_unwritten(tmp_path, there, kit)
    client.hub.faults = []
    client.pull(out, replace_other=True)  # also of files that lay damaged in the cache
    assert kit.files_of(out) == client.hub.repos[kit.REPO].head()


def test_repositories_that_are_no_whole_artifact(client: Any, artifact: Path, tmp_path: Path, kit: ModuleType) -> None:
    whole = kit.files_of(artifact)
    half = whole | {kit.LARGE[1]: whole[kit.LARGE[1]][:-100]}
    other = whole | {kit.LARGE[1]: whole[kit.LARGE[0]]}
    wrong = {name: content for name, content in whole.items() if name != kit.LARGE[1]}
    manifest = json.loads(whole["artifact.json"])
    changed = json.dumps(manifest | {"vocab_size": 9}).encode()
    manifest["files"]["../outside.txt"] = manifest["files"]["README.md"]
    cases: list[tuple[dict[str, bytes], type[Exception], str]] = [
        ({"config.json": b"{}"}, ValueError, "holds no artifact: it has no artifact.json; a model is used by its name"),
        ({"medusa_lm_head.pt": b"\0"}, ValueError, f"`draftsmith import {kit.REPO} --out OUT`"),
        ({"notes.txt": b""}, ValueError, r"no artifact\.json$"),
        (wrong, HubError, r"lacks second\.safetensors, which its artifact\.json lists"),
        (half, HubError, r"second\.safetensors of .* has \d+ bytes, its artifact\.json says"),
        (other, HubError, r"second\.safetensors of .* has the hash"),
        (whole | {"artifact.json": b"{}"}, HubError, r"artifact\.json cannot be read"),
        (whole | {"artifact.json": json.dumps(manifest).encode()}, HubError, r"files names '\.\./outside\.txt'"),
        (whole | {"artifact.json": changed}, HubError, r"artifact\.json of .* has been changed since it was written"),
        (whole | {"deep/few.json": b'{"seed": 9}'}, HubError, r"deep/few\.json of .* has the hash"),
    ]
    for files, error, message in cases:
        client.hub.repo(kit.REPO, files)
        with pytest.raises(error, match=message):
            client.pull(tmp_path / "pulled" / "out")
        assert list(tmp_path.glob("pulled/*")) == list(tmp_path.glob("outside*")) == []


def test_what_somebody_added_on_the_hub_is_passed_over(
    client: Any, artifact: Path, tmp_path: Path, kit: ModuleType
) -> None:
    whole = kit.files_of(artifact)
    client.hub.repo(kit.REPO, whole | {"LICENSE": b"mit", "samples/a.txt": b"a"})
    client.pull(tmp_path / "theirs")
    assert kit.files_of(tmp_path / "theirs") == whole


def test_what_stands_there_is_not_replaced_unasked(
    client: Any, artifact: Path, tmp_path: Path, kit: ModuleType
) -> None:
    client.push(artifact)
    out = kit.make_artifact(tmp_path / "trained", seed=9)
    before, size = kit.files_of(out), (out / kit.LARGE[0]).stat().st_size
    with pytest.raises(ValueError, match=r"trained holds another artifact \(table, written on .*\).*--replace"):
        client.pull(out)
    assert kit.files_of(out) == before
    assert client.hub.count("store") == 0, "nothing large was fetched for it"
    client.pull(out, replace_other=True)
    theirs = client.hub.repos[kit.REPO].head()
    assert kit.files_of(out) == theirs
    again = pull(Hub(), kit.REPO, out)
    assert (again.is_new, again.commit) == (False, client.hub.repos[kit.REPO].branches["main"])
    assert client.hub.count("store") == 2, "it stood there already"
    (out / kit.LARGE[0]).write_bytes(b"x" * size)
    with pytest.raises(ValueError, match=r"this artifact, but changed: .*first\.safetensors has the hash"):
        client.pull(out)
    (out / "artifact.json").write_text("{}")
    with pytest.raises(ValueError, match=r"an artifact that cannot be read: .*; choose another folder"):
        client.pull(out)
    assert pull(Hub(), kit.REPO, out, replace_other=True).is_new
    assert kit.files_of(out) == theirs
    (tmp_path / "empty").mkdir()
    assert pull(Hub(), kit.REPO, tmp_path / "empty").is_new


@pytest.mark.parametrize("name", ["thesis.tex", "artifact.json"])
@pytest.mark.parametrize("replace", [False, True])
def test_what_came_there_during_a_pull_stays(
    client: Any,
    artifact: Path,
    tmp_path: Path,
    kit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    replace: bool,
) -> None:
    client.push(artifact)
    out, download = tmp_path / "out", Hub.download

    def slow(self: Hub, repo: str, path: str, commit: str) -> Path:
        if path == kit.LARGE[1] and not out.exists():
            if name == "artifact.json":
                kit.make_artifact(out, seed=9)
            else:
                out.mkdir()
                (out / name).write_text("years of work")
        return download(self, repo, path, commit)

    monkeypatch.setattr(Hub, "download", slow)
    if replace and name == "artifact.json":
        assert pull(Hub(), kit.REPO, out, replace_other=True).is_new
        return
    with pytest.raises(ValueError, match="holds another artifact" if name == "artifact.json" else "holds other files"):
        pull(Hub(), kit.REPO, out, replace_other=replace)
    assert (out / name).is_file()
    assert list(tmp_path.glob(".out*")) == []


def test_gated_missing_and_private_repositories(client: Any, artifact: Path, tmp_path: Path, kit: ModuleType) -> None:
    with pytest.raises(HubError, match=f"there is no repository {kit.REPO}, or not for this account"):
        client.pull(tmp_path / "out")
    repo = client.hub.repo(kit.REPO, kit.files_of(artifact), gated=True)
    with pytest.raises(HubError, match=r"is gated: ask for access at http://127.*/somebody/drafts, log in"):
        client.pull(tmp_path / "out")
    repo.gated, repo.private = False, True
    client.pull(tmp_path / "out")
    (client.home / "token").unlink()
    with pytest.raises(HubError, match="or not for this account"):
        client.pull(tmp_path / "other")
    with pytest.raises(HubError, match="no token is stored: log in with `hf auth login`"):
        client.push(artifact)
    assert not (tmp_path / "other").exists()


def test_revisions(client: Any, artifact: Path, tmp_path: Path, kit: ModuleType) -> None:
    first = client.push(artifact)
    newer = kit.make_artifact(tmp_path / "newer", seed=3)
    second = client.push(newer, branch="trial")
    assert client.hub.repos[kit.REPO].branches == {"main": first, "trial": second}
    for revision, source in ((None, artifact), ("trial", newer), (first, artifact), (second, newer)):
        client.pull(tmp_path / "out", revision, replace_other=True)
        assert kit.weights_of(tmp_path / "out") == kit.weights_of(source)
    with pytest.raises(HubError, match="has no such revision"):
        client.pull(tmp_path / "out", "nowhere")
    with pytest.raises(ValueError, match="is no branch, tag or commit"):
        client.pull(tmp_path / "out", "../main")
    with pytest.raises(ValueError, match="push to its main branch first"):
        plan_push(Hub(), artifact, "somebody/new", lambda _: "", branch="trial")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_pull_that_is_killed(
    client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, nth: int, kit: ModuleType
) -> None:
    client.push(artifact)
    client.hub.faults = [stand_in.Fault("store", "hang", nth=nth)]
    kit.kill_when_hanging(client, client.pull, tmp_path / "pulled" / "out")
    assert not (tmp_path / "pulled" / "out").exists()
    client.hub.faults = []
    client.pull(tmp_path / "pulled" / "out")
    assert kit.files_of(tmp_path / "pulled" / "out") == client.hub.repos[kit.REPO].head()
    assert client.hub.count("store") == 3, "what had been fetched was not fetched again"
    check_unwritten(tmp_path, client.hub.repos[kit.REPO].head(), kit)
