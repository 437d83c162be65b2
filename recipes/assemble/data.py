"""From a recipe's data section to blocks to train on: kept in a cache that knows when it is stale, or streamed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...checkpoints.artifact.artifact import tokenizer_fingerprint
from ...data.blocks.prepared import SCHEMA, PreparedData, padding_id, prepare
from ...data.blocks.stream import StreamedData
from ...data.cleaning.options import Cleaning
from ...data.conversations import Conversation, CorpusReport, write_conversations
from ...data.rendering.lint import Linter, LintReport, colour
from ...data.rendering.render import Renderer
from ...data.rendering.templates import get_template
from ...data.sources.files import data_files
from ...data.sources.mixture import Part, hashed_share, mixture
from ...data.sources.reading import numbered_conversations
from ...data.sources.registry import DOCUMENTED, find_corpus
from ..schema.data import DataSection, SourceSection
from ..session.terminal import console, counter, log

# What a section says about how it is read, not about what comes of it.
_WITHOUT_EFFECT = {"cache", "workers", "min_clean_share", "min_trained_share"}
NOT_OF_CONVERSATIONS = _WITHOUT_EFFECT | {"block_tokens", "packing", "streaming", "window"}
"""What a section says that changes no conversation."""


@dataclass(frozen=True)
class Prepared:
    """Blocks to train on, blocks and conversations held out, and what became of the source's rows."""

    train: PreparedData | StreamedData
    heldout: PreparedData
    folder: Path
    report: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """For an artifact's manifest: where the data came from, and how much of it there is."""
        manifest = self.train.manifest
        if isinstance(self.train, StreamedData):
            return {"source": manifest, "streamed": True}
        counts = {key: manifest[key] for key in ("rows", "documents", "blocks", "tokens", "trainable_tokens")}
        return {"source": manifest["source"], **counts, "sha256": manifest["sha256"], "corpus": self.report}


def prepare_data(section: DataSection, tokenizer: Any, *, seed: int = 0, quiet: bool = False) -> Prepared:
    """Read, clean, render, split and pack a recipe's data, or reuse what an earlier run left.

    Reused when, and only when, source files, options, template and tokenizer are the same. With `streaming` only the
    held-out part is kept; `seed` then orders the rest.

    Raises:
        ValueError: what reading, rendering and packing raise; nothing held out; shares below the section's floors.
    """
    check_heldout(section)
    identity = _identity(section, tokenizer, _WITHOUT_EFFECT if section.streaming else {*_WITHOUT_EFFECT, "window"})
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(section.cache) / key
    if not (folder / "report.json").is_file():
        _prepare(section, tokenizer, identity, folder)
    elif not quiet:
        log(f"data: reusing {folder} (same source, options and tokenizer)")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    heldout = PreparedData.load(folder / "heldout")
    if not section.streaming:
        train = PreparedData.load(folder / "train")
        for failure in _failures(section, report["lint"]):
            raise ValueError(f"data: {failure} (`draftsmith prepare --lint` shows rows)")
        return Prepared(train, heldout, folder, report)
    streamed = StreamedData(
        partial(_training_rows, section, seed),
        tokenizer,
        get_template(section.template, tokenizer),
        section.block_tokens,
        packing=section.packing,
        last_turn_only=section.last_turn_only,
        size=section.window,
        workers=section.workers,
        seed=seed,
        padding_id=padding_id(tokenizer),
        identity=identity,
    )
    return Prepared(streamed, heldout, folder, report)


def check_heldout(section: DataSection) -> None:
    """Raises ValueError where a section leaves no conversations to evaluate on, which only counting can do without."""
    if not section.heldout_share and section.heldout_source is None:
        raise ValueError(
            "`data.heldout_share` is 0 and there is no `data.heldout_source`: nothing would be held out to evaluate on"
        )


def lint_data(section: DataSection, tokenizer: Any) -> list[str]:
    """Render a recipe's training data once more, decode what would be learned of every row and print what was found.

    Returns:
        What lies below the section's floors; nothing if all is well.
    """
    linter = Linter(tokenizer, get_template(section.template, tokenizer))
    rows = _training_rows(section, 0, 0)
    with counter("linting", "documents") as advance:
        for document in _renderer(section, tokenizer)(rows):
            linter.check(document)
            advance(linter.report.documents, 0)
    for document in linter.examples():
        console().rule(f"{document.conversation.id}", align="left")
        console().print(colour(document, tokenizer))
    console().rule()
    console().print(f"lint: {linter.report.summary()}", markup=False)
    return linter.report.failures(section.min_clean_share, section.min_trained_share)


def training_conversations(
    section: DataSection,
    reports: list[CorpusReport],
    *,
    tell: bool,
    hold: Callable[[Conversation], None] | None = None,
) -> Iterator[Conversation]:
    """The conversations to train on, always the same in the same order: cleaned, and without those held out.

    Args:
        reports: one for each corpus of the section, filled on the way.
        tell: say in which form each corpus was found.
        hold: is given those held out.
    """
    return _rows(section, 0, reports, hold, tell=tell)


def conversations_identity(section: DataSection, tokenizer: Any) -> dict[str, Any]:
    """All that decides which conversations those are and what ids they get: sources with their hashes, options,
    cleaning, template and tokenizer, without what only concerns blocks."""
    return _identity(section, tokenizer, NOT_OF_CONVERSATIONS)


def _renderer(section: DataSection, tokenizer: Any) -> Renderer:
    template = get_template(section.template, tokenizer)
    return Renderer(template, tokenizer, section.block_tokens, last_turn_only=section.last_turn_only)


def _prepare(section: DataSection, tokenizer: Any, identity: dict[str, Any], folder: Path) -> None:
    template = get_template(section.template, tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    reports = [CorpusReport() for _ in section.parts()]
    linter = Linter(tokenizer, template)
    heldout: list[Conversation] = []
    options: dict[str, Any] = {"packing": section.packing, "last_turn_only": section.last_turn_only}
    names = ", ".join(part.source for part in section.parts())
    try:
        with counter(f"preparing {names}", "conversations") as advance:
            rows = _rows(section, 0, reports, heldout.append, tell=True)
            if section.streaming:
                _hold_out(section, rows, heldout)
            else:
                train = prepare(
                    rows,
                    tokenizer,
                    template,
                    section.block_tokens,
                    unfinished / "train",
                    source=identity,
                    watch=linter.count,
                    progress=advance,
                    **options,
                )
        heldout = _checked_heldout(section, heldout, reports)
        prepare(heldout, tokenizer, template, section.block_tokens, unfinished / "heldout", source=identity, **options)
        write_conversations(heldout, unfinished / "heldout.jsonl")
        report = _report(section, reports, linter.report)
        (unfinished / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "report.json").is_file():
                raise
            log(f"data: another process has prepared {folder} meanwhile")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for part, corpus in zip(section.parts(), reports, strict=True):
        log(f"data: {part.source}: {corpus.summary()}")
    if section.streaming:
        log(f"data: streaming, {len(heldout)} held out")
        return
    log(f"data: {linter.report.summary()}")
    numbers = train.manifest
    log(
        f"data: {numbers['tokens']:,} tokens in {numbers['blocks']:,} blocks of {section.block_tokens} "
        f"({numbers['packing_density']:.1%} full), {numbers['trainable_share']:.1%} trained; {len(heldout)} held out"
    )


def _checked_heldout(
    section: DataSection, heldout: list[Conversation], reports: list[CorpusReport]
) -> list[Conversation]:
    """The conversations to evaluate on: those of a source of their own, or those that were taken out.

    Raises:
        ValueError: there are none.
    """
    if section.heldout_source is not None:
        part = SourceSection(source=section.heldout_source, limit=section.heldout_limit)
        heldout = list(_read(section, part, CorpusReport(), tell=False))
        if not heldout:
            raise ValueError(f"no conversation of data.heldout_source, {section.heldout_source}, could be used")
    if not heldout:
        names = ", ".join(part.source for part in section.parts())
        raise ValueError(
            f"no conversation of {names} was held out: {sum(report.kept for report in reports)} rows at a share of "
            f"{section.heldout_share}; raise data.heldout_share or give data.heldout_source"
        )
    return heldout[: section.heldout_limit]


def _report(section: DataSection, reports: list[CorpusReport], lint: LintReport) -> dict[str, Any]:
    """All sources together, each by itself, and what the cheap look at every document found."""
    total = CorpusReport()
    for corpus in reports:
        total.merge(corpus)
    each = [
        {"source": part.source, "weight": part.weight} | corpus.as_dict()
        for part, corpus in zip(section.parts(), reports, strict=True)
    ]
    return total.as_dict() | {"sources": each, "lint": lint.as_dict()}


def _failures(section: DataSection, lint: dict[str, Any]) -> list[str]:
    counts = {name: lint[name] for name in ("documents", "tokens", "trained_tokens", "clean")}
    return LintReport(**counts).failures(section.min_clean_share, section.min_trained_share)


def _rows(
    section: DataSection,
    seed: int,
    reports: list[CorpusReport],
    hold: Callable[[Conversation], None] | None,
    *,
    tell: bool = False,
) -> Iterator[Conversation]:
    """The conversations to train on; those held out are given to `hold`."""

    def open_part(part: SourceSection, report: CorpusReport, number: int) -> Iterator[Conversation]:
        # a later pass over the same rows is not counted again
        rows = _read(section, part, report if number == 0 else CorpusReport(), tell=tell)
        for conversation in rows:
            if is_held_out(section, conversation):
                if hold is not None and number == 0:
                    hold(conversation)
            else:
                yield conversation

    parts = section.parts()
    opened = [Part(part.weight, partial(open_part, part, report)) for part, report in zip(parts, reports, strict=True)]
    return mixture(opened, seed)


def _training_rows(section: DataSection, seed: int, epoch: int) -> Iterator[Conversation]:
    """One epoch's conversations, always the same."""
    return _rows(section, seed, [CorpusReport() for _ in section.parts()], None)


def _read(section: DataSection, part: SourceSection, report: CorpusReport, *, tell: bool) -> Iterator[Conversation]:
    on_form = partial(say_form, part) if tell else None
    return (conversation for _, conversation in read_part(section, part, report, on_form))


def read_part(
    section: DataSection,
    part: SourceSection,
    report: CorpusReport,
    on_form: Callable[[str], None] | None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, Conversation]]:
    """The clean conversations of one corpus of a section with the numbers of their rows; see `open_dialogues`."""
    return numbered_conversations(
        part.source,
        path=part.path,
        config=part.config,
        split=part.split,
        revision=part.revision,
        file=part.file,
        limit=part.limit,
        streaming=section.streaming,
        skip_broken=section.skip_broken,
        cleaning=Cleaning(**section.clean),
        report=report,
        shard=shard,
        on_form=on_form,
    )


def say_form(part: SourceSection, form: str) -> None:
    """Say in which form a corpus was found."""
    log(f"data: {part.source}: form {form}")


def _hold_out(section: DataSection, rows: Iterator[Conversation], heldout: list[Conversation]) -> None:
    """Read a stream until enough of it is held out."""
    if section.heldout_source is None:
        for _ in rows:
            if len(heldout) >= section.heldout_limit:
                break


def is_held_out(section: DataSection, conversation: Conversation) -> bool:
    """Whether a conversation of a section's corpora is not to train on, by its id alone."""
    return section.heldout_source is None and _held_out(conversation, section.heldout_share)


def _held_out(conversation: Conversation, share: float) -> bool:
    # ShareGPT's parts of one long conversation are called abcdefg_0, abcdefg_1 …: they must fall on one side.
    part = re.fullmatch(r"([A-Za-z0-9]{7})_\d+", conversation.id)
    whole = part[1] if part else conversation.id
    return hashed_share(f"held out {whole}") < share


def _identity(section: DataSection, tokenizer: Any, ignored: set[str]) -> dict[str, Any]:
    """All that decides what comes of a section, but for the options that are `ignored`."""
    hashes = _Hashes(Path(section.cache) / "hashes.json")
    identity = {
        "schema": SCHEMA,
        "options": section.model_dump(mode="json", exclude=ignored),
        "cleaning": asdict(Cleaning(**section.clean)),
        "template": asdict(get_template(section.template, tokenizer)),
        "sources": [hashes.of(part.path or part.source) for part in section.parts()],
        "heldout": hashes.of(section.heldout_source) if section.heldout_source else None,
        "contamination": [hashes.of(name) for name in section.clean.get("contamination", [])],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "encoder": encoder_hash(tokenizer),
    }
    hashes.save()
    return json.loads(json.dumps(identity))


def encoder_hash(tokenizer: Any) -> str:
    """What decides which of the vocabulary's ids a text gets: merges, normalizer …; "" where that cannot be asked."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest()


class _Hashes:
    """SHA-256 of files, remembered by size and time of change so that a large corpus is not read at every start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, list[Any]] = {}
        self._used: dict[str, list[Any]] = {}
        if file.is_file():
            try:
                self._known = json.loads(file.read_text(encoding="utf-8"))
            except json.JSONDecodeError:  # two processes wrote it at once
                self._known = {}

    def of(self, source: str) -> dict[str, Any]:
        """What a source is: its files' hashes where it is local, its name where it is on the hub."""
        path = Path(source).expanduser()
        if path.is_file():
            return {"files": {path.name: self._sha256(path)}}
        if path.is_dir():
            files = data_files(path, None)
            return {"files": {str(item.relative_to(path)): self._sha256(item) for item in files}}
        corpus = find_corpus(source)
        if corpus is not None and corpus.rows is not None:
            return {"made of": {package: _version(package) for package in DOCUMENTED}}
        return {"hub": source}

    def save(self) -> None:
        """Keep what was asked for, for the next start."""
        if self._used != self._known:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._known | self._used), encoding="utf-8")

    def _sha256(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        name = str(path.resolve())
        found = self._known.get(name)
        if found is None or found[:3] != stamp:
            with path.open("rb") as opened:
                found = [*stamp, hashlib.file_digest(opened, "sha256").hexdigest()]
        self._used[name] = found
        return str(found[3])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
