"""Places by name: a folder that is here, or a repository of the hub at a revision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic import stands

_PLAIN_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


def split_revision(place: str) -> tuple[str, str | None]:
    """Name and revision of `user/name@revision`; else the place and None. Raises ValueError: the hub allows no such."""
    repo, at, _ = place.partition("@")
    is_named = at and "/" in repo and not is_path(repo) and here(place) is None
    return hub_place(place) if is_named else (place, None)


def adapter_base(settings: Mapping[str, Any]) -> str | None:
    """The model that an adapter's settings name, with peft's `revision` as `user/name@revision`; None without one."""
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        return None
    is_on_hub = "/" in base and "@" not in base and not is_path(base) and here(base) is None
    return f"{base}@{revision}" if is_on_hub and isinstance(revision, str) else base


def here(place: str | Path) -> Path | None:
    """The folder or file of this name on this machine."""
    try:
        folder = Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no folder {place}: {error}") from error
    return folder if stands(folder) else None


def hub_place(place: str, revision: str | None = None) -> tuple[str, str | None]:
    """Name and revision of `user/name[@revision]`. Raises ValueError: a path, two revisions, or not allowed."""
    repo, at, named = place.partition("@")
    if is_path(repo):
        raise ValueError(f"there is no folder {place}")
    if at and revision not in (None, named):
        raise ValueError(f"{place} names the revision {named!r}, and {revision!r} was asked for: which one?")
    try:
        check_repository_name(repo)
        revision = named if at else revision
        if revision is not None:
            check_revision(revision)
    except ValueError as error:
        raise ValueError(f"there is no folder {place!a}, and on the hub it cannot be: {error}") from error
    return repo, revision


def is_path(place: str) -> bool:
    """Whether a path was meant, not the hub."""
    return place.startswith((".", "/", "~", "runs/")) or place.count("/") > 1 or "\\" in place or place.endswith("/")


def check_repository_name(name: str) -> None:
    """Raises ValueError for what is no `user/name`; odd characters, some of which look like others, are escaped."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        is_good = name.count("/") == 1 and name.isascii()
    except HFValidationError:
        is_good = False
    if not is_good:
        raise ValueError(f"{name!a} is no name of a repository: user/name of letters, digits, '-', '_' and '.'")


def check_revision(revision: str) -> None:
    """Raises ValueError for what can be no branch, tag or commit."""
    if not _PLAIN_REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith(("/", ".")):
        raise ValueError(f"{revision!a} is no branch, tag or commit of a repository")
