"""What is refused: each message names the numbers and settings that it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.decode.evaluation.certify.certify import Plan
from draftsmith.decode.evaluation.profile import heads_flops

REFUSED: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a plan without tokens", lambda: Plan(tokens=0), ("tokens", "0")),
    ("a plan without rows", lambda: Plan(batch=0), ("batch", "0")),
    ("heads without the target", lambda: heads_flops(PredictionHeads(2, 1, 8, None, "target")), ("projection",)),
]


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the words are compared below)
        call()
    assert all(word in str(refused.value) for word in words), refused.value
