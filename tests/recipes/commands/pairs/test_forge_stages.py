"""Recipes that a forge writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.decode.evaluation.tuning.tuner import Measurement
from draftsmith.recipes.commands.pairs.stages import combine_rows, kind_of


def test_settings_of_several_candidates_share_one_evaluation() -> None:
    def measured(name: str, method: str, **options: Any) -> Measurement:
        return Measurement(name, "", 1.0, 1.0, (1.0, 1.0), method=method, options=options)

    some = [
        measured("prompt lookup", "suffix"),
        measured("own", "speculative", gamma=2),
        measured("heads", "suffix", fallback="heads", datastore="table"),
        measured("runs/given", "speculative", gamma=4),
        measured("own", "speculative", gamma=4),
        measured("runs/given", "speculative", gamma=2),
    ]
    trained: dict[str, dict[str, Any]] = {"own": {"drafters": ["runs/own"]}, "heads": {"heads": "runs/heads"}}
    rows, parts = combine_rows(some, trained, ["runs/given"])
    assert [options.get("drafter") for _, options in rows] == [None, None, None, 2, None, 2], "each is opened once"
    assert parts == {"drafters": ["runs/own", "runs/given"], "heads": "runs/heads", "table": True}
    assert combine_rows(some[:1], trained, [])[1] == {"drafters": [], "table": False}


def test_the_kind_of_a_given_drafter_is_detected(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    make_llama(64).save_pretrained(tmp_path / "drafter")
    make_llama(64, pard_token=7).save_pretrained(tmp_path / "parallel")
    assert [kind_of(tmp_path / name) for name in ("drafter", "parallel")] == ["drafter", "parallel"]
