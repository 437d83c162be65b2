"""Stand-in for the hub on 127.0.0.1, with the protocol of huggingface_hub: repositories with commits and branches.

Large files are uploaded like small ones. Undocumented responses of the real hub follow the source of the client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_" + "StandInToken" * 3
USER = "somebody"


@dataclass(frozen=True)
class Blob:
    """File of a commit."""

    content: bytes

    @property
    def large(self) -> bool:
        return b"\0" in self.content[:512] or len(self.content) > 100_000

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Git object id of the file."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def about(self, name: str) -> dict[str, Any]:
        """Return the entry of the file in the listing of a repository."""
        known = {"type": "file", "path": name, "rfilename": name, "oid": self.oid, "blobId": self.oid}
        known |= {"size": len(self.content)}
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": len(self.content), "pointerSize": 130}
        return known | ({"lfs": lfs} if self.large else {})


@dataclass
class Repo:
    """Repository with commits by id, and the last commit of each branch."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, Blob]) -> str:
        content = sorted((path, blob.oid) for path, blob in files.items())
        name = hashlib.sha1(f"{len(self.commits)} {branch} {content}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def at(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    def head(self, branch: str = "main") -> dict[str, bytes]:
        """Return the files of a branch, except files whose names begin with a dot."""
        files = self.commits[self.branches[branch]]
        return {name: blob.content for name, blob in files.items() if not name.startswith(".")}


class Hub(ThreadingHTTPServer):
    """Local hub with the repositories `repos`. It records kinds of requests and downloaded files (`got`).

    `failing` maps kinds of requests to the error status with which they are answered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.got: list[str] = []
        self.failing: dict[str, int] = {}

    handle_error = staticmethod(lambda *_: None)  # do not report closed connections

    def repo(self, name: str, files: dict[str, bytes] | None = None, **about: Any) -> Repo:
        """Create a repository with files."""
        created = self.repos[name] = Repo(**about)
        created.add("main", {".gitattributes": Blob(b"*")} | {path: Blob(data) for path, data in (files or {}).items()})
        return created


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()


def point_client(url: str, home: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = None) -> None:
    """Make the hub client of this process use the local hub at `url`."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    paths = {"HF_TOKEN_PATH": "token", "AGENT_HARNESSES_PATH": "agents", "HF_HUB_CACHE": "hub"}
    settings: dict[str, Any] = {name: str(home / path) for name, path in paths.items()}
    settings |= {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}"}
    settings |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    if token is not None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "token").write_text(token)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers)


def refused(status: int, code: str = "", message: str = "no") -> Answer:
    headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
    return as_json({"error": message}, status, **headers)


NOT_FOUND = refused(404, "RepoNotFound", "Repository not found")
NO_REVISION = refused(404, "RevisionNotFound", "Invalid rev id")
WRITES = ("preupload", "commit")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    log_message = staticmethod(lambda *_: None)

    def handle_any(self) -> None:
        self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.is_user = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        kind, call, arguments = self._route()
        self.server.requests.append(kind)
        if kind in self.server.failing:
            answer = refused(self.server.failing[kind], "Odd", f"no, {TOKEN}")
        else:
            answer = NOT_FOUND if kind in WRITES and arguments[0] not in self.server.repos else call(*arguments)
        self.send_response(answer.status)
        headers = {"Content-Length": str(len(answer.body)), "Connection": "close"} | answer.headers
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.close_connection = True  # tests that stop the hub expect no open connections

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _route(self) -> tuple[str, Any, tuple[Any, ...]]:
        """Return the kind of request, the method that answers the request, and the arguments of the method."""
        match [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]:
            case ["api", "whoami-v2"]:
                return "whoami", self.whoami, ()
            case ["api", "validate-yaml"]:
                return "validate", lambda: as_json({"errors": [], "warnings": []}), ()
            case ["api", "repos", "create"]:
                return "create", self.create, ()
            case ["api", "models", user, name]:
                return "info", self.info, (f"{user}/{name}", "main")
            case ["api", "models", user, name, ("revision" | "tree"), revision]:
                return "info", self.info, (f"{user}/{name}", revision)
            case ["api", "models", user, name, ("preupload" | "commit") as act, revision]:
                return act, getattr(self, act), (f"{user}/{name}", revision)
            case [user, name, "resolve", revision, *path]:
                act = "head" if self.command == "HEAD" else "get"
                return act, self.resolve, (f"{user}/{name}", revision, "/".join(path))
        return "unknown", lambda: refused(404), ()

    def _visible_repo(self, name: str) -> Repo | None:
        repo = self.server.repos.get(name)
        return None if repo is None or (repo.private and not self.is_user) else repo

    def whoami(self) -> Answer:
        if not self.is_user:
            return refused(401, message="Invalid credentials in Authorization header")
        return as_json({"type": "user", "name": USER, "orgs": []})

    def create(self) -> Answer:
        request = json.loads(self.sent)
        name = f"{USER}/{request['name']}"
        if name in self.server.repos:
            return as_json({"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, 409)
        self.server.repo(name, private=request.get("visibility") == "private" or bool(request.get("private")))
        return as_json({"url": f"{self.server.url}/{name}", "name": name})

    def info(self, name: str, revision: str) -> Answer:
        repo = self._visible_repo(name)
        commit = repo and repo.at(revision)
        if repo is None or commit is None:
            return NOT_FOUND if repo is None else NO_REVISION
        siblings = [blob.about(path) for path, blob in sorted(repo.commits[commit].items())]
        if "/tree/" in self.path:
            return as_json(siblings)
        gated = "manual" if repo.gated else False
        return as_json({"id": name, "sha": commit, "private": repo.private, "gated": gated, "siblings": siblings})

    def preupload(self, name: str, revision: str) -> Answer:
        repo = self.server.repos[name]
        commit = repo.at(revision)
        if commit is None:
            return NO_REVISION
        stored = {path: blob.oid for path, blob in repo.commits[commit].items()}
        paths = [each["path"] for each in json.loads(self.sent)["files"]]
        modes = {"uploadMode": "regular", "shouldIgnore": False}
        files = [{"path": path, "oid": stored.get(path)} | modes for path in paths]
        return as_json({"files": files})

    def commit(self, name: str, branch: str) -> Answer:
        repo = self.server.repos[name]
        files = dict(repo.commits[repo.branches[branch]])
        for line in self.sent.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    if value.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
                        return refused(412, message="A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]))
                case "deletedFile":
                    del files[value["path"]]
        created = repo.add(branch, files)
        url = f"{self.server.url}/{name}/commit/{created}"
        return as_json({"success": True, "commitOid": created, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, revision: str, path: str) -> Answer:
        repo = self._visible_repo(name)
        if repo is None:
            return NOT_FOUND
        if repo.gated:
            return refused(403, "GatedRepo", f"Access to model {name} is restricted")
        commit = repo.at(revision)
        blob = repo.commits[commit].get(path) if commit else None
        if commit is None or blob is None:
            return refused(404, "EntryNotFound" if commit else "RevisionNotFound")
        if self.command == "GET":
            self.server.got.append(path)
        return Answer(
            200, blob.content, {"X-Repo-Commit": commit, "ETag": f'"{blob.sha256 if blob.large else blob.oid}"'}
        )
