"""Push against a stand-in of the hub, through every fault: one whole commit, or a clear failure and none."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.artifact.manifest import MAX_MANIFEST_BYTES
from draftsmith.checkpoints.hub import client as hub
from draftsmith.checkpoints.hub.client import Hub, HubError
from draftsmith.checkpoints.hub.push_pull import plan_push, push
from draftsmith.checkpoints.storage.places import check_repository_name, check_revision
from huggingface_hub import constants


def test_what_is_pushed_is_pulled(client: Any, artifact: Path, tmp_path: Path, kit: ModuleType) -> None:
    commit = client.push(artifact)
    repo = client.hub.repos[kit.REPO]
    assert repo.branches["main"] == commit
    assert len(repo.commits) == 2  # the hub's own first one, and this
    assert repo.commits[commit][kit.LARGE[0]].large
    assert client.pull(tmp_path / "theirs") == commit
    verify_artifact(tmp_path / "theirs", "table")
    assert kit.files_of(tmp_path / "theirs") == repo.head()
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)
    assert (tmp_path / "theirs" / "README.md").read_text() == "a card"
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o755
    assert not any(request.authorized for request in client.hub.requests if request.storage)
    assert client.slept == []


def test_large_files_in_parts_and_lists_in_pages(
    make_client: Callable[..., Any], artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    client = make_client(part_bytes=2500, page=2)
    client.hub.faults = [stand_in.Fault("part", "drop", nth=2), stand_in.Fault("complete", "status")]
    client.push(artifact)
    assert client.hub.count("part") == 7
    client.pull(tmp_path / "theirs")
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)


QUICK = {"headers": {"Retry-After": "0"}}
FOREVER = {"times": 99, **QUICK}
PASSING_PUSHES = {
    **{f"{kind} {status}": [{"kind": kind, "what": "status", "status": status, **QUICK}]
       for kind in ("whoami", "info", "tree", "create", "preupload", "validate", "batch", "put", "verify", "commit")
       for status in (429, 503)},
    **{f"{kind} dropped": [{"kind": kind, "what": "drop"}]
       for kind in ("whoami", "info", "tree", "create", "preupload", "validate", "batch", "put", "verify", "commit")},
    **{f"{kind} done, answer lost": [{"kind": kind, "what": "late"}] for kind in ("create", "put", "verify", "commit")},
    "a proxy's page": [{"kind": kind, "what": "page"} for kind in ("whoami", "create", "validate", "commit")],
    "second upload broken in the middle": [{"kind": "put", "what": "break", "nth": 2}],
    "second upload 500": [{"kind": "put", "what": "status", "status": 500, "nth": 2, **QUICK}],
    "list after the commit 503": [{"kind": "tree", "what": "status", "nth": 2, **QUICK}],
    "commit done, answer lost, hub away": [
        {"kind": "commit", "what": "late"}, {"kind": "info", "what": "drop", "nth": 3, "times": 2}],
}  # fmt: skip
FAILING_PUSHES = {
    "token unknown": ({"kind": "whoami", "what": "status", "status": 401, "times": 99}, "does not accept the stored"),
    "may not make": ({"kind": "create", "what": "status", "status": 403, "times": 99}, "refuses this account"),
    "hub down": ({"kind": "info", "what": "status", **FOREVER}, "answers with 503"),
    "hub gone": ({"kind": "info", "what": "drop", "times": 99}, "the connection to http://127.0.0.1"),
    "too many": ({"kind": "preupload", "what": "status", "status": 429, **FOREVER}, "too many requests"),
    "an hour to wait": (
        {"kind": "info", "what": "status", "status": 429, "headers": {"Retry-After": "3600"}}, "too many requests"),
    "store down": ({"kind": "put", "what": "status", **FOREVER}, "answers with 503"),
    "store forbids the second": ({"kind": "put", "what": "status", "status": 403, "nth": 2, "times": 99}, "refuses"),
    "store keeps another file": ({"kind": "verify", "what": "status", "status": 422, "times": 99}, "422"),
    "commit forbidden": ({"kind": "commit", "what": "status", "status": 403, "times": 99}, "refuses this account"),
    "commit refused": ({"kind": "commit", "what": "status", "status": 400, "times": 99}, "answers with 400"),
    "commit never": ({"kind": "commit", "what": "status", **FOREVER}, "answers with 503"),
    "commit always dropped": ({"kind": "commit", "what": "drop", "times": 99}, "the connection to"),
}  # fmt: skip


@pytest.fixture(params=["new", "standing"])
def before(request: pytest.FixtureRequest, client: Any, tmp_path: Path, kit: ModuleType) -> dict[str, bytes]:
    """What the repository holds before a push: there is none, or it has an older artifact, with one file more."""
    if request.param == "new":
        return {}
    client.push(kit.make_artifact(tmp_path / "older", seed=1, **{"gone.bin": b"\0old"}))
    client.hub.requests.clear()
    client.slept.clear()
    return dict(client.hub.repos[kit.REPO].head())


def check_unpublished(client: Any, before: dict[str, bytes], kit: ModuleType) -> None:
    """The repository is as it was; one that the push made is empty."""
    repo = client.hub.repos.get(kit.REPO)
    assert (repo.head() if repo else {}) == before
    assert repo is None or len(repo.commits) == (2 if before else 1)
    assert client.hub.count("delete") == 0, "what others put there in that moment would be gone with it"


@pytest.mark.parametrize("faults", PASSING_PUSHES.values(), ids=PASSING_PUSHES)
def test_a_push_gets_through(
    client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, faults: list[dict[str, Any]], kit: ModuleType
) -> None:
    client.hub.faults = [stand_in.Fault(**fault) for fault in faults]
    client.push(artifact)
    assert all(client.hub.count(fault.kind) >= fault.nth for fault in client.hub.faults), "a fault was not met"
    assert len(client.hub.repos[kit.REPO].commits) == 2, "one commit, even where its answer was lost"
    client.hub.faults = []
    client.pull(tmp_path / "theirs")
    assert kit.weights_of(tmp_path / "theirs") == kit.weights_of(artifact)


@pytest.mark.parametrize(("fault", "message"), FAILING_PUSHES.values(), ids=FAILING_PUSHES)
def test_a_push_that_fails_publishes_nothing(
    client: Any,
    artifact: Path,
    stand_in: ModuleType,
    before: dict[str, bytes],
    fault: dict[str, Any],
    message: str,
    kit: ModuleType,
) -> None:
    if fault["kind"] == "create" and before:
        pytest.skip("nothing is made where a repository stands")
    client.hub.faults = [stand_in.Fault(**fault)]
    with pytest.raises(HubError, match=message) as failed:
        client.push(artifact)
    check_unpublished(client, before, kit)
    assert stand_in.TOKEN not in f"{failed.value}{client.told}"
    assert sum(client.slept) < 200, "there is a limit to patience"
    client.hub.faults = []
    client.push(artifact)
    assert kit.weights_of(artifact).items() <= client.hub.repos[kit.REPO].head().items()
    assert "gone.bin" not in client.hub.repos[kit.REPO].head()


def test_what_was_uploaded_is_not_sent_again(
    client: Any, artifact: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    client.hub.faults = [stand_in.Fault("commit", "status", times=99, headers={"Retry-After": "0"})]
    with pytest.raises(HubError, match="another push goes on from there"):
        client.push(artifact)
    assert client.hub.count("put") == 2
    client.hub.faults = []
    client.push(artifact)
    assert client.hub.count("put") == 2
    commits = len(client.hub.repos[kit.REPO].commits)
    client.push(artifact)
    assert (client.hub.count("put"), len(client.hub.repos[kit.REPO].commits)) == (2, commits)


@pytest.mark.parametrize("kind", ["put", "commit"])
def test_a_refusal_leaves_the_new_repository_empty(
    client: Any, artifact: Path, stand_in: ModuleType, kind: str, kit: ModuleType
) -> None:
    client.hub.faults = [stand_in.Fault(kind, "status", status=403, times=99)]
    message = f"nothing was published; the repository {kit.REPO} is there now, and another push goes on from there"
    with pytest.raises(HubError, match=message):
        client.push(artifact)
    check_unpublished(client, {}, kit)
    repo = client.hub.repos[kit.REPO]
    theirs = repo.add("main", {"LICENSE": stand_in.Blob(b"another's", False)})
    client.hub.faults = []
    client.push(artifact)
    assert theirs in repo.commits
    assert set(repo.head()) == set(kit.files_of(artifact)), "what a hand put there is replaced as it says"


def test_a_card_that_the_hub_refuses(client: Any, artifact: Path, kit: ModuleType) -> None:
    here = Hub()
    plan = plan_push(here, artifact, kit.REPO, lambda _: "---\nlicense: nonsense\n---\n")
    with pytest.raises(HubError, match=r"license.* must be one of"):
        push(here, plan)
    check_unpublished(client, {}, kit)


def test_the_hub_says_how_long_to_wait(make_client: Callable[..., Any], artifact: Path, stand_in: ModuleType) -> None:
    client = make_client()
    client.hub.faults = [
        stand_in.Fault("info", "status", status=429, headers={"Retry-After": "7"}),
        stand_in.Fault("commit", "status", status=503, headers={"Retry-After": "5"}),
        stand_in.Fault("put", "status", status=429, headers={"Retry-After": "3"}),
    ]
    client.push(artifact)
    assert {7.0, 5.0} <= set(client.slept)
    assert any(seconds >= 3 for seconds in client.slept if seconds not in (7.0, 5.0)), "the client's own wait"
    assert [line for line in client.told if "answer 429; again in 7 s, 4 tries are left" in line]


def test_a_client_that_may_not_ask(client: Any, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, and the hub is needed"):
        client.push(artifact)
    assert client.hub.requests == []


def test_it_waits_that_long(make_client: Callable[..., Any], stand_in: ModuleType) -> None:
    client = make_client(quick=False)
    client.hub.faults = [stand_in.Fault("whoami", "status", status=429, headers={"Retry-After": "1"})]
    assert Hub().account() == "somebody"
    first, second = (request.at for request in client.hub.requests if request.kind == "whoami")
    assert second - first >= 1.0


def test_a_branch_that_was_begun_for_nothing_stays_where_main_is(
    client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    client.push(artifact)
    client.hub.faults = [stand_in.Fault("commit", "status", nth=2, status=403, times=9)]
    newer = kit.make_artifact(tmp_path / "newer", seed=3)
    with pytest.raises(HubError, match="nothing was published; the branch trial of somebody/drafts is there now, and"):
        client.push(newer, branch="trial")
    branches = client.hub.repos[kit.REPO].branches
    assert branches["trial"] == branches["main"]
    client.hub.faults = []
    client.push(newer, branch="trial")
    assert kit.weights_of(newer).items() <= client.hub.repos[kit.REPO].head("trial").items()


@pytest.mark.parametrize("branch", ["main", "trial"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["refused", "an answer was lost"])
def test_what_another_push_has_made_is_not_deleted(
    client: Any, artifact: Path, tmp_path: Path, stand_in: ModuleType, kit: ModuleType, branch: str, is_lost: bool
) -> None:
    """Two plan to make the same; one has made it and is uploading when the other comes, which fails for good."""
    kind, made = ("create", "the repository") if branch == "main" else ("branch", "the branch trial of")
    if branch != "main":
        client.push(kit.make_artifact(tmp_path / "older", seed=1))
    newer = kit.make_artifact(tmp_path / "newer", seed=3)
    here, there = Hub(), Hub()
    mine = plan_push(here, artifact, kit.REPO, lambda _: "mine", branch=branch)
    theirs = plan_push(there, newer, kit.REPO, lambda _: "theirs", branch=branch)
    if branch == "main":
        there.create(kit.REPO, False)
    else:
        there.create_branch(kit.REPO, branch)
    (artifact / kit.LARGE[0]).write_bytes(b"changed meanwhile")
    client.hub.faults = [stand_in.Fault(kind, "drop", nth=client.hub.count(kind) + 1)] if is_lost else []
    message = f"nothing was published; {made} {kit.REPO} is there now" if is_lost else "somebody else made .* meanwhile"
    with pytest.raises(HubError, match=message):
        push(here, mine)
    assert branch in client.hub.repos[kit.REPO].branches
    about = {"branch": branch, "parent": client.hub.repos[kit.REPO].branches[branch], "message": "theirs"}
    sent = there.upload(kit.REPO, theirs.files, branch)
    there.commit(kit.REPO, sent, theirs.deleted, is_whole=theirs.is_whole, **about)
    assert theirs.is_whole(there.look(kit.REPO, branch)), "the one that made it goes on"


def test_a_private_push_does_not_fill_what_somebody_made_public(
    client: Any, artifact: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    here = Hub()
    plan = plan_push(here, artifact, kit.REPO, lambda _: "", private=True)
    client.hub.repo(kit.REPO)
    client.hub.faults = [stand_in.Fault("create", "drop")]
    with pytest.raises(HubError, match="meanwhile, and it is public"):
        push(here, plan)
    assert client.hub.repos[kit.REPO].head() == {}
    assert client.hub.count("put") == 0


def test_a_manifest_that_is_too_large_is_not_fetched(client: Any, artifact: Path, kit: ModuleType) -> None:
    client.hub.repo(kit.REPO, {"artifact.json": b" " * (MAX_MANIFEST_BYTES + 1)})
    with pytest.raises(ValueError, match=rf"cannot be read: it has .* at most {MAX_MANIFEST_BYTES:,}; --replace"):
        client.push(artifact)
    with pytest.raises(HubError, match=rf"artifact\.json cannot be read: it has .* at most {MAX_MANIFEST_BYTES:,}"):
        client.pull(artifact.with_name("theirs"))
    assert client.hub.count("store") == client.hub.count("get") == 0


@pytest.mark.parametrize("kind", ["info", "tree", "whoami", "create", "batch", "put", "commit"])
def test_what_is_waited_for_is_told(
    client: Any, artifact: Path, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch, kit: ModuleType, kind: str
) -> None:
    """The stand-in answers nothing until its client has told that it waits, or a minute later."""
    monkeypatch.setattr(hub, "_SILENCE", 0.05)
    client.hub.faults = [stand_in.Fault(kind, "hang")]
    name = {"info": kit.REPO, "batch": "sending", "put": "sending", "create": "making", "tree": "files of"}
    wanted = f"hub: {name.get(kind, kind)}"
    told = []

    def tell(line: str) -> None:
        told.append(line)
        if line.startswith(wanted) and client.hub.hanging.wait(60):  # a slow stand-in hangs later than that is told
            client.hub.let_go.set()

    late = threading.Timer(60, client.hub.let_go.set)
    late.daemon = True
    late.start()
    here = Hub(tell)
    push(here, plan_push(here, artifact, kit.REPO, lambda _: ""))
    late.cancel()
    slow = [line for line in told if f"waiting for {client.hub.url}" in line]
    assert all(line.endswith(("tries are left", "is tried 5 times more")) for line in slow)
    assert any(line.startswith(wanted) for line in slow), told
    assert len(client.hub.repos[kit.REPO].commits) == 2


def test_what_is_told_of_another_try_holds_no_token(
    client: Any, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers with the request's own words, in what is no HTTP."""

    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(f"{stand_in.TOKEN} is yours\r\n\r\n".encode() * (self.request.recv(65536) != b""))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(HubError):
            Hub(client.told.append).account()
        server.shutdown()
    assert len(client.told) == 4
    assert all("is yours" in line and stand_in.TOKEN not in line for line in client.told)


def test_a_repository_of_something_else_is_not_written_over(client: Any, artifact: Path, kit: ModuleType) -> None:
    client.hub.repo(kit.REPO, {"config.json": b"{}", "model.bin": b"\0", "README.md": b"mine"})
    with pytest.raises(ValueError, match=r"something else than an artifact \(config\.json, model\.bin\).*--replace"):
        client.push(artifact)
    manifest = json.loads((artifact / "artifact.json").read_text()) | {"kind": "heads"}
    client.hub.repo(kit.REPO, {"artifact.json": json.dumps(manifest).encode()})
    with pytest.raises(ValueError, match="an artifact of kind 'heads', and this one is of kind 'table'"):
        client.push(artifact)
    client.hub.repo(kit.REPO, {"artifact.json": b"[]"})
    with pytest.raises(ValueError, match=r"the artifact\.json of .* cannot be read: .*; --replace replaces it"):
        client.push(artifact)
    client.push(artifact, replace_other=True)
    assert set(client.hub.repos[kit.REPO].head()) == set(kit.files_of(artifact))
    with pytest.raises(ValueError, match="somebody/drafts is public"):
        client.push(artifact, private=True)


def test_another_commit_in_between_is_not_undone(
    client: Any, artifact: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    client.push(artifact)
    here = Hub()
    plan = plan_push(here, kit.make_artifact(artifact.with_name("newer"), seed=4), kit.REPO, lambda _: "newer")
    repo = client.hub.repos[kit.REPO]
    files = dict(repo.commits[repo.branches["main"]]) | {"LICENSE": stand_in.Blob(b"mine", False)}
    theirs = repo.add("main", files)
    with pytest.raises(HubError, match=f"another commit, {theirs[:12]}, was made in {kit.REPO} meanwhile"):
        push(here, plan)
    assert repo.branches["main"] == theirs


def test_damaged_artifacts_and_texts_with_tokens_stay_here(
    client: Any, tmp_path: Path, stand_in: ModuleType, kit: ModuleType
) -> None:
    for number, content in enumerate((stand_in.TOKEN, "hf_" + "A" * 30)):
        leaky = kit.make_artifact(tmp_path / f"leaky{number}", **{"notes.txt": f"my token is {content}".encode()})
        with pytest.raises(ValueError, match=r"notes\.txt holds what looks like a token") as refused:
            client.push(leaky)
        assert content not in str(refused.value)
    damaged = kit.make_artifact(tmp_path / "damaged")
    (damaged / kit.LARGE[0]).write_bytes(b"x" + (damaged / kit.LARGE[0]).read_bytes()[1:])
    with pytest.raises(ValueError, match=r"first\.safetensors has the hash"):
        client.push(damaged)
    assert client.hub.repos == {}


def test_a_file_that_changes_while_it_is_uploaded(client: Any, artifact: Path, kit: ModuleType) -> None:
    here = Hub()
    plan = plan_push(here, artifact, kit.REPO, lambda _: "")
    content = (artifact / kit.LARGE[0]).read_bytes()
    (artifact / kit.LARGE[0]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(HubError, match=r"first\.safetensors was changed while it was uploaded; nothing was published"):
        push(here, plan)
    check_unpublished(client, {}, kit)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("somebody/dr\u0430fts", r"'somebody/dr\\u0430fts'.*character 12 is U\+0430 \(CYRILLIC SMALL LETTER A\)"),
        ("some\u200bbody/x", r"character 5 is U\+200B \(ZERO WIDTH SPACE\)"),
        ("somebody/x\n", r"character 11 is U\+000A \(a control character\)"),
        ("x", "give user/name"),
        ("a/b/c", "give user/name"),
        ("../b", "give user/name"),
        ("a/b..c", "give user/name"),
        ("a/-b", "give user/name"),
        ("a/b.git", "give user/name"),
        ("a/" + "b" * 95, "has 97 characters"),
    ],
)
def test_odd_names_of_repositories(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_repository_name(name)


def test_good_names() -> None:
    for name in ("lmsys/vicuna-7b-v1.3", "A_b/c.d"):
        check_repository_name(name)
    for revision in ("main", "v1.0", "refs/pr/1", "0" * 40):
        check_revision(revision)


@pytest.mark.parametrize("fault", [("put", "hang", 2), ("commit", "hang", 1), ("commit", "done", 1)], ids=str)
def test_a_push_that_is_killed(
    client: Any, artifact: Path, stand_in: ModuleType, fault: tuple[str, str, int], kit: ModuleType
) -> None:
    kind, what, nth = fault
    client.hub.faults = [stand_in.Fault(kind, what, nth=nth)]
    kit.kill_when_hanging(client, client.push, artifact)
    head = client.hub.repos[kit.REPO].head()
    assert set(head) in (set(), set(kit.files_of(artifact))), "all of it, or nothing"
    client.hub.faults = []
    client.push(artifact)
    assert kit.weights_of(artifact).items() <= client.hub.repos[kit.REPO].head().items()
    assert len(client.hub.repos[kit.REPO].commits) == 2
