"""Compare the training of DFlash and DSpark drafters, with a random start of the Markov head and one from a table.

    python tests/bench/train_dspark.py [--quick] [--pair runs/quickstart] [--steps 200] [--seeds 3]

The target, the corpus and the table are those of a finished quickstart. All drafters have one layer and seven draft
tokens, and learn 0.1 · cross-entropy + 1.8 · total variation from the same blocks of the corpus, with hidden states
from a cache. The Markov head has rank 64. The results are means over the seeds: the acceptance length (tokens per step)
of greedy chains on held-out prompts, after each quarter of the steps, and the held-out loss of the first draft token in
nats. The last line of the output is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import finish, parser_of
from draftsmith.recipes.assemble.teacher import prepare_teacher
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe
from draftsmith.recipes.schema.training import DSPARK_OBJECTIVE, HeadsRecipe

BLOCK, BATCH, RANK, DRAFTS = 256, 4, 64, 7
CASES: dict[str, dict[str, Any]] = {
    "dflash": {"architecture": "dflash"},
    "dspark, random start": {"architecture": "dspark"},
    "dspark, start from a table": {"architecture": "dspark"},
}


def recipe_of(case: str, seed: int, args: argparse.Namespace, folder: Path) -> HeadsRecipe:
    """Return the recipe of a case, which writes to `folder`."""
    quarter, corpus = max(1, args.steps // 4), args.pair / "corpus"
    data = {
        "source": str(corpus / "train.jsonl"),
        "heldout_source": str(corpus / "heldout.jsonl"),
        "template": "chatml",
    }
    data |= {"limit": 20 * args.steps, "heldout_limit": 64, "block_tokens": BLOCK, "cache": str(folder / "prepared")}
    train = {"steps": args.steps, "global_batch": BATCH, "micro_batch": BATCH, "learning_rate": 3e-3}
    train |= {"seed": seed, "evaluate_every": quarter, "save_every": 0}
    out, target = str(folder / f"{[*CASES].index(case)}-{seed}"), str(args.pair / "target")
    values = {"kind": "heads", **CASES[case], "out": out, "target": target, "data": data, "train": train}
    values |= {"num_heads": DRAFTS, "anchors": 64, "objective": DSPARK_OBJECTIVE}
    values |= {"hidden": {"cache": str(folder / "hidden")}}
    values |= {"measure": {"prompts": 16, "new_tokens": 48, "gamma": DRAFTS, "blocks": 16}}
    if values["architecture"] == "dspark":
        table = str(args.pair / "table") if "table" in case else None
        values["dspark"] = {"markov_rank": RANK, "markov_start": table}
    recipe = parse_recipe(values, case)
    assert isinstance(recipe, HeadsRecipe)
    return recipe


def evaluations(out: str) -> dict[int, tuple[float, float]]:
    """Return the acceptance length and the held-out loss of the first draft token, by step."""
    lines = map(json.loads, (Path(f"{out}.state") / "log.jsonl").read_text().splitlines())
    found = {line["step"]: line["evaluation"] for line in lines if "evaluation" in line}
    return {step: (metrics["tokens_per_step"], metrics["head0_loss"]) for step, metrics in found.items()}


def main() -> None:
    parser = parser_of(__doc__, "8 steps and 1 seed", pair=True, steps=200, seeds=3)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 8, 1
    if not (args.pair / "table").is_dir():
        raise SystemExit(f"no finished pair at {args.pair}: run `make quickstart` first")
    measured: dict[str, list[dict[int, tuple[float, float]]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as temporary:
        prepare_teacher(recipe_of("dflash", 0, args, Path(temporary)))
        for seed in range(args.seeds):
            for case, runs in measured.items():
                recipe = recipe_of(case, seed, args, Path(temporary))
                run_train(recipe)
                runs.append(evaluations(recipe.out))
    results: dict[str, Any] = {"steps": args.steps, "seeds": args.seeds, "rank": RANK, "cases": {}}
    for case, runs in measured.items():
        rows = {}
        for step in runs[0]:
            lengths, losses = zip(*(run[step] for run in runs), strict=True)
            rows[step] = {"tokens_per_step": statistics.mean(lengths), "spread": max(lengths) - min(lengths)}
            rows[step]["first_loss_nats"] = statistics.mean(losses)
        print(f"\n{case}\n{'step':>6} {'acceptance length':>18} {'max - min':>10} {'loss of token 1':>16}")
        for step, row in rows.items():
            print(f"{step:6} {row['tokens_per_step']:18.3f} {row['spread']:10.3f} {row['first_loss_nats']:16.3f}")
        results["cases"][case] = rows
    finish(results)


if __name__ == "__main__":
    main()
