"""How a drafter comes to agree with a real target's answers: Vicuna-7B's to AlpacaEval, held-out ones while training.

    python tests/bench/vicuna_answers.py [--quick] [--steps 200]

Runs the recipe drafter/vicuna-68m on the 805 answers of Vicuna-7B-v1.3 in the shared data, from random weights in the
68M shape (no hub is needed; --quick: 2 x 128), with LLaMA's tokenizer; a tenth of the answers is held out. The curve
is the teacher-forced agreement with the held-out answers: how often the target's token is the drafter's first choice,
or among its first five. The last line is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from common import LLAMA, SHARED, VICUNA, finish, parser_of
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import DrafterRecipe

SHAPE_68M = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}


def curve(folder: Path, steps: int, shape: dict[str, int], points: int = 8) -> list[dict[str, Any]]:
    """Train; step, tokens and metrics of each evaluation, the untrained start first."""
    model = {"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 2} | shape
    changes = [
        f"data.source={VICUNA}",
        f"tokenizer={LLAMA}",
        "target=null", "model.source=null", f"model.config={json.dumps(model)}", f"out={folder / 'drafter'}",
        f"data.cache={folder / 'prepared'}", "data.block_tokens=512", "data.heldout_share=0.1",
        f"train.steps={steps}", "train.global_batch=4", "train.micro_batch=4", "train.precision=no",
        "train.learning_rate=1e-3", f"train.evaluate_every={max(1, steps // points)}", "train.save_every=0",
    ]  # fmt: skip
    recipe = load_recipe("drafter/vicuna-68m", changes)
    assert isinstance(recipe, DrafterRecipe)
    run_train(recipe)
    lines = [json.loads(line) for line in (folder / "drafter.state" / "log.jsonl").read_text().splitlines()]
    return [
        {"step": line["step"], "tokens": line["tokens"]} | line["evaluation"] for line in lines if "evaluation" in line
    ]


def main() -> None:
    parser = parser_of(__doc__, "a small shape, 40 steps", steps=200)
    options = parser.parse_args()
    if not SHARED.is_dir():
        parser.error(f"there is no folder {SHARED}: set DRAFTSMITH_SHARED to the shared data")
    steps, shape = (40, SMALL) if options.quick else (options.steps, SHAPE_68M)
    with tempfile.TemporaryDirectory() as folder:
        points = curve(Path(folder), steps, shape)
    print(f"{'tokens':>10} {'top-1':>7} {'top-5':>7} {'loss':>7}")
    for point in points:
        shares = f"{point['top1_accuracy']:7.1%} {point['top5_accuracy']:7.1%}"
        print(f"{point['tokens']:10,} {shares} {point['heldout_loss']:7.3f}")
    finish({"shape": shape, "steps": steps, "curve": points})


if __name__ == "__main__":
    main()
