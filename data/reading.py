"""Conversations in: local files or a hub dataset, whatever their row form, as one clean stream.

Every row that does not survive is counted under a named reason, so that the counts of a report add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .cleaning import clean
from .conversations import Conversation, CorpusReport
from .files import Row, open_source
from .forms import read_dialogue


def read_conversations(
    source: str,
    *,
    split: str = "train",
    revision: str | None = None,
    file: str | None = None,
    limit: int | None = None,
    report: CorpusReport | None = None,
) -> Iterator[Conversation]:
    """Stream the conversations of a local file or folder, or of a hub dataset.

    `source` is a .json (one list), .jsonl or .parquet file, a folder of them (read in sorted order), or else a hub
    id; `split`, `revision` and `file` (a data file in the repository) apply to the hub alone. At most `limit`
    conversations are yielded. `report` is filled while the iterator is consumed.

    The row's form is found from its columns (see `FORMS`). Leading assistant turns and trailing user turns are cut;
    an empty message goes together with its question or answer; a conversation that does not alternate after that,
    or that has a role the table `ROLES` does not know, is dropped and counted.

    Raises:
        ValueError: no such file (with the nearest name) or unreachable hub; a file that does not parse; a row that
            is not an object or fits no form. The message names file, row and what was expected.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}, expected 0 or more")
    rows = open_source(source, split=split, revision=revision, file=file)
    return _conversations(rows, limit, report if report is not None else CorpusReport())


def _conversations(rows: Iterable[Row], limit: int | None, report: CorpusReport) -> Iterator[Conversation]:
    if limit == 0:
        return
    for row in rows:
        conversation = clean(read_dialogue(row), report)
        if conversation is not None:
            yield conversation
            if report.kept == limit:
                return
