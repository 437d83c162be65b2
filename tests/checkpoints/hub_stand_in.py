"""A hub on 127.0.0.1 that speaks what huggingface_hub's client speaks, and fails as it is told to.

Repositories have commits, branches and a store of large files, which lies on a second address as on the real hub: there
no token must be sent. Large files go through the LFS protocol, in one part or several, or through Xet, where the hub is
given such a store. What is not known of the real hub's answers follows the client's source.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "StandInToken" * 3
USER = "somebody"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with requests of a kind, from the `nth` on, `times` times."""

    kind: str
    """Of request: whoami, validate, create, delete, info, tree, refs, branch, preupload, batch, put, part, complete,
    verify, commit, head, get, store; of Xet: token, xorbs, shards, reconstructions, fetch."""
    what: str
    """status: it is answered with `status`; drop: the connection ends without an answer; break: it ends in the middle
    of what the client sends; late: it is done, and then the connection ends; cut: the answer's body ends in its middle;
    flip: one bit of it is another; page: an answer that is no JSON; hang: it waits until the hub is let go, and then
    the connection ends; done: the same, after it was done."""
    nth: int = 1
    times: int = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One that came in: `at` a second of a monotonic clock, with a token or not, for the store or not."""

    kind: str
    path: str
    at: float
    authorized: bool
    storage: bool


@dataclass(frozen=True)
class Blob:
    """A file of a commit."""

    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Git's name of it; of a large file, of a pointer."""
        content = f"oid sha256:{self.sha256}\n".encode() if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """Commits by name, and where branches stand."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, Blob]) -> str:
        held = sorted((path, blob.oid) for path, blob in files.items())
        name = hashlib.sha1(f"{len(self.commits)} {branch} {held}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def at(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    def head(self, branch: str = "main") -> dict[str, bytes]:
        """Files at the end of a branch, without those whose names begin with a dot."""
        files = self.commits[self.branches[branch]]
        return {name: blob.content for name, blob in files.items() if not name.startswith(".")}


class Hub:
    """The stand-in. `repos` is what it holds, `requests` what was asked of it."""

    def __init__(self, part_bytes: int | None = None, page: int = 1000, xet: Any = None) -> None:
        self.part_bytes = part_bytes
        self.page, self.xet = page, xet
        """`part_bytes`: of parts that large files are uploaded in, if they are; `page`: files a list has at once."""
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock, self.hanging, self.let_go = threading.RLock(), threading.Event(), threading.Event()
        self._servers = [_Server(self, storage) for storage in (False, True)]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.let_go.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def count(self, kind: str) -> int:
        """Requests of a kind so far."""
        return sum(request.kind == kind for request in self.requests)

    def repo(self, name: str, files: dict[str, bytes] | None = None, **about: Any) -> Repo:
        """Make a repository that holds files; those of some size, or with zeros, are large."""
        made = self.repos[name] = Repo(**about)
        blobs = {path: Blob(content, is_large(content)) for path, content in (files or {}).items()}
        self.store |= {blob.sha256: blob.content for blob in blobs.values() if blob.large}
        made.add("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)} | blobs)
        return made

    def note(self, request: Request) -> Fault | None:
        """Keep a request; what is to go wrong with it."""
        with self.lock:
            self.requests.append(request)
            number = self.count(request.kind)
        for fault in self.faults:
            if fault.kind == request.kind and fault.nth <= number < fault.nth + fault.times:
                return fault
        return None


@contextmanager
def running_hub(**settings: Any) -> Iterator[Hub]:
    hub = Hub(**settings)
    try:
        yield hub
    finally:
        hub.close()


def is_large(content: bytes) -> bool:
    return b"\0" in content[:512] or len(content) > 100_000


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub, storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.storage, self.daemon_threads = hub, storage, True

    handle_error = staticmethod(lambda *_: None)  # clients that go away are no news


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def said(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers)


def refused(status: int, code: str = "", message: str = "no") -> Answer:
    headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
    return said({"error": message}, status, **headers)


WRITES = ("branch", "preupload", "batch", "commit")
NOT_FOUND = refused(404, "RepoNotFound", "Repository not found")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    log_message = staticmethod(lambda *_: None)

    def handle_any(self) -> None:
        self.hub = self.server.hub
        parts = urlsplit(self.path)
        self.place, self.query = parts.path, parse_qs(parts.query)
        kind, call, given = self._route()
        self.user = USER if self.headers.get("Authorization") == f"Bearer {TOKEN}" else None
        authorized = "Authorization" in self.headers
        fault = self.hub.note(Request(kind, self.path, time.monotonic(), authorized, self.server.storage))
        what = fault.what if fault else ""
        if what == "break":
            self.rfile.read(int(self.headers.get("Content-Length", 2)) // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.sent = self._body()
        if len(self.sent) < int(self.headers.get("Content-Length", 0)):  # the client was killed while it sent
            self.close_connection = True
            return
        if what == "hang":
            self.hub.hanging.set()
            self.hub.let_go.wait()
        if fault and what == "status":
            answer = refused(fault.status)
            answer.headers |= fault.headers
        elif what == "page":
            answer = Answer(502, b"<html>bad gateway</html>", {"Content-Type": "text/html"})
        elif what not in ("drop", "hang"):
            with self.hub.lock:
                no = self._may_write(given[0]) if kind in WRITES else None
                answer = no or call(*given)
        if what == "done":
            self.hub.hanging.set()
            self.hub.let_go.wait()
        if what in ("drop", "late", "hang", "done"):
            self.close_connection = True
        else:
            self._answer(answer, what)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size + 2)[:-2]
        self.rfile.readline()
        return body

    def _answer(self, answer: Answer, what: str) -> None:
        body = answer.body
        if what == "flip" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.send_response(answer.status)
        length = answer.headers.pop("Content-Length", str(len(body)))
        for name, text in ({"Content-Length": length} | answer.headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.close_connection = what == "cut"
            self.wfile.write(body[: len(body) // 2] if what == "cut" else body)

    def _route(self) -> tuple[str, Any, tuple[Any, ...]]:
        """Kind of request, the method that answers, and its arguments."""
        parts = [unquote(part) for part in self.place.strip("/").split("/")]
        if self.server.storage:
            return self._storage_route(parts)
        match parts:
            case ["api", "whoami-v2"]:
                return "whoami", self.whoami, ()
            case ["api", "validate-yaml"]:
                return "validate", self.validate, ()
            case ["api", "repos", ("create" | "delete") as act]:
                return act, self.create if act == "create" else lambda: refused(403), ()
            case ["api", "models", user, name]:
                return "info", self.info, (f"{user}/{name}", "main")
            case ["api", "models", user, name, "revision", revision]:
                return "info", self.info, (f"{user}/{name}", revision)
            case ["api", "models", user, name, ("tree" | "preupload" | "commit" | "branch") as act, revision]:
                return act, getattr(self, act), (f"{user}/{name}", revision)
            case ["api", "models", user, name, "refs"]:
                return "refs", self.refs, (f"{user}/{name}",)
            case [user, name, "info", "lfs", "objects", "batch"]:
                return "batch", self.batch, (f"{user}/{name.removesuffix('.git')}",)
            case ["lfs", ("verify" | "complete") as act]:
                return act, getattr(self, act), ()
            case ["api", "models", user, name, ("xet-write-token" | "xet-read-token"), _] if self.hub.xet:
                return "token", self.token, (f"{user}/{name}",)
            case [user, name, "resolve", revision, *path]:
                act = "head" if self.command == "HEAD" else "get"
                return act, self.resolve, (f"{user}/{name}", revision, "/".join(path))
        return "unknown", lambda: refused(404), ()

    def _storage_route(self, parts: list[str]) -> tuple[str, Any, tuple[Any, ...]]:
        match self.command, parts:
            case "PUT", ["lfs", oid]:
                return "put", self.put, (oid,)
            case "PUT", ["lfs", oid, number]:
                return "part", self.part, (oid, int(number))
            case "GET", ["file", oid]:
                return "store", self.stored, (oid,)
            case "GET", ["xorb", name]:
                return "fetch", lambda: self._ranged(self.hub.xet.xorbs[name]), ()
            case _, ["v1", kind, *rest] if self.hub.xet and kind in self.hub.xet.KINDS:
                return kind, lambda: said(self.hub.xet.answer(self.hub, kind, rest, self.sent)), ()
        return "unknown", lambda: refused(404), ()

    def _seen(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        return None if repo is None or (repo.private and self.user is None) else repo

    def _may_write(self, name: str) -> Answer | None:
        if self.user is None:
            return refused(401, message="Invalid username or password.")
        if not name.startswith(f"{USER}/"):
            return refused(403, "Forbidden", f"You have no rights to {name}")
        return None if name in self.hub.repos else NOT_FOUND

    def whoami(self) -> Answer:
        if self.user is None:
            return refused(401, message="Invalid credentials in Authorization header")
        return said({"type": "user", "name": self.user, "orgs": []})

    def validate(self) -> Answer:
        content, errors = json.loads(self.sent)["content"], []
        try:
            head = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else {}
            if head.get("license", "mit") not in ("mit", "apache-2.0"):
                errors = [{"message": '"license" must be one of [mit, apache-2.0]'}]
        except yaml.YAMLError as error:
            errors = [{"message": str(error)}]
        return said({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self) -> Answer:
        asked = json.loads(self.sent)
        name = f"{asked['organization'] or USER}/{asked['name']}"
        no = self._may_write(name)
        if no is not None and no is not NOT_FOUND:
            return no
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            return said({"error": "You already created this model repo", "url": url}, 409)
        self.hub.repo(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return said({"url": url, "name": name})

    def info(self, name: str, revision: str) -> Answer:
        repo = self._seen(name)
        if repo is None:
            return NOT_FOUND
        commit = repo.at(revision)
        if commit is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        gated = "manual" if repo.gated else False
        return said({"id": name, "sha": commit, "private": repo.private, "gated": gated, "siblings": []})

    def tree(self, name: str, revision: str) -> Answer:
        repo = self._seen(name)
        commit = repo and repo.at(revision)
        if repo is None or commit is None:
            return NOT_FOUND if repo is None else refused(404, "RevisionNotFound")
        entries = []
        for path, blob in sorted(repo.commits[commit].items()):
            large = {"lfs": {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 130}} if blob.large else {}
            entries.append({"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid} | large)
        start = int(self.query.get("cursor", ["0"])[0])
        end = start + self.hub.page
        more = f'<{self.hub.url}{self.place}?recursive=true&cursor={end}>; rel="next"'
        return said(entries[start:end], **({"Link": more} if end < len(entries) else {}))

    def refs(self, name: str) -> Answer:
        branches = getattr(self._seen(name), "branches", {})
        found = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": at} for name, at in branches.items()]
        return said({"branches": found, "converts": [], "tags": []}) if found else NOT_FOUND

    def branch(self, name: str, branch: str) -> Answer:
        repo = self.hub.repos[name]
        if self.command == "DELETE":
            del repo.branches[branch]
        elif branch in repo.branches:
            return refused(409, message="Reference already exists")
        else:
            repo.branches[branch] = repo.branches["main"]
        return Answer()

    def preupload(self, name: str, revision: str) -> Answer:
        commit = self.hub.repos[name].at(revision)
        if commit is None:
            return refused(404, "RevisionNotFound")
        there, files = self.hub.repos[name].commits[commit], []
        for asked in json.loads(self.sent)["files"]:
            large = is_large(base64.b64decode(asked["sample"])) or asked["size"] > 100_000
            blob = there.get(asked["path"])
            about = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            about["oid"] = blob and (blob.sha256 if blob.large else blob.oid)
            files.append({"path": asked["path"]} | about)
        return said({"files": files})

    def batch(self, name: str) -> Answer:
        objects = []
        for asked in json.loads(self.sent)["objects"]:
            if asked["oid"] in self.hub.store:
                objects.append(asked)
                continue
            oid, size, part = asked["oid"], asked["size"], self.hub.part_bytes
            upload: dict[str, Any] = {"href": f"{self.hub.storage_url}/lfs/{oid}"}
            if part is not None and size > part:
                count = -(-size // part)
                urls = {f"{n:05d}": f"{self.hub.storage_url}/lfs/{oid}/{n}" for n in range(1, count + 1)}
                upload = {"href": f"{self.hub.url}/lfs/complete", "header": {"chunk_size": str(part)} | urls}
            objects.append(asked | {"actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/verify"}}})
        return said({"transfer": "multipart" if self.hub.part_bytes else "basic", "objects": objects})

    def put(self, oid: str) -> Answer:
        self.hub.store[oid] = self.sent
        return Answer()

    def part(self, oid: str, number: int) -> Answer:
        self.hub.parts.setdefault(oid, {})[number] = self.sent
        return Answer(headers={"ETag": f'"{hashlib.md5(self.sent).hexdigest()}"'})

    def complete(self) -> Answer:
        asked = json.loads(self.sent)
        self.hub.store[asked["oid"]] = b"".join(part for _, part in sorted(self.hub.parts[asked["oid"]].items()))
        return said({})

    def verify(self) -> Answer:
        oid = json.loads(self.sent)["oid"]
        if hashlib.sha256(self.hub.store.get(oid, b"")).hexdigest() == oid:
            return said({})
        self.hub.store.pop(oid, None)
        return refused(422, message="the file's hash is another")

    def commit(self, name: str, branch: str) -> Answer:
        repo = self.hub.repos[name]
        if branch not in repo.branches:
            return refused(404, "RevisionNotFound")
        files = dict(repo.commits[repo.branches[branch]])
        for line in self.sent.splitlines():
            asked = json.loads(line)
            value = asked["value"]
            match asked["key"]:
                case "header":
                    if value.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
                        return refused(412, message="A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    if value["oid"] not in self.hub.store:
                        return refused(400, message=f"{value['path']}: there is no such object")
                    files[value["path"]] = Blob(self.hub.store[value["oid"]], True)
                case "deletedFile":
                    if files.pop(value["path"], None) is None:
                        return refused(404, "EntryNotFound", "A file with this name doesn't exist")
        made = repo.add(branch, files)
        url = f"{self.hub.url}/{name}/commit/{made}"
        return said({"success": True, "commitOid": made, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, revision: str, path: str) -> Answer:
        repo = self._seen(name)
        if repo is None:
            return NOT_FOUND
        if repo.gated:
            return refused(403, "GatedRepo", f"Access to model {name} is restricted")
        commit = repo.at(revision)
        blob = repo.commits[commit].get(path) if commit else None
        if commit is None or blob is None:
            return refused(404, "EntryNotFound" if commit else "RevisionNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.oid}"'}
        if not blob.large:
            answer = self._ranged(blob.content)
            answer.headers |= headers
            return answer
        headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        if self.hub.xet:
            headers |= self.hub.xet.headers(blob.sha256, f"{self.hub.url}/api/models/{name}/xet-read-token/{commit}")
        self.hub.store.setdefault(blob.sha256, blob.content)
        return Answer(302, b"", headers | {"Location": f"{self.hub.storage_url}/file/{blob.sha256}"})

    def token(self, name: str) -> Answer:
        if self._seen(name) is None:
            return NOT_FOUND
        about = self.hub.xet.connection(self.hub.storage_url)
        return said(about, **{f"X-Xet-{key}": str(value) for key, value in about.items()})

    def stored(self, oid: str) -> Answer:
        return self._ranged(self.hub.store[oid])

    def _ranged(self, content: bytes) -> Answer:
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes="):
            return Answer(200, content, {"Content-Length": str(len(content))})
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), int(last or len(content) - 1)
        return Answer(206, content[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(content)}"})
