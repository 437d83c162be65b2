"""The hub: its repositories seen, filled and read through `huggingface_hub`, patiently and with plain errors.

Who asks is known by huggingface_hub's own store alone (`hf auth login`, or HF_TOKEN): no token is taken, kept or shown.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..artifact.manifest import REDACTED, to_json_safe

_T = TypeVar("_T")

_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""What a hub answers that may answer otherwise in a moment."""
_TAKEN = 409
_CONFLICT = (_TAKEN, 412)
_TOO_MANY = 429
_TRIES = 5
_THEIR_TRIES = "what fails is tried 5 times more"
"""Where huggingface_hub tries again by itself."""
_LONGEST_WAIT = 300
_LONGEST_LOOK = 30
"""Seconds for an answer of a few lines. The client itself would wait for ever."""
_SILENCE = 3.0
"""Seconds without an answer after which that is told."""
_LONGEST_WORDS = 300


class HubError(OSError):
    """What went wrong with the hub, and what can be done about it."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
        """Whether it may go better another time without anything being changed."""


@dataclass(frozen=True)
class Stored:
    """A file as the hub lists it."""

    size: int
    """Bytes."""
    blob: str
    """Git's name for it, SHA-1 of its content with a header; of large files, of a pointer to it."""
    sha256: str | None
    """Of large files alone."""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    commit: str
    private: bool
    files: Mapping[str, Stored]
    """By path."""


@dataclass(frozen=True)
class Addition:
    """A file to upload."""

    content: Path | bytes
    """Where it lies, or what it holds."""
    size: int
    sha256: str

    def is_stored(self, stored: Stored | None) -> bool:
        """Whether the hub has this very file."""
        if stored is None or stored.size != self.size:
            return False
        return stored.sha256 == self.sha256 if stored.sha256 is not None else stored.blob == self._blob()

    def _blob(self) -> str:
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Hub:
    """The hub that huggingface_hub's settings name (HF_ENDPOINT, HF_HOME …)."""

    tell: Callable[[str], None] = lambda _: None
    """Is given a line where a call takes long, or is made again."""

    @property
    def address(self) -> str:
        """Where it is."""
        return str(self._api().endpoint)

    def account(self) -> str | None:
        """Whose token is stored; None where there is none.

        Raises:
            HubError: the hub does not know the token, or cannot be asked.
        """
        from huggingface_hub import get_token

        if get_token() is None:
            return None
        with self._explained("whoami"):
            return str(self._patiently("whoami", self._api().whoami)["name"])

    def has(self, repo: str) -> bool:
        """Whether there is a repository of this name that can be seen."""
        return self._info(repo, None) is not None

    def look(self, repo: str, revision: str | None = None) -> Repository | None:
        """A repository as it stands; None where there is none that can be seen.

        Raises:
            HubError: it has no such revision, or the hub cannot be asked.
        """
        info = self._info(repo, revision)
        if info is None:
            return None
        from huggingface_hub import RepoFile

        with self._explained(repo), self._told_if_slow(f"files of {repo}", _THEIR_TRIES):
            listed = self._api().list_repo_tree(repo, recursive=True, revision=info.sha)
            found = [entry for entry in listed if isinstance(entry, RepoFile)]
        files = {}
        for entry in found:
            large = entry.lfs
            files[entry.path] = Stored(entry.size, entry.blob_id, None if large is None else large.sha256)
        return Repository(str(info.sha), bool(info.private), files)

    def branches(self, repo: str) -> list[str]:
        """Names of a repository's branches."""
        with self._explained(repo):
            refs = self._patiently("branches", partial(self._api().list_repo_refs, repo))
        return [branch.name for branch in refs.branches]

    def create(self, repo: str, private: bool) -> None:
        """Make an empty repository.

        Raises:
            HubError: somebody else made it meanwhile, or it cannot be made.
        """
        with self._explained(repo):
            self._make(repo, partial(self._api().create_repo, repo, private=private))

    def create_branch(self, repo: str, branch: str) -> None:
        """Begin a branch where the main one stands. Raises the same as `create`."""
        with self._explained(repo):
            self._make(f"the branch {branch} of {repo}", partial(self._api().create_branch, repo, branch=branch))

    def upload(self, repo: str, files: Mapping[str, Addition], branch: str) -> list[Any]:
        """Bring large files to the hub's store, where no one sees them yet; those that it has are not sent.

        Returns:
            Operations for `commit`.

        Raises:
            HubError: it failed, or a file is another than it was when its hash was taken.
        """
        from huggingface_hub import CommitOperationAdd

        operations = []
        for path, file in files.items():
            content = file.content if isinstance(file.content, bytes) else str(file.content)
            operations.append(CommitOperationAdd(path_in_repo=path, path_or_fileobj=content))
        with self._explained(repo), self._told_if_slow(f"sending {len(files)} files to {repo}", _THEIR_TRIES):
            self._api().preupload_lfs_files(repo, operations, revision=branch, free_memory=False)
        for path, operation in zip(files, operations, strict=True):
            if operation.upload_info.sha256.hex() != files[path].sha256:
                raise HubError(f"{path} was changed while it was uploaded")
        return operations

    def commit(
        self,
        repo: str,
        additions: Sequence[Any],
        deletions: Sequence[str],
        *,
        branch: str,
        parent: str,
        message: str,
        is_whole: Callable[[Repository], bool],
    ) -> str:
        """Publish what was uploaded and delete files, all in one commit on top of `parent`.

        An answer can be lost though the commit was made. So before another try, the branch is looked at.

        Args:
            is_whole: whether a repository holds all that the commit should bring.

        Returns:
            The commit's name.

        Raises:
            HubError: it was refused, or another commit was made in between.
            ValueError: the hub does not take the card's head.
        """
        from huggingface_hub import CommitOperationDelete

        operations = [*additions, *(CommitOperationDelete(path, is_folder=False) for path in deletions)]
        settings: dict[str, Any] = {"commit_message": message, "revision": branch, "parent_commit": parent}

        def once() -> str:
            try:
                return str(self._api().create_commit(repo, operations, **settings).oid)
            except (_network_error(), json.JSONDecodeError) as error:
                if _waiting(error, 0.0) is None and _status(error) not in _CONFLICT:
                    raise
                now = self.look(repo, branch)
                if now is None or now.commit == parent:
                    raise
                if is_whole(now):
                    return now.commit
                raise HubError(
                    f"another commit, {now.commit[:12]}, was made in {repo} meanwhile: look at it, then push again"
                ) from error

        with self._explained(repo):
            return self._patiently("commit", once)

    def download(self, repo: str, path: str, commit: str) -> Path:
        """A file of a commit, in huggingface_hub's cache: what is there already is not fetched again."""
        from huggingface_hub import hf_hub_download

        def once() -> str:
            return hf_hub_download(repo, path, revision=commit)

        with self._explained(f"{repo}: {path}"):
            return Path(self._patiently(path, once))

    def forget(self, cached: Path) -> None:
        """Take a file out of the cache that `download` gave."""
        cached.resolve().unlink(missing_ok=True)
        cached.unlink(missing_ok=True)

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(library_name="draftsmith")

    def _info(self, repo: str, revision: str | None) -> Any:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        look = partial(self._api().model_info, timeout=_LONGEST_LOOK)
        with self._explained(repo):
            try:
                return self._patiently(repo, partial(look, repo, revision=revision))
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

    def _make(self, what: str, call: Callable[[], Any]) -> None:
        """Make it with this call; where an answer was lost, it may stand there by then."""
        may_be_done = False

        def once() -> None:
            nonlocal may_be_done
            try:
                call()
            except (_network_error(), json.JSONDecodeError) as error:
                if _status(error) != _TAKEN:
                    may_be_done |= _status(error) != _TOO_MANY
                    raise
                if not may_be_done:
                    raise HubError(f"somebody else made {what} meanwhile: look at it, then push again") from error

        self._patiently(f"making {what}", once)

    def _patiently(self, what: str, call: Callable[[], _T]) -> _T:
        """The call's result; what may pass by itself is tried again, some times. huggingface_hub does so for some of
        its calls and not for others: looking, making, committing, and a download whose server fails."""
        pause = 1.0
        for left in reversed(range(_TRIES)):
            try:
                with self._told_if_slow(what, f"{left} tries are left"):
                    return call()
            except (_network_error(), json.JSONDecodeError) as error:
                wait = _waiting(error, pause)
                if wait is None or not left:
                    raise
                self.tell(_safe(f"hub: {what}: {_brief(error)}; again in {wait:g} s, {left} tries are left"))
                time.sleep(wait)
                pause *= 2
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _told_if_slow(self, what: str, tries: str) -> Iterator[None]:
        """Tell what is waited for where that takes more than a moment."""
        line = _safe(f"hub: {what}: waiting for {self.address} for {_SILENCE:g} s now; {tries}")
        clock = threading.Timer(_SILENCE, self.tell, (line,))
        clock.daemon = True
        clock.start()
        try:
            yield
        finally:
            clock.cancel()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Errors of the client as `HubError`; those of this machine, such as a full disk, as they are."""
        try:
            yield
        except HubError:
            raise
        except (OSError, json.JSONDecodeError, RuntimeError, _network_error()) as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, _network_error()):
                raise
            passing = _status(_root(error)) in (None, *_PASSING)
            raise HubError(_safe(self._words(_root(error), what)), passing) from error

    def _words(self, error: BaseException, what: str) -> str:
        from huggingface_hub import get_token
        from huggingface_hub.errors import (
            GatedRepoError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        status, said = _status(error), _said(error)
        repo = what.partition(":")[0]
        if isinstance(error, GatedRepoError):
            return f"{what} is gated: ask for access at {self.address}/{repo}, log in with `hf auth login`, then again"
        if isinstance(error, RevisionNotFoundError):
            return f"{repo} has no such revision{said}"
        if status == 401 and get_token() is not None:
            return f"{what}: the hub does not accept the stored token (401): `hf auth login` stores another one"
        if status == 401 or isinstance(error, RepositoryNotFoundError):
            return f"{what}: there is no such repository, or not for this account: check its name, or `hf auth login`"
        if status == 403:
            return (
                f"{what}: the hub refuses this account (403){said}: choose a repository of your own, or store a token "
                "that may write to it with `hf auth login`"
            )
        if isinstance(error, OfflineModeIsEnabled):
            return f"{what}: HF_HUB_OFFLINE is set, and the hub is needed"
        if status == 429:
            return f"{what}: the hub has had too many requests (429), also after waiting: try again later"
        if status is not None:
            return f"{what}: the hub answers with {status}{said}"
        if isinstance(error, json.JSONDecodeError):
            return f"{what}: {self.address} gives answers that are none of a hub's"
        if isinstance(error, _network_error()):
            return f"{what}: the connection to {self.address} failed: {_brief(error)}"
        return f"{what}: {error}"


def _network_error() -> type[Exception]:
    """What all errors of the client's connections are: `HTTPError` of httpx, or of httpx2, by the client's version."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _waiting(error: BaseException, pause: float) -> float | None:
    """Seconds to wait before the same is asked again: those that the hub says, else `pause`; None where it is of no
    use, or would take too long."""
    status = _status(error)
    if status is None:
        return pause if isinstance(error, (_network_error(), json.JSONDecodeError)) else None
    if status not in _PASSING:
        return None
    said = str(error.response.headers.get("Retry-After", ""))  # type: ignore[attr-defined]
    wait = float(said) if said.isdecimal() else pause
    return wait if wait <= _LONGEST_WAIT else None


def _root(error: BaseException) -> BaseException:
    """The error that the client wrapped in others: an answer of the hub, or a failed connection."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _network_error()) or _status(seen) is not None:
            return seen
        seen = seen.__cause__
    return error


def _brief(error: BaseException) -> str:
    status = _status(error)
    return f"{type(error).__name__}: {error}" if status is None else f"answer {status}"


def _said(error: BaseException) -> str:
    message = getattr(error, "server_message", None)
    return f" ({message})" if message else ""


def _safe(text: str) -> str:
    """Words of others in a message of ours: one line, without control characters, without a token."""
    from huggingface_hub import get_token

    token = get_token()
    text = str(to_json_safe(text if token is None else text.replace(token, REDACTED)))
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _LONGEST_WORDS else line[:_LONGEST_WORDS] + "…"
