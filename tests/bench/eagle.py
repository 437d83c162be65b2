"""Training EAGLE-3 beside speculators' own trainer: the same layer from the same start, on the same blocks.

    python tests/bench/eagle.py --pair runs/realpair --python /path/to/an/environment/bin/python
        [--steps 24] [--rounds 3] [--vocabulary 8192]

The pair is a finished quickstart of recipe realpair, whose EAGLE-3 recipe, data and hidden states are used, with so
many steps and tokens to propose (0: all). The environment has speculators 0.9 (`pip install speculators`). Ours runs
`fit`; theirs its `Trainer`, told that the device is the CPU, over files of the states that ours read, in the order in
which it read them, each side in a process of its own, in turns. Both begin as the target's own layer, with AdamW, the
same rates, bfloat16 under autocast, and the target's states from disk. Theirs with each attention and each loss of its
own, as far as they run here.

In the results tokens/s by the median step, the peak of memory that no file backs and what of it came with training, and
the loss of each step. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import finish, own_process, parser_of
from draftsmith.data.blocks.packing import IGNORED
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.heads import heads_parts
from draftsmith.recipes.commands.pairs.quickstart import resolve
from draftsmith.recipes.schema.loading import parse_recipe, read_recipe
from draftsmith.recipes.schema.training import HeadsRecipe
from draftsmith.train.loop.fit import FitConfig, fit
from memory import Anonymous
from safetensors.torch import save_file

WARM = 3  # steps that are not timed
THEIRS = [(attention, loss) for attention in ("eager", "simple_flex_attention") for loss in ("eager", "fused")]


def opened(pair: str, vocabulary: int) -> tuple[HeadsRecipe, Any, Any]:
    """The recipe, its data, and its task."""
    folder = Path(pair)
    file = folder / "quickstart.yaml"
    recipe = resolve(parse_recipe(read_recipe(file), str(file))).eagle  # type: ignore[arg-type]
    assert recipe is not None
    values = recipe.model_dump(mode="json")
    values["measure"] |= {"prompts": 0, "blocks": 0}
    values["vocabulary"] = {"tokens": vocabulary} if vocabulary else None
    recipe = HeadsRecipe.model_validate(values)
    tokenizer = load_tokenizer(recipe.target)
    prepared = prepare_data(recipe.data, tokenizer, quiet=True)
    torch.manual_seed(0)
    return recipe, prepared, heads_parts(recipe, tokenizer, prepared, "cpu").task


def ours(pair: str, vocabulary: int, steps: int) -> dict[str, Any]:
    """In this process: what `fit` takes, and the rows of each step."""
    recipe, prepared, task = opened(pair, vocabulary)
    rows, begun = list[list[int]](), list[float]()
    batch = prepared.train.batch

    def told(numbers: Any) -> Any:
        rows.append(np.asarray(numbers).tolist())
        begun.append(time.perf_counter())
        return batch(numbers)

    prepared.train.batch = told
    train = recipe.train
    config = FitConfig(
        steps, 1, 1, train.learning_rate, "cosine", WARM / steps, betas=(0.9, 0.999), precision="bf16", log_every=1
    )
    with tempfile.TemporaryDirectory() as state, Anonymous() as memory:
        fit(task, prepared.train, config, state)
        lines = [json.loads(line) for line in (Path(state) / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "losses": losses,
        "ends": begun[1:],
        "peak_mb": memory.peak_mb,
        "above_mb": memory.peak_mb - memory.before_mb,
        "rows": rows,
    }


def written(pair: str, vocabulary: int, rows: list[list[int]], folder: Path) -> int:
    """The start and the batches of the other side; positions of a block."""
    recipe, prepared, task = opened(pair, vocabulary)
    module, heads = task.module, task.module.heads
    names = {name: name.replace("midlayer.", "layers.0.") for name in heads.state_dict() if "rotary" not in name}
    start = {mine: heads.state_dict()[name].float().contiguous() for name, mine in names.items()}
    ids = torch.arange(heads.vocab_size) if heads.proposed is None else heads.proposed
    save_file(start | {"ids": ids.clone()}, folder / "start.safetensors")
    hidden = heads.hidden_size
    for step, numbers in enumerate(rows):
        batch = prepared.train.batch(numbers)
        states_TS = module.frozen_states(batch)
        labels_T = module.labels(batch)[0, :, 0]
        shifted_T = torch.nn.functional.pad(batch.tokens_BT[0, 1:], (0, 1))
        last_TD = torch.nn.functional.pad(states_TS[1:, -hidden:], (0, 0, 0, 1))
        save_file(
            {
                "hidden_states": states_TS[None, :, :-hidden].contiguous(),
                "verifier_last_hidden_states": last_TD[None].contiguous(),
                "input_ids": shifted_T[None],
                "document_ids": batch.documents_BT,
                "position_ids": batch.positions_BT,
                "loss_mask": (labels_T != IGNORED)[None],
            },
            folder / f"batch-{step}.safetensors",
        )
    settings = {
        "target": str(Path(recipe.target).resolve()),
        "layers": list(heads.layers),
        "num_heads": heads.num_heads,
        "decay": recipe.weight_decay_by_head,
        "rate": recipe.train.learning_rate,
        "warmup": WARM,
        "steps": len(rows),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return int(batch.tokens_BT.numel())


def theirs(python: str, folder: Path, attention: str, implementation: str) -> dict[str, Any] | str:
    """What the other side takes; or why it does not run."""
    file = folder / "settings.json"
    settings = json.loads(file.read_text()) | {"attention": attention, "implementation": implementation}
    file.write_text(json.dumps(settings))
    script = Path(__file__).with_name("eagle_child.py")
    done = subprocess.run([python, str(script), str(folder)], capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate_of(found: dict[str, Any], positions: int) -> float:
    ends = found["ends"][WARM:]
    return positions / statistics.median(later - earlier for earlier, later in pairwise(ends))


def main() -> None:
    parser = parser_of(__doc__, "8 steps, one round", pair=True, steps=24, rounds=3, vocabulary=8192)
    parser.add_argument("--python", required=True, help="of the environment with speculators")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 8, 1
    pair, sides = str(options.pair), dict[str, list[dict[str, Any]]]()
    failed = dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        folder, positions = Path(name), 0
        for _ in range(options.rounds):
            mine = own_process("eagle.ours", pair, options.vocabulary, options.steps)
            positions = positions or written(pair, options.vocabulary, mine["rows"], folder)
            sides.setdefault("ours", []).append(mine)
            for attention, loss in THEIRS:
                label = f"speculators, attention {attention}, loss {loss}"
                found = failed.get(label) or theirs(options.python, folder, attention, loss)
                if isinstance(found, str):
                    failed[label] = found
                else:
                    sides.setdefault(label, []).append(found)
    rows = {}
    for label, runs in sides.items():
        rates = [rate_of(run, positions) for run in runs]
        rows[label] = {
            "tokens_per_s": statistics.median(rates),
            "rates": rates,
            "peak_mb": max(run["peak_mb"] for run in runs),
            "above_mb": max(run["above_mb"] for run in runs),
            "losses": runs[0]["losses"],
        }
        print(f"{label:60} {rows[label]['tokens_per_s']:8.0f} tokens/s  {rows[label]['peak_mb']:8.0f} MB")
    for label, reason in failed.items():
        print(f"{label:60} does not run here: {reason}")
    finish({"rows": rows, "failed": failed, "steps": options.steps, "vocabulary": options.vocabulary})


if __name__ == "__main__":
    main()
