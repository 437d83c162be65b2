"""What each objective is worth: one initial drafter, one token budget, every objective, tokens per step by decoding.

    python tests/bench/objectives.py --pair runs/quickstart [--seeds 3] [--steps 320] [--rows NAME …] [--quick]

Every row trains the stage-1 drafter of a finished quickstart (cross entropy, 160 steps) on for so many steps with the
settings of its second stage, and decodes held-out prompts at temperatures 0 and 1 (gamma 4). Rows differ in the
objective alone, two also in the learning rate; seeds change the order of the blocks and the random numbers. Intervals:
95 %, bootstrap over seeds and prompts together; `gain`: over plain fine-tuning with the better of its learning rates at
that temperature, over the same prompts and seeds. The last line is one JSON object.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    bootstrap_draws,
    finish,
    heldout_prompts,
    interval_of,
    parser_of,
    per_step,
    quickstart_of,
    train_steps,
)
from draftsmith.data.prompts import stop_ids
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.train.losses.drafter import TopK
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.on_policy import OnPolicy
from draftsmith.train.teachers.teacher import ModelTeacher

GAMMA, NEW_TOKENS = 4, 64
TEMPERATURES = (0.0, 1.0)
PLAIN = "cross-entropy"
LOWER = 1e-3  # than the recipe's learning rate


def rows(stop: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """What each row trains with, by name."""
    own = OnPolicy(share=0.5, new_tokens=64, stop_ids=stop)
    single = (PLAIN, "forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "lk-alpha", "lk-lambda")
    lower = {f"{name}, rate {LOWER:g}": {"objective": {name: 1.0}, "rate": LOWER} for name in (PLAIN, "forward-kl")}
    return (
        lower
        | {name: {"objective": {name: 1.0}} for name in single}
        | {
            "forward-kl, then lk-alpha": {"objective": {"forward-kl": [1.0, 0.0, 0.5], "lk-alpha": [0.0, 1.0, 0.5]}},
            "forward-kl, top 50": {"objective": {"forward-kl": 1.0}, "top_k": TopK(50, "bucket")},
            "forward-kl, half on-policy": {"objective": {"forward-kl": 1.0}, "on_policy": own},
        }
    )


class Bench:
    """The pair, its data and its prompts."""

    def __init__(self, pair: Path, prompts: int) -> None:
        self.recipe = quickstart_of(pair).distilled
        self.tokenizer = load_tokenizer(str(pair / "tokenizer"))
        self.data = prepare_data(self.recipe.data, self.tokenizer, quiet=True)
        self.target = load_model(str(pair / "target"))
        self.start = str(pair / "drafter-stage1")
        self.scorer = wrap_model(self.target)
        self.stop = tuple(stop_ids(self.tokenizer))
        heldout = pair / "corpus" / "heldout.jsonl"
        self.prompts = heldout_prompts(heldout, self.recipe.data.template, self.tokenizer, prompts)

    def train(self, settings: dict[str, Any], steps: int, seed: int) -> tuple[Any, dict[str, float], float]:
        """A drafter trained on from the start; what was measured on held-out blocks; seconds of training."""
        drafter = load_model(self.start)
        settings = dict(settings)
        rate = settings.pop("rate", self.recipe.train.learning_rate)
        needs = settings["objective"].keys() != {PLAIN}
        teacher = ModelTeacher(self.target)
        task = DrafterTask(
            drafter, self.data.heldout, teacher=teacher if needs else None, eval_teacher=teacher, **settings
        )
        result = train_steps(task, self.data.train, self.recipe.train, steps, rate, seed)
        return drafter, result.metrics, result.seconds

    def measure(self, drafter: Any) -> dict[str, np.ndarray]:
        """Kept tokens and steps of each prompt [prompts, 2], by temperature."""
        found = {}
        parts, limits = Parts(drafter=wrap_model(drafter)), Limits(NEW_TOKENS, self.stop)
        for temperature in TEMPERATURES:
            sampling = Sampling(temperature=temperature)
            method = build_method("speculative", parts, sampling, gamma=GAMMA)
            tallies = [
                decode(self.scorer, method, sampling, number, prompt, limits).tally
                for number, prompt in enumerate(self.prompts)
            ]
            found[f"{temperature:g}"] = np.array([[tally.tokens, tally.steps] for tally in tallies], dtype=np.float64)
        return found


def pooled(runs: list[dict[str, np.ndarray]], temperature: str) -> float:
    """Tokens per step over all seeds of a row."""
    return per_step(np.stack([run[temperature] for run in runs]))


def interval(counts_SP2: np.ndarray, plain_SP2: np.ndarray) -> dict[str, list[float]]:
    """95 % intervals of tokens per step and of the gain over plain fine-tuning, seeds and prompts drawn together."""
    values, gains = [], []
    for chosen in bootstrap_draws(*counts_SP2.shape[:2]):
        values.append(per_step(counts_SP2[chosen]))
        gains.append(values[-1] / per_step(plain_SP2[chosen]))
    return {"interval": interval_of(values), "gain_interval": interval_of(gains)}


def main() -> None:
    quick = "one seed, 20 steps, 8 prompts, two rows"
    parser = parser_of(__doc__, quick, pair=True, seeds=3, steps=320, prompts=64)
    parser.add_argument("--rows", nargs="+", help="only these rows, by name; plain fine-tuning is always one")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.prompts, options.rows = 1, 20, 8, ["forward-kl"]
    bench = Bench(options.pair, options.prompts)
    known = rows(bench.stop)
    chosen = [name for name in known if not options.rows or name in options.rows or name.startswith(PLAIN)]
    counts: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in chosen}
    held: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    start = bench.measure(load_model(bench.start))
    began = time.monotonic()
    for seed in range(options.seeds):  # seeds outside: what is finished early compares all rows
        for name in chosen:
            torch.manual_seed(seed)
            drafter, metrics, took = bench.train(known[name], options.steps, seed)
            counts[name].append(bench.measure(drafter))
            held[name].append(metrics)
            seconds[name].append(took)
            now = {t: round(per_step(c), 3) for t, c in counts[name][-1].items()}
            print(f"[{time.monotonic() - began:5.0f} s] seed {seed} {name}: {now} overlap {metrics['overlap']:.4f}")
    plain = {t: max((n for n in chosen if n.startswith(PLAIN)), key=lambda n, t=t: pooled(counts[n], t)) for t in start}
    results: dict[str, Any] = {"start": {t: per_step(c) for t, c in start.items()}, "rows": {}}
    print(f"start: {results['start']}")
    for name in chosen:
        row: dict[str, Any] = {"overlap": float(np.mean([m["overlap"] for m in held[name]]))}
        row |= {"heldout_loss": float(np.mean([m["heldout_loss"] for m in held[name]]))}
        row["train_sec"] = float(np.median(seconds[name]))
        for temperature in start:
            sides = (name, plain[temperature])
            mine, base = (np.stack([c[temperature] for c in counts[side]]) for side in sides)
            entry = {"tokens_per_step": per_step(mine), "gain": per_step(mine) / per_step(base)}
            row[f"T={temperature}"] = entry | interval(mine, base)
        results["rows"][name] = row
    for name, row in sorted(results["rows"].items(), key=lambda item: -item[1]["T=1"]["tokens_per_step"]):
        shown = "  ".join(
            f"{t}: {row[t]['tokens_per_step']:.3f} ({row[t]['gain']:.3f}, {row[t]['gain_interval'][0]:.3f}–"
            f"{row[t]['gain_interval'][1]:.3f})"
            for t in row
            if t.startswith("T=")
        )
        print(f"{name:36} overlap {row['overlap']:.4f}  {shown}")
    settings = {"seeds": options.seeds, "steps": options.steps, "prompts": len(bench.prompts), "gamma": GAMMA}
    finish(results | settings | {"new_tokens": NEW_TOKENS})


if __name__ == "__main__":
    main()
