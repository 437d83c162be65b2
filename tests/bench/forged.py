"""What forges chose, beside the best that is known.

    python tests/bench/forged.py runs/forge-0 runs/forge-1 runs/forge-2 --seconds 200
    python tests/bench/forged.py runs/forge-0 --drafters runs/drafter runs/eagle --heads runs/heads --prompts FILE

Forges of one target and the same questions. `--seconds`: every candidate, also those that a forge leaves out, is
trained so long on the first forge's answers; `--drafters` and `--heads` are artifacts made by hand. All their rows,
and what costs no training, are measured in turns on held-out questions; the fastest of them is then measured beside
what each forge chose on others, so that the best of many is not the luckiest. The questions are those in the middle of
what was held out, where a forge looks last, or spread over `--prompts`. All look up the first forge's answers. Texts at
a time and temperatures have a comparison each. `share` is a choice's speedup over that of the best, with its 95 %
interval where both were measured together. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, parser_of
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.storage.names import MANIFEST_FILE
from draftsmith.checkpoints.storage.safe_read import load_json
from draftsmith.decode.evaluation.metrics import speedup_interval
from draftsmith.decode.evaluation.tuning.costs import Curve
from draftsmith.decode.evaluation.tuning.plan import Candidate, ModelShape, list_candidates
from draftsmith.decode.evaluation.tuning.tuner import Workload
from draftsmith.recipes.commands.evaluation.evaluate import evaluate_once
from draftsmith.recipes.commands.pairs.quickstart import run_stage
from draftsmith.recipes.commands.pairs.stages import (
    DRAFT_VOCABULARY,
    UNTRAINED,
    WITH_ANSWERS,
    Row,
    base_of,
    evaluation_of,
    kind_of,
    label_of,
    list_rows,
    training_of,
)
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.forge import ForgeRecipe
from draftsmith.recipes.schema.loading import load_recipe

TRIED = 16


class Way(NamedTuple):
    """A row, and what it drafts with."""

    name: str
    row: Row
    drafter: str | None = None
    heads: str | None = None


class Forge(NamedTuple):
    folder: Path
    recipe: ForgeRecipe
    results: dict[str, Any]


def opened(folder: Path) -> Forge:
    """A finished one."""
    recipe = load_recipe(str(folder / "forge.yaml"), kinds=("forge",))
    assert isinstance(recipe, ForgeRecipe)
    return Forge(folder, recipe.model_copy(update={"out": str(folder)}), load_json(folder / "forge.json", "workloads"))


def trained(forge: Forge, candidate: Candidate, seconds: float) -> Path:
    """A candidate, trained so long."""
    base = base_of(forge.recipe)
    vocabulary = load_json(forge.folder / "costs.json", "shape")["shape"]["vocabulary"]

    def train(steps: int) -> Path:
        name = f"{candidate.kind}-{len(candidate.layers)}-{steps}"
        stage = training_of(base, candidate, vocabulary, steps, forge.folder / "exhaustive" / name)
        run_stage(stage)
        return Path(stage.out)

    return train(max(TRIED, int(seconds / (float(load_manifest(train(TRIED)).training["seconds"]) / TRIED))))


def known_ways(forge: Forge, args: argparse.Namespace) -> list[Way]:
    """List all settings that could be chosen."""
    costs = load_json(forge.folder / "costs.json", "shape")
    shape, seconds = ModelShape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
    found = [Way("no training", row) for row in [*UNTRAINED, *WITH_ANSWERS]]
    for candidate in list_candidates(shape, DRAFT_VOCABULARY, costs["eagle"]) if args.seconds else ():
        made = str(trained(forge, candidate, args.seconds))
        part = {"heads" if candidate.kind == "heads" else "drafter": made}
        rows = list_rows(candidate.kind, seconds, shape, candidate.cost)
        found += [Way(candidate.name, row, **part) for row in rows]
    for folder in args.drafters:
        found += [Way(str(folder), row, drafter=str(folder)) for row in list_rows(kind_of(folder), seconds, shape)]
    for given in map(str, args.heads):
        found += [Way(given, row, heads=given) for row in list_rows("heads", seconds, shape)]
    return list({(way.row[0], str(way.row[1]), way.drafter, way.heads): way for way in found}.values())


def share_of(row: dict[str, Any], other: dict[str, Any], batch: int) -> tuple[float, Any]:
    """Return the speed of a row relative to another one measured in turns with it, and its 95 % interval."""
    sides = [[each[key] for each in one["by_prompt"]] for one in (row, other) for key in ("tokens", "seconds")]
    return speedup_interval(*([sum(side[at : at + batch]) for at in range(0, len(side), batch)] for side in sides))


def chosen_way(forge: Forge, workload: Workload) -> Way | None:
    """What a forge chose; None: plain decoding. Raises ValueError: it did not look there."""
    found = [each for each in forge.results["workloads"] if Workload(each["batch"], each["temperature"]) == workload]
    if not found:
        raise ValueError(f"{forge.folder} decided nothing for {workload}")
    if found[0]["winner"] is None:
        return None
    several = len(forge.results["workloads"]) > 1
    file = forge.folder / (f"winner-{workload.slug}.yaml" if several else "winner.yaml")
    recipe = load_recipe(str(file), kinds=("evaluate",))
    assert isinstance(recipe, EvaluateRecipe)
    (row,) = recipe.methods[1:]
    return Way(f"chosen by {forge.folder.name}", (row.method, row.options), recipe.drafter, recipe.heads)


def measured(
    forge: Forge, workload: Workload, ways: Sequence[Way], prompts: Path, limit: int, name: str
) -> list[dict[str, Any]]:
    """The row of each, in turns; heads, of which an evaluation has one kind, in one of their own."""
    found: dict[int, dict[str, Any]] = {}
    table = next(each for each in forge.folder.glob("table*") if (each / MANIFEST_FILE).is_file())
    for number, heads in enumerate(dict.fromkeys(way.heads for way in ways)):
        own = [index for index, way in enumerate(ways) if way.heads == heads]
        drafters = list(dict.fromkeys(each for index in own if (each := ways[index].drafter) is not None))
        rows: list[Row] = []
        for index in own:
            (method, options), drafter = ways[index].row, ways[index].drafter
            kept = {key: value for key, value in options.items() if key != "drafter"}
            at = drafters.index(drafter) + 1 if drafter is not None else 1
            rows.append((method, kept | ({"drafter": at} if at > 1 else {})))
        labels = [f"{index} {label_of(ways[index].row)}, {ways[index].name}" for index in own]
        given: dict[str, Any] = {
            "drafters": drafters,
            "heads": heads,
            "table": True,
            "labels": labels,
            "source": prompts.name,
        }
        recipe = evaluation_of(
            base_of(forge.recipe), forge.recipe, f"{name}-{number}", rows, workload, limit, **given
        ).model_copy(update={"table": str(table)})
        by_label = {row["label"]: row for row in evaluate_once(recipe)["methods"]}
        found |= {index: by_label[label] for index, label in zip(own, labels, strict=True)}
    return [found[index] for index in range(len(ways))]


def halved(first: Forge, prompts: Path | None, limit: int) -> list[Path]:
    """Two files of so many questions each."""
    lines = (prompts or first.folder / "corpus" / "heldout.jsonl").read_text().splitlines(keepends=True)
    middle = max(0, len(lines) // 2 - limit)
    lines = lines[middle : middle + 2 * limit] if prompts is None else lines[:: max(1, len(lines) // (2 * limit))]
    halves = [first.folder / "corpus" / f"{prompts.stem if prompts else 'middle'}-{which}.jsonl" for which in (1, 2)]
    for which, half in enumerate(halves):
        half.write_text("".join(lines[which::2]))
    return halves


def compared(
    forges: Sequence[Forge], workload: Workload, ways: Sequence[Way], args: argparse.Namespace
) -> dict[str, Any]:
    first, limit = forges[0], max(1, args.limit // workload.batch) * workload.batch
    halves = halved(first, args.prompts, limit)
    rows = measured(first, workload, ways, halves[0], limit, f"known-{workload.slug}")
    ranked = sorted(zip(ways, rows, strict=True), key=lambda pair: -float(pair[1]["speedup"]))
    choices = [chosen_way(forge, workload) for forge in forges]
    rivals = [ranked[0][0], *(way for way in choices if way is not None)]
    best, *finals = measured(first, workload, rivals, halves[1], limit, f"choices-{workload.slug}")
    names = {"name": ranked[0][0].name, "row": label_of(ranked[0][0].row)}
    known = [
        {"name": way.name, "row": label_of(way.row)}
        | {key: row[key] for key in ("tokens_per_step", "speedup", "speedup_interval")}
        for way, row in ranked
    ]
    found: dict[str, Any] = {"known": known, "best": names | {"speedup": best["speedup"]}, "chosen": []}
    for forge, way in zip(forges, choices, strict=True):
        row = finals.pop(0) if way is not None else None
        part, interval = 1 / best["speedup"], None
        if row is not None and way is not None:
            part, interval = row["speedup"] / best["speedup"], None
            if way.heads == rivals[0].heads:
                part, interval = share_of(row, best, workload.batch)
        said: dict[str, Any] = {"forge": forge.folder.name, "row": label_of(way.row) if way else "autoregressive"}
        said |= {"share": part, "interval": interval, "speedup": row["speedup"] if row else 1.0}
        found["chosen"].append(said)
        print(f"{workload}: {said['forge']} {said['row']}, {part:.2f} of {names['name']} {names['row']}")
    return found


def main() -> None:
    parser = parser_of(__doc__, "two questions each", limit=24, seconds=0)
    parser.add_argument("forges", nargs="+", type=Path)
    parser.add_argument("--drafters", nargs="*", type=Path, default=[])
    parser.add_argument("--heads", nargs="*", type=Path, default=[])
    parser.add_argument("--prompts", type=Path)
    args = parser.parse_args()
    args.limit = 2 if args.quick else args.limit
    forges = [opened(folder) for folder in args.forges]
    ways = known_ways(forges[0], args)
    workloads = [Workload(each["batch"], each["temperature"]) for each in forges[0].results["workloads"]]
    found = {str(workload): compared(forges, workload, ways, args) for workload in workloads}
    finish({"forges": [str(forge.folder) for forge in forges], "seconds": args.seconds, "workloads": found})


if __name__ == "__main__":
    main()
