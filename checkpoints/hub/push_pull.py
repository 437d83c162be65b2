"""Push of artifacts to the hub, as one commit that is planned and shown first, and pull of verified artifacts.

The hub gets the artifact's files unchanged except README.md, the card, which may hold more than when the artifact was
made; `artifact.json` on the hub has that card's hash. The account is that of huggingface_hub's stored token.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from ..artifact.artifact import CARD_FILE, check_replaceable, file_faults, load_manifest, verify_artifact
from ..artifact.locate import fetch, fetch_artifact, hub_errors
from ..artifact.manifest import Manifest
from ..storage.atomic import atomic_dir
from ..storage.names import MANIFEST_FILE
from ..storage.places import check_repository_name, check_revision, hub_place
from ..storage.redaction import SECRET_VALUE
from ..verify.inspect import check_tensors

MAIN = "main"
_TEXT_FILES = (".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".py", ".jinja")
_LARGEST_TEXT = 64 << 20
_HARMLESS = (CARD_FILE, "LICENSE")
"""What a repository may hold that was made by hand, to be filled."""
_PATIENCE = 30
"""Seconds for an answer of a few lines."""


@dataclass(frozen=True)
class Plan:
    """What a push would do."""

    repo: str
    branch: str
    message: str
    account: str | None
    """Whose token is stored; without one nothing can be pushed."""
    private: bool
    """As the repository is, or will be made."""
    parent: str | None
    """The commit that the branch stands at; None where there is no repository yet."""
    new_branch: bool
    files: dict[str, CommitOperationAdd]
    """All files of the artifact."""
    deleted: tuple[str, ...]
    """Files on the hub that the artifact does not have."""

    @property
    def card(self) -> str:
        """README.md."""
        return _text(self.files[CARD_FILE])


def address() -> str:
    """Of the hub that huggingface_hub's settings name (HF_ENDPOINT)."""
    return str(constants.ENDPOINT)


def is_on_hub(repo: str) -> bool:
    """Whether there is a model of this name. Raises ValueError where the hub cannot be asked."""
    with hub_errors(f"{repo} on the hub", repo):
        return _api().repo_exists(repo)


def plan_push(
    artifact: Path,
    repo: str,
    card: Callable[[Manifest], str],
    *,
    branch: str = MAIN,
    private: bool = False,
    message: str | None = None,
    replace_other: bool = False,
) -> Plan:
    """Check an artifact, look at the repository, and say what a push would do, with a `card` as README.md; nothing is
    changed. With `private` a repository that is public is refused; with `replace_other` it may hold something else than
    such an artifact.

    Raises ValueError: a damaged artifact, a text in it that holds a token, a repository that should not be written, or
    a hub that cannot be asked.
    """
    check_repository_name(repo)
    check_revision(branch)
    kind, files = _files_to_push(artifact, card)
    found = _look(repo)
    with hub_errors("the hub", repo):
        account = None if get_token() is None else str(_api().whoami()["name"])
        refs = [] if found is None or branch == MAIN else _api().list_repo_refs(repo).branches
    new_branch = branch != MAIN and branch not in [ref.name for ref in refs]
    if found is None and new_branch:
        raise ValueError(f"there is no repository {repo} yet: push to its {MAIN} branch first, then to {branch}")
    if found is not None and not new_branch and branch != MAIN:
        found = _look(repo, branch)
    if found is not None and private and not found.private:
        raise ValueError(f"{repo} is public: make it private in its settings on the hub, or push without --private")
    if not replace_other:
        _check_other(repo, found, kind)
    return Plan(
        repo=repo,
        branch=branch,
        message=message or f"{kind} pushed with draftsmith",
        account=account,
        private=private if found is None else bool(found.private),
        parent=None if found is None else found.sha,
        new_branch=new_branch,
        files=files,
        deleted=tuple(name for name in _stored(found) if name not in files),
    )


def push(plan: Plan) -> str:
    """Make the commit of a plan, unless it changes nothing, and return its name.

    Raises:
        ValueError: No token is stored, or the hub refuses; nothing is published then.
    """
    if plan.account is None:
        raise ValueError("no token is stored: log in with `hf auth login`, then push again")
    deletions = [CommitOperationDelete(name, is_folder=False) for name in plan.deleted]
    with hub_errors(f"{plan.repo} on the hub", plan.repo):
        if plan.parent is None:
            _api().create_repo(plan.repo, private=plan.private)  # fails where somebody has made it meanwhile
        elif plan.new_branch:
            _api().create_branch(plan.repo, branch=plan.branch, exist_ok=True)
        done = _api().create_commit(
            plan.repo,
            [*plan.files.values(), *deletions],
            commit_message=plan.message,
            revision=plan.branch,
            parent_commit=plan.parent,
        )
    return str(done.oid)


class Pulled(NamedTuple):
    """What a pull came to."""

    manifest: Manifest
    commit: str
    """That it is from."""
    is_new: bool
    """False where that very artifact stood there already."""


def pull(source: str, out: Path) -> Pulled:
    """Download an artifact, `user/name[@revision]`, to `out`, whole and with every hash checked, or not at all.

    Raises:
        ValueError: A malformed name or revision; an `out` that holds something else; a repository without an artifact;
            files that differ from their manifest; a hub that is out of reach.
    """
    repo, revision = hub_place(source)
    check_replaceable(out)
    folder = fetch(repo, [MANIFEST_FILE], revision)
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(f"{repo} has no {MANIFEST_FILE}: `draftsmith import {repo} --out OUT` makes an artifact of it")
    manifest = load_manifest(folder)
    if _is_there(out, manifest):
        return Pulled(manifest, folder.name, is_new=False)
    folder = fetch_artifact(repo, folder)
    with atomic_dir(out) as unfinished:
        for name in (MANIFEST_FILE, *manifest.files):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, unfinished / name)
        _is_there(out, manifest)  # again: fetching may have taken minutes
    return Pulled(manifest, folder.name, is_new=True)


def _is_there(out: Path, manifest: Manifest) -> bool:
    """Return whether an artifact with these files is at `out`; raise ValueError if another one is."""
    check_replaceable(out)
    if not (out / MANIFEST_FILE).is_file():
        return False
    what = "another artifact, or this one changed"
    try:
        if load_manifest(out).files == manifest.files and not file_faults(out, manifest):
            return True
    except ValueError as error:
        what = f"an artifact that cannot be read ({error})"
    raise ValueError(f"{out} holds {what}: choose another folder")


def _api() -> HfApi:
    return HfApi(library_name="draftsmith")


def _look(repo: str, revision: str | None = None) -> ModelInfo | None:
    """A repository and its files at a revision; None where there is none that can be seen."""
    with hub_errors(f"{repo} on the hub", repo):
        try:
            return _api().model_info(repo, revision=revision, timeout=_PATIENCE)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None


def _stored(found: ModelInfo | None) -> list[str]:
    """Return the names of a repository's files, without hidden ones, which are the hub's own (.gitattributes)."""
    siblings = [] if found is None else found.siblings or []
    return sorted(file.rfilename for file in siblings if not file.rfilename.startswith("."))


def _files_to_push(artifact: Path, card: Callable[[Manifest], str]) -> tuple[str, dict[str, CommitOperationAdd]]:
    """The artifact's kind, and its files by name, with a new card and the manifest that has its hash."""
    manifest = verify_artifact(artifact)
    check_tensors(artifact, manifest)
    readme = card(manifest).encode()
    entry = {"sha256": hashlib.sha256(readme).hexdigest(), "bytes": len(readme)}
    entries: Mapping[str, dict[str, object]] = manifest.files | {CARD_FILE: entry}
    made = {CARD_FILE: readme, MANIFEST_FILE: replace(manifest, files=dict(entries)).to_json().encode()}
    files = {}
    for name in sorted({*entries, MANIFEST_FILE}):
        files[name] = CommitOperationAdd(name, made[name] if name in made else str(artifact / name))
        if name in entries and files[name].upload_info.sha256.hex() != entries[name]["sha256"]:
            raise ValueError(f"{artifact / name} was changed meanwhile")
        _check_for_tokens(name, files[name])
    return manifest.kind, files


def _check_for_tokens(name: str, file: CommitOperationAdd) -> None:
    """Raises ValueError where a text holds a hub token: the stored one, or what looks like one."""
    if not name.lower().endswith(_TEXT_FILES) or file.upload_info.size > _LARGEST_TEXT:
        return
    text, token = _text(file), get_token()
    if SECRET_VALUE.search(text) or (token and token in text):
        raise ValueError(f"{name} holds what looks like a token of the hub: take it out, then push again")


def _text(file: CommitOperationAdd) -> str:
    with file.as_file() as opened:
        return opened.read().decode(errors="replace")


def _check_other(repo: str, found: ModelInfo | None, kind: str) -> None:
    """Raises ValueError where a repository holds something else than an artifact of this kind."""
    names = [name for name in _stored(found) if name not in _HARMLESS]
    theirs = "none"
    if found is not None and MANIFEST_FILE in names:
        folder = fetch(repo, [MANIFEST_FILE], found.sha)
        try:
            theirs = load_manifest(folder).kind
        except ValueError as error:
            raise ValueError(f"{repo} holds no artifact that can be read ({error}): --replace replaces it") from error
    if names and theirs != kind:
        raise ValueError(
            f"{repo} holds {', '.join(names[:3])} …, and no artifact of kind {kind!r} (its kind: {theirs}): "
            "choose another repository, or replace all of it with --replace"
        )
