"""Heads whose target ZeRO-3 spreads, and heads trained with their target, go on after a signal as if none had come.

What they learn is compared with one process's by the recipes' tests; here all parameters are spread, however small.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow  # one test of ZeRO-3 with heads is in the recipes'

# 33 tokens by 17: sizes that two processes do not divide evenly
UNEVEN = {
    "hidden_size": 17,
    "intermediate_size": 33,
    "vocab_size": 33,
    "head_dim": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "spread": {"task": "heads", "shard_target": True},
    "joint": {"task": "joint"},  # its target joins in with step 3 of 4: before the signal, and after it
}
STOPS = {"spread": (3,), "joint": (1, 3)}
CONFIG = {"steps": 4, "micro_batch": 2, "save_every": 2, "clip_norm": 0.5}


def jobs() -> list[dict[str, Any]]:
    """Of each kind a run that nothing happens to, and those that are stopped by one process and go on; one in bf16."""
    # the others, in float32, come after it in the same processes
    found = [KINDS["spread"] | {"name": "bf16", "model": UNEVEN, "config": CONFIG | {"precision": "bf16"}}]
    for kind, options in KINDS.items():
        common = options | {"model": UNEVEN, "config": CONFIG}
        found.append(common | {"name": kind})
        for at in STOPS[kind]:
            stopped = f"{kind} stopped at {at}"
            found.append(common | {"name": stopped, "kill_at": at, "kill_rank": 1})
            found.append(common | {"name": f"{kind} went on from {at}", "folder": stopped})
    return found


@pytest.fixture(scope="module")
def runs(launch_zero: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zero3")
    return folder, launch_zero(folder, 3, jobs())


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stopped_run_goes_on_to_the_very_same_weights(
    runs: tuple[Path, dict[str, Any]], logged: Callable[..., list[Any]], kind: str
):
    folder, said = runs
    assert (said[kind]["distributed_type"], said[kind]["processes"]) == ("DEEPSPEED", 2)
    assert said[kind]["afterwards"] == 0, "all weights are whole at the end"
    expected = load_file(folder / f"{kind}.safetensors")
    assert all(tensor.numel() > 0 and bool(torch.isfinite(tensor).all()) for tensor in expected.values())
    for at in STOPS[kind]:
        stopped = f"{kind} stopped at {at}"
        assert said[stopped]["error"].startswith(f"Interrupted: stopped by SIGTERM after step {at} of 4")
        assert said[f"{kind} went on from {at}"]["resumed_from"] == at
        assert logged(folder / stopped) == logged(folder / kind)
        found = load_file(folder / f"{kind} went on from {at}.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_precision_may_change_from_one_run_of_a_process_to_the_next(
    runs: tuple[Path, dict[str, Any]], logged: Callable[..., list[Any]]
):
    folder, said = runs
    assert "error" not in said["bf16"], said["bf16"]
    assert logged(folder / "bf16") == pytest.approx(logged(folder / "spread"), abs=2e-2)  # 8 bits of mantissa
    types = [load_file(folder / f"{name}.safetensors")["heads.0.1.weight"].dtype for name in ("bf16", "spread")]
    assert types == [torch.bfloat16, torch.float32]


def test_checkpoints_hold_what_is_trained_and_nothing_empty(runs: tuple[Path, dict[str, Any]]):
    folder, _ = runs
    stored = {kind: load_file(folder / kind / "checkpoints" / "step-000004" / "model.safetensors") for kind in KINDS}
    assert not [name for name in stored["spread"] if name.startswith("target.")]
    adapters = {name for name in stored["joint"] if name.startswith("target.")}
    assert adapters
    assert all("lora_" in name for name in adapters)
    assert stored["joint"].keys() - adapters == stored["spread"].keys()
    for name, tensor in (stored["spread"] | stored["joint"]).items():
        assert tensor.numel() > 0, name
    changed = [tensor.abs().max() > 0 for name, tensor in stored["joint"].items() if "lora_B" in name]
    assert changed
    assert all(changed), "adapters begin as nothing"
