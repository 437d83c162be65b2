"""Artifacts to the hub and back: a push is planned, shown and then made as one commit; a pull is checked, then stands.

The hub gets the artifact's files as they are, but for its card, README.md, which can say more than it did when the
artifact was made; `artifact.json` there has that card's hash.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..artifact.artifact import CARD_FILE, check_replaceable, file_faults, load_manifest, verify_artifact
from ..artifact.manifest import MAX_MANIFEST_BYTES, SECRET_VALUE, Manifest, record_fault
from ..storage.atomic import atomic_dir
from ..storage.names import MANIFEST_FILE
from ..storage.places import check_repository_name, check_revision
from ..storage.safe_read import read_text
from ..verify.tensors import check_tensors
from .client import Addition, Hub, HubError, Repository

MAIN = "main"
_TEXT_FILES = (".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".py", ".jinja")
_LARGEST_TEXT = 64 << 20
_HARMLESS = (CARD_FILE, "LICENSE")
"""What a repository may hold that was made by hand, to be filled."""


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
    """Whether the branch will be begun."""
    files: dict[str, Addition]
    """All files of the artifact."""
    sent: tuple[str, ...]
    """Those that the hub lacks, or has others of the name of."""
    deleted: tuple[str, ...]
    """Files on the hub that the artifact does not have."""

    @property
    def manifest(self) -> Manifest:
        """As it will be on the hub."""
        return Manifest.from_json(_text(self.files[MANIFEST_FILE]))

    @property
    def card(self) -> str:
        """README.md."""
        return _text(self.files[CARD_FILE])

    @property
    def changes_files(self) -> bool:
        """Whether there is anything to commit."""
        return self.parent is None or bool(self.sent or self.deleted)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Name and content of each file that people may read, unless it is very large."""
        for name, file in self.files.items():
            if _is_text(name, file):
                yield name, _text(file)

    def is_whole(self, found: Repository) -> bool:
        """Whether a repository is what it should be after the push."""
        return not self.differences(found)

    def differences(self, found: Repository) -> list[str]:
        """Files that a repository lacks, has another of, or has too many."""
        differing = [name for name, file in self.files.items() if not file.is_stored(found.files.get(name))]
        return differing + [name for name in found.files if name not in self.files and not name.startswith(".")]


def plan_push(
    hub: Hub,
    artifact: Path,
    repo: str,
    card: Callable[[Manifest], str],
    *,
    branch: str = MAIN,
    private: bool = False,
    message: str | None = None,
    replace_other: bool = False,
) -> Plan:
    """Check an artifact, look at the repository, and say what a push would do; nothing is changed.

    Args:
        card: README.md for the artifact's manifest.
        private: of a repository that is made; one that is public is refused.
        replace_other: also where the repository holds something else than such an artifact.

    Raises:
        ValueError: a damaged artifact, a text in it that holds a token, or a repository that should not be written.
        HubError: the hub cannot be asked.
    """
    check_repository_name(repo)
    check_revision(branch)
    files = _files_to_push(artifact, card)
    found = hub.look(repo)
    account = hub.account()
    new_branch = found is not None and branch != MAIN and branch not in hub.branches(repo)
    if found is None:
        if branch != MAIN:
            raise ValueError(f"there is no repository {repo} yet: push to its {MAIN} branch first, then to {branch}")
        sent, deleted = tuple(files), tuple[str, ...]()
    else:
        if not new_branch and branch != MAIN:
            found = hub.look(repo, branch)
            assert found is not None, "a branch of a repository that is not there"
        if private and not found.private:
            raise ValueError(f"{repo} is public: make it private in its settings on the hub, or push without --private")
        if not replace_other:
            _check_other(hub, repo, found, Manifest.from_json(_text(files[MANIFEST_FILE])).kind)
        sent = tuple(name for name, file in files.items() if not file.is_stored(found.files.get(name)))
        deleted = tuple(sorted(name for name in found.files if name not in files and not name.startswith(".")))
    return Plan(
        repo=repo,
        branch=branch,
        message=message or f"{_kind_of(files)} pushed with draftsmith",
        account=account,
        private=private if found is None else found.private,
        parent=None if found is None else found.commit,
        new_branch=new_branch,
        files=files,
        sent=sent,
        deleted=deleted,
    )


def push(hub: Hub, plan: Plan) -> str:
    """Do what a plan says, in one commit, and compare what the hub then lists with the artifact.

    Whatever fails before the commit leaves the files of the repository as they were. Large files that were uploaded
    by then are not sent again by another push.

    Returns:
        The name of the commit.

    Raises:
        HubError: what failed, and what is left on the hub.
    """
    if plan.account is None:
        raise HubError("no token is stored: log in with `hf auth login`, then push again")
    if plan.parent is not None and not plan.new_branch and not plan.changes_files:
        return plan.parent
    if plan.parent is None:
        hub.create(plan.repo, plan.private)
    elif plan.new_branch:
        hub.create_branch(plan.repo, plan.branch)
    try:
        commit = _commit(hub, plan)
    except (HubError, ValueError) as error:
        passing = isinstance(error, HubError) and error.passing
        raise HubError(f"{error}; {_left(plan)}", passing) from error
    found = hub.look(plan.repo, commit)
    if found is None or (differing := plan.differences(found)):
        named = "everything" if found is None else ", ".join(differing)
        raise HubError(f"the hub made the commit {commit} of {plan.repo} with other content than was sent: {named}")
    return commit


def _commit(hub: Hub, plan: Plan) -> str:
    parent = plan.parent
    if parent is None:
        made = hub.look(plan.repo)
        if made is None:
            raise HubError(f"{plan.repo} was made, and cannot be seen")
        if any(not name.startswith(".") for name in made.files):
            raise HubError(f"somebody else filled {plan.repo} meanwhile: look at it, then push again")
        if plan.private and not made.private:
            raise HubError(f"somebody else made {plan.repo} meanwhile, and it is public: look at it, then push again")
        parent = made.commit
    additions = hub.upload(plan.repo, {name: plan.files[name] for name in plan.sent}, plan.branch)
    about = {"branch": plan.branch, "parent": parent, "message": plan.message}
    return hub.commit(plan.repo, additions, plan.deleted, is_whole=plan.is_whole, **about)


def _left(plan: Plan) -> str:
    """What a push that failed leaves on the hub, in words.

    What it made stays, empty: the hub cannot be asked to delete a repository or a branch only as long as it is so, and
    what somebody else puts there meanwhile would be gone.
    """
    if plan.parent is not None and not plan.new_branch:
        return f"nothing was published, {plan.repo} is as it was"
    made = f"the branch {plan.branch} of {plan.repo}" if plan.new_branch else f"the repository {plan.repo}"
    return f"nothing was published; {made} is there now, and another push goes on from there"


class Pulled(NamedTuple):
    """What a pull came to."""

    manifest: Manifest
    commit: str
    """That it is from."""
    is_new: bool
    """False where that very artifact stood there already."""


def pull(hub: Hub, repo: str, out: Path, revision: str | None = None, *, replace_other: bool = False) -> Pulled:
    """Fetch an artifact from the hub to `out`, whole and with every hash checked, or not at all.

    Files go through huggingface_hub's cache: a pull that was stopped fetches only those that are not there yet.

    Args:
        replace_other: also where another artifact stands at `out`; other files are never replaced.

    Raises:
        ValueError: a name or revision that is none, an `out` that holds something else, a repository without an
            artifact.
        HubError: the hub cannot be asked, or its files differ from their manifest, named.
    """
    out = Path(out)
    check_repository_name(repo)
    if revision is not None:
        check_revision(revision)
    check_replaceable(out)
    found = hub.look(repo, revision)
    if found is None:
        raise HubError(f"there is no repository {repo}, or not for this account: check its name, or `hf auth login`")
    if MANIFEST_FILE not in found.files:
        raise ValueError(f"{repo} holds no artifact: it has no {MANIFEST_FILE}{_hint(repo, found)}")
    try:
        manifest = _their_manifest(hub, repo, found)
    except ValueError as error:
        raise HubError(f"{repo}: {MANIFEST_FILE} cannot be read: {error}") from error
    if _stands(out, manifest, replace_other):
        return Pulled(manifest, found.commit, is_new=False)
    with atomic_dir(out) as unfinished:
        _fetch(hub, repo, found, manifest, unfinished)
        _stands(out, manifest, replace_other)  # again: fetching may have taken minutes
    return Pulled(manifest, found.commit, is_new=True)


def _stands(out: Path, manifest: Manifest, replace_other: bool) -> bool:
    """Whether an artifact with these very files is at `out`.

    Raises:
        ValueError: something else is there, which is not to be replaced; says what.
    """
    check_replaceable(out)
    if replace_other or not (out / MANIFEST_FILE).is_file():
        return False
    try:
        mine = load_manifest(out)
        what = f"another artifact ({mine.kind}{f', written on {mine.created}' if mine.created else ''})"
        if mine.files == manifest.files:
            faults = file_faults(out, mine)
            if not faults:
                return True
            what = f"this artifact, but changed: {faults[0]}"
    except ValueError as error:
        what = f"an artifact that cannot be read: {error}"
    raise ValueError(f"{out} holds {what}; choose another folder, or replace all that is there with --replace")


def _their_manifest(hub: Hub, repo: str, found: Repository) -> Manifest:
    """Raises ValueError where it is none, or too large to be one, which is not downloaded."""
    size = found.files[MANIFEST_FILE].size
    if size > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has {size:,} bytes, expected at most {MAX_MANIFEST_BYTES:,}")
    return Manifest.from_json(read_text(hub.download(repo, MANIFEST_FILE, found.commit), MAX_MANIFEST_BYTES))


def _fetch(hub: Hub, repo: str, found: Repository, manifest: Manifest, folder: Path) -> None:
    """All files that the manifest names, and the manifest, checked, in a folder."""
    cached = hub.download(repo, MANIFEST_FILE, found.commit)
    shutil.copyfile(cached, folder / MANIFEST_FILE)
    if fault := record_fault(read_text(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES), manifest):
        hub.forget(cached)
        raise HubError(f"{MANIFEST_FILE} of {repo} {fault}")
    for name, entry in manifest.files.items():
        listed = found.files.get(name)
        if listed is None:
            raise HubError(f"{repo} lacks {name}, which its {MANIFEST_FILE} lists")
        if listed.size != entry["bytes"]:
            raise HubError(f"{name} of {repo} has {listed.size} bytes, its {MANIFEST_FILE} says {entry['bytes']}")
        if listed.sha256 not in (None, entry["sha256"]):
            raise HubError(f"{name} of {repo} has the hash {listed.sha256}, its {MANIFEST_FILE} says {entry['sha256']}")
    for name, entry in manifest.files.items():
        _fetch_file(hub, repo, found.commit, folder, name, entry["sha256"])


def _fetch_file(hub: Hub, repo: str, commit: str, folder: Path, name: str, wanted: str) -> None:
    """One file; what arrives or lies in the cache with another hash is fetched once more."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    for again in (True, False):
        cached = hub.download(repo, name, commit)
        shutil.copyfile(cached, target)
        with target.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest == wanted:
            return
        hub.forget(cached)
        if again:
            hub.tell(f"hub: {name} of {repo} arrived damaged; it is fetched again")
    raise HubError(f"{name} of {repo} has the hash {digest}, its {MANIFEST_FILE} says {wanted}")


def _files_to_push(artifact: Path, card: Callable[[Manifest], str]) -> dict[str, Addition]:
    """The artifact's files by name, with a new card and the manifest that has its hash."""
    manifest = verify_artifact(artifact)
    check_tensors(artifact, manifest)
    readme = _addition(card(manifest).encode("utf-8"))
    entries = manifest.files | {CARD_FILE: {"sha256": readme.sha256, "bytes": readme.size}}
    published = _addition(replace(manifest, files=entries).to_json().encode("utf-8"))
    files = {
        name: Addition(artifact / name, entry["bytes"], entry["sha256"])
        for name, entry in sorted(entries.items())
        if name != CARD_FILE
    }
    files |= {CARD_FILE: readme, MANIFEST_FILE: published}
    for name, file in files.items():
        _check_for_tokens(name, file)
    return files


def _check_for_tokens(name: str, file: Addition) -> None:
    """Raises ValueError where a text holds a hub token: the stored one, or what looks like one."""
    if not _is_text(name, file):
        return
    from huggingface_hub import get_token

    text, token = _text(file), get_token()
    if SECRET_VALUE.search(text) or (token and token in text):
        raise ValueError(f"{name} holds what looks like a token of the hub: take it out, then push again")


def _is_text(name: str, file: Addition) -> bool:
    return name.lower().endswith(_TEXT_FILES) and file.size <= _LARGEST_TEXT


def _addition(content: bytes) -> Addition:
    return Addition(content, len(content), hashlib.sha256(content).hexdigest())


def _text(file: Addition) -> str:
    content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    return content.decode("utf-8", errors="replace")


def _kind_of(files: dict[str, Addition]) -> str:
    return Manifest.from_json(_text(files[MANIFEST_FILE])).kind


def _check_other(hub: Hub, repo: str, found: Repository, kind: str) -> None:
    """Raises ValueError where a repository holds something else than an artifact of this kind."""
    visible = sorted(name for name in found.files if not name.startswith(".") and name not in _HARMLESS)
    if not visible:
        return
    if MANIFEST_FILE not in found.files:
        more = ", …" if len(visible) > 3 else ""
        raise ValueError(
            f"{repo} holds something else than an artifact ({', '.join(visible[:3])}{more}): choose another "
            "repository, or replace all of it with --replace"
        )
    try:
        theirs = _their_manifest(hub, repo, found).kind
    except ValueError as error:
        raise ValueError(f"the {MANIFEST_FILE} of {repo} cannot be read: {error}; --replace replaces it") from error
    if theirs != kind:
        raise ValueError(
            f"{repo} holds an artifact of kind {theirs!r}, and this one is of kind {kind!r}: choose another "
            "repository, or replace all of it with --replace"
        )


def _hint(repo: str, found: Repository) -> str:
    """What a repository without a manifest may be."""
    if any(Path(name).name.startswith("medusa_lm_head") for name in found.files):
        return f"; published heads become an artifact with `draftsmith import {repo} --out OUT`"
    if "config.json" in found.files:
        return f"; a model is used by its name, as in `--target {repo}`, without being pulled"
    return ""
