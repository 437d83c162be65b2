"""Questions from templates: different, complete, balanced and reproducible."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from draftsmith.data.sources import questions
from draftsmith.data.sources.questions import template_questions


def test_questions_are_different_complete_and_reproducible() -> None:
    rows = template_questions(900, seed=3)
    texts = [row.turns[0].text for row in rows]
    assert len(set(texts)) == len({row.id for row in rows}) == 900
    assert Counter(row.id.split("-")[0] for row in rows) == {"code": 300, "mathematics": 300, "chat": 300}
    assert not [text for text in texts if re.search(r"[{}|]|\\n", text) or text != text.strip()]
    assert texts == [row.turns[0].text for row in template_questions(900, seed=3)]
    assert set(texts) != {row.turns[0].text for row in template_questions(900, seed=4)}


def test_exhausted_templates_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = json.loads(questions._FILE.read_text(encoding="utf-8"))["values"]
    (tmp_path / "q.json").write_text(json.dumps({"templates": {"chat": ["What is a {reader}?"]}, "values": values}))
    monkeypatch.setattr(questions, "_FILE", tmp_path / "q.json")
    assert len(template_questions(14)) == 14
    with pytest.raises(ValueError, match=r"14 different questions, but 15"):
        template_questions(15)
