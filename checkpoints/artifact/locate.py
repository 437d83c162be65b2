"""Resolution of model and artifact locations: local folders, or hub repositories, which are downloaded and verified.

Downloads use the credentials and the cache of huggingface_hub.
"""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..storage.gguf import gguf_folder, is_gguf
from ..storage.names import ADAPTER_FILE, CONFIG_FILE, DRAFT_VOCABULARY, HEADS_FILE, MANIFEST_FILE, TABLE_FILE
from ..storage.places import check_location, find_local, is_path, out_of_reach, parse_hub_id, split_revision
from ..storage.redaction import REDACTED, redacted
from .artifact import load_manifest, verify_artifact

SETTINGS_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Glob patterns of configuration and tokenizer files."""
_MODEL_FILES = ("model*.safetensors", ADAPTER_FILE, DRAFT_VOCABULARY, *SETTINGS_FILES)
_METHOD_FILES = (*_MODEL_FILES, *(f"{part}/*.safetensors" for part in ("drafter-*", "heads", "table")))
_PLAIN_FILES = {"heads": (HEADS_FILE, CONFIG_FILE), "table": (TABLE_FILE,), "None": _METHOD_FILES}
"""Glob patterns of files to download if there is no `artifact.json`, by kind ("None": a model or a saved method)."""


def resolve(location: str | Path, kind: str | None = None, revision: str | None = None) -> Path:
    """Return the local folder of an artifact, model, heads or table, which is downloaded if necessary.

    A local folder is returned unchanged. An artifact on the hub (`user/name[@revision]`) is downloaded and verified.
    If a repository has no `artifact.json`, only the files that `kind` requires are downloaded.

    Raises ValueError if the folder, repository or revision does not exist or is inaccessible, if `revision` is given
    for a local folder, or if the artifact is damaged or of a different kind.
    """
    if (folder := find_local(location)) is not None:
        if revision is not None:
            raise ValueError(f"{location} is a local folder, which has no revisions: remove {revision!r}")
        return folder
    repo, named = parse_hub_id(str(location) if revision is None else f"{location}@{revision}")
    folder = fetch(repo, [MANIFEST_FILE], named)
    if not (folder / MANIFEST_FILE).is_file():
        return fetch(repo, _PLAIN_FILES.get(str(kind), _MODEL_FILES), named)
    return fetch_artifact(repo, folder, kind)


@cache
def model_source(location: str, *, weights: bool = True) -> str:
    """Return the path or hub id to pass to `from_pretrained`. The result is cached per process.

    GGUF files are converted. Artifacts on the hub and repositories with a revision (`user/name@revision`) are
    downloaded. With `weights=False`, a repository with a revision is downloaded without its weights. Any other hub id
    is returned unchanged.

    Raises ValueError for the same reasons as `resolve`, or if a path does not exist.
    """
    if split_revision(location)[1] is not None:
        return str(resolve(location) if weights else find_folder(location, SETTINGS_FILES))
    if is_gguf(location):
        return str(gguf_folder(location))
    check_location(location)
    if find_local(location) is not None or "/" not in location or is_path(location):
        return location
    try:
        folder = fetch(location, [MANIFEST_FILE])
    except ValueError:
        return location  # transformers reports its own errors
    return str(fetch_artifact(location, folder)) if (folder / MANIFEST_FILE).is_file() else location


def fetch_model(location: str) -> Path:
    """Download a model's configuration, safetensors weights and tokenizer, and return their folder."""
    return find_folder(location, _MODEL_FILES)


def find_folder(source: str, files: Sequence[str]) -> Path:
    """Return a model's folder; for a hub id, download `files` (glob patterns). Raises ValueError if there is none."""
    folder = find_local(source)
    if folder is None:
        repo, revision = parse_hub_id(source)
        return fetch(repo, files, revision)
    if not folder.is_dir():
        raise ValueError(f"{source} is a file, expected the folder of a model")
    return folder


def fetch(repo: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download files that match `patterns` from the hub, and return the cache folder. Raises ValueError on failure."""
    from huggingface_hub import snapshot_download

    named = repo if revision is None else f"{repo} at {revision}"
    with hub_errors(f"folder {repo} does not exist, and {named} on the hub", repo):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))


def fetch_artifact(repo: str, folder: Path, kind: str | None = None) -> Path:
    """Download and verify all files of an artifact. `folder` is a hub snapshot that contains its manifest.

    Raises ValueError if the download or the verification fails.
    """
    manifest = load_manifest(folder, kind)
    names = [glob.escape(name) for name in (MANIFEST_FILE, *manifest.files)]
    folder = fetch(repo, names, folder.name)  # the snapshot's commit, since the branch may have changed
    try:
        verify_artifact(folder, kind)
    except ValueError as error:
        raise ValueError(
            f"the cached copy of {repo} differs from the published artifact: {error}; delete {folder.parents[1]} to "
            "download it again"
        ) from error
    return folder


@contextmanager
def hub_errors(prefix: str, repo: str) -> Iterator[None]:
    """Convert huggingface_hub errors for `repo` to ValueErrors that start with `prefix`, except local file errors."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, HfHubHTTPError):
            raise
        cause = error.__cause__  # the hub's response, which the client may wrap
        answer = cause if isinstance(cause, HfHubHTTPError) and not isinstance(error, OSError) else error
        text = f"{prefix} {_explain_hub_error(answer, repo)}"
        raise ValueError(redacted(text.replace(get_token() or REDACTED, REDACTED))) from error


def _explain_hub_error(error: BaseException, repo: str) -> str:
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login`"
    known: dict[type[Exception], str] = {
        errors.GatedRepoError: f"is gated: request access at {constants.ENDPOINT}/{repo}, then {login}",
        errors.RevisionNotFoundError: "has no such branch, tag or commit",
        errors.RepositoryNotFoundError: f"does not exist, or this account has no access: check the name, or {login}",
        errors.OfflineModeIsEnabled: f"is required, but {out_of_reach()}",
    }
    for kind, reason in known.items():
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.LocalEntryNotFoundError):
        away = out_of_reach() or f"it cannot be reached: {_line(error.__cause__ or error)}"
        return f"is missing or incomplete in the local cache, and {away}"
    if not isinstance(error, errors.HfHubHTTPError) or error.response is None:
        return f"could not be downloaded: {_line(error)}"
    message = f" ({error.server_message})" if error.server_message else ""
    return f"could not be downloaded: the hub returned {error.response.status_code}{message}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
