"""Preparation of the data of a recipe as token blocks, which are cached on disk."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from ...checkpoints.artifact.model_ref import tokenizer_fingerprint
from ...checkpoints.storage.atomic import atomic_dir, atomic_text, check_writable
from ...checkpoints.storage.messages import escape_control
from ...checkpoints.storage.redaction import without_secrets
from ...checkpoints.storage.safe_read import file_hash, load_json
from ...data.blocks.prepared import MANIFEST, SCHEMA, PreparedData, prepare
from ...data.cleaning.cleaner import Cleaning
from ...data.conversations import Conversation, CorpusReport, write_conversations
from ...data.rendering.lint import Linter, PieceDecoder, special_flags, vocabulary_size
from ...data.rendering.render import Rendered, Renderer
from ...data.rendering.templates import OWN, get_template
from ...data.sources.files import data_files
from ...data.sources.reading import Part, draw_key, has_few_ids, hash_share, mix, read_conversations
from ..schema.data import DataSection, SourceSection
from ..session.terminal import console, counter, log

# Fields of the data section that do not change prepared blocks.
_WITHOUT_EFFECT = {"cache", "min_clean_share", "min_trained_share"}
NOT_OF_CONVERSATIONS = _WITHOUT_EFFECT | {"block_tokens", "packing"}
"""Fields of the data section that do not change the conversations."""
_STYLES = ("", "bold green", "dim", "dim green")  # trained: green; special: dim
_BEGIN, _END = "⟦⟧"  # around supervised text, for output without colour
_HASHED = (f"train/{MANIFEST}", f"heldout/{MANIFEST}", "heldout.jsonl")
"""Files whose hashes are stored in report.json. The manifests contain the hashes of the arrays."""


@dataclass(frozen=True)
class Prepared:
    """Prepared data of a recipe: training blocks, held-out blocks, their directory, and the corpus report."""

    train: PreparedData
    heldout: PreparedData
    folder: Path
    report: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Return the source, the counts and the hashes of the data, for the manifest of an artifact."""
        manifest = self.train.manifest
        counts = {key: manifest[key] for key in ("rows", "documents", "blocks", "tokens", "trainable_tokens")}
        return {"source": manifest["source"], **counts, "sha256": manifest["sha256"], "corpus": self.report}


def prepare_data(section: DataSection, tokenizer: Any, *, quiet: bool = False) -> Prepared:
    """Read, clean, render, split and pack the data of a recipe, or reuse the result of an earlier run.

    Raises ValueError if no conversation is held out, or the share of supervised tokens is below its minimum.
    """
    if not section.heldout_share and section.heldout_source is None:
        raise ValueError("`data.heldout_share` must be above 0, or `data.heldout_source` set, to evaluate")
    check_writable(Path(section.cache) / "report.json")
    identity = data_identity(section, tokenizer, _WITHOUT_EFFECT)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(section.cache) / key
    file = folder / "report.json"
    if not file.is_file():
        _prepare(section, tokenizer, identity, folder)
    elif not quiet:
        log(f"data: reusing {folder} (same source, options and tokenizer)")
    train = PreparedData.load(folder / "train")
    if (share := train.manifest["trainable_share"]) < section.min_trained_share:
        raise ValueError(
            f"data: {share:.4%} of the tokens are supervised, expected at least {100 * section.min_trained_share:.6g} "
            "% (`data.min_trained_share`): check examples with `draftsmith prepare --lint`"
        )
    return Prepared(train, PreparedData.load(folder / "heldout"), folder, load_json(file, "sources", "sha256"))


def verify_data(prepared: Prepared, tokenizer: Any) -> None:
    """Raise ValueError if a file of the prepared data is missing, or its hash has changed."""
    for name, expected in prepared.report["sha256"].items():
        path = prepared.folder / name
        if not path.is_file() or file_hash(path) != expected:
            raise ValueError(f"{path} is missing or was changed: delete {prepared.folder} to prepare it again")
    for data in (prepared.train, prepared.heldout):
        data.verify(vocabulary_size(tokenizer))


def lint_data(section: DataSection, tokenizer: Any) -> list[str]:
    """Check the rendered documents and print examples. Return a message if too few are clean or supervised."""
    template = get_template(section.template, tokenizer, section.template_options)
    linter = Linter(tokenizer, template)
    render = Renderer(template, tokenizer, section.block_tokens, last_turn_only=section.last_turn_only)
    reports = [CorpusReport() for _ in section.parts()]
    advance = counter("linting", "documents")
    for document in render(_require_conversations(section, reports)):
        linter.check(document)
        advance(linter.report.documents)
    for document in linter.examples():
        console().rule(f"{document.conversation.id}", align="left")
        console().print(colour(document, tokenizer))
    console().rule()
    console().print(f"{_BEGIN}supervised{_END}: green; special tokens: dim")
    for part, report in zip(section.parts(), reports, strict=True):
        console().print(f"{part.source}: {report.summary()}")
    console().print(f"lint: {linter.report.summary()}")
    return linter.report.failures(section.min_clean_share, section.min_trained_share)


def colour(document: Rendered, tokenizer: Any) -> Text:
    """Format a document for the terminal: supervised tokens are green and in ⟦⟧, special tokens are dim.

    Control characters are printed as symbols ("␛"), and ids outside the vocabulary are omitted.
    """
    known = (document.ids >= 0) & (document.ids < vocabulary_size(tokenizer))
    ids, trained = document.ids[known].tolist(), document.trainable()[known]
    style = trained + 2 * special_flags(tokenizer)[ids]
    bounds = [0, *(np.flatnonzero(np.diff(style)) + 1).tolist(), len(ids)]
    text = Text()
    pieces = PieceDecoder(tokenizer).decode([ids[start:end] for start, end in pairwise(bounds)])
    edges = np.diff(trained, prepend=False, append=False)
    for piece, (start, end) in zip(pieces, pairwise(bounds), strict=False):
        opening, closing = (mark * bool(trained[start] and edges[at]) for mark, at in ((_BEGIN, start), (_END, end)))
        text.append(opening + escape_control(piece) + closing, _STYLES[style[start]])
    return text


def _prepare(section: DataSection, tokenizer: Any, identity: dict[str, Any], folder: Path) -> None:
    template = get_template(section.template, tokenizer, section.template_options)
    reports = [CorpusReport() for _ in section.parts()]
    heldout: list[Conversation] = []
    options: dict[str, Any] = {"packing": section.packing, "last_turn_only": section.last_turn_only, "source": identity}
    names = ", ".join(part.source for part in section.parts())
    section = _with_heldout(section)
    with atomic_dir(folder) as unfinished:
        rows, out = _require_conversations(section, reports, hold=heldout.append), unfinished / "train"
        advance = counter(f"preparing {names}", "conversations")
        train = prepare(rows, tokenizer, template, section.block_tokens, out, progress=advance, **options)
        heldout = _select_heldout(section, heldout, reports)
        prepare(heldout, tokenizer, template, section.block_tokens, unfinished / "heldout", **options)
        write_conversations(heldout, unfinished / "heldout.jsonl")
        report = all_reports(section.parts(), reports)
        report["sha256"] = {name: file_hash(unfinished / name) for name in _HASHED}
        atomic_text(unfinished / "report.json", json.dumps(report, indent=2) + "\n")
    for part, corpus in zip(section.parts(), reports, strict=True):
        log(f"data: {part.source}: {corpus.summary()}")
    numbers = train.manifest
    log(
        f"data: {numbers['tokens']:,} tokens in {numbers['blocks']:,} blocks of {section.block_tokens} "
        f"({numbers['packing_density']:.1%} full), {numbers['trainable_share']:.1%} supervised; "
        f"{len(heldout)} conversations held out"
    )
    for kind in ("answer", "question"):
        if tokens := numbers["rendering"][f"{kind}_tokens_cut"]:
            count = numbers["rendering"][f"{kind}s_cut"]
            log(f"data: truncated {count:,} {kind}s by {tokens:,} tokens to fit a block (data.block_tokens)")


def _select_heldout(
    section: DataSection, heldout: list[Conversation], reports: list[CorpusReport]
) -> list[Conversation]:
    """Return the held-out conversations, from `heldout_source` if it is set. Raise ValueError if there are none."""
    if section.heldout_source is not None:
        part = SourceSection(source=section.heldout_source, limit=section.heldout_limit)
        heldout = list(_read_part(section, part, report := CorpusReport()))
        if not heldout:
            raise ValueError(f"data.heldout_source: no usable rows in {part.source}: {report.explain_empty()}")
    if not heldout:
        names, count = ", ".join(part.source for part in section.parts()), sum(report.kept for report in reports)
        rows = f"{count} identical rows" if count > 1 else "1 row"
        raise ValueError(
            f"no conversation of {names} was held out: {rows} cannot be split by data.heldout_share "
            f"({section.heldout_share}); set data.heldout_source, or add rows"
        )
    return heldout[: section.heldout_limit]


def all_reports(parts: Sequence[SourceSection], reports: Sequence[CorpusReport]) -> dict[str, Any]:
    """Return the counts of all corpora together and of each corpus, as JSON values."""
    total = CorpusReport()
    for corpus in reports:
        total.merge(corpus)
    corpora = zip(parts, reports, strict=True)
    each = [{"source": part.source, "weight": part.weight} | corpus.as_dict() for part, corpus in corpora]
    return total.as_dict() | {"sources": without_secrets(each)}


def training_conversations(
    section: DataSection,
    reports: list[CorpusReport],
    *,
    hold: Callable[[Conversation], None] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Conversation]:
    """Yield the cleaned training conversations of a data section, in a reproducible order.

    `hold` is called with each held-out conversation. `reports` (one per corpus) are updated. `shard` (index and number
    of shards) selects a subset of the rows of each corpus.
    """

    def open_pass(part: SourceSection, report: CorpusReport, by_content: bool, number: int) -> Iterator[Conversation]:
        # Rows are counted only in the first pass.
        for conversation in _read_part(section, part, report if number == 0 else CorpusReport(), shard):
            if not is_held_out(section, conversation, by_content=by_content):
                yield conversation
            elif hold is not None and number == 0:
                hold(conversation)

    parts = [(part, report, _has_few_ids(section, part)) for part, report in zip(section.parts(), reports, strict=True)]
    return mix([Part(each[0].weight, partial(open_pass, *each), by_content=each[2]) for each in parts], seed=0)


def refuse_none(section: DataSection, reports: Sequence[CorpusReport]) -> None:
    """Raise ValueError with reasons and remedies if no row of any corpus was kept."""
    if not any(report.kept for report in reports):
        parts = zip(section.parts(), reports, strict=True)
        reasons = "; ".join(f"{part.source}: {report.explain_empty()}" for part, report in parts)
        raise ValueError(f"no usable rows: {reasons}")


def _require_conversations(section: DataSection, reports: list[CorpusReport], **options: Any) -> Iterator[Conversation]:
    """Yield the conversations of `training_conversations`. Raise ValueError if there are none."""
    conversation = None
    for conversation in training_conversations(section, reports, **options):
        yield conversation
    refuse_none(section, reports)
    if conversation is None:
        count = sum(report.kept for report in reports)
        share = f"`data.heldout_share` is {section.heldout_share:.6g}"
        raise ValueError(f"no training data: all {count:,} conversations are held out because {share}: decrease it")


def _read_part(
    section: DataSection, part: SourceSection, report: CorpusReport, shard: tuple[int, int] = (0, 1)
) -> Iterator[Conversation]:
    """Yield the cleaned conversations of one corpus of a data section."""
    options = part.model_dump(exclude={"weight"}) | {"cleaning": Cleaning(**section.clean), "report": report}
    # Only the tokenizer's own chat template renders tools and tool calls.
    return read_conversations(tools=section.template == OWN, shard=shard, **options)


def _has_few_ids(section: DataSection, part: SourceSection) -> bool:
    """Check if a corpus must be split by hashes of its conversation ids, but has too few distinct ids."""
    is_divided = part.weight % 1 or (section.heldout_source is None and section.heldout_share)
    return bool(is_divided) and has_few_ids(_read_part(section, part, CorpusReport()))


def is_held_out(section: DataSection, conversation: Conversation, *, by_content: bool = False) -> bool:
    """Check if a conversation is held out, based on a hash of its id (with `by_content`: id and content)."""
    return section.heldout_source is None and _draw(conversation, by_content) < section.heldout_share


def _draw(conversation: Conversation, by_content: bool) -> float:
    """Hash a conversation to a number in [0, 1). It is held out if the number is below `heldout_share`."""
    # ShareGPT splits long conversations into abcdefg_0, abcdefg_1 …, which must get the same number.
    part = None if by_content else re.fullmatch(r"([A-Za-z0-9]{7})_\d+", conversation.id)
    return hash_share(f"held out {part[1] if part else draw_key(conversation, by_content=by_content)}")


def _with_heldout(section: DataSection) -> DataSection:
    """Return the section. If `heldout_share` selects no conversation, increase it to hold out one conversation."""
    least, most = 1.0, 0.0
    if section.heldout_source is not None:
        return section
    for part in section.parts():
        by_content = _has_few_ids(section, part)
        for conversation in _read_part(section, part, CorpusReport()):
            draw = _draw(conversation, by_content)
            if draw < section.heldout_share:
                return section
            least, most = min(least, draw), max(most, draw)
    if least >= most:
        return section
    log(f"data: holding out one conversation, because data.heldout_share {section.heldout_share:.6g} selects none")
    return section.model_copy(update={"heldout_share": float(np.nextafter(least, 1))})


def data_identity(section: DataSection, tokenizer: Any, ignored: set[str]) -> dict[str, Any]:
    """Return the values that identify prepared data: sources, options, cleaning, template and tokenizer.

    Local files and the tokenizer are represented by hashes. Options in `ignored` are omitted.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    file = Path(section.cache) / "hashes.json"
    known: dict[str, list[Any]] = {}
    with suppress(FileNotFoundError, ValueError):  # damaged hashes are computed again
        known = load_json(file)
    before = dict(known)
    identity = {
        "schema": SCHEMA,
        "options": section.model_dump(mode="json", exclude=ignored),
        "cleaning": Cleaning(**section.clean).model_dump(mode="json"),
        "template": asdict(get_template(section.template, tokenizer, section.template_options)),
        "sources": [_source_identity(part.path or part.source, known) for part in section.parts()],
        "heldout": _source_identity(section.heldout_source, known) if section.heldout_source else None,
        "contamination": [_source_identity(name, known) for name in section.clean.get("contamination", [])],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "encoder": "" if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest(),
    }
    if known != before:
        atomic_text(file, json.dumps(known))
    return dict(without_secrets(json.loads(json.dumps(identity))))


def _source_identity(source: str, known: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the hashes of a local source's files (cached in `known`), or the name of a hub dataset."""
    path = Path(source).expanduser()
    if path.exists():
        folder, files = (path, data_files(path, None)) if path.is_dir() else (path.parent, [path])
        return {"files": {str(file.relative_to(folder)): _sha256(file, known) for file in files}}
    return {"hub": source}


def _sha256(path: Path, known: dict[str, list[Any]]) -> str:
    """Return the SHA-256 of a file. `known` caches it until the size, modification time or inode changes."""
    stat, name = path.stat(), str(path.resolve())
    cached = known.get(name)
    if cached is None or cached[:3] != [stat.st_size, stat.st_mtime_ns, stat.st_ino]:
        known[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino, file_hash(path)]
    return str(known[name][3])
