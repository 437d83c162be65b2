"""What each process of a count reads: together everything once, and no row of another's is looked into."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data.conversations import CorpusReport
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import training_conversations
from draftsmith.recipes.assemble.table.count import Job
from draftsmith.recipes.assemble.table.shares import CorpusStats, Reading, numbering
from draftsmith.recipes.assemble.table.state import LAUNCH, read_positions
from draftsmith.recipes.schema.data import DataSection, SourceSection
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.documents import CONVERSATION, ROW, Share, read_progress
from hypothesis import given, settings
from hypothesis import strategies as st

WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 2.25])
ROWS = ["good", "good", "good", "other form", "torn", "no form", "alone", "unknown role"]


def line(kind: str, name: str) -> str:
    """A row of a JSON-lines file, good or at fault."""
    turns = [{"role": "user", "content": f"question {name}"}, {"role": "assistant", "content": f"answer {name}"}]
    rows: dict[str, Any] = {
        "good": {"id": name, "messages": turns},
        "other form": {"id": name, "prompt": f"question {name}", "response": f"answer {name}"},
        "no form": {"id": name, "colour": "red"},
        "alone": {"id": name, "messages": turns[:1]},
        "unknown role": {"id": name, "messages": [{"role": "oracle", "content": "?"}, *turns]},
    }
    return json.dumps(rows[kind]) if kind in rows else '{"id": "torn'


def write_rows(path: Path, kinds: list[str]) -> str:
    path.write_text("".join(f"{line(kind, f'{path.stem}-{n}')}\n\n" for n, kind in enumerate(kinds)))
    return str(path)


def reading(section: DataSection, rank: int, world: int, by: str = ROW) -> Reading:
    return Reading(section, Share(rank, world), by, lambda: False, log_forms=False)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_shares_of_all_processes_are_the_corpus(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    parts = []
    for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]:
        source = write_rows(folder / f"{name}.jsonl", data.draw(st.lists(st.sampled_from(ROWS), max_size=20)))
        parts.append(SourceSection(source=source, weight=data.draw(WEIGHTS)))
    unknown = data.draw(st.sampled_from(["drop", "cut"]))
    section = DataSection(mixture=parts, skip_broken=True, heldout_share=0.3, clean={"unknown_roles": unknown})
    reports, held = [CorpusReport() for _ in parts], []
    whole = list(training_conversations(section, reports, tell=False, hold=held.append))
    world = data.draw(st.integers(1, 5))
    numbers: list[int] = []
    found, seen = Counter[Any](), CorpusStats.empty(section)
    for rank in range(world):
        mine = reading(section, rank, world)
        own = list(mine)
        assert [number for number, _ in own] == sorted({number for number, _ in own})
        assert all(number % world == rank for number, _ in own)
        numbers += [number for number, _ in own]
        found.update(conversation for _, conversation in own)
        seen.merge(mine.stats)
    assert found == Counter(whole)
    assert len(set(numbers)) == len(numbers)
    assert [report.as_dict() for report in seen.reports] == [report.as_dict() for report in reports]
    assert (seen.conversations, seen.held_out) == (len(whole), len(held))
    alone = reading(section, 0, 1)
    assert sorted(number for number, _ in alone) == sorted(numbers), "a row's number is everywhere the same"
    assert list(map(set, seen.forms)) == list(map(set, alone.stats.forms))
    assert all(len(forms) == len(set(forms)) for forms in seen.forms)


@pytest.mark.parametrize("kind", ["torn", "no form"])
def test_a_row_at_fault_is_found_by_its_own_process_alone(kind: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["good"] * 7 + [kind] + ["good"] * 4)
    section = DataSection(source=source, heldout_share=0)
    for rank in range(3):
        if rank == 7 % 3:
            with pytest.raises(ValueError, match=r"a\.jsonl, row 15: "):
                list(reading(section, rank, 3))
        else:
            assert [number for number, _ in reading(section, rank, 3)] == [*range(rank, 12, 3)]


def test_rows_that_others_decide_about_are_read_by_all() -> None:
    one, two = {"source": "a.jsonl"}, {"source": "b.jsonl", "limit": 3}
    for values, expected in (
        (one, ROW),
        (one | {"clean": {"duplicates": []}}, ROW),
        (one | {"clean": {"html": "drop"}, "skip_broken": True}, ROW),
        (one | {"clean": {"duplicates": ["id"]}}, CONVERSATION),
        (two, CONVERSATION),
        ({"mixture": [SourceSection(**one), SourceSection(**two)]}, CONVERSATION),
    ):
        section = DataSection(**values)
        assert [numbering(section, world) for world in (1, 2, 16)] == [CONVERSATION, expected, expected]


def count(recipe: TableRecipe, tokenizer: Any, rank: int, world: int) -> Job:
    """What one of several processes counts, while no other runs."""
    job = Job(
        recipe,
        SimpleNamespace(process_index=rank, num_processes=world, is_main_process=False),
        tokenizer,
        len(tokenizer),
    )
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / LAUNCH).write_text(job.launch)
    job.count()
    return job


def test_counts_resume_by_their_own_numbers(corpus: Path, tmp_path: Path) -> None:
    """Rank 1 of 3 is through, the others never began: who goes on counts the rows that are left."""
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "heldout_share": 0.2}
    for first, then in ((3, 1), (3, 2), (1, 4)):
        values = {"kind": "table", "out": str(tmp_path / f"{first}-{then}"), "tokenizer": str(corpus / "tokenizer")}
        recipe = TableRecipe.model_validate(values | {"data": data})
        before = count(recipe, tokenizer, first // 2, first)
        documents = before.counted(check=True).documents
        expected = CONVERSATION if first == 1 else ROW
        assert read_positions(before.folder)[1] == before.by == expected
        for rank in range(then):
            job = count(recipe, tokenizer, rank, then)
            assert job.by == expected
        assert all(read_progress(path).by in (expected, None) for path in before.folder.glob("rank-*"))
        kept = len(list(training_conversations(recipe.data, [CorpusReport()], tell=False)))
        assert 0 < kept < 80
        assert documents == kept if first == 1 else 0 < documents < kept / 2
        assert job.counted(check=True).documents == kept
