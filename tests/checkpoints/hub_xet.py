"""The store behind a hub's Xet protocol, as far as the client needs it: blocks of chunks (xorbs), files made of their
ranges (shards), and where to fetch what (reconstructions). By the protocol's public specification.

Chunks are to come uncompressed: the client is to be run with HF_XET_XORB_COMPRESSION_POLICY=none.
"""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

STORE_TOKEN = "a-token-for-the-store"
_ENTRY = 48
_HEADER = 8
_END = b"\xff" * 32
_WITH_HASHES, _WITH_SHA256 = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Term:
    """Chunks `start` to `end` (not included) of a xorb, and their bytes."""

    xorb: str
    start: int
    end: int
    size: int


@dataclass
class XetStore:
    """What was uploaded."""

    xorbs: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    """By the protocol's own hash of a file."""
    hashes: dict[str, str] = field(default_factory=dict)
    """That hash by the file's SHA-256."""

    KINDS: ClassVar = ("xorbs", "shards", "reconstructions")

    def answer(self, hub: Any, kind: str, place: list[str], body: bytes) -> dict[str, Any]:
        """To an upload, or to the question how a file is put together. What is uploaded is in the hub's store then."""
        if kind == "xorbs":
            self.xorbs[place[-1]] = body
            return {"was_inserted": True}
        if kind == "shards":
            hub.store |= self.take_shard(body)
            return {"result": 1}
        return self.reconstruction(place[0], hub.storage_url)

    def connection(self, address: str) -> dict[str, Any]:
        """Where the store is, and the token for it: under the names in answers, and those in headers."""
        until = int(time.time()) + 3600
        body = {"casUrl": address, "accessToken": STORE_TOKEN, "exp": until}
        return body | {"Cas-Url": address, "Access-Token": STORE_TOKEN, "Token-Expiration": until}

    def headers(self, digest: str, refresh: str) -> dict[str, str]:
        """What tells the client that a file can be had from here."""
        return {"X-Xet-Hash": self.hashes[digest], "X-Xet-Refresh-Route": refresh} if digest in self.hashes else {}

    def take_shard(self, shard: bytes) -> dict[str, bytes]:
        """Note the files of a shard: their contents, by SHA-256."""
        found, at = {}, _ENTRY
        while shard[at : at + 32] != _END:
            name, flags, count = _name(shard[at : at + 32]), *struct.unpack_from("<II", shard, at + 32)
            at += _ENTRY
            terms = []
            for _ in range(count):
                size, start, end = struct.unpack_from("<III", shard, at + 36)
                terms.append(Term(_name(shard[at : at + 32]), start, end, size))
                at += _ENTRY
            at += _ENTRY * (count * bool(flags & _WITH_HASHES) + bool(flags & _WITH_SHA256))
            content = b"".join(self._bytes(term) for term in terms)
            digest = hashlib.sha256(content).hexdigest()
            self.files[name], self.hashes[digest], found[digest] = terms, name, content
        return found

    def reconstruction(self, name: str, address: str) -> dict[str, Any]:
        """How a file is put together, and the addresses of its parts."""
        terms = [
            {"hash": term.xorb, "unpacked_length": term.size, "range": {"start": term.start, "end": term.end}}
            for term in self.files[name]
        ]
        fetch: dict[str, list[dict[str, Any]]] = {}
        for term in self.files[name]:
            places = self._chunks(term.xorb)
            span = {"start": places[term.start][0], "end": places[term.end - 1][1] - 1}
            part = {"range": {"start": term.start, "end": term.end}, "url_range": span}
            fetch.setdefault(term.xorb, []).append(part | {"url": f"{address}/xorb/{term.xorb}"})
        return {"offset_into_first_range": 0, "terms": terms, "fetch_info": fetch}

    def _chunks(self, xorb: str) -> list[tuple[int, int]]:
        """Where each chunk begins and ends, its header included."""
        body, at, places = self.xorbs[xorb], 0, []
        while at + _HEADER <= len(body) and body[at] == 0:
            size = int.from_bytes(body[at + 1 : at + 4], "little")
            assert body[at + 4] == 0, "chunks are to come uncompressed"
            places.append((at, at + _HEADER + size))
            at += _HEADER + size
        return places

    def _bytes(self, term: Term) -> bytes:
        places = self._chunks(term.xorb)[term.start : term.end]
        return b"".join(self.xorbs[term.xorb][begin + _HEADER : end] for begin, end in places)


def _name(digest: bytes) -> str:
    """A hash as the protocol writes it: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
