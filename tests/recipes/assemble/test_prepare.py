"""The held-out split: whole conversations, whatever their ids look like."""

from __future__ import annotations

from draftsmith.data.conversations import Conversation
from draftsmith.recipes.assemble.data import is_held_out
from draftsmith.recipes.schema.data import DataSection


def share_of(ids: list[str]) -> float:
    section = DataSection(source="any", heldout_share=0.2)
    return sum(is_held_out(section, Conversation(name, ())) for name in ids) / len(ids)


def test_rows_are_held_out_one_by_one_and_parts_of_one_conversation_together() -> None:
    # 1000 independent rows at 0.2: outside [0.15, 0.25] with a probability under 1e-4.
    assert 0.15 < share_of([f"alpaca_data-{number}" for number in range(1000)]) < 0.25
    assert 0.15 < share_of([f"identity_{number}" for number in range(1000)]) < 0.25
    for whole in ("QWJhYvA", "abcdefg", "0123456"):
        assert share_of([f"{whole}_{part}" for part in range(50)]) in (0.0, 1.0)
