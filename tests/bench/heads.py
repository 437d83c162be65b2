"""What prediction heads are worth by how they were trained, and what SLiM makes of them: tokens per step by decoding.

    python tests/bench/heads.py --pair runs/quickstart [--seeds 3] [--steps 120] [--own FILE] [--quick]

The pair is a finished quickstart. Its target first answers the corpus's questions itself, greedily (`draftsmith
regenerate`; `--own` keeps the answers). Rows then train four heads (the self-distilled ones six, of which four are
used) for so many steps of 1,024 tokens and decode held-out prompts at temperature 0: Medusa-1 on the corpus's text;
with the target's distributions as soft targets; on the target's own answers; on both (self-distillation); and
Medusa-2, measured with the target that it makes.

With the self-distilled heads: SLiM's claims (`slim.txt`, sections 4.2 and 4.4), the correlation table against none at
equal numbers of sequences, the share of Medusa's tokens per step and verification FLOPs that is left when the
hypotheses are reduced, and more heads. Intervals: 95 %, bootstrap over seeds and prompts together. Every method's
tokens are compared with the target's own greedy ones. The last line is one JSON object.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import stop_ids
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode, raw_costs
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.models import add_lora
from draftsmith.recipes.commands.regenerate import run_regenerate
from draftsmith.recipes.schema.evaluation import RegenerateRecipe
from draftsmith.recipes.schema.training import LoraSection, ModelSection
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.tasks.medusa2 import Medusa2, Medusa2Task

HEADS, MORE_HEADS = 4, 6
NEW_TOKENS = 64
GREEDY = Sampling(temperature=0.0)
TREE = "4x2x2x2"  # Medusa's: all of its 60 candidates are verified
SEQUENCES = (1, 4, 16)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"tree": TREE}),
    "slim-s": ("slim-s", {"sequences": 16, "depth": HEADS}),
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
    "self-distillation": Row("forward-kl", own=True, heads=MORE_HEADS),
    "Medusa-2": Row(own=True, medusa2=Medusa2(heads_weight=0.2)),
}
DISTILLED = "self-distillation"


class Bench:
    """The pair, its data and its prompts."""

    def __init__(self, pair: Path, prompts: int, own: Path, questions: int) -> None:
        found = quickstart_of(pair)
        self.recipe, section = found.heads, found.distilled.data
        self.tokenizer = load_tokenizer(str(pair / "target"))
        self.source = str(pair / "target")
        self.target = load_model(self.source)
        self.stop = tuple(stop_ids(self.tokenizer))
        regenerated = RegenerateRecipe(
            kind="regenerate", out=str(own), source=str(section.source), limit=questions, target=self.source,
            template=section.template, temperature=0, max_new_tokens=96, on_length="keep", batch=64,
        )  # fmt: skip
        run_regenerate(regenerated)
        answers = section.model_copy(update={"source": str(own), "heldout_source": None, "heldout_share": 0.02})
        self.text = prepare_data(section, self.tokenizer, quiet=True)
        self.own = prepare_data(answers, self.tokenizer, quiet=True)
        vocab = self.target.get_output_embeddings().weight.shape[0]
        self.table = BigramTable.from_documents(self.own.train.iter_documents(), vocab)
        self.prompts = heldout_prompts(section.heldout_source, section.template, self.tokenizer, prompts)

    def train(self, row: Row, steps: int, seed: int) -> tuple[PredictionHeads, Any, dict[str, float], float]:
        """Heads, the target that they are for, what was measured on held-out blocks, and seconds of training."""
        data = self.own if row.own else self.text
        target = load_model(self.source) if row.medusa2 else self.target
        weight_VD = target.get_output_embeddings().weight.detach()
        heads = PredictionHeads.from_lm_head(weight_VD, row.heads, self.recipe.num_layers)
        common: dict[str, Any] = {"objective": {row.objective: 1.0}}
        common["head_weights"] = [self.recipe.weight_decay_by_head**k for k in range(row.heads)]
        adapter: Any = None
        if row.medusa2 is None:
            task = HeadsTask(target, heads, data.heldout, **common)
        else:
            torch.manual_seed(seed)
            adapter = add_lora(target, ModelSection(source=self.source, lora=LoraSection(rank=16)))
            task = Medusa2Task(target, heads, data.heldout, row.medusa2, **common)
        result = train_steps(task, data.train, self.recipe.train, steps, RATE, seed)
        model = target if adapter is None else adapter.merge_and_unload()
        return heads, model, result.metrics, result.seconds

    def measure(self, scorer: Any, heads: Any, name: str, table: BigramTable | None, **options: Any) -> np.ndarray:
        """Kept tokens, steps and nodes of each prompt [prompts, 3].

        Raises:
            AssertionError: not the target's own greedy tokens.
        """
        method = build_method(name, Parts(heads=heads, table=table), GREEDY, **options)
        limits, counts = Limits(NEW_TOKENS, self.stop), []
        for number, prompt in enumerate(self.prompts):
            found = decode(scorer, method, GREEDY, number, prompt, limits)
            assert found.ids == self.greedy(scorer)[number], f"{name} {options}: other tokens on prompt {number}"
            counts.append([found.tally.tokens, found.tally.steps, found.tally.nodes])
        return np.array(counts, dtype=np.float64)

    def greedy(self, scorer: Any) -> list[list[int]]:
        """The target's own tokens for each prompt."""
        if not hasattr(scorer, "greedy_ids"):
            method, limits = build_method("autoregressive", Parts(), GREEDY), Limits(NEW_TOKENS, self.stop)
            scorer.greedy_ids = [decode(scorer, method, GREEDY, 0, prompt, limits).ids for prompt in self.prompts]
        found: list[list[int]] = scorer.greedy_ids
        return found

    def flops(self, scorer: Any, heads: Any, counts_SP3: np.ndarray) -> float:
        """Of verification a token: those of a tree of as many nodes as a step had."""
        tokens, steps, nodes = counts_SP3.reshape(-1, 3).sum(0)
        method = build_method("medusa", Parts(heads=heads), GREEDY, tree="1")
        return raw_costs(scorer, method, nodes / steps, 128, runs=1).tree_flops * steps / tokens


def interval(counts_SP3: np.ndarray) -> list[float]:
    """Of tokens per step, 95 %, seeds and prompts drawn together."""
    return interval_of([per_step(counts_SP3[drawn]) for drawn in bootstrap_draws(*counts_SP3.shape[:2])])


def claims(bench: Bench, scorer: Any, trained: list[PredictionHeads]) -> dict[str, Any]:
    """SLiM's orderings with the self-distilled heads of all seeds."""

    def counts(name: str, table: BigramTable | None = None, **options: Any) -> np.ndarray:
        return np.stack([bench.measure(scorer, heads, name, table, **options) for heads in trained])

    def entry(found: np.ndarray) -> dict[str, Any]:
        return {
            "tokens_per_step": per_step(found),
            "interval": interval(found),
            "nodes_per_step": float(found[..., 2].sum() / found[..., 1].sum()),
            "verification_mflop_per_token": bench.flops(scorer, trained[0], found) / 1e6,
        }

    medusa = entry(counts("medusa", tree=TREE))
    results: dict[str, Any] = {"medusa": medusa | {"tree": TREE}, "sequences": {}, "heads": {}}
    for sequences in SEQUENCES:
        options = {"sequences": sequences, "depth": HEADS}
        kinds = ("table", "none")
        rows = {kind: entry(counts("slim-s", bench.table, correlation=kind, **options)) for kind in kinds}
        for row in rows.values():
            row["of_medusa"] = row["tokens_per_step"] / medusa["tokens_per_step"]
            row["flops_of_medusa"] = row["verification_mflop_per_token"] / medusa["verification_mflop_per_token"]
        results["sequences"][sequences] = rows
    for depth in range(1, MORE_HEADS + 1):
        tree = "x".join(TREE.split("x")[:depth] + ["1"] * (depth - HEADS))
        slim = entry(counts("slim-s", bench.table, sequences=16, depth=depth))
        results["heads"][depth] = {"medusa": entry(counts("medusa", tree=tree)), "slim-s": slim}
    return results


def tables(results: dict[str, Any]) -> Iterator[str]:
    """What a reader wants to see."""
    for name, row in results["rows"].items():
        cells = []
        for method in METHODS:
            low, high = row[method]["interval"]
            cells.append(f"{method} {row[method]['tokens_per_step']:.2f} ({low:.2f}–{high:.2f})")
        accuracy = " ".join(f"{value:.2f}" for value in row["top1"])
        yield f"{name:24} {'  '.join(cells)}  top-1 {accuracy}  {row['train_sec']:.0f} s{row['note']}"
    slim = results["slim"]
    base = slim["medusa"]
    yield f"medusa {TREE}: {base['tokens_per_step']:.2f} tokens/step, {base['nodes_per_step']:.0f} nodes"
    for sequences, rows in slim["sequences"].items():
        for name, row in rows.items():
            yield (
                f"slim-s {sequences:>3} sequences, table {name:5}: {row['tokens_per_step']:.2f} tokens/step "
                f"({row['of_medusa']:.0%} of Medusa's), {row['nodes_per_step']:.0f} nodes, "
                f"verification FLOPs {row['flops_of_medusa']:.0%}"
            )
    for depth, rows in slim["heads"].items():
        cells = []
        for name, row in rows.items():
            cost = row["verification_mflop_per_token"]
            cells.append(f"{name} {row['tokens_per_step']:.2f} ({cost:.0f} MFLOP a token)")
        yield f"{depth} heads: {', '.join(cells)}"


def orderings(slim: dict[str, Any]) -> dict[str, Any]:
    """Which of the paper's claims held."""
    per_step_of = {
        sequences: {kind: row["tokens_per_step"] for kind, row in rows.items()}
        for sequences, rows in slim["sequences"].items()
    }
    tables_of = [rows["table"] for rows in slim["sequences"].values()]
    cheap = [row["of_medusa"] for row in tables_of if row["flops_of_medusa"] <= 0.4]
    by_heads = [row["slim-s"]["tokens_per_step"] for row in slim["heads"].values()]
    return {
        "table_beats_none_at": [number for number, row in per_step_of.items() if row["table"] > row["none"]],
        "of_medusa_at_40_percent_flops": max(cheap, default=None),
        "gain_of_each_further_head": [after / before for before, after in pairwise(by_heads)],
    }


def main() -> None:
    quick = "one seed, 10 steps, 4 prompts, 60 questions"
    parser = parser_of(__doc__, quick, pair=True, seeds=3, steps=120, prompts=20)
    parser.add_argument("--questions", type=int, default=1500, help="that the target answers itself")
    parser.add_argument("--own", type=Path, help="file of the target's own answers, made where it is missing")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.prompts, options.questions = 1, 10, 4, 60
    with tempfile.TemporaryDirectory() as scratch:
        own = options.own or Path(scratch) / "own.jsonl"
        bench = Bench(options.pair, options.prompts, own, options.questions)
        results = run(bench, options.seeds, options.steps)
    for line in tables(results):
        print(line)
    results["held"] = orderings(results["slim"])
    print(results["held"])
    settings = {"seeds": options.seeds, "steps": options.steps, "prompts": len(bench.prompts), "new_tokens": NEW_TOKENS}
    finish(results | settings | {"questions": options.questions})


def run(bench: Bench, seeds: int, steps: int) -> dict[str, Any]:
    """Train and measure every row, then SLiM's claims."""
    scorer, began = wrap_model(bench.target), time.monotonic()
    counts: dict[str, dict[str, list[np.ndarray]]] = {name: {method: [] for method in METHODS} for name in ROWS}
    held: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    distilled: list[PredictionHeads] = []
    for seed in range(seeds):  # seeds outside: what is finished early compares all rows
        for name, row in ROWS.items():
            heads, target, metrics, took = bench.train(row, steps, seed)
            theirs = wrap_model(target) if row.medusa2 else scorer
            for method, (kind, options) in METHODS.items():
                table = bench.table if kind.startswith("slim") else None
                counts[name][method].append(bench.measure(theirs, heads.eval(), kind, table, **options))
            held[name].append(metrics)
            seconds[name].append(took)
            if name == DISTILLED:
                distilled.append(heads)
            now = {method: round(per_step(found[-1]), 3) for method, found in counts[name].items()}
            print(f"[{time.monotonic() - began:5.0f} s] seed {seed} {name}: {now}")
    results: dict[str, Any] = {"rows": {}}
    for name in ROWS:
        stacked = {method: np.stack(found) for method, found in counts[name].items()}
        entry: dict[str, Any] = {
            m: {"tokens_per_step": per_step(c), "interval": interval(c)} for m, c in stacked.items()
        }
        entry["top1"] = [float(np.mean([m[f"head{k}_top1"] for m in held[name]])) for k in range(HEADS)]
        entry["train_sec"] = float(np.median(seconds[name]))
        overlap = [m["base_overlap"] for m in held[name] if "base_overlap" in m]
        entry["base_overlap"] = float(np.mean(overlap)) if overlap else None
        entry["note"] = f"  target's overlap with the original {np.mean(overlap):.3f}" if overlap else ""
        results["rows"][name] = entry
    return results | {"slim": claims(bench, scorer, distilled)}


if __name__ == "__main__":
    main()
