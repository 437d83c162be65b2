"""A hub of folders `user/name`, on 127.0.0.1, as far as looking and downloading go."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves the folders below `root`, and keeps what was got. `user/gated` and `user/ill` are refused, and no
    repository has a revision v9."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.root, self.got = root, list[str]()


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        is_api = self.path.startswith("/api/models/")
        parts = self.path.removeprefix("/api/models").strip("/").split("/")
        folder = self.server.root / parts[0] / parts[1]
        if parts[1] == "gated":
            return self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        if parts[1] == "ill":
            return self.answer(500, b"{}")
        if not folder.is_dir():
            return self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        if "v9" in parts:
            return self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        if is_api and "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0"} for name, path in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            return self.answer(
                200, json.dumps({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings}).encode()
            )
        name = "/".join(parts[4:])
        if self.command == "GET":
            self.server.got.append(name)
        return self.answer(200, files[name].read_bytes())

    do_HEAD = do_GET

    def answer(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """A hub that runs as long as this lasts; `root` is made."""
    root.mkdir()
    with Hub(root) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
