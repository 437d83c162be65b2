"""What the commands refuse before anything is decoded: each message names the option, and both numbers or files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.commands.evaluation.certify import CertifyOptions, make_plan
from draftsmith.recipes.commands.evaluation.energy import energy_command, run_energy
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe

COMMAND: dict[str, Any] = {"runs": 1, "context": 4, "out": None}
REFUSED: list[tuple[str, Callable[[str], Any], tuple[str, ...]]] = [
    ("energy: an empty batch", lambda target: run_energy(target, batches=(1, 0)), ("--batch", "0")),
    ("energy: a batch twice", lambda target: run_energy(target, batches=(2, 4, 2)), ("--batch", "2")),
    ("energy: no batch", lambda target: run_energy(target, batches=()), ("--batch",)),
    ("energy: no runs", lambda target: run_energy(target, runs=0), ("--runs", "0")),
    ("energy: no context", lambda target: run_energy(target, context=0), ("--context", "0")),
    ("energy: too much context", lambda target: run_energy(target, context=512), ("--context 512", "512 positions")),
    ("energy: no JSON", lambda target: run_energy(target, out=Path("table.txt")), ("--out", "table.txt")),
    ("energy: no numbers", lambda target: energy_command(None, [], target, batch="1;2", **COMMAND), ("'1;2'",)),
    ("energy: no target", lambda target: energy_command(None, [], None, batch="1", **COMMAND), ("--target T",)),
    ("energy: no type", lambda target: energy_command("dtype=float8", [], target, batch="1", **COMMAND), ("dtype",)),
    ("certify: a level of 2", lambda _: make_plan(CertifyOptions(level=2.0), 4, 0), ("level", "2.0")),
    ("certify: no bias", lambda _: make_plan(CertifyOptions(power=0.0), 4, 0), ("bias", "0.0")),
    ("certify: no tokens", lambda _: make_plan(CertifyOptions(tokens=0), 4, 0), ("tokens", "0")),
    ("an unknown key", lambda _: evaluate_recipe("all-methods", ["max_new_token=2"], {}), ("'max_new_tokens'",)),
    ("another kind", lambda _: evaluate_recipe("quickstart", [], {}), ("'quickstart'",)),
    ("no target", lambda _: evaluate_recipe("limit=3", [], {"target": None, "drafter": "D"}), ("--target T",)),
]


@pytest.fixture(scope="module")
def target(stand_ins: Any) -> str:
    """Of 512 positions."""
    return str(stand_ins.target("JackFram/llama-68m"))


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(target: str, call: Callable[[str], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the words are compared below)
        call(target)
    assert all(word in str(refused.value) for word in words), refused.value
