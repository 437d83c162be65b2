"""Streaming of dialogues, conversations and prompts from registered corpora, local files and hub datasets.

Each dropped row is counted under a reason, so that the counts of a report add up.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from ...checkpoints.storage.messages import did_you_mean
from ..cleaning.cleaner import Cleaner, Cleaning, role_of
from ..conversations import Conversation, CorpusReport, Dialogue, FollowUp, Prompt, Turn, encodable
from .files import SUFFIXES, WHOLE, Row, Shard, local_rows
from .hub import download, hub_rows
from .registry import CORPORA, Corpus, find_corpus

_GROUPS_SHOWN = 20
_FEW_IDS, _ROWS_AN_ID = 20, 4
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Opening(TypedDict, total=False):
    """Options for opening a source. `config`, `split`, `revision` and `file` override the values in the registry."""

    path: str | None
    """Local copy to use instead of the hub dataset."""
    config: str | None
    """Configuration of a hub dataset."""
    split: str | None
    """Split of a hub dataset, or of the data files in a directory."""
    revision: str | None
    """Revision of a hub dataset."""
    file: str | None
    """Data file in the hub repository, or URL of a file."""
    shard: Shard
    """Pair (index, count) that selects the rows with `number % count == index`."""


def open_dialogues(source: str, **opening: Unpack[Opening]) -> Iterator[Dialogue]:
    """Stream the rows of a source as dialogues, without cleaning.

    A source is a local file or directory, the name of a registered corpus, or a hub id (searched in this order).

    Raises ValueError if the source does not exist (the message suggests similar names), the hub cannot be reached, or a
    row has an unknown format.
    """
    corpus, rows = _open_rows(source, opening)
    yield from map(corpus.read, rows)


def _open_rows(source: str, opening: Opening) -> tuple[Corpus, Iterator[Row]]:
    shard = opening.get("shard", WHOLE)
    local, corpus = _resolve(source, opening.get("path"))
    split, file = opening.get("split") or corpus.split, opening.get("file") or corpus.file
    if local is None and file is not None and "://" in file:
        local = download(file)
    if local is not None:
        return corpus, local_rows(local, shard, split=split, columns=corpus.usable_columns)
    assert corpus.hub is not None
    return corpus, hub_rows(
        corpus.hub,
        shard,
        columns=corpus.usable_columns,
        near="" if corpus.name in CORPORA else _suggest_name(source),
        name=opening.get("config") or corpus.config,
        split=split or "train",
        revision=opening.get("revision") or corpus.revision,
        data_files=file,
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
    """Stream at most `limit` cleaned conversations of a source. See `Cleaner` for `tools` and `questions`.

    `report` is updated while the iterator is consumed. Raises ValueError for the same reasons as `open_dialogues`.
    """
    report = CorpusReport() if report is None else report
    cleaning = Cleaning() if cleaning is None else cleaning
    sets = [prompt for name in cleaning.contamination for prompt in read_prompts(name)]
    texts = [text for p in sets for text in (*(t.text for t in p.turns), *(f.question for f in p.follow_ups))]
    cleaner = Cleaner(cleaning, report, texts, tools=tools, questions=questions)
    cleaned = map(cleaner, open_dialogues(source, **opening))
    yield from islice((conversation for conversation in cleaned if conversation is not None), limit)


def read_prompts(
    source: str,
    *,
    groups: Collection[str] | None = None,
    skipped: Counter[str] | None = None,
    **opening: Unpack[Opening],
) -> Iterator[Prompt]:
    """Stream the prompts of an evaluation set or of conversations, optionally only of some categories (`groups`).

    The first question of a conversation is the prompt, its answer is a reference, and later questions are follow-ups.
    Rows without a question are counted in `skipped` under "no question".

    Raises ValueError if the source lacks one of the groups, or for the same reasons as `open_dialogues`.
    """
    corpus = find_corpus(source)
    for group in groups or ():
        if corpus is not None and corpus.groups and group not in corpus.groups:
            raise _no_group(source, group, corpus.groups)
    categories = dict[str, None]()
    for dialogue in open_dialogues(source, **opening):
        prompt = _prompt(dialogue)
        if prompt is None:
            if skipped is not None:
                skipped["no question"] += 1
            continue
        categories[prompt.category] = None
        if groups is None or prompt.category in groups:
            yield prompt
    if groups and categories and "shard" not in opening and not categories.keys() & {*groups}:
        raise _no_group(source, ", ".join(groups), categories)


def _no_group(source: str, group: str, known: Collection[str]) -> ValueError:
    listed = ", ".join(map(repr, islice(known, _GROUPS_SHOWN))) + (", …" if len(known) > _GROUPS_SHOWN else "")
    return ValueError(f"{source} has no group {group}.{did_you_mean(group, known)} Its groups: {listed}")


def _prompt(dialogue: Dialogue) -> Prompt | None:
    """Convert a dialogue to a prompt. Return None if it contains no question."""
    turns: list[Turn] = []
    for written_role, content in dialogue.messages:
        role = role_of(written_role)
        if role is None or not isinstance(content, str):
            if any(turn.role == "user" for turn in turns):  # later questions may refer to dropped content
                break
            continue
        if content.strip() and (role != "system" or not turns):
            turns.append(Turn(role, encodable(content)))
    first = next((index for index, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return None
    system = [turn for turn in turns[:1] if turn.role == "system"]
    questions, answers = list[str](), list[str]()
    for turn in turns[first:]:
        if turn.role == "user":
            questions.append(turn.text)
            answers.append("")
        else:
            answers[-1] = f"{answers[-1]}\n\n{turn.text}".lstrip("\n")
    own, *references = [(answer,) if answer else () for answer in answers]
    later = zip(answers[:-1], questions[1:], references, strict=True)
    return Prompt(
        encodable(dialogue.id),
        (*system, turns[first]),
        encodable(dialogue.category),
        tuple(FollowUp(*each) for each in later),
        tuple(encodable(text) for text in dialogue.references) or own,
    )


def _resolve(source: str, path: str | None) -> tuple[Path | None, Corpus]:
    """Return the local path of a source (None if remote) and its corpus entry (a default entry if unregistered)."""
    local = Path(source if path is None else path).expanduser()
    exists = bool(source) and local.exists()
    corpus = find_corpus(source) if path is not None or not exists else None
    if exists:
        return local, corpus or Corpus(source, None, (), "", split=None)
    if path is not None:
        raise ValueError(f"no such file or folder: {path}.{_suggest_name(path)}")
    if corpus is not None:
        return None, corpus
    looks_local = local.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(source):
        raise ValueError(f"no such file, folder, known corpus or hub id: {source or '(empty)'}.{_suggest_name(source)}")
    return None, Corpus(source, source, (), "", split=None)


def _suggest_name(name: str) -> str:
    """Return a hint that names a file or corpus with a similar name, or an empty string."""
    path = Path(name).expanduser()
    corpora = [*CORPORA, *(corpus.hub for corpus in CORPORA.values() if corpus.hub is not None)]
    entries = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, entries) or did_you_mean(name, corpora)


@dataclass(frozen=True, slots=True)
class Part:
    """Corpus of a mixture.

    Attributes:
        weight: Number of uses of each row per epoch. With 1.5, every row is used once, and half of the rows, selected
            by a hash of their ids, a second time.
        open_pass: Function that opens the corpus for the n-th pass of an epoch, starting at 0.
        by_content: Whether to hash contents in addition to ids, for corpora with few distinct ids.
    """

    weight: float
    open_pass: Callable[[int], Iterator[Conversation]]
    by_content: bool = False


def mix(parts: Sequence[Part], seed: int) -> Iterator[Conversation]:
    """Interleave the rows of all corpora in random order. The weight of a corpus is the number of uses of each row."""
    streams = [_iterate_passes(part, seed) for part in parts]
    weights = [part.weight for part in parts]
    rng = np.random.default_rng(seed)
    while streams:
        chosen = 0
        if len(streams) > 1:
            chosen = int(np.searchsorted(np.cumsum(weights), rng.random() * sum(weights), side="right"))
            chosen = min(chosen, len(streams) - 1)  # the sum is rounded
        try:
            yield next(streams[chosen])
        except StopIteration:
            del streams[chosen], weights[chosen]


def hash_share(name: str) -> float:
    """Hash a name to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def has_few_ids(conversations: Iterable[Conversation]) -> bool:
    """Check if there are fewer than 20 distinct ids, and at least four conversations per id on average."""
    ids, count = set[str](), 0
    for count, conversation in enumerate(conversations, start=1):  # noqa: B007 (used after the loop)
        ids.add(conversation.id)
        if len(ids) >= _FEW_IDS:
            return False
    return count >= _ROWS_AN_ID * max(len(ids), 1)


def draw_key(conversation: Conversation, *, by_content: bool) -> str:
    """Return the string whose hash selects a conversation: its id, or its id and content."""
    return f"{conversation.id} {conversation.turns}" if by_content else conversation.id


def _iterate_passes(part: Part, seed: int) -> Iterator[Conversation]:
    whole, rest = divmod(part.weight, 1)
    for number, share in enumerate([1.0] * int(whole) + [rest] * (rest > 0)):
        for row in part.open_pass(number):
            if share == 1 or hash_share(f"{seed} {draw_key(row, by_content=part.by_content)}") < share:
                yield row
