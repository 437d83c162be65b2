"""Measure every method with a finished pair on Spec-Bench at temperatures 0 and 1, by group of prompts.

    python tests/bench/realpair.py --pair runs/realpair [--prompts FILE] [--limit 80] [--rows 'medusa*']

Runs `draftsmith evaluate` with all lossless methods and MJSD; "eagle" rows draft with the pair's EAGLE-3 heads. The
evaluation resumes from `--work` (default: PAIR/bench). `--quick` uses two prompts and 16 tokens. The last line is one
JSON object, which `--out` also writes to a file.
"""

import argparse
import fnmatch
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import SHARED, finish, parser_of
from draftsmith.checkpoints.storage.atomic import atomic_text
from draftsmith.checkpoints.storage.draft_vocabulary import mask_token
from draftsmith.checkpoints.verify.model_files import load_config
from draftsmith.decode.methods import METHODS
from draftsmith.recipes.commands.evaluation.evaluate import NotLosslessError, evaluate_once
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import load_results
from draftsmith.recipes.session.machine import machine
from draftsmith.train.parallel.processes import Interrupted
from pair import on_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC_BENCH = SHARED / "eval" / "spec_bench_question.jsonl"
BASELINE = {"method": "autoregressive"}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"gamma": 1}),
    ("speculative", {"gamma": 2}),
    ("speculative", {"gamma": 3}),
    ("speculative", {"gamma": 3, "verification": "block"}),
    ("prompt-lookup", {"min_ngram": 2}),
    ("adaptive", {"confidence_threshold": 0.6}),
    ("suffix", {"datastore": "table"}),
    ("suffix", {"fallback": "heads", "datastore": "table"}),
    ("multi-candidate", {"k_config": "2x1x1"}),
    ("dynamic-tree", {"max_nodes": 3, "max_depth": 3}),
    ("dynamic-tree", {"max_nodes": 10, "max_depth": 5, "min_prob": 0.06}),
    ("medusa", {"tree": "2x1"}),
    ("slim-s", {"num_sequences": 8, "min_prob": 0.05}),
]
"""Rows in addition to all methods with default settings."""
OF_EAGLE: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"gamma": 1}),
    ("speculative", {"gamma": 2}),
    ("speculative", {"gamma": 3}),
    ("speculative", {"gamma": 3, "verification": "block"}),
    ("speculative", {"gamma": 4}),
    ("dynamic-tree", {}),
    ("dynamic-tree", {"max_nodes": 3, "max_depth": 3}),
    ("dynamic-tree", {"max_nodes": 4, "max_depth": 1, "width": 4, "min_prob": 0.05}),
    ("dynamic-tree", {"max_nodes": 8, "max_depth": 2, "width": 4, "min_prob": 0.05}),
    ("dynamic-tree", {"max_nodes": 24, "max_depth": 4, "width": 4, "min_prob": 0.005}),
    ("suffix", {"fallback": "drafter"}),
    ("suffix", {"fallback": "drafter", "min_prob": 0.05}),
    ("suffix", {"fallback": "drafter", "datastore": "table"}),
    ("suffix", {"fallback": "drafter", "max_nodes": 6, "draft_depth": 2, "min_prob": 0.15, "datastore": "table"}),
    ("suffix", {"fallback": "drafter", "max_nodes": 4, "draft_depth": 1, "datastore": "table"}),
    (
        "suffix",
        {"fallback": "drafter", "max_nodes": 11, "draft_depth": 2, "width": 4, "min_prob": 0.03, "datastore": "table"},
    ),
    ("multi-candidate", {"k_config": "4"}),
    ("multi-candidate", {"k_config": "3x1"}),
    ("multi-candidate", {"k_config": "4x2"}),
    ("multi-candidate", {"k_config": "4x2", "verification": "traversal"}),
    ("multi-candidate", {"k_config": "2x1x1"}),
]
"""Rows that draft with the pair's EAGLE-3 heads, if it has them."""
OF_PARALLEL = [("speculative", {"gamma": gamma, "parallel": True}) for gamma in (1, 2, 3, 4)]
"""Rows for a drafter that was trained for parallel drafting."""
NUMBERS = (
    "method", "options", "lossless", "tokens_per_step", "tokens_per_step_interval", "acceptance_rate",
    "acceptance_by_depth", "nodes_per_step", "speedup", "speedup_interval", "ideal", "bound", "efficiency",
    "tokens_per_second", "speedup_over_transformers", "identical_to_greedy", "near_ties", "cost_ratio", "steady",
    "slowdown", "perplexity",
)  # fmt: skip
IN_GROUPS = ("prompts", "tokens_per_step", "acceptance_by_depth", "speedup", "speedup_interval", "bound", "efficiency")
BRIEF = ("tokens_per_step", "speedup", "speedup_interval", "tokens_per_second")


def recipe_of(options: argparse.Namespace, temperature: float, methods: list[dict[str, Any]], **changes: Any) -> Any:
    """Return the recipe that evaluates the pair on the chosen prompts at one temperature."""
    out = options.work / f"{title_of(options, temperature)}.json"
    values = {"kind": "evaluate", "out": str(out), "target": "", "prompts": ""}
    recipe = EvaluateRecipe.model_validate(values | {"methods": methods})
    settings: dict[str, Any] = {"prompts": str(options.prompts)}
    if "spec_bench" in options.prompts.name:
        settings = {"prompts": "spec-bench", "prompts_path": str(options.prompts)}  # interleaves the groups
    settings |= {"groups": options.groups, "limit": options.limit, "max_prompt_tokens": options.prompt_tokens}
    settings |= {"max_new_tokens": options.tokens, "repeats": options.repeats, "temperature": temperature}
    settings |= {
        "compare_with_transformers": not options.alone,
        "energy": "off",
        "drafter_dtype": options.drafter_dtype,
        "dtype": options.dtype,
    }
    if (eagle := options.pair / "eagle").is_dir():
        settings |= {"more_drafters": [str(eagle)]}
    return on_pair(recipe, options.pair, **settings | changes)


def title_of(options: argparse.Namespace, temperature: float) -> str:
    """Return the title of results: the temperature, and the dtypes of target and drafters if not the default."""
    target_dtype = None if options.dtype == "auto" else f"target {options.dtype}"
    return ", ".join(filter(None, [f"T={temperature:g}", target_dtype, options.drafter_dtype]))


def rows_of(chosen: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return the baseline and those rows of a pair whose labels match a pattern in `chosen` (empty: all rows)."""
    entries = [(name, {}) for name, method in METHODS.items() if method.lossless or name == "mjsd"] + MORE
    entries = [row for row in entries if row[0] != BASELINE["method"]]
    if mask_token(load_config(str(folder / "drafter"))) is not None:
        entries += OF_PARALLEL
    rows: list[tuple[str, str, dict[str, Any]]] = [
        (" ".join([name, *(key if value is True else str(value) for key, value in options.items())]), name, options)
        for name, options in entries
    ]
    if (folder / "eagle").is_dir():
        eagle_rows = [(" ".join([name, *map(str, extra.values()), "eagle"]), name, extra) for name, extra in OF_EAGLE]
        rows += [(label, name, {**extra, "drafter": 2}) for label, name, extra in eagle_rows]
    labels = [label for label, _, _ in rows]
    selected = set(labels) if not chosen else {label for word in chosen for label in fnmatch.filter(labels, word)}
    if unknown := [word for word in chosen if not fnmatch.filter(labels, word)]:
        raise SystemExit(f"--rows: no label matches {unknown[0]!r}; choose from {', '.join(labels)}")
    return [BASELINE, *({"method": name, "label": label, "options": o} for label, name, o in rows if label in selected)]


def rounded(value: Any) -> Any:
    """Round every float in nested results to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def short(word: Path | str) -> str:
    """Shorten an absolute path to its last two parts; return any other argument unchanged."""
    return str(Path(*Path(word).parts[-2:])) if Path(word).is_absolute() else str(word)


def methods(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate all rows at every temperature and return the results by title."""
    by_title = {}
    for temperature in options.temperatures:
        recipe = recipe_of(options, temperature, rows_of(options.rows, options.pair))
        try:
            results = evaluate_once(recipe)
        except NotLosslessError as error:
            print(f"error: {error}")
            results = load_results(recipe.out)
        rows = {row["label"]: numbers_of(row) for row in results["methods"]}
        print_rows(f"T={temperature:g}, {results['prompts']} prompts", rows)
        by_title[title_of(options, temperature)] = {
            **{key: results[key] for key in ("prompts", "prompts_sha256", "categories", "errors")},
            "greedy_equals_transformers": results["greedy_equals_transformers"],
            "rows": rows,
        }
    return by_title


def numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return those metrics of a row that the results file stores, rounded."""
    numbers = {key: row[key] for key in NUMBERS}
    numbers["groups"] = {name: {key: part[key] for key in IN_GROUPS} for name, part in row["by_category"].items()}
    return dict(rounded(numbers))


def print_rows(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the rows, then their tokens per step and speedup by group of prompts."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    def span(interval: Sequence[float] | None) -> str:
        return "" if interval is None else f"({interval[0]:.2f}–{interval[1]:.2f})"

    print(f"{title}\n{'':26}tokens/step             speedup              bound  efficiency  greedy text")
    for label, row in rows.items():
        identical = "{:g}/{:g}".format(*row["identical_to_greedy"]) if row["identical_to_greedy"] else ""
        print(
            f"{label:26}{number(row['tokens_per_step']):>5} {span(row['tokens_per_step_interval']):16}"
            f"{number(row['speedup']):>7} {span(row['speedup_interval']):14}"
            f"{number(row['bound']):>5}{number(row['efficiency']):>12}  {identical}"
        )
    groups = list(next(iter(rows.values()))["groups"])
    print(f"{'tokens/step, speedup':26}" + "".join(f"{group:>20}" for group in groups))
    for label, row in rows.items():
        parts = [row["groups"][group] for group in groups]
        cells = [f"{number(part['tokens_per_step'])} {number(part['speedup'])} x" for part in parts]
        print(f"{label:26}" + "".join(f"{cell:>20}" for cell in cells))


def brief(results: Any) -> Any:
    """Return the main metrics over all prompts, for the last line of the output."""
    if not isinstance(results, dict):
        return results
    excluded = {*NUMBERS, "groups", "categories"} - {*BRIEF}
    return {key: brief(value) for key, value in results.items() if key not in excluded}


def main() -> None:
    parser = parser_of(
        __doc__, "use two prompts and 16 new tokens", limit=80, tokens=96, prompt_tokens=1024, repeats=1, threads=0
    )
    parser.add_argument("--pair", type=Path, default=Path("runs/realpair"), help="folder of a finished quickstart")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH, help="file of prompts (default: Spec-Bench)")
    parser.add_argument("--groups", nargs="+", default=[], help="use only these groups of prompts")
    parser.add_argument("--rows", nargs="+", default=[], help="measure only these labels, e.g. 'speculative*'")
    parser.add_argument("--dtype", default="auto", help="dtype of the target's weights (default: as stored)")
    parser.add_argument("--drafter-dtype", help="dtype of the drafters' weights (default: the target's)")
    parser.add_argument("--alone", action="store_true", help="skip the greedy texts of transformers")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="default: 0 1")
    parser.add_argument("--work", type=Path, help="folder of finished evaluations (default: PAIR/bench)")
    parser.add_argument("--out", type=Path, help="output file (.json) for the results")
    options = parser.parse_args()
    if options.quick:
        options.limit, options.tokens = 2, 16
    if options.threads:
        torch.set_num_threads(options.threads)
    options.work = options.work or options.pair / "bench"
    try:
        results = methods(options)
    except Interrupted as stopped:
        raise SystemExit(str(stopped)) from None
    if options.out is not None:
        command = " ".join(["python tests/bench/realpair.py", *map(short, sys.argv[1:])])
        about = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(DEVICE), "command": command}
        text = json.dumps({"methods": results, "about": {"methods": about}}, indent=1)
        text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)  # one line per list
        atomic_text(options.out, text + "\n")
    finish({"methods": brief(results)}, DEVICE)


if __name__ == "__main__":
    main()
