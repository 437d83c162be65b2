"""Peak memory of loading a model and preparing its optimised forward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decode.models.products.native import compiled

BENCH = Path(__file__).resolve().parents[2] / "bench" / "memory.py"


@pytest.mark.slow
def test_weights_are_held_once(make_llama: Any, tmp_path: Path) -> None:
    """In each dtype the peak stays below 1.3 times the weights and 0.1 GB, from files of bfloat16."""
    if compiled() is None:
        pytest.skip("without compiled functions, int8 weights are stored in float32")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
    make_llama(vocab_size=16000, tie_word_embeddings=False, **sizes).bfloat16().save_pretrained(tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH), str(tmp_path)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    rows = json.loads(output.splitlines()[-1])
    for dtype in ("float32", "bfloat16", "int8"):
        assert rows[dtype]["peak_memory_bytes"] < 1.3 * rows[dtype]["weights_bytes"] + 10**8, rows[dtype]
