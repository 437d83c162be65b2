"""The number of threads follows the idle cores."""

import os
import sys
from pathlib import Path

import pytest
from draftsmith.recipes.session import threads

BEFORE = """cpu  100 0 10 900 5 0 0 0 0 0
cpu0 50 0 5 450 5 0 0 0 0 0
cpu1 50 0 5 450 0 0 0 0 0 0
cpu2 7 0 0 3 0 0 0 0 0 0
intr 1
"""
AFTER = """cpu  110 0 10 910 5 0 0 0 0 0
cpu0 60 0 5 450 5 0 0 0 0 0
cpu1 50 0 5 458 2 0 0 0 0 0
cpu2 7 0 0 3 0 0 0 0 0 0
intr 2
"""


@pytest.mark.parametrize(("cores", "idle"), [({0, 1}, 1.0), ({0}, 0.0), ({1}, 1.0), ({0, 1, 2}, 2.0)])
def test_idle_cores_are_counted_among_those_of_the_process(cores: set[int], idle: float) -> None:
    assert threads.count_idle(BEFORE, AFTER, cores) == pytest.approx(idle)


@pytest.mark.parametrize(
    ("command", "setting", "expected"), [("train", None, "1"), ("train", "7", "7"), ("show", None, None)]
)
def test_the_command_line_respects_the_users_setting(
    command: str, setting: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(BEFORE)
    monkeypatch.setattr(threads, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(threads.time, "sleep", lambda _: (tmp_path / "stat").write_text(AFTER))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sys, "argv", ["draftsmith", command])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    line = threads.choose_threads()
    assert ("1 of 2 cores" in line) == (expected == "1")
    assert os.environ.get("OMP_NUM_THREADS") == expected
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
