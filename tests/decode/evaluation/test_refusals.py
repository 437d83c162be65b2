"""What is refused: each message names the numbers and settings that it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.decode.evaluation.certify.certify import Plan
from draftsmith.decode.evaluation.certify.uniformity import tokens_for
from draftsmith.decode.evaluation.flops import forward_flops, heads_flops
from transformers import LlamaConfig, MixtralConfig

LLAMA = LlamaConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=80)
REFUSED: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a plan without tokens", lambda: Plan(tokens=0), ("tokens", "0")),
    ("a plan without rows", lambda: Plan(batch=0), ("batch", "0")),
    ("a plan that is never wrong", lambda: Plan(level=1.0), ("level", "1.0")),
    ("a bias above 1", lambda: tokens_for(2, 1e-6, 0.99), ("bias", "2")),
    ("a forward of nothing", lambda: forward_flops(LLAMA, 0, 3), ("0 new", "3 cached")),
    ("a negative cache", lambda: forward_flops(LLAMA, 2, -1), ("2 new", "-1 cached")),
    ("no rows", lambda: forward_flops(LLAMA, 2, 3, rows=0), ("0 rows",)),
    ("an unknown family", lambda: forward_flops(MixtralConfig(), 1, 1), ("'mixtral'", "'mistral'")),
    ("heads without the target", lambda: heads_flops(PredictionHeads(2, 1, 8, None, "target")), ("projection",)),
]


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the words are compared below)
        call()
    assert all(word in str(refused.value) for word in words), refused.value
