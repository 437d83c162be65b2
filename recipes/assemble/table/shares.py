"""What each process of a count reads: its own rows where each row can be judged by itself, else the whole corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ....data.conversations import Conversation, CorpusReport
from ....data.sources.mixture import is_used, pass_shares
from ....train.table.documents import CONVERSATION, ROW, Numbered, Share
from ...schema.data import DataSection, SourceSection
from ..data import all_reports, is_held_out, read_part, say_form, training_conversations

_PASS = 1 << 40
"""More rows than any corpus has: what the numbers of two passes through corpora lie apart."""


def numbering(section: DataSection, world: int) -> str:
    """By what `world` processes number what they count: `ROW`, the numbers of rows, or `CONVERSATION`, which every
    process counts in all rows: one process does so, and all do where a row depends on those before it."""
    alone = not section.clean.get("duplicates") and all(part.limit is None for part in section.parts())
    return ROW if world > 1 and alone else CONVERSATION


@dataclass
class CorpusStats:
    """What was read of a section's corpora: a report and the forms of rows of each, the conversations to count, and
    those held out."""

    reports: list[CorpusReport]
    forms: list[list[str]]
    conversations: int = 0
    held_out: int = 0

    @classmethod
    def empty(cls, section: DataSection) -> CorpusStats:
        parts = section.parts()
        return cls([CorpusReport() for _ in parts], [[] for _ in parts])

    def merge(self, other: CorpusStats) -> None:
        """Add what another process read of its own rows."""
        for report, more in zip(self.reports, other.reports, strict=True):
            report.merge(more)
        for forms, found in zip(self.forms, other.forms, strict=True):
            forms += [form for form in found if form not in forms]
        self.conversations += other.conversations
        self.held_out += other.held_out

    def corpus(self, parts: Sequence[SourceSection]) -> dict[str, Any]:
        """What became of the rows of all corpora together, and of each; for an artifact's manifest."""
        return all_reports(parts, self.reports)


@dataclass
class Reading:
    """A process's share of a section's conversations with their numbers (`by`: see `numbering`), until `stopping`;
    `stats` fills on the way."""

    section: DataSection
    share: Share
    by: str
    stopping: Callable[[], bool]
    log_forms: bool
    stats: CorpusStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = CorpusStats.empty(self.section)

    def __iter__(self) -> Iterator[Numbered]:
        for number, conversation in self._own_rows() if self.by == ROW else self._whole():
            if self.stopping():
                return
            self.stats.conversations += 1
            if self.share.wants(number):
                yield number, conversation

    def _whole(self) -> Iterator[Numbered]:
        reports = self.stats.reports
        return enumerate(training_conversations(self.section, reports, tell=self.log_forms, hold=self._hold))

    def _hold(self, _: Conversation) -> None:
        self.stats.held_out += 1

    def _own_rows(self) -> Iterator[Numbered]:
        """Pass after pass, so that numbers ascend; in which order counts are made makes no difference to them."""
        first = 0
        for index, part in enumerate(self.section.parts()):
            for again, used in enumerate(pass_shares(part.weight)):
                shard = ((self.share.rank - first) % self.share.world, self.share.world)
                # a later pass over the same rows is not counted again
                report = CorpusReport() if again else self.stats.reports[index]
                found = None if again else partial(self._found, index, part)
                for conversation in read_part(self.section, part, report, found, shard):
                    if is_held_out(self.section, conversation):
                        self.stats.held_out += not again
                    elif is_used(conversation, used, 0):
                        yield first + conversation.number, conversation
                first += _PASS

    def _found(self, index: int, part: SourceSection, form: str) -> None:
        self.stats.forms[index].append(form)
        if self.log_forms:
            say_form(part, form)
