"""Parsing of model locations: local paths, or hub ids with an optional revision."""

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .gguf import PACKAGE, gguf_folder, is_gguf
from .messages import error_text

_TIMEOUT = 4.0
"""Timeout in seconds for the hub's first response."""
_REASONS: dict[str, str] = {}
"""Mapping from each tested endpoint to the reason why it is unreachable, or "" if it responded."""
_PLAIN_REVISION = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_./-]*[A-Za-z0-9_-])?")


def split_revision(location: str) -> tuple[str, str | None]:
    """Split a location into `user/name` and revision (None if there is none). Raises ValueError if it is invalid."""
    repo, at, _ = location.partition("@")
    is_named = at and "/" in repo and not is_path(repo) and find_local(location) is None
    return parse_hub_id(location) if is_named else (location, None)


def adapter_base(settings: Mapping[str, Any]) -> str | None:
    """Return the base model (`user/name@revision` if it has a revision) in an adapter's config; None if missing."""
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        return None
    is_on_hub = "/" in base and "@" not in base and not is_path(base) and find_local(base) is None
    return f"{base}@{revision}" if is_on_hub and isinstance(revision, str) else base


def find_local(location: str | Path) -> Path | None:
    """Return the local path of a file or folder; None if it does not exist.

    GGUF files, including files in packages, are converted, and the folder of the converted model is returned.
    """
    if is_gguf(location) and str(location).startswith(PACKAGE):
        return gguf_folder(location)
    try:
        folder = Path(location).expanduser()
    except RuntimeError as error:
        raise ValueError(f"folder {location} does not exist: {error}") from error
    if not folder.exists():
        return None
    return gguf_folder(folder) if is_gguf(folder) else folder


def parse_hub_id(location: str) -> tuple[str, str | None]:
    """Split `user/name[@revision]` into name and revision. Raises ValueError for paths and invalid names."""
    repo, at, revision = location.partition("@")
    check_location(repo)
    try:
        check_repository_name(repo)
        if at and (not _PLAIN_REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
            raise ValueError(f"{revision!a} is not a valid branch, tag or commit")
    except ValueError as error:
        raise ValueError(f"folder {location!a} does not exist, and it is not a valid hub id: {error}") from error
    return repo, revision if at else None


def is_path(location: str) -> bool:
    """Check if a location is a path rather than a hub id."""
    is_marked = location.startswith((".", "/", "~", "runs/")) or location.endswith("/")
    return is_marked or location.count("/") > 1 or "\\" in location


def check_location(location: str) -> None:
    """Raise ValueError if a path does not exist. For hub ids, check the connection to the hub (see `out_of_reach`)."""
    if find_local(location) is None:
        if is_path(location):
            raise ValueError(f"folder {location} does not exist")
        out_of_reach()


def out_of_reach() -> str:
    """Return the reason why the hub cannot be reached, or an empty string. The result is cached per process.

    If the hub cannot be reached, huggingface_hub is switched to offline mode, which avoids long retries.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and constants.ENDPOINT not in _REASONS:
        return "HF_HUB_OFFLINE is set"
    if constants.ENDPOINT not in _REASONS:
        _REASONS[constants.ENDPOINT] = _ask(constants.ENDPOINT)
        constants.HF_HUB_OFFLINE = bool(_REASONS[constants.ENDPOINT])
    return _REASONS[constants.ENDPOINT]


def _ask(endpoint: str) -> str:
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session

    reasons = [f"{endpoint} did not respond within {_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_TIMEOUT)
            reasons.clear()
        except (OSError, HTTPError) as error:
            reasons[:] = [f"{endpoint} cannot be reached: {error_text(error)}"]

    asking = threading.Thread(target=ask, daemon=True)  # name resolution has no timeout
    asking.start()
    asking.join(_TIMEOUT)
    return "".join(reasons)


def check_repository_name(name: str) -> None:
    """Raise ValueError if a name is not a valid repository name (`user/name`)."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        is_good = name.count("/") == 1 and name.isascii()
    except HFValidationError:
        is_good = False
    if not is_good:
        raise ValueError(f"{name!a} is not a repository name: expected user/name of letters, digits, '-', '_' and '.'")
