"""Measure lookups, a small model and trained drafters of a pair on HumanEval, GSM8K, MT-bench and Spec-Bench.

    python tests/bench/coder.py --pair runs/coder [--sets humaneval] [--limit 20] [--rows 'small model*' suffix]
                                [--dtypes bfloat16 int8] [--batches 1 4] [--temperatures 0 1] [--certify 1000]

The folder is that of `draftsmith quickstart --recipe coder`, finished or not: rows whose artifact is missing are left
out. Each set, batch size and dtype is one `draftsmith evaluate` with the first question of each conversation, which
resumes from `--work` (default: PAIR/bench). Speedups are over autoregressive decoding of the same prompts, with the
prefill and, as `decoding`, without it. `--quick` uses one prompt of each set and 16 tokens. The last line is one JSON
object, which `--out` also writes to a file.
"""

import argparse
import fnmatch
import itertools
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import SHARED, finish, parser_of
from draftsmith.checkpoints.storage.atomic import atomic_text
from draftsmith.data.sources.registry import find_corpus
from draftsmith.decode.evaluation.metrics import speedup_interval
from draftsmith.recipes.commands.evaluation.evaluate import NotLosslessError, certify_once, evaluate_once
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import load_results
from draftsmith.recipes.session.machine import machine
from draftsmith.train.parallel.processes import Interrupted
from realpair import DEVICE, rounded, short

SETS = {
    "humaneval": "eagle_humaneval_question.jsonl",
    "gsm8k": "eagle_gsm8k_question.jsonl",
    "mt-bench": "mt_bench_question.jsonl",
    "spec-bench": "spec_bench_question.jsonl",
}
DRAFTERS = ("drafter", "small_model", "trimmed", "eagle", "block")
LENGTHS = {"drafter": (2, 3, 5), "small_model": (2, 3, 5), "trimmed": (2, 3, 5), "eagle": (2, 3, 4), "block": (3, 5, 7)}
"""Numbers of draft tokens to measure for each drafter."""
STORED, TREE = {"datastore": "table"}, {"max_nodes": 5, "min_prob": 0.05, "expand_prob": 0.5}
WITH_DRAFTER = {"fallback": "drafter", "max_nodes": 5, **STORED}
ENTRIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "prompt lookup": ("prompt-lookup", {"min_ngram": 2}, ()),
    "suffix": ("suffix", {}, ()),
    "suffix table": ("suffix", STORED, ("table",)),
    "suffix heads": ("suffix", {"fallback": "heads", **STORED}, ("table", "heads")),
    **{f"suffix {name.replace('_', ' ')}": ("suffix", WITH_DRAFTER, ("table", name)) for name in DRAFTERS},
    **{
        f"{name.replace('_', ' ')} {gamma}": ("speculative", {"gamma": gamma}, (name,))
        for name, lengths in LENGTHS.items()
        for gamma in lengths
    },
    **{f"{name.replace('_', ' ')} tree": ("dynamic-tree", TREE, (name,)) for name in DRAFTERS[:3]},
    "eagle tree": ("dynamic-tree", {"max_nodes": 5, "max_depth": 3}, ("eagle",)),
    "block tree": ("dynamic-tree", {"max_nodes": 15, "max_depth": 6}, ("block",)),
    "medusa": ("medusa", {"tree": "2x1"}, ("heads",)),
    "slim": ("slim-s", {"num_sequences": 4}, ("heads", "table")),
}
"""Mapping from labels to methods, their options and the artifacts that they need."""
NUMBERS = (
    "tokens_per_step", "tokens_per_step_interval", "acceptance_rate", "acceptance_by_depth", "tokens_per_second",
    "speedup", "speedup_interval", "bound", "identical_to_greedy", "near_ties", "cost_ratio", "steady",
)  # fmt: skip


def chosen_entries(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Return the entries whose labels match `--rows` and whose artifacts exist."""
    for word in options.rows:
        if not fnmatch.filter(ENTRIES, word):
            raise SystemExit(f"--rows: no label matches {word!r}; choose from {', '.join(ENTRIES)}")
    matching = {label for word in options.rows or ["*"] for label in fnmatch.filter(ENTRIES, word)}
    found = {label: all((options.pair / name).is_dir() for name in entry[2]) for label, entry in ENTRIES.items()}
    return {label: entry for label, entry in ENTRIES.items() if label in matching and found[label]}


def recipe_of(options: argparse.Namespace, prompts: str, batch: int, dtype: str) -> EvaluateRecipe:
    """Return the recipe that evaluates all rows on a set of prompts."""
    file = str(SHARED / "eval" / SETS[prompts])
    fixed: dict[str, Any] = {"prompts": file}
    if find_corpus(prompts) is not None:  # known sets alternate between their groups
        fixed = {"prompts": prompts, "prompts_path": file}
    entries = chosen_entries(options)
    needed = {name for entry in entries.values() for name in entry[2]}
    drafters = [name for name in DRAFTERS if name in needed]
    fixed |= {name: str(options.pair / name) for name in ("heads", "table") if name in needed}
    if drafters:
        first, *more = (str(options.pair / name) for name in drafters)
        fixed |= {"drafter": first, "more_drafters": more}
    rows: list[dict[str, Any]] = []
    for at in options.temperatures:
        rows.append({"method": "autoregressive", "temperature": at})
        for label, (method, settings, needs) in entries.items():
            number = next((1 + drafters.index(name) for name in needs if name in drafters), 1)
            numbered = settings | ({"drafter": number} if number > 1 else {})
            rows.append({"method": method, "label": f"{label} T={at:g}", "options": numbered, "temperature": at})
    fixed |= {"out": str(options.work / f"{prompts}-b{batch}-{dtype}.json"), "target": str(options.pair / "target")}
    fixed |= {"dtype": dtype, "batch": batch, "limit": options.limit, "max_prompt_tokens": options.prompt_tokens}
    fixed |= {"max_new_tokens": options.tokens, "methods": rows, "turns": "first", "energy": "off"}
    fixed |= {"kind": "evaluate", "template": "tokenizer", "compare_with_transformers": False}
    return EvaluateRecipe.model_validate(fixed)


def speeds_of(row: dict[str, Any], base: dict[str, Any], batch: int, key: str) -> dict[str, Any]:
    """Return tokens per second, and the speedup with its interval over batches, for the seconds stored as `key`."""

    def by_batch(of: dict[str, Any], name: str) -> list[float]:
        values = [prompt[name] for prompt in of["by_prompt"]]
        return [sum(values[start : start + batch]) for start in range(0, len(values), batch)]

    columns = [by_batch(of, name) for of in (row, base) for name in ("tokens", key)]
    speedup, interval = speedup_interval(*columns)
    rate = sum(columns[0]) / sum(columns[1])
    return {"tokens_per_second": rate, "speedup": speedup, "speedup_interval": interval}


def measure(options: argparse.Namespace, batch: int, dtype: str) -> dict[str, Any]:
    """Evaluate all sets, print a table, and return the numbers of the rows by set, and over all sets."""
    pooled: dict[str, dict[str, Any]] = {}
    numbers: dict[str, Any] = {}
    for prompts in options.sets:
        recipe = recipe_of(options, prompts, batch, dtype)
        try:
            results = evaluate_once(recipe)
        except NotLosslessError as error:
            print(f"error: {error}")
            results = load_results(recipe.out)
        rows = {row["label"]: row for row in results["methods"]}
        numbers[prompts] = {"prompts": results["prompts"], "prompts_sha256": results["prompts_sha256"], "rows": {}}
        verdicts = certify_once(recipe, options.certify) if options.certify else {}
        for label, row in rows.items():
            base = rows[f"autoregressive T={row['temperature']:g}"]
            decoding = speeds_of(row, base, batch, "decoding_seconds")
            more = {"decoding": decoding, "certificate": verdicts.get(label)}
            numbers[prompts]["rows"][label] = {name: row[name] for name in NUMBERS} | more
            total = pooled.setdefault(label, {"temperature": row["temperature"], "by_prompt": [], "identical": [0, 0]})
            total["by_prompt"] += row["by_prompt"]
            equal, compared = row["identical_to_greedy"] or (0, 0)
            total["identical"] = [total["identical"][0] + equal, total["identical"][1] + compared]
    together: dict[str, Any] = {}
    for label, row in pooled.items():
        base = pooled[f"autoregressive T={row['temperature']:g}"]
        tokens, steps = (sum(prompt[name] for prompt in row["by_prompt"]) for name in ("tokens", "steps"))
        together[label] = {"tokens_per_step": tokens / steps, "identical_to_greedy": row["identical"]}
        together[label] |= speeds_of(row, base, batch, "seconds")
        together[label]["decoding"] = speeds_of(row, base, batch, "decoding_seconds")
    numbers["all"] = {"prompts": sum(part["prompts"] for part in numbers.values()), "rows": together}
    print_rows(f"{dtype}, batch {batch}", numbers)
    return numbers


def print_rows(title: str, numbers: dict[str, Any]) -> None:
    """Print each row's acceptance length, speed and speedups, over all sets and by set."""

    def span(interval: Sequence[float] | None) -> str:
        return "" if interval is None else f"({interval[0]:.2f}–{interval[1]:.2f})"

    for name, part in numbers.items():
        print(f"{title}, {name}, {part['prompts']} prompts\n{'':28}tokens/step tokens/s  speedup           decoding")
        for label, row in part["rows"].items():
            pairs = [f"{each['speedup']:.2f} {span(each['speedup_interval']):12}" for each in (row, row["decoding"])]
            identical = "{:g}/{:g}".format(*row["identical_to_greedy"]) if row["identical_to_greedy"] else ""
            rate = f"{row['tokens_per_step']:11.2f} {row['tokens_per_second']:8.1f}"
            print(f"{label:28}{rate}  {pairs[0]} {pairs[1]} {identical}")


def main() -> None:
    parser = parser_of(
        __doc__, "use one prompt of each set and 16 new tokens", limit=20, tokens=128, prompt_tokens=1024
    )
    parser.add_argument("--pair", type=Path, default=Path("runs/coder"), help="folder of `quickstart --recipe coder`")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of prompts (default: all)")
    parser.add_argument("--rows", nargs="+", default=[], help="measure only these labels, e.g. 'eagle*'")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"], help="dtypes of target and drafters")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="batch sizes (default: 1 4)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="default: 0 1")
    parser.add_argument(
        "--certify", type=int, default=0, help="number of tokens on which to certify the rows (default: 0)"
    )
    parser.add_argument("--work", type=Path, help="folder of finished evaluations (default: PAIR/bench)")
    parser.add_argument("--out", type=Path, help="output file (.json) for the results")
    options = parser.parse_args()
    if options.quick:
        options.limit, options.tokens = 1, 16
    options.work = options.work or options.pair / "bench"
    try:
        workloads = itertools.product(options.dtypes, options.batches)
        results = {f"{dtype}, batch {batch}": measure(options, batch, dtype) for dtype, batch in workloads}
    except Interrupted as stopped:
        raise SystemExit(str(stopped)) from None
    results = rounded(results)
    if options.out is not None:
        command = " ".join(["python tests/bench/coder.py", *map(short, sys.argv[1:])])
        about = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(DEVICE), "command": command}
        atomic_text(options.out, json.dumps({"coder": results, "about": {"coder": about}}, indent=1) + "\n")
    finish({"coder": {title: part["all"]["rows"] for title, part in results.items()}}, DEVICE)


if __name__ == "__main__":
    main()
