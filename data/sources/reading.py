"""Dialogues, conversations and prompts in: of a registered corpus, local files or a hub dataset, as one stream.

Every row that does not survive is counted under a named reason, so that the counts of a report add up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TypedDict, Unpack

from ...checkpoints.storage.messages import did_you_mean
from ..cleaning.cleaner import Cleaner, role_of
from ..cleaning.options import Cleaning
from ..conversations import Conversation, CorpusReport, Dialogue, Prompt, Turn, encodable
from .files import SUFFIXES, WHOLE, Columns, Row, Shard, local_rows
from .forms import Renames
from .hub import downloaded, hub_rows
from .registry import CORPORA, Corpus, find_corpus
from .trees import assembled, is_flat

_GROUPS_SHOWN = 20
MOST_CHARACTERS = 8 << 20
"""Of a row: tokenising takes some 150 bytes of memory for each."""
_ROWS_LOOKED_AT = 1000  # for the columns that are renamed
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Opening(TypedDict, total=False):
    """How a source is opened."""

    path: str | None
    """A local copy that stands in for the hub."""
    config: str | None
    """Of a hub dataset, in place of what the registry says; as the next three."""
    split: str | None
    """Picks files of a folder by their names, too."""
    revision: str | None
    file: str | None
    """A data file of the repository."""
    streaming: bool
    """Read a hub dataset as it arrives, instead of copying it to the cache of `datasets`."""
    skip_broken: bool
    """Count rows that cannot be read, or are in no known form, in `skipped`, by reason."""
    skipped: Counter[str]
    shard: tuple[int, int]
    """(index, count): of the rows, numbered from 0 over all files, those with `number % count == index`."""
    on_form: Callable[[str], None] | None
    """Gets each form that rows are found in, once: "instruction + output"."""
    columns: Renames
    """Columns by their names there, and what they are called here."""


def open_dialogues(source: str, **opening: Unpack[Opening]) -> Iterator[Dialogue]:
    """The rows of a source as they were written, each as a dialogue, in constant memory.

    `source` is the first of these that there is: a local file or folder (see `files.SUFFIXES`; packed with gzip or
    Zstandard too), the name or hub id of a registered corpus (see `registry.CORPORA`), any other hub id.

    Raises ValueError: no such source (with the nearest name), or an unreachable hub; when it is reached, a row or file
    that cannot be read, with file, row and what was expected.
    """
    skip_broken, on_form = opening.get("skip_broken", False), opening.get("on_form")
    skipped = opening.get("skipped", Counter[str]())
    forms: set[str] = set()
    corpus, rows = _open_rows(source, opening, skipped)
    rows = _renamed(source, rows, opening.get("columns") or {})
    for row in rows:
        try:
            dialogue = corpus.read(row)
        except ValueError:
            if not skip_broken:
                raise
            skipped["no known form"] += 1
            continue
        size = sum(len(content) for _, content in dialogue.messages if isinstance(content, str))
        if size > MOST_CHARACTERS:
            if not skip_broken:
                raise ValueError(f"{row.location}: {size:,} characters, expected at most {MOST_CHARACTERS:,} in a row")
            skipped["too large"] += 1
            continue
        if on_form is not None and dialogue.form not in forms:
            forms.add(dialogue.form)
            on_form(dialogue.form)
        yield dialogue


def _renamed(source: str, rows: Iterator[Row], renames: Renames) -> Iterator[Row]:
    """Rows with columns by our names. ValueError: a column that none of the first rows has, or two of one name."""
    unseen, names = {name for name, ours in renames.items() if ours is not None}, set[str]()
    for count, row in enumerate(rows):
        if not renames or not isinstance(row.value, Mapping):
            yield row
            continue
        names |= row.value.keys()
        unseen -= names
        if unseen and count >= _ROWS_LOOKED_AT:
            break
        pairs = [(renames.get(name, name), value) for name, value in row.value.items()]
        value = {name: value for name, value in pairs if name is not None}
        if len(value) < sum(name is not None for name, _ in pairs):
            raise ValueError(f"{row.location}: columns: two are called {', '.join(value)}; null leaves one out")
        yield replace(row, value=value)
    if unseen and names:
        name, listed = min(unseen), ", ".join(sorted(names)[:_GROUPS_SHOWN])
        raise ValueError(f"columns: no row of {source} has {name!r}.{did_you_mean(name, names)} Its columns: {listed}")


def _open_rows(source: str, opening: Opening, skipped: Counter[str]) -> tuple[Corpus, Iterator[Row]]:
    """The corpus that a source is registered as, and its rows; messages that are rows are put together to trees, which
    are then shared out by their first one's number."""
    shard = Shard(*opening.get("shard", (0, 1)))
    corpus, rows = _single_rows(source, opening, skipped, shard)
    first = list(islice(rows, 1))
    if not first or not is_flat(first[0].value):
        return corpus, chain(first, rows)
    trees = assembled(_single_rows(source, opening, skipped, WHOLE)[1])
    return corpus, (row for row in trees if row.number % shard.count == shard.index)


def _single_rows(source: str, opening: Opening, skipped: Counter[str], shard: Shard) -> tuple[Corpus, Iterator[Row]]:
    local, corpus = _resolve(source, opening.get("path"))
    split, file = opening.get("split") or corpus.split, opening.get("file") or corpus.file
    columns: Columns = list if opening.get("columns") else corpus.usable_columns  # any may be renamed
    if local is None and file is not None and "://" in file:
        local = downloaded(file)
    if local is not None:
        skip = opening.get("skip_broken", False)
        return corpus, local_rows(local, shard, split=split, columns=columns, skip_broken=skip, skipped=skipped)
    if corpus.rows is not None:
        made = corpus.rows(split or "train")
        return corpus, (row for row in made if row.number % shard.count == shard.index)
    assert corpus.hub is not None
    return corpus, hub_rows(
        corpus.hub,
        shard,
        config=opening.get("config") or corpus.config,
        split=split or "train",
        revision=opening.get("revision") or corpus.revision,
        file=file,
        streaming=opening.get("streaming", False),
        columns=columns,
        near="" if corpus.name in CORPORA else _nearest(source),
    )


def read_conversations(
    source: str,
    *,
    limit: int | None = None,
    report: CorpusReport | None = None,
    cleaning: Cleaning | None = None,
    tools: bool = False,
    questions: bool = False,
    **opening: Unpack[Opening],
) -> Iterator[Conversation]:
    """Stream the clean conversations of a source, at most `limit` of them; `tools` and `questions` as for `Cleaner`.

    `report` is filled while the iterator is consumed; skipped rows are added at its end. The sets that the cleaning's
    `contamination` names are read as prompts, each from its own source.

    Raises ValueError: as `open_dialogues`; a negative limit.
    """
    report = CorpusReport() if report is None else report
    cleaning = Cleaning() if cleaning is None else cleaning
    sets = [prompt for name in cleaning.contamination for prompt in read_prompts(name)]
    texts = [text for p in sets for text in (*(t.text for t in p.turns), *p.follow_ups)]
    cleaner = Cleaner(cleaning, report, texts, tools=tools, questions=questions)
    broken = opening["skipped"] = Counter[str]()
    try:
        cleaned = map(cleaner, open_dialogues(source, **opening))
        yield from islice((conversation for conversation in cleaned if conversation is not None), limit)
    finally:
        report.rows += broken.total()
        report.dropped.update({f"broken: {reason}": rows for reason, rows in broken.items()})


def read_prompts(source: str, *, groups: Collection[str] | None = None, **opening: Unpack[Opening]) -> Iterator[Prompt]:
    """Stream the questions of an evaluation set, or of conversations, of `groups` alone.

    Of a conversation the first question is the prompt, the answer to it is a reference, and later questions are
    follow-ups. Rows without a question are counted in `skipped` under "no question".

    Raises ValueError: as `open_dialogues`; groups that the source does not have, with those it has.
    """
    corpus = find_corpus(source)
    for group in groups or ():
        if corpus is not None and corpus.groups and group not in corpus.groups:
            raise _no_group(source, group, corpus.groups)
    skipped, seen = opening.setdefault("skipped", Counter()), dict[str, None]()
    for dialogue in open_dialogues(source, **opening):
        prompt = _prompt(dialogue)
        if prompt is None:
            skipped["no question"] += 1
            continue
        seen[prompt.category] = None
        if groups is None or prompt.category in groups:
            yield prompt
    if groups and seen and "shard" not in opening and not seen.keys() & {*groups}:
        raise _no_group(source, ", ".join(groups), seen)


def _no_group(source: str, group: str, known: Collection[str]) -> ValueError:
    listed = ", ".join(map(repr, islice(known, _GROUPS_SHOWN))) + (", …" if len(known) > _GROUPS_SHOWN else "")
    return ValueError(f"{source} has no group {group}.{did_you_mean(group, known)} Its groups: {listed}")


def _prompt(dialogue: Dialogue) -> Prompt | None:
    """None where nothing is asked."""
    turns: list[Turn] = []
    for written_role, content in dialogue.messages:
        role = role_of(written_role)
        if role is None or not isinstance(content, str):
            if any(turn.role == "user" for turn in turns):  # later questions may be about what cannot be shown
                break
            continue
        if content.strip() and (role != "system" or not turns):
            turns.append(Turn(role, encodable(content)))
    first = next((index for index, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return None
    system = [turn for turn in turns[:1] if turn.role == "system"]
    after = turns[first + 1 :]
    answers = (after[0].text,) if after and after[0].role == "assistant" else ()
    return Prompt(
        encodable(dialogue.id),
        (*system, turns[first]),
        encodable(dialogue.category),
        tuple(turn.text for turn in after if turn.role == "user"),
        tuple(encodable(text) for text in dialogue.references) or answers,
    )


def _resolve(source: str, path: str | None) -> tuple[Path | None, Corpus]:
    """Where rows lie: a local path, if they do, and the corpus they are of, which need not be a registered one."""
    local = Path(source if path is None else path).expanduser()
    exists = bool(source) and local.exists()
    corpus = find_corpus(source) if path is not None or not exists else None
    if exists:
        return local, corpus or Corpus(source, None, (), "", split=None)
    if path is not None:
        raise ValueError(f"no such file or folder: {path}.{_nearest(path)}")
    if corpus is not None:
        return None, corpus
    looks_local = local.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(source):
        raise ValueError(f"no such file or folder, known corpus or hub id: {source or '(empty)'}.{_nearest(source)}")
    return None, Corpus(source, source, (), "", split=None)


def _nearest(name: str) -> str:
    """What is known by a name like a missing one: a corpus, or what lies in the folder of a path."""
    path = Path(name).expanduser()
    corpora = [*CORPORA, *(corpus.hub for corpus in CORPORA.values() if corpus.hub is not None)]
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, beside) or did_you_mean(name, corpora)
