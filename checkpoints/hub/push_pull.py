"""Upload of artifacts to the Hugging Face Hub in a single commit, and download with verification.

An upload contains a new model card (README.md), whose hash is written to the uploaded `artifact.json`. The account
is the owner of the token stored by huggingface_hub.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from ..artifact.artifact import CARD_FILE, check_new, load_manifest, verify_artifact
from ..artifact.locate import fetch, fetch_artifact, hub_errors
from ..artifact.manifest import Manifest
from ..storage.atomic import atomic_dir
from ..storage.names import MANIFEST_FILE
from ..storage.places import check_repository_name, parse_hub_id
from ..storage.redaction import SECRET_VALUE

_TEXT_FILES = (".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".py", ".jinja")
_LARGEST_TEXT = 64 << 20
_TIMEOUT = 30  # seconds


@dataclass(frozen=True)
class Plan:
    """Planned commit of an artifact to the hub."""

    repo: str
    message: str
    account: str | None
    """Account of the stored token; None if no token is stored."""
    private: bool
    """True if the repository is or will be private."""
    parent: str | None
    """Latest commit of the main branch; None if the repository does not exist yet."""
    files: dict[str, CommitOperationAdd]
    """Mapping from path to upload operation, for all files of the artifact."""
    deleted: tuple[str, ...]
    """Files to delete from the repository because the artifact does not contain them."""

    @property
    def card(self) -> str:
        """Text of the model card (README.md)."""
        return _text(self.files[CARD_FILE])

    @property
    def url(self) -> str:
        """URL of the repository."""
        return f"{constants.ENDPOINT}/{self.repo}"


def is_on_hub(repo: str) -> bool:
    """Check if a model repository of this name exists. Raises ValueError if the hub cannot be reached."""
    with hub_errors(f"{repo} on the hub", repo):
        return HfApi().repo_exists(repo)


def plan_push(artifact: Path, repo: str, card: Callable[[Manifest], str], *, private: bool = False) -> Plan:
    """Check an artifact and its repository (`user/name`), and return the planned commit.

    `card` returns the text of README.md for a manifest. With `private`, the repository must be private.

    Raises ValueError if the artifact is damaged or contains a token, a private repository is required but the
    repository is public, or the hub cannot be reached.
    """
    check_repository_name(repo)
    files = _files_to_push(artifact, card)
    repository = _find_repository(repo)
    if repository is not None and private and not repository.private:
        raise ValueError(f"{repo} is public: make it private in its settings on the hub, or push without --private")
    with hub_errors("the hub", repo):
        account = None if get_token() is None else str(HfApi().whoami()["name"])
    stored = [] if repository is None else [file.rfilename for file in repository.siblings or []]
    return Plan(
        repo=repo,
        message="Upload with draftsmith",
        account=account,
        private=private if repository is None else bool(repository.private),
        parent=None if repository is None else repository.sha,
        files=files,
        deleted=tuple(name for name in sorted(stored) if name not in files and not name.startswith(".")),
    )


def push(plan: Plan) -> str:
    """Create the planned commit and return its id. Nothing is committed if no file has changed.

    Raises ValueError, without publishing anything, if no token is stored or the hub rejects the commit.
    """
    if plan.account is None:
        raise ValueError("no token is stored: log in with `hf auth login`, then push again")
    api = HfApi(library_name="draftsmith")
    operations: list[Any] = [*plan.files.values()]
    operations += [CommitOperationDelete(name, is_folder=False) for name in plan.deleted]
    with hub_errors(f"{plan.repo} on the hub", plan.repo):
        if plan.parent is None:
            api.create_repo(plan.repo, private=plan.private)  # fails if it was created meanwhile
        done = api.create_commit(plan.repo, operations, commit_message=plan.message, parent_commit=plan.parent)
    return str(done.oid)


def pull(source: str, out: Path) -> tuple[Manifest, str]:
    """Download an artifact, `user/name[@revision]`, and check all hashes. Return the manifest and the commit id.

    Raises ValueError if `out` is not empty, the repository contains no artifact, a file differs from the manifest,
    or the hub cannot be reached.
    """
    repo, revision = parse_hub_id(source)
    check_new(out)
    folder = fetch(repo, [MANIFEST_FILE], revision)
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(f"{repo} has no {MANIFEST_FILE}: convert it with `draftsmith import {repo} --out OUT`")
    folder = fetch_artifact(repo, folder)
    manifest = load_manifest(folder)
    with atomic_dir(out) as unfinished:
        for name in (MANIFEST_FILE, *manifest.files):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, unfinished / name)
    return manifest, folder.name


def _find_repository(repo: str) -> Any:
    """Return the hub's metadata of a repository; None if it does not exist or the account has no access."""
    with hub_errors(f"{repo} on the hub", repo):
        try:
            return HfApi().model_info(repo, timeout=_TIMEOUT)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None


def _files_to_push(artifact: Path, card: Callable[[Manifest], str]) -> dict[str, CommitOperationAdd]:
    """Return an upload operation for each file, with a new model card and a manifest that contains the card's hash."""
    manifest = verify_artifact(artifact)
    readme = card(manifest).encode()
    entries = manifest.files | {CARD_FILE: {"sha256": hashlib.sha256(readme).hexdigest(), "bytes": len(readme)}}
    contents = {CARD_FILE: readme, MANIFEST_FILE: replace(manifest, files=entries).to_json().encode()}
    files = {name: CommitOperationAdd(name, contents.get(name, str(artifact / name))) for name in entries | contents}
    for name, file in files.items():
        if name in entries and file.upload_info.sha256.hex() != entries[name]["sha256"]:
            raise ValueError(f"{artifact / name} was changed during the push: push again")
        if name.lower().endswith(_TEXT_FILES) and file.upload_info.size <= _LARGEST_TEXT:
            text, token = _text(file), get_token()
            if SECRET_VALUE.search(text) or (token and token in text):
                raise ValueError(f"{name} contains what looks like a hub token: remove it, then push again")
    return files


def _text(file: CommitOperationAdd) -> str:
    with file.as_file() as stream:
        return stream.read().decode(errors="replace")
