"""numpy's AVX-512 is switched off by a restart, where it has any and sorts slowly with it."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import pytest
from draftsmith.recipes.session import restart

SWITCH = "NPY_DISABLE_CPU_FEATURES"
numpy_core = import_module("numpy._core._multiarray_umath")


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> str:
    """A processor with AVX-512, as far as numpy is concerned."""
    (name,) = [name for name in ("X86_V4", "AVX512_SKX") if name in numpy_core.__cpu_dispatch__][:1] or [""]
    if not name:
        pytest.skip("this numpy has no AVX-512")
    monkeypatch.setitem(numpy_core.__cpu_features__, name, True)
    return name


def test_the_switch_is_set_beside_what_is_switched_off(avx512: str) -> None:
    found = restart.without_avx512({SWITCH: "AVX2,FMA3", "NPY_ENABLE_CPU_FEATURES": "AVX2", "HOME": "/root"})
    assert found is not None
    assert (found["HOME"], found.get("NPY_ENABLE_CPU_FEATURES")) == ("/root", None)
    assert {"AVX2", "FMA3", avx512} <= set(found[SWITCH].split())
    assert restart.without_avx512(found) is None, "no second restart"


def test_a_restart_keeps_the_arguments(avx512: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(restart, "sorting_seconds", lambda: 50e-9)
    monkeypatch.setattr(sys, "argv", ["draftsmith", "train", "table.yaml"])
    restart.restart_where_sorting_is_slow()
    assert not started, "a fork of another program"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "draftsmith", "train", "table.yaml"])
    restart.restart_where_sorting_is_slow()
    monkeypatch.setattr(restart, "sorting_seconds", lambda: 5e-9)
    restart.restart_where_sorting_is_slow()
    ((program, arguments, environment),) = started
    assert program == arguments[0] == sys.executable
    assert arguments[1:] == ["-m", "draftsmith", "train", "table.yaml"]
    assert avx512 in environment[SWITCH]
