"""Small training run for tests, which can run in the test process, in a separate process, or in two processes.

python worker.py '{"state_dir": "…", "steps": 6, "kill_at": 4, "signal": 9, "weights": "final.safetensors"}'
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.recipes.session.launch import destroy_process_group
from draftsmith.train.loop.fit import FitConfig, fit
from draftsmith.train.tasks.drafter import DrafterTask
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32


def make_data(blocks: int = 24, length: int = 16, seed: int = 0) -> PreparedData:
    """Return blocks of up to three random documents with padding; two thirds of the tokens are supervised."""
    rng = np.random.default_rng(seed)
    shape = (blocks, length)
    documents = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
    documents[:, -2:] = -1
    tokens = rng.integers(0, VOCAB, shape)
    return data_of(tokens, (rng.random(shape) < 0.67) & (documents >= 0), documents, f"of seed {seed}")


def data_of(tokens_BT: Any, trained_BT: Any, documents_BT: Any, name: str) -> PreparedData:
    """Return prepared data in memory; `documents_BT` has document numbers, and −1 for padding."""
    starts, ids, flags, sizes = [0], [], [], []
    for row, numbers in enumerate(documents_BT.tolist()):
        places = [at for at, number in enumerate(numbers) if number >= 0]
        borders = [at for at in places if at == 0 or numbers[at] != numbers[at - 1]] + [len(places)]
        for first, end in pairwise(borders):
            ids += tokens_BT[row, first:end].tolist()
            flags += [0, *trained_BT[row, first + 1 : end].tolist()]
            starts.append(len(ids))
        sizes.append(len(borders) - 1)
    arrays = {
        "tokens": np.array(ids, dtype=np.int32),
        "trained": np.array(flags, dtype=np.uint8),
        "documents": np.array(starts),
        "order": np.arange(len(starts) - 1),
        "blocks": np.cumsum([0, *sizes]),
    }
    options = {"block_tokens": documents_BT.shape[1], "packing": "best-fit"}
    manifest = {"sha256": {"tokens": name}, "options": options, "padding_id": 0}
    return PreparedData(Path("nowhere"), manifest, arrays)


def make_model(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Return a random Llama with about ten thousand parameters."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,  # so that a resumed run must draw the same random numbers
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


class SignallingTask(DrafterTask):
    """Task that sends a signal to its own process during step `at` (from 1)."""

    def __init__(self, model: Any, heldout: PreparedData | None, at: int = 0, number: int = 9, **options: Any) -> None:
        super().__init__(model, heldout, **options)
        self._left, self._number = at, number

    def count(self, batch: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return super().count(batch)


def make_config(**overrides: Any) -> FitConfig:
    """Return a config with six steps of eight blocks and a checkpoint after every second step."""
    settings = {"steps": 6, "global_batch": 8, "micro_batch": 4, "learning_rate": 1e-2, "save_every": 2}
    settings |= {"evaluate_every": 0, "log_every": 1}
    return FitConfig(**(settings | overrides))


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    task = SignallingTask(
        make_model(attention_dropout=options.get("dropout", 0.1)),
        make_data(4, seed=1),
        options.get("kill_at", 0) if rank == options.get("kill_rank", 0) else 0,
        options.get("signal", 9),
    )
    config = make_config(**options.get("config", {}))
    result = fit(task, make_data(), config, options["state_dir"])
    if rank == 0:
        state = {name: tensor.contiguous() for name, tensor in task.module.state_dict().items()}
        save_file(state, options["weights"])
        print(json.dumps({"processes": result.processes, "distributed_type": result.distributed_type}))


if __name__ == "__main__":
    try:
        main()
    finally:
        destroy_process_group()
