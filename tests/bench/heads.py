"""What prediction heads are worth by how they were trained: tokens per step of Medusa and SLiM by decoding.

    python tests/bench/heads.py --pair runs/quickstart [--seeds 3] [--steps 120] [--own FILE] [--quick]

The pair is a finished quickstart. Its target first answers the corpus's questions itself, greedily (`draftsmith
regenerate`; `--own` keeps the answers). Rows then train four heads (the self-distilled ones six, of which four are
used) for so many steps of 1,024 tokens and decode held-out prompts at temperature 0: Medusa-1 on the corpus's text;
with the target's distributions as soft targets; on the target's own answers; on both (self-distillation); and
Medusa-2, measured with the target that it makes. Intervals: 95 %, bootstrap over seeds and prompts together. Every
method's tokens are compared with the target's own greedy ones. The last line is one JSON object.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Trained, bootstrap, by_seed, finish, parser_of, per_step, train_steps
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.models import add_lora
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.schema.evaluation import RegenerateRecipe
from draftsmith.recipes.schema.training import LoraSection, ModelSection
from draftsmith.train.config import Medusa2
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.tasks.medusa2 import Medusa2Task
from pair import Pair

HEADS = 4
NEW_TOKENS = 64
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"tree": "4x2x2x2"},  # all of its 60 candidates are verified
    "slim-s": {"num_sequences": 16, "max_depth": HEADS},
}
RATE = 3e-3


@dataclass(frozen=True)
class Row:
    """How heads are trained."""

    objective: str = "cross-entropy"
    own: bool = False
    """On the target's own answers."""
    medusa2: Medusa2 | None = None
    heads: int = HEADS


ROWS = {
    "Medusa-1": Row(),
    "Medusa-1, soft targets": Row("forward-kl"),
    "Medusa-1, own answers": Row(own=True),
    "self-distillation": Row("forward-kl", own=True, heads=HEADS + 2),
    "Medusa-2": Row(own=True, medusa2=Medusa2(heads_weight=0.2)),
}


class Bench(Pair):
    """The pair, its data and its prompts."""

    def prepare(self, own: Path, questions: int) -> None:
        section = self.recipes.drafter.data.model_copy(update={"source": self.recipes.answers.source})
        self.source = str(self.folder / "target")
        regenerated = RegenerateRecipe(
            kind="regenerate", out=str(own), source=str(section.source), limit=questions, target=self.source,
            template=section.template, temperature=0, max_new_tokens=96, on_length="keep", batch=64,
        )  # fmt: skip
        run_regenerate(regenerated)
        answers = section.model_copy(update={"source": str(own), "heldout_source": None, "heldout_share": 0.02})
        self.text, self.own = (prepare_data(each, self.tokenizer, quiet=True) for each in (section, answers))
        vocab = self.target_model.get_output_embeddings().weight.shape[0]
        tokens, starts = (np.load(self.own.train.directory / f"{name}.npy") for name in ("tokens", "documents"))
        self.table = BigramTable.from_documents(np.split(tokens, starts[1:-1]), vocab)
        self.greedy = self.counts("autoregressive", Parts(), 0.0, NEW_TOKENS)[1]

    def run(self, name: str, steps: int, seed: int) -> Trained:
        """Heads, and what they are worth with the target that they are for."""
        row, recipe = ROWS[name], self.recipes.heads
        data = self.own if row.own else self.text
        target = load_model(self.source) if row.medusa2 else self.target_model
        heads = PredictionHeads.from_lm_head(
            target.get_output_embeddings().weight.detach(), row.heads, recipe.num_layers, recipe.projection, recipe.rank
        )
        common: dict[str, Any] = {"objective": {row.objective: 1.0}}
        common["head_weights"] = [recipe.weight_decay_by_head**k for k in range(row.heads)]
        adapter: Any = None
        if row.medusa2 is None:
            task = HeadsTask(target, heads, data.heldout, **common)
        else:
            torch.manual_seed(seed)
            adapter = add_lora(target, ModelSection(source=self.source, lora=LoraSection(rank=16)))
            task = Medusa2Task(target, heads, data.heldout, row.medusa2, **common)
        result = train_steps(task, data.train, recipe.train, steps, RATE, seed)
        scorer = self.target if adapter is None else wrap_model(adapter.merge_and_unload())
        greedy = self.greedy if adapter is None else self.counts("autoregressive", Parts(), 0.0, NEW_TOKENS, scorer)[1]
        counts, parts = {}, Parts(heads=heads.eval(), table=self.table)
        for method, options in METHODS.items():
            counts[method], ids = self.counts(method, parts, 0.0, NEW_TOKENS, scorer, **options)
            assert ids == greedy, f"{method}: not the target's own tokens"
        return Trained(counts, result.metrics, result.seconds)


def main() -> None:
    quick = "one seed, 10 steps, 4 prompts, 60 questions"
    parser = parser_of(__doc__, quick, pair=True, seeds=3, steps=120, prompts=20)
    parser.add_argument("--questions", type=int, default=1500, help="that the target answers itself")
    parser.add_argument("--own", type=Path, help="file of the target's own answers, made where it is missing")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.prompts, options.questions = 1, 10, 4, 60
    bench = Bench(options.pair, options.prompts)
    with tempfile.TemporaryDirectory() as scratch:
        bench.prepare(options.own or Path(scratch) / "own.jsonl", options.questions)
        runs = by_seed(list(ROWS), options.seeds, lambda name, seed: bench.run(name, options.steps, seed))
    results: dict[str, Any] = {}
    for name, trained in runs.items():
        row: dict[str, Any] = {}
        for method in METHODS:
            counts_SPX = np.stack([run.counts[method] for run in trained])
            interval = bootstrap(lambda chosen, all=counts_SPX: per_step(all[chosen]), *counts_SPX.shape[:2])
            row[method] = {"tokens_per_step": per_step(counts_SPX), "interval": interval}
        row["top1"] = [float(np.mean([run.metrics[f"head{k}_top1"] for run in trained])) for k in range(HEADS)]
        row["train_sec"] = float(np.median([run.seconds for run in trained]))
        overlap = [run.metrics["base_overlap"] for run in trained if "base_overlap" in run.metrics]
        row["base_overlap"] = float(np.mean(overlap)) if overlap else None
        results[name] = row
        cells = [
            f"{m} {row[m]['tokens_per_step']:.2f} ({{:.2f}}–{{:.2f}})".format(*row[m]["interval"]) for m in METHODS
        ]
        accuracy = " ".join(f"{value:.2f}" for value in row["top1"])
        note = f"  target's overlap with the original {row['base_overlap']:.3f}" if overlap else ""
        print(f"{name:24} {'  '.join(cells)}  top-1 {accuracy}  {row['train_sec']:.0f} s{note}")
    settings = {"seeds": options.seeds, "steps": options.steps, "prompts": len(bench.prompts), "new_tokens": NEW_TOKENS}
    finish({"rows": results} | settings | {"questions": options.questions})


if __name__ == "__main__":
    main()
