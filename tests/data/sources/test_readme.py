"""Each row of the README's table of forms is read as it says there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import draftsmith
import pytest
from draftsmith.data.conversations import CorpusReport
from draftsmith.data.sources.reading import read_conversations

README = Path(draftsmith.__path__[0]) / "data" / "README.md"
LINES = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
TABLE = [line for line in LINES if line[1].startswith(('`{"', "`[{", '`"'))]


@pytest.mark.parametrize(("form", "written", "turns"), TABLE, ids=[form for form, _, _ in TABLE])
def test_a_row_of_the_table_is_read_as_it_says(form: str, written: str, turns: str, tmp_path: Path) -> None:
    source, forms, report = tmp_path / "rows.jsonl", list[str](), CorpusReport()
    rows = [span for span in re.findall(r"`(.+?)`", written) if span[0] in '{["']
    source.write_text("".join(json.dumps(json.loads(row)) + "\n" for row in rows))
    options = {"tools": True, "questions": True, "report": report, "on_form": forms.append}
    (conversation,) = read_conversations(str(source), **options)
    expected = [span.replace("\\n", "\n").partition(" ") for span in re.findall(r"`(.+?)`", turns)]
    assert [(turn.role, turn.text) for turn in conversation.turns] == [(role, text) for role, _, text in expected]
    assert forms == [form]
    assert set(report.unused_columns) <= {"rejected"}
    assert (report.rows, report.kept, report.exchanges) == (1, 1, report.exchanges_kept)
