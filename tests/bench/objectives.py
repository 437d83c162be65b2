"""What each objective is worth: one initial drafter, one token budget, every objective, tokens per step by decoding.

    python tests/bench/objectives.py --pair runs/quickstart [--seeds 3] [--steps 320] [--rows NAME …] [--quick]

Every row trains the stage-1 drafter of a finished quickstart (cross entropy, 160 steps) on for so many steps with the
settings of its second stage, or, of a pair without one, the drafter from its start, and decodes held-out prompts at
temperatures 0 and 1 (gamma 4). Rows differ in the objective alone, two also in the learning rate; seeds change the
order of the blocks and the random numbers. Intervals: 95 %, bootstrap over seeds and prompts together; `gain`: over
plain fine-tuning with the better of its learning rates at that temperature, over the same prompts and seeds. The last
line is one JSON object.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import Trained, bootstrap, by_seed, finish, parser_of, per_step, train_steps
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.drafter import drafter_parts
from draftsmith.train.config import OnPolicy
from draftsmith.train.losses.drafter import TopK
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.teachers.teacher import ModelTeacher
from pair import Pair

GAMMA, NEW_TOKENS = 4, 64
TEMPERATURES = (0.0, 1.0)
PLAIN = "cross-entropy"
LOWER = 1e-3  # than the recipe's learning rate


def rows(stop: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """What each row trains with, by name."""
    single = (PLAIN, "forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "lk-alpha", "lk-lambda")
    found = {f"{name}, rate {LOWER:g}": {"objective": {name: 1.0}, "rate": LOWER} for name in (PLAIN, "forward-kl")}
    found |= {name: {"objective": {name: 1.0}} for name in single}
    forward = {"forward-kl": 1.0}
    return found | {
        "forward-kl, then lk-alpha": {"objective": {"forward-kl": [1.0, 0.0, 0.5], "lk-alpha": [0.0, 1.0, 0.5]}},
        "forward-kl, top 50": {"objective": forward, "top_k": TopK(50, "bucket")},
        "forward-kl, half on-policy": {"objective": forward, "on_policy": OnPolicy(0.5, 64, stop_ids=stop)},
    }


class Bench(Pair):
    """The pair, its data and its prompts."""

    def prepare(self) -> None:
        self.recipe = self.recipes.distilled or self.recipes.drafter
        self.data = prepare_data(self.recipe.data, self.tokenizer, quiet=True)
        self.known = rows(self.stop)

    def start(self) -> Any:
        if self.recipes.distilled is not None:
            return load_model(str(self.folder / "drafter-stage1"))
        unmeasured = {"objective": {PLAIN: 1.0}, "measure": self.recipe.measure.model_copy(update={"prompts": 0})}
        start = drafter_parts(self.recipe.model_copy(update=unmeasured), self.tokenizer, self.data, "cpu")
        return start.trained.model

    def run(self, name: str, steps: int, seed: int) -> Trained:
        """A drafter trained on from the start, and what its drafts are worth."""
        torch.manual_seed(seed)
        drafter, settings, teacher = self.start(), dict(self.known[name]), ModelTeacher(self.target_model)
        rate = settings.pop("rate", self.recipe.train.learning_rate)
        taught = None if settings["objective"].keys() == {PLAIN} else teacher
        task = DrafterTask(drafter, self.data.heldout, teacher=taught, eval_teacher=teacher, **settings)
        result = train_steps(task, self.data.train, self.recipe.train, steps, rate, seed)
        return Trained(self.measure(drafter), result.metrics, result.seconds)

    def measure(self, drafter: Any) -> dict[str, np.ndarray]:
        """Counts by temperature."""
        parts = Parts(drafter=wrap_model(drafter))
        return {f"{t:g}": self.counts("speculative", parts, t, NEW_TOKENS, gamma=GAMMA)[0] for t in TEMPERATURES}


def entry(mine_SPX: np.ndarray, plain_SPX: np.ndarray) -> dict[str, Any]:
    """Tokens per step and the gain over plain fine-tuning, with intervals, seeds and prompts drawn together."""

    def gain(chosen: Any) -> float:
        return per_step(mine_SPX[chosen]) / per_step(plain_SPX[chosen])

    sizes = mine_SPX.shape[:2]
    return {
        "tokens_per_step": per_step(mine_SPX),
        "gain": per_step(mine_SPX) / per_step(plain_SPX),
        "interval": bootstrap(lambda chosen: per_step(mine_SPX[chosen]), *sizes),
        "gain_interval": bootstrap(gain, *sizes),
    }


def main() -> None:
    quick = "one seed, 20 steps, 8 prompts, two rows"
    parser = parser_of(__doc__, quick, pair=True, seeds=3, steps=320, prompts=64)
    parser.add_argument("--rows", nargs="+", help="only these rows, by name; plain fine-tuning is always one")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.prompts, options.rows = 1, 20, 8, ["forward-kl"]
    bench = Bench(options.pair, options.prompts)
    bench.prepare()
    chosen = [name for name in bench.known if not options.rows or name in options.rows or name.startswith(PLAIN)]
    start = {t: per_step(counts) for t, counts in bench.measure(bench.start()).items()}
    runs = by_seed(chosen, options.seeds, lambda name, seed: bench.run(name, options.steps, seed))
    counts = {(name, t): np.stack([run.counts[t] for run in runs[name]]) for name in chosen for t in start}
    fine_tuned = [name for name in chosen if name.startswith(PLAIN)]
    plain = {t: max(fine_tuned, key=lambda name, t=t: per_step(counts[name, t])) for t in start}
    results: dict[str, Any] = {}
    for name in chosen:
        row = {key: float(np.mean([run.metrics[key] for run in runs[name]])) for key in ("overlap", "heldout_loss")}
        row["train_sec"] = float(np.median([run.seconds for run in runs[name]]))
        results[name] = row | {f"T={t}": entry(counts[name, t], counts[plain[t], t]) for t in start}
    print(f"start: {start}")
    for name, row in sorted(results.items(), key=lambda item: -item[1]["T=1"]["tokens_per_step"]):
        cells = [
            f"T={t}: {row[f'T={t}']['tokens_per_step']:.3f} ({row[f'T={t}']['gain']:.3f}, "
            + "–".join(f"{bound:.3f}" for bound in row[f"T={t}"]["gain_interval"]) + ")"
            for t in start
        ]  # fmt: skip
        print(f"{name:36} overlap {row['overlap']:.4f}  {'  '.join(cells)}")
    settings = {"seeds": options.seeds, "steps": options.steps, "prompts": len(bench.prompts), "gamma": GAMMA}
    finish({"start": start, "rows": results} | settings | {"new_tokens": NEW_TOKENS})


if __name__ == "__main__":
    main()
