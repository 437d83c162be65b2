"""Run the papers' recipes on a trained pair, and check the claims of the papers' tables.

    python tests/bench/papers.py [--pair runs/quickstart] [--only slim/heads …] [--limit 24] [--tokens 48] [--quick]
    python tests/bench/papers.py --out tests/bench/results/papers-cpu.json

The pair replaces the models and prompts of each recipe of `recipes/evaluate/`. The first drafter is the one before
distillation, the second the distilled one, and the third the target itself. Rows that need more heads than the pair has
are left out. A claim is a predicate over the metrics of rows. It is `held` if at least 95 % of the bootstrap resamples
of the prompts (paired between rows) satisfy it, `not held` if at most 5 % do, and `noise` otherwise.

Shape letters: P prompts, R resamples, the first of which is the sample itself.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import finish, parser_of
from draftsmith.checkpoints.storage.atomic import atomic_text
from draftsmith.decode.evaluation.bootstrap import resample_weights
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.tree import parse_tree
from draftsmith.recipes.assemble.evaluation import load_target
from draftsmith.recipes.commands.evaluation.evaluate import evaluate_once, measure_energy
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe, parse_recipe
from draftsmith.recipes.schema.training import TableRecipe
from pair import on_pair, recipe_of_pair

Rows = Mapping[str, Any]
"""Metrics by label; each metric is an array [R]."""
Predicate = Callable[[Rows], Any]
SAMPLED = {"temperature": 0.25}
"""Settings of recipes with heads, since a small target's greedy text repeats itself and every head predicts it."""


def rising(metric: str, *labels: str) -> Predicate:
    """Return a predicate that checks whether a metric increases from row to row, in the order of `labels`."""

    def holds(rows: Rows) -> Any:
        values = [getattr(rows[label], metric) for label in labels]
        return np.all([low < high for low, high in pairwise(values)], axis=0)

    return holds


def close(metric: str, label: str, other: str, tolerance: float) -> Predicate:
    """Return a predicate that checks whether two rows agree within a relative tolerance (log-perplexity: absolute)."""

    def holds(rows: Rows) -> Any:
        value, reference = getattr(rows[label], metric), getattr(rows[other], metric)
        return np.abs(value - reference) <= tolerance * (1 if metric == "log_perplexity" else np.abs(reference))

    return holds


def closed_form(label: str, gamma: int) -> Predicate:
    """Return a predicate that compares tokens per step with (1 - α^(γ+1)) / (1 - α) for acceptance rate α (± 10 %)."""

    def holds(rows: Rows) -> Any:
        expected = sum(rows[label].acceptance_rate ** depth for depth in range(gamma + 1))
        return np.abs(rows[label].tokens_per_step / expected - 1) < 0.1

    return holds


def gain(rows: Rows, label: str, base: str) -> Any:
    """Return the increase in tokens per step from the row `base` to the row `label`."""
    return rows[label].tokens_per_step - rows[base].tokens_per_step


STEP, RATE, SPEED, PERPLEXITY, FLOPS = (
    "tokens_per_step", "acceptance_rate", "tokens_per_second", "log_perplexity", "flops_per_token"
)  # fmt: skip
CLAIMS: dict[str, dict[str, Predicate]] = {
    "speculative/gamma": {
        "more draft tokens, more tokens per step": rising(STEP, "γ=1", "γ=3", "γ=7"),
        "each further draft token adds less": lambda r: gain(r, "γ=2", "γ=1") > gain(r, "γ=3", "γ=2"),
        "tokens per step follow from α, γ = 3": closed_form("γ=3", 3),
        "tokens per step follow from α, γ = 7": closed_form("γ=7", 7),
        "the oracle wastes fewer draft tokens than a fixed length": rising(RATE, "γ=7", "oracle"),
    },
    "speculative/speedups": {
        "a larger drafter is accepted more often, greedily": rising(RATE, "small T=0", "large T=0"),
        "a larger drafter is accepted more often, sampling": rising(RATE, "small T=1", "large T=1"),
        "the smallest drafter is faster than the largest, greedily": rising(SPEED, "large T=0", "small T=0"),
        "the smallest drafter is faster than the largest, sampling": rising(SPEED, "large T=1", "small T=1"),
    },
    "speculative/acceptance": {
        "a drafter is accepted more often than bigrams, greedily": rising(RATE, "bigram T=0", "small T=0"),
        "a drafter is accepted more often than bigrams, sampling": rising(RATE, "bigram T=1", "small T=1"),
        "bigrams are accepted more often than unigrams, greedily": rising(RATE, "unigram T=0", "bigram T=0"),
        "bigrams are accepted more often than unigrams, sampling": rising(RATE, "unigram T=1", "bigram T=1"),
    },
    "multi-candidate/main": {
        "more tokens per step than SD with the same γ, greedily": rising(STEP, "same γ T=0", "candidates T=0"),
        "more tokens per step than SD with the same γ, sampling": rising(STEP, "same γ T=1", "candidates T=1"),
        "more tokens per step than SD with the best γ, sampling": rising(STEP, "best γ T=1", "candidates T=1"),
        "faster than SD with the best γ, greedily": rising(SPEED, "best γ T=0", "candidates T=0"),
        "faster than SD with the best γ, sampling": rising(SPEED, "best γ T=1", "candidates T=1"),
    },
    "multi-candidate/ablation": {
        "more tokens per step than naive sampling": rising(STEP, "MCNS", "with replacement"),
        "more tokens per step without replacement than with": rising(STEP, "with replacement", "without replacement"),
        "the gain of drawing without replacement is small": close(STEP, "without replacement", "with replacement", 0.1),
        "tree attention keeps the tokens per step": close(STEP, "without replacement", "without tree attention", 0.05),
        "tree attention is faster than a batch": rising(SPEED, "without tree attention", "without replacement"),
    },
    "multi-candidate/k-configurations": {
        **{f"falling beats rising: {a}x{b}": rising(STEP, f"{b}x{a}", f"{a}x{b}")
           for a, b in ((4, 1), (4, 2), (8, 2), (16, 1), (8, 4), (16, 2))},
        "falling configurations of 16 candidates are alike": close(STEP, "16x1", "8x2", 0.1),
        "32 candidates make more tokens per step than 16": rising(STEP, "8x2", "16x2"),
        "32 candidates are slower than 16": rising(SPEED, "16x2", "8x2"),
    },
    "multi-candidate/acceptance": {
        "acceptance rises with k, greedily": rising(STEP, "k=1 T=0", "k=4 T=0", "k=16 T=0"),
        "acceptance rises with k, sampling": rising(STEP, "k=1 T=1", "k=4 T=1", "k=16 T=1"),
        "beyond 16 it has almost converged": lambda r: (
            gain(r, "k=64 T=1", "k=16 T=1") < gain(r, "k=4 T=1", "k=1 T=1") / 4
        ),
        "without replacement beats with replacement": rising(STEP, "with replacement k=4 T=1", "k=4 T=1"),
        "with replacement beats naive sampling": rising(STEP, "naive k=4 T=1", "with replacement k=4 T=1"),
        "sampling is accepted less often than argmax": rising(STEP, "k=1 T=1", "k=1 T=0"),
        "a fine-tuned drafter is accepted more often, greedily": rising(STEP, "k=1 T=0", "fine-tuned k=1 T=0"),
        "a fine-tuned drafter is accepted more often, sampling": rising(STEP, "k=1 T=1", "fine-tuned k=1 T=1"),
        "candidates help a fine-tuned drafter": rising(STEP, "fine-tuned k=1 T=1", "fine-tuned k=4 T=1"),
    },
    "mjsd/main": {
        "MJSD is faster than plain decoding": rising(SPEED, "autoregressive", "mjsd"),
        "MJSD is faster than speculative decoding": rising(SPEED, "speculative", "mjsd"),
        "MJSD accepts more tokens per step": rising(STEP, "speculative", "mjsd"),
        "MJSD is faster than BiLD": rising(SPEED, "bild", "mjsd"),
        "MJSD is faster than SpecTr": rising(SPEED, "spectr", "mjsd"),
        "MJSD has the lower perplexity": rising(PERPLEXITY, "mjsd", "autoregressive"),
        "MJSD has a lower perplexity than BiLD": rising(PERPLEXITY, "mjsd", "bild"),
        "speculative decoding keeps the perplexity": close(PERPLEXITY, "speculative", "autoregressive", 0.1),
        "SpecTr keeps the perplexity": close(PERPLEXITY, "spectr", "autoregressive", 0.1),
    },
    "mjsd/threshold": {
        "a stricter threshold accepts less": rising(STEP, "τ=1", "τ=0.9", "τ=0.5", "τ=0"),
        "a stricter threshold is slower": rising(SPEED, "τ=1", "τ=0.9", "τ=0"),
        "at 1 every draft is rejected": lambda r: np.abs(r["τ=1"].tokens_per_step - 1) < 1e-3,
        "at 1 the perplexity is that of plain decoding": close(PERPLEXITY, "τ=1", "autoregressive", 0.1),
        "at 0 the perplexity is lower than at 1": rising(PERPLEXITY, "τ=0", "τ=1"),
    },
    "mjsd/beams": {
        "more beams accept more tokens per step": rising(STEP, "2 beams", "8 beams"),
        "more beams give a lower perplexity": rising(PERPLEXITY, "8 beams", "2 beams"),
        "more beams are faster": rising(SPEED, "2 beams", "8 beams"),
    },
    "mjsd/joint-greedy": {
        "K = 1 is greedy decoding": close(PERPLEXITY, "K=1", "autoregressive", 1e-3),
        "two joint tokens lower the perplexity": rising(PERPLEXITY, "K=2", "K=1"),
        "it falls with K": rising(PERPLEXITY, "K=5", "K=2"),
        "ROUGE-L rises with K": rising("rouge_l", "K=1", "K=5"),
    },
    "energy": {
        "sixteen inputs take less than a quarter longer than one": lambda r: (
            r["batch 16"].seconds_per_run < 1.25 * r["batch 1"].seconds_per_run
        ),
        "time per input falls with the batch": rising("seconds_per_input", "batch 16", "batch 4", "batch 1"),
        "energy per input falls with the batch": rising("joules_per_input", "batch 16", "batch 4", "batch 1"),
    },
    "slim/main": {
        "SLiM-S is faster than Medusa": rising(SPEED, "medusa", "slim-s"),
        "Medusa is faster than BPD": rising(SPEED, "bpd", "medusa"),
        "BPD is faster than plain decoding": rising(SPEED, "autoregressive", "bpd"),
        "SLiM-S makes as many tokens per step as Medusa": close(STEP, "slim-s", "medusa", 0.1),
        "more sequences make more tokens per step": rising(STEP, "bpd", "slim-ss", "slim-s", "slim-l"),
        "correlation makes up for the reduction": rising(STEP, "reduction only", "slim-s"),
        "SLiM-S takes half of Medusa's computation": lambda r: (
            r["slim-s"].flops_per_token < r["medusa"].flops_per_token / 2
        ),
        "BPD takes less computation than SLiM": rising(FLOPS, "autoregressive", "bpd", "slim-s"),
    },
    "slim/budget": {
        "computation grows with the sequences": rising("flops_per_step", "1", "10", "95"),
        "time grows less than computation": lambda r: (
            r["95"].seconds_per_step / r["1"].seconds_per_step < r["95"].flops_per_step / r["1"].flops_per_step
        ),
        "correlation chooses 5 sequences better": rising(STEP, "5 without table", "5"),
        "correlation chooses 10 sequences better": rising(STEP, "10 without table", "10"),
        "10 sequences beat a fixed tree of 8": rising(STEP, "tree 4x2x1x1", "10"),
        "and take less computation": rising(FLOPS, "10", "tree 4x2x1x1"),
    },
    "slim/heads": {
        "further heads make more tokens per step": rising(STEP, "SLiM 1", "SLiM 2", "SLiM 3"),
        "each further head adds less": lambda r: gain(r, "SLiM 3", "SLiM 2") < gain(r, "SLiM 2", "SLiM 1"),
        "four heads beat Medusa with four": rising(STEP, "Medusa 4", "SLiM 4"),
        "fewer heads take less computation": rising(FLOPS, "SLiM 1", "SLiM 2"),
        "correlation makes heads more accurate": rising(STEP, "without correlation", "with correlation"),
    },
    "slim/speculative": {
        "BPD is faster than SD with the smallest drafter": rising(SPEED, "SD-SS", "bpd"),
        "SLiM-S is faster than SD with the smallest drafter": rising(SPEED, "SD-SS", "slim-s"),
        "a large drafter makes the most tokens per step": rising(STEP, "SD-SS", "SD-L"),
        "but is the slowest": rising(SPEED, "SD-L", "SD-SS"),
    },
    "slim/saturation": {
        "a table of the whole corpus beats none": rising(STEP, "r = 1", "table"),
        "one of too little text is worse": rising(STEP, "table of 5", "r = 1"),
        "more text helps": rising(STEP, "table of 5", "table of 50", "table"),
        "beyond a point it helps little": lambda r: (
            r["table"].tokens_per_step < 1.02 * r["table of 50"].tokens_per_step
        ),
    },
    "theory/rejections": {
        "rejections per token are E[TV]": lambda r: (
            np.abs(r["speculative"].rejections + r["γ=1"].acceptance_rate - 1) < 0.05
        ),
        "four drafts are rejected less often than one": rising("rejections", "4 drafts", "speculative"),
        "but not by more than half": lambda r: r["4 drafts"].rejections > r["speculative"].rejections / 2,
        "OPT rejects less often than exact decoding": rising("rejections", "OPT ε=0.01", "speculative"),
        "a larger ε rejects less often": rising("rejections", "OPT ε=0.1", "OPT ε=0.01"),
        "OPT and UNO reject equally often": close("rejections", "OPT ε=0.01", "UNO ε=0.01", 0.25),
    },
}  # fmt: skip
"""Claims of the papers about the table of each recipe."""


def metrics_of(row: Mapping[str, Any]) -> SimpleNamespace:
    """Return each metric of a row as an array: its value over all prompts, then its values for resampled prompts."""

    def column(name: str) -> np.ndarray:
        return np.array([prompt[name] or 0 for prompt in row["by_prompt"]], float)

    prompts = len(row["by_prompt"])
    weights_RP = np.concatenate((np.ones((1, prompts)), resample_weights(prompts)))
    tokens, steps, seconds = column("tokens"), column("steps"), column("seconds")
    nats = tokens * np.log(np.maximum(column("perplexity"), 1e-9))
    flops_per_step = row["flops_per_token"]["total"] * row["tokens_per_step"]
    ratios = {
        "tokens_per_step": (tokens, steps),
        "acceptance_rate": (column("accepted"), column("examined")),
        "tokens_per_second": (tokens, seconds),
        "seconds_per_step": (seconds, steps),
        "log_perplexity": (nats, tokens),
        "rouge_l": (column("rouge_l"), np.ones(prompts)),
        "rejections": (steps - 1, tokens),  # valid if drafts are as long as the text
        "flops_per_token": (flops_per_step * steps, tokens),
        "flops_per_step": (flops_per_step * steps, steps),
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        return SimpleNamespace(**{name: (weights_RP @ over) / (weights_RP @ under)
                                  for name, (over, under) in ratios.items()})  # fmt: skip


def recipe_for(name: str, folder: Path, options: Any, **changes: Any) -> EvaluateRecipe:
    """Return a shipped recipe with small limits for the pair, without rows that need more heads than the pair has."""
    recipe = load_recipe(f"evaluate/{name}", kinds=[EvaluateRecipe])
    undistilled = folder / "drafter-stage1"
    drafters = [undistilled if undistilled.is_dir() else folder / "drafter", folder / "drafter", folder / "target"]
    heads = recipe_of_pair(folder).heads.num_heads

    def depth(row: Any) -> int:
        tree = row.options.get("tree")
        return max(row.options.get("max_depth") or 1, parse_tree(tree)[0].max_depth if tree else 1)

    sizes = {"limit": options.limit, "max_new_tokens": options.tokens, "compare_with_transformers": False}
    sizes |= SAMPLED if name.startswith("slim/") else {}
    rows = [row for row in recipe.methods if recipe.heads is None or depth(row) <= heads]
    settings = {"out": str(folder / "papers" / f"{name}.json"), "energy": "off", "methods": rows}
    if recipe.drafter is not None:
        settings |= {"drafter": str(drafters[0]), "more_drafters": [*map(str, drafters[1:])]}
    return on_pair(recipe, folder, **settings | sizes | changes)


def results_of(name: str, folder: Path, options: Any) -> dict[str, Any]:
    """Run an evaluation, or load its finished results, and return the metrics of its rows by label."""
    if name == "energy":
        recipe = recipe_for("mjsd/main", folder, options)
        sizes = {"energy_batches": [1, 4, 16], "energy_runs": 30, "energy_context": 64}
        recipe = recipe.model_copy(update=sizes)
        runs = measure_energy(wrap_model(load_target(recipe)), recipe)["rows"]
        numbers = ({key: np.array([value]) for key, value in row.items() if isinstance(value, float)} for row in runs)
        return {f"batch {row['batch']}": SimpleNamespace(**metrics) for row, metrics in zip(runs, numbers, strict=True)}
    rows = evaluate_once(recipe_for(name, folder, options))["methods"]
    if name == "slim/saturation":
        for size in (5, 50):
            table, out = partial_table(folder, size), str(folder / "papers" / f"{name}-{size}.json")
            part = evaluate_once(recipe_for(name, folder, options, table=str(table), out=out))["methods"]
            rows += [row | {"label": f"table of {size}"} for row in part if row["label"] == "table"]
    return {row["label"]: metrics_of(row) for row in rows}


def partial_table(folder: Path, limit: int) -> Path:
    """Count a bigram table from the first `limit` conversations of the pair's corpus; return its folder."""
    table = recipe_of_pair(folder).table
    values = table.model_dump(mode="json") | {"tokenizer": str(folder / "target")}
    values["out"] = str(folder / "papers" / f"table-{limit}")
    values["data"] |= {"limit": limit, "cache": str(folder / "papers" / "prepared")}
    recipe = parse_recipe(values, "partial table")
    assert isinstance(recipe, TableRecipe)
    return run_train(recipe)


def judge(predicate: Predicate, rows: Rows) -> str:
    """Return the verdict on a claim about resampled rows: "held", "not held", "noise" or "not measured"."""
    try:
        holds = np.asarray(predicate(rows), dtype=bool)
    except (KeyError, AttributeError):
        return "not measured"
    share = holds[1:].mean() if len(holds) > 1 else holds.mean()
    return "held" if holds[0] and share >= 0.95 else "not held" if not holds[0] and share <= 0.05 else "noise"


def main() -> None:
    parser = parser_of(__doc__, "use two prompts and eight new tokens", pair=True, limit=24, tokens=48)
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="RECIPE", help="recipes")
    parser.add_argument("--out", type=Path, help="output file (.json) for the results")
    options = parser.parse_args()
    if options.quick:
        options.limit, options.tokens = 2, 8
    results: dict[str, Any] = {}
    for name in options.only:
        rows = results_of(name, options.pair, options)
        verdicts = {claim: judge(predicate, rows) for claim, predicate in CLAIMS[name].items()}
        points = {label: {key: round(float(value[0]), 6) for key, value in vars(row).items()}
                  for label, row in rows.items()}  # fmt: skip
        results[name] = {"claims": verdicts, "rows": points}
        print(f"\n{name}", *(f"  {verdict:12s} {claim}" for claim, verdict in verdicts.items()), sep="\n", flush=True)
    statuses = [status for result in results.values() for status in result["claims"].values()]
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    print(f"\n{len(statuses)} claims: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    if options.out:
        text = json.dumps({"counts": counts, "recipes": results}, indent=1, ensure_ascii=False)
        atomic_text(options.out, text.replace("NaN", "null") + "\n")
    finish({"counts": counts})


if __name__ == "__main__":
    main()
