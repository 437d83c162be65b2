"""What kinds of drafts are worth that learned from the same answers, as many blocks of them, with several seeds.

    python tests/bench/kinds.py --pair runs/realpair [--steps 400] [--seeds 3] [--work DIR] [--limit 16]

The pair is a finished quickstart of recipe realpair: its answers, caches and recipes are used, with `--steps` steps for
every kind. Trained, one after another, in processes of their own: heads, which decode as Medusa's and with the pair's
table as SLiM's; EAGLE-3's layer; a drafter cut from the target with a draft vocabulary (trimmed), the same to draft
several tokens at once (parallel: PARD), with the whole vocabulary (drafter), with an output layer of rank 128 over the
draft vocabulary (thin), and on AdaSPEC's selection of tokens, for which the trimmed one is the reference (selected).
`--kinds` names some of them. Then each seed's are measured side by side on the same questions of Spec-Bench, at
temperatures 0 and 1. What is finished is reused; `--trained` stops before measuring. `--quick`: 4 steps, one seed, 2
questions.

In the results tokens per step, accepted share by depth, speedup with its interval for each seed; tokens, seconds, peak
memory of the training process, and parameters but those of embeddings. The last line is one JSON object.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import SHARED, finish, parser_of
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.recipes.commands.evaluation.evaluate import evaluate_once
from draftsmith.recipes.commands.pairs.quickstart import resolve
from draftsmith.recipes.schema.evaluation import EvaluateRecipe, QuickstartRecipe
from draftsmith.recipes.schema.loading import parse_recipe, read_recipe, write_recipe
from realpair import numbers_of, print_rows
from safetensors import safe_open

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("heads", {}),
    "eagle": ("eagle", {}),
    "trimmed": ("drafter", {}),
    "parallel": ("drafter", {"parallel": {"tokens": 4}}),
    "drafter": ("drafter", {"model": {"vocabulary": None}, "teacher": {"cache": "{work}/teacher"}}),
    "thin": ("drafter", {"model": {"vocabulary": {"rank": 128}, "freeze_embeddings": False}}),
    "selected": ("drafter", {"selection": {"reference": "{work}/trimmed-{seed}"}}),
}
"""By kind the stage of the pair that it is like, and what differs."""
DRAFTED = {0.0: (2, 4), 1.0: (1, 4)}
"""By temperature the lengths of drafts: what is fastest, and a long one, whose depths are told apart."""


def rows_of(temperature: float, kinds: list[str]) -> list[dict[str, Any]]:
    """Plain decoding, and each kind as it drafts best after a short training."""
    found: list[tuple[str, str, dict[str, Any]]] = [("autoregressive", "autoregressive", {})]
    numbers = {kind: number for number, kind in enumerate(drafters_of(kinds), 1)}
    for gamma in DRAFTED[temperature]:
        for kind, number in numbers.items():
            found.append((f"{kind}, γ = {gamma}", "speculative", {"gamma": gamma, "drafter": number}))
    if "parallel" in numbers:
        for gamma in (2, 4):
            options = {"gamma": gamma, "parallel": True, "drafter": numbers["parallel"]}
            found.append((f"parallel at once, γ = {gamma}", "speculative", options))
    if "eagle" in numbers:
        tree = {"max_nodes": 8, "max_depth": 3, "min_prob": 0.05, "drafter": numbers["eagle"]}
        found.append(("eagle, a tree of 8", "dynamic-tree", tree))
    if "heads" in kinds:
        found.append(("medusa", "medusa", {"tree": "2x1x1"}))
        found.append(("slim", "slim-s", {"num_sequences": 8, "min_prob": 0.05}))
    return [{"method": name, "label": label, "options": given} for label, name, given in found]


def drafters_of(kinds: list[str]) -> list[str]:
    """Those that draft token by token, in the order in which rows number them."""
    return [kind for kind in KINDS if kind in kinds and kind != "heads"]


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with those of sections replaced."""
    both = {
        key: merged(values[key], change) for key, change in changes.items() if isinstance(change, dict) and values[key]
    }
    return values | changes | both


def trained(kind: str, seed: int, pair: QuickstartRecipe, steps: int, work: Path) -> Path:
    """Train one kind, if it is not there; its folder."""
    stage, changes = KINDS[kind]
    values = getattr(pair, stage).model_dump(mode="json")
    out = work / f"{kind}-{seed}"
    filled = json.loads(json.dumps(changes).replace("{work}", str(work)).replace("{seed}", str(seed)))
    values = merged(merged(values, filled), {"out": str(out), "train": {"steps": steps, "seed": seed}})
    values["measure"]["prompts"] = 0
    file = work / f"{kind}-{seed}.yaml"
    write_recipe(parse_recipe(values, str(file)), file)
    if (out / "artifact.json").is_file():
        return out
    print(f"{kind}, seed {seed}", flush=True)
    command = [sys.executable, "-m", "draftsmith"]
    if stage == "drafter":
        subprocess.run([*command, "prepare", str(file), "--teacher"], check=True, stdout=subprocess.DEVNULL)
    child = subprocess.Popen([*command, "train", str(file)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"training {kind} with seed {seed} ended with status {status}: draftsmith train {file}")
    (work / f"{kind}-{seed}.json").write_text(json.dumps({"peak_mb": usage.ru_maxrss / 1e3}))
    return out


def cost_of(folder: Path) -> dict[str, float]:
    """What an artifact took to train."""
    found = load_manifest(folder).training
    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            sizes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        parameters += sum(math.prod(size) for name, size in sizes.items() if "embed" not in name)
    peak = json.loads(folder.with_suffix(".json").read_text())["peak_mb"]
    return {"tokens": found["tokens"], "seconds": found["seconds"], "peak_mb": peak, "parameters": parameters}


def measured(seed: int, pair: QuickstartRecipe, work: Path, limit: int, kinds: list[str]) -> dict[str, Any]:
    """By temperature and row what a seed's drafts are worth."""
    folders = [str(work / f"{kind}-{seed}") for kind in drafters_of(kinds)]
    heads = {"heads": str(work / f"heads-{seed}"), "table": pair.evaluate.table} if "heads" in kinds else {}
    some = "" if kinds == list(KINDS) else "".join(f"-{kind}" for kind in kinds)
    found = {}
    for temperature in (0.0, 1.0):
        recipe = EvaluateRecipe.model_validate({
            "kind": "evaluate", "out": str(work / f"seed-{seed}-T{temperature:g}{some}.json"),
            "target": pair.evaluate.target,
            "drafter": folders[0] if folders else None, "more_drafters": folders[1:], "drafter_dtype": "bfloat16",
            "prompts": "spec-bench", "prompts_path": str(SHARED / "eval" / "spec_bench_question.jsonl"),
            "template": "tokenizer", "limit": limit, "max_prompt_tokens": 512, "max_new_tokens": 64,
            "temperature": temperature, "compare_with_transformers": False, "energy": "off",
            "methods": rows_of(temperature, kinds), **heads,
        })  # fmt: skip
        results = evaluate_once(recipe)
        found[f"T={temperature:g}"] = {row["label"]: numbers_of(row) for row in results["methods"]}
        print_rows(f"seed {seed}, T={temperature:g}", found[f"T={temperature:g}"])
    return found


def main() -> None:
    parser = parser_of(__doc__, "4 steps, one seed, 2 questions", pair=True, steps=400, seeds=3, limit=16)
    parser.add_argument("--work", type=Path, help="where artifacts and results lie; by default PAIR/kinds")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="by default all")
    parser.add_argument("--trained", action="store_true", help="only train")
    options = parser.parse_args()
    options.kinds = [kind for kind in KINDS if kind in options.kinds]
    if options.quick:
        options.steps, options.seeds, options.limit = 4, 1, 2
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    work = options.work or options.pair / "kinds"
    work.mkdir(parents=True, exist_ok=True)
    file = options.pair / "quickstart.yaml"
    recipe = parse_recipe(read_recipe(file), str(file))
    assert isinstance(recipe, QuickstartRecipe)
    pair = resolve(recipe)
    costs = {
        f"{kind}, seed {seed}": cost_of(trained(kind, seed, pair, options.steps, work))
        for seed in range(options.seeds)
        for kind in options.kinds
    }
    rows = {}
    if not options.trained:
        rows = {f"seed {s}": measured(s, pair, work, options.limit, options.kinds) for s in range(options.seeds)}
    finish({"steps": options.steps, "trained": costs, "measured": rows})


if __name__ == "__main__":
    main()
