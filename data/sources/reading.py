"""Dialogues, conversations and prompts in: of a registered corpus, local files or a hub dataset, as one stream.

Every row that does not survive is counted under a named reason, so that the counts of a report add up.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..cleaning.cleaner import ROLES, Cleaner
from ..cleaning.options import Cleaning
from ..conversations import Conversation, CorpusReport, Dialogue, Prompt, Turn
from .files import MAX_ROW_BYTES, SUFFIXES, Row, Selection, local_rows
from .forms import form_of, read_dialogue, usable_columns
from .hub import hub_rows
from .registry import Corpus, find_corpus, nearest_corpus

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Opening(TypedDict, total=False):
    """What `open_dialogues` takes beside the source."""

    path: str | None
    config: str | None
    split: str | None
    revision: str | None
    file: str | None
    streaming: bool
    skip_broken: bool
    skipped: Counter[str] | None
    shard: tuple[int, int]
    start: int
    max_row_bytes: int
    on_form: Callable[[str], None] | None


def open_dialogues(
    source: str,
    *,
    path: str | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    streaming: bool = False,
    skip_broken: bool = False,
    skipped: Counter[str] | None = None,
    shard: tuple[int, int] = (0, 1),
    start: int = 0,
    max_row_bytes: int = MAX_ROW_BYTES,
    on_form: Callable[[str], None] | None = None,
) -> Iterator[Dialogue]:
    """The rows of a source as they were written, each as a dialogue.

    `source` is the first of these that there is: a local file or folder (see `files.SUFFIXES`; packed with gzip or
    Zstandard too), the name or hub id of a registered corpus (see `corpora.CORPORA`), any other hub id. `path` is a
    local copy that stands in for the hub. `config`, `split`, `revision` and `file` (a data file of the repository) go
    to the hub, in place of what the registry says; `split` also picks files of a folder by their names. A hub dataset
    is copied to the cache of `datasets` and mapped, or with `streaming` read as it arrives; local files are always
    streams. The memory that is needed does not grow with a source, except for the documentation of the installed
    packages.

    Rows are numbered from 0 over all files; those numbered `start` and above are read, and of them, by `shard`
    (index, count), those with `number % count == index`. With `skip_broken`, rows that cannot be read (see
    `files.Selection`), or are in no known form, are counted in `skipped` by their reasons and passed over. `on_form`
    gets each form that rows are found in, once: "instruction + output".

    Raises:
        ValueError: no such source (with the nearest name), or an unreachable hub; when it is reached, a row or file
            that cannot be read. The message names file, row and what was expected.
    """
    selection = Selection(shard, start, skip_broken, max_row_bytes)
    skipped = Counter() if skipped is None else skipped
    local, corpus, hub = _resolve(source, path)
    columns = usable_columns if corpus is None else corpus.usable_columns
    if local is not None:
        split = split or (corpus.split if corpus is not None else None)
        rows = local_rows(local, selection, split=split, columns=columns, skipped=skipped)
    elif corpus is not None and corpus.rows is not None:
        rows = (row for row in corpus.rows(split or corpus.split) if selection.wants(row.number))
    else:
        rows = hub_rows(
            hub,
            selection,
            config=config or (corpus.config if corpus else None),
            split=split or (corpus.split if corpus else "train"),
            revision=revision or (corpus.revision if corpus else None),
            file=file or (corpus.file if corpus else None),
            streaming=streaming,
            columns=columns,
            missing=f"no such local file or folder: {source}{_nearest(source)}" if corpus is None else "",
        )
    return _dialogues(rows, corpus, selection, skipped, on_form)


def _dialogues(
    rows: Iterator[Row],
    corpus: Corpus | None,
    selection: Selection,
    skipped: Counter[str],
    on_form: Callable[[str], None] | None,
) -> Iterator[Dialogue]:
    read, form_of_row = (read_dialogue, form_of) if corpus is None else (corpus.read, corpus.form)
    seen: set[str] = set()
    for row in rows:
        try:
            dialogue = read(row)
            form = form_of_row(row) if on_form is not None else ""
        except ValueError:
            if not selection.skip_broken:
                raise
            skipped["no known form"] += 1
            continue
        if on_form is not None and form not in seen:
            seen.add(form)
            on_form(form)
        yield dialogue


def read_conversations(
    source: str,
    *,
    limit: int | None = None,
    report: CorpusReport | None = None,
    cleaning: Cleaning | None = None,
    **opening: Unpack[Opening],
) -> Iterator[Conversation]:
    """Stream the clean conversations of a source; `opening` is what `open_dialogues` takes.

    At most `limit` conversations are yielded. `report` is filled while the iterator is consumed, and counts rows that
    were passed over as broken too. `cleaning` says what is cut, dropped and rewritten (see `Cleaning`). The sets that
    its `contamination` names are read as prompts, each from its own source.

    Raises:
        ValueError: as `open_dialogues`; a negative limit.
    """
    numbered = numbered_conversations(source, limit=limit, report=report, cleaning=cleaning, **opening)
    return (conversation for _, conversation in numbered)


def numbered_conversations(
    source: str,
    *,
    limit: int | None = None,
    report: CorpusReport | None = None,
    cleaning: Cleaning | None = None,
    **opening: Unpack[Opening],
) -> Iterator[tuple[int, Conversation]]:
    """`read_conversations`, each with the number of its row, which is the same for all shards."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}, expected 0 or more")
    report = CorpusReport() if report is None else report
    cleaning = Cleaning() if cleaning is None else cleaning
    skipped = opening.get("skipped")
    broken: Counter[str] = Counter()
    opening["skipped"] = broken
    dialogues = open_dialogues(source, **opening)
    texts = [text for name in cleaning.contamination for text in _asked(read_prompts(name))]
    cleaner = Cleaner(cleaning, report, texts)

    def count_broken() -> None:
        if skipped is not None:
            skipped.update(broken)
        for reason, rows in broken.items():
            report.rows += rows
            report.dropped[f"broken: {reason}"] += rows
        broken.clear()

    def conversations() -> Iterator[tuple[int, Conversation]]:
        if limit == 0:
            return
        kept = 0
        for dialogue in dialogues:
            count_broken()
            conversation = cleaner(dialogue)
            if conversation is not None:
                kept += 1
                yield dialogue.number, conversation
                if kept == limit:
                    return
        count_broken()

    return conversations()


def read_prompts(
    source: str,
    *,
    limit: int | None = None,
    groups: Collection[str] | None = None,
    **opening: Unpack[Opening],
) -> Iterator[Prompt]:
    """Stream the questions of an evaluation set, or of conversations; `opening` is what `open_dialogues` takes.

    Of a conversation the system message and the first question are the prompt, the answer to it is a reference, and
    later questions are follow-ups, up to a message by neither side. Rows without a question are passed over, and
    counted in `skipped` under "no question". With `groups` only prompts of these categories are yielded, at most
    `limit` of them.

    Raises:
        ValueError: as `open_dialogues`; a negative limit; groups that the source does not have, with those it has.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}, expected 0 or more")
    corpus = _resolve(source, opening.get("path"))[1]
    if groups is not None and corpus is not None and corpus.groups:
        for group in groups:
            if group not in corpus.groups:
                raise ValueError(_no_group(source, group, corpus.groups))
    given = opening.get("skipped")
    skipped: Counter[str] = Counter() if given is None else given
    opening["skipped"] = skipped
    dialogues = open_dialogues(source, **opening)

    def prompts() -> Iterator[Prompt]:
        if limit == 0:
            return
        count, seen = 0, set[str]()
        for dialogue in dialogues:
            prompt = _prompt(dialogue)
            if prompt is None:
                skipped["no question"] += 1
                continue
            seen.add(prompt.category)
            if groups is None or prompt.category in groups:
                count += 1
                yield prompt
                if count == limit:
                    return
        if groups is not None and count == 0 and opening.get("shard", (0, 1)) == (0, 1):
            raise ValueError(_no_group(source, ", ".join(groups), sorted(seen)))

    return prompts()


def _prompt(dialogue: Dialogue) -> Prompt | None:
    """None where nothing is asked."""
    turns: list[Turn] = []
    for written_role, content in dialogue.messages:
        role = ROLES.get(written_role) if isinstance(written_role, str) else None
        if role is None or not isinstance(content, str):
            if any(turn.role == "user" for turn in turns):  # later questions may be about what cannot be shown
                break
            continue
        if content.strip() and (role != "system" or not turns):
            turns.append(Turn(role, _encodable(content)))
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return None
    system = [turn for turn in turns[:1] if turn.role == "system"]
    after = turns[first + 1 :]
    answers = (after[0].text,) if after and after[0].role == "assistant" else ()
    return Prompt(
        _encodable(dialogue.id),
        (*system, turns[first]),
        _encodable(dialogue.category),
        tuple(turn.text for turn in after if turn.role == "user"),
        tuple(_encodable(text) for text in dialogue.references) or answers,
    )


def _encodable(text: str) -> str:
    """Half an emoji has no UTF-8: what cannot be encoded becomes the replacement character."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _asked(prompts: Iterator[Prompt]) -> Iterator[str]:
    for prompt in prompts:
        yield from (turn.text for turn in prompt.turns)
        yield from prompt.follow_ups


def _no_group(source: str, group: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(group, known, n=1)
    return (
        f"{source} has no prompt of the group {group}{f' (did you mean {close[0]}?)' if close else ''}; its groups are "
        + (", ".join(name or "(none named)" for name in known) or "(none)")
    )


def _resolve(source: str, path: str | None) -> tuple[Path | None, Corpus | None, str | None]:
    """Where rows lie: a local path, the registered corpus they are of, a hub id; None what does not apply.

    Raises:
        ValueError: nowhere.
    """
    local = Path(source if path is None else path).expanduser()
    exists = bool(source) and local.exists()
    corpus = find_corpus(source) if path is not None or not exists else None
    if exists:
        return local, corpus, None
    if path is not None:
        raise ValueError(f"no such file or folder: {path}{_nearest(path)}")
    if corpus is not None:
        return None, corpus, corpus.hub
    looks_local = local.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(source):
        raise ValueError(f"no such file or folder, known corpus or hub id: {source or '(empty)'}{_nearest(source)}")
    return None, None, source


def _nearest(name: str) -> str:
    """What is known by a name like a missing one: a corpus, or what lies in the folder of a path."""
    path = Path(name).expanduser()
    corpus = nearest_corpus(name)
    near: list[Any] = [f"the corpus {corpus}"] if corpus is not None else []
    if path.parent.is_dir():
        names = sorted(entry.name for entry in path.parent.iterdir())
        near += [path.with_name(close) for close in difflib.get_close_matches(path.name, names, n=1)]
    elif not near and not _HUB_ID.fullmatch(name):
        return f" (the folder {path.parent} does not exist)"
    return f" (did you mean {' or '.join(map(str, near))}?)" if near else ""
