"""`draftsmith papers` and `draftsmith evaluate` with recipes of kind `paper`: the papers' tables, run again.

Each recipe leaves a folder with `report.html` and `paper.json`: `schema` (1) and `kind` ("paper"); `name`, `paper`,
`where`, `experiment`, `not_rerun` and `theirs` as in the recipe; `identity`, sha256 of the settings, of what they name
and of the machine (the same is not run twice); `pair`, a pair's folder, or null; `machine` as in
`results.json`; `rows`: label, metrics, and their numbers by prompt (see `claims.judge`); `claims`: says, where, holds,
ours (the sides in numbers), status, why, and paper, paper_status, paper_why: the same by the paper's own numbers.

`papers.json` holds those of all recipes of a run, without what is by prompt, and the errors of those that failed;
`papers.html` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.messages import words
from ...assemble.evaluation import device_of
from ...report.page import write_page, write_report
from ...report.papers import claims_table, numbers_table, papers_body, title_of
from ...schema.claims import judge, parse_claim
from ...schema.loading import read_extended, shipped_recipes, write_recipe
from ...schema.papers import Pair, PaperRecipe
from ...schema.results import load_results, write_results
from ...session.machine import machine
from ...session.terminal import console, log
from ..evaluation.finished import identity_of, read_finished
from ..evaluation.recipe import EVALUATIONS, paper_recipe
from .experiments import EXPERIMENTS, results_of

SCHEMA = 1
FOLDER = "runs/papers"
HEADING = "The papers' tables, run again"


def shipped_papers() -> list[str]:
    """Names of the shipped recipes of kind `paper`."""
    return [name for name, path in shipped_recipes().items() if read_extended(path).get("kind") == "paper"]


def run_paper(recipe: PaperRecipe, name: str, pair: Pair | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Run a paper's table, judge its claims, print both and write `paper.json` and `report.html`. A recipe that has
    finished with the same settings and artifacts is only read and judged again. `pair`: what it runs on, at small size;
    `folder`: of the results, by default `folder_of`."""
    used = recipe.on_pair(pair) if pair is not None else recipe
    folder = folder or folder_of(recipe, pair)
    check_writable(folder)
    settings = used.recorded(include={"experiment", "settings", "evaluate"})
    identity = identity_of(settings, used.sources(), used.evaluate)
    log(f"papers: {name}, {recipe.where}")
    if used.not_rerun != recipe.not_rerun:
        log(f"papers: {str(used.not_rerun).removeprefix(recipe.not_rerun or '').strip()}")
    # an evaluation knows by itself which of its runs have finished
    earlier = read_finished(folder / "paper.json", identity) if used.experiment != "evaluate" else None
    if earlier is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder / "recipe.yaml")
        rows = EXPERIMENTS[used.experiment](used, folder)
    else:
        log(f"papers: {name} had finished already")
        rows = earlier["rows"]
    result: dict[str, Any] = {"schema": SCHEMA, "kind": "paper", "identity": identity, "name": name}
    result["pair"] = pair.folder if pair is not None else None
    result |= used.recorded(include={"paper", "where", "experiment", "not_rerun", "theirs"})
    result |= {"machine": machine(device_of(used.evaluate)), "rows": rows, "claims": []}
    _write(folder / "paper.json", result)  # what was measured stands, whatever becomes of the claims
    result["claims"] = judged(recipe, rows)
    _write(folder / "paper.json", result)
    _report(folder, result, used)
    console().print(f"{name}: {title_of(result)}{f' on {pair.folder}' if pair else ''}")
    console().print(numbers_table(result, result["rows"]).rich())
    if result["claims"]:
        console().print(claims_table([result]).rich())
    console().print(f"results: {folder / 'paper.json'}, and {folder / 'report.html'} to look at", soft_wrap=True)
    return result


def judged(recipe: PaperRecipe, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recipe's claims, judged by our rows and by the paper's own numbers."""
    paper_rows = [{"label": label} | numbers for label, numbers in recipe.theirs.items()]
    found = []
    for section in recipe.claims:
        claim = parse_claim(section.holds)
        ours = judge(claim, rows, tolerance=section.tolerance)
        paper = judge(claim, paper_rows, tolerance=section.tolerance)
        found.append(
            {
                "says": section.says, "where": section.where or recipe.where, "holds": section.holds,
                "status": ours.status, "ours": ours.numbers, "why": ours.why,
                "paper": paper.numbers, "paper_status": paper.status, "paper_why": paper.why,
            }
        )  # fmt: skip
    return found


def run_papers(names: Sequence[str], pair: Pair | None, out: Path | None) -> list[str]:
    """Run all shipped paper recipes, or those named, and write `papers.json` and `papers.html` after each; the names of
    those that failed, which do not keep the others from running. Raises ValueError: two would write to one folder."""
    recipes = [(short_name(name), paper_recipe(name)) for name in names or shipped_papers()]
    folders = [out / short if out is not None else folder_of(recipe, pair) for short, recipe in recipes]
    double = next((folder for folder in folders if folders.count(folder) > 1), None)
    if double is not None:
        raise ValueError(f"two of the recipes would both write to {double}: run them one by one")
    root = out or Path(f"{FOLDER}-{pair.name}" if pair is not None else FOLDER)
    done: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for index, ((name, recipe), folder) in enumerate(zip(recipes, folders, strict=True), 1):
        log(f"papers: {index} of {len(recipes)}")
        try:
            done.append(run_paper(recipe, name, pair, folder))
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            failed[name] = words(error)
            log(f"papers: {name} failed: {failed[name]}")
        rows = [[{key: row[key] for key in row if key != "pairs"} for row in result["rows"]] for result in done]
        papers = [result | {"rows": found} for result, found in zip(done, rows, strict=True)]
        _write(root / "papers.json", {"schema": SCHEMA, "kind": "papers", "papers": papers, "failed": failed})
        write_page(root / "papers.html", HEADING, papers_body(HEADING, done, failed))
    if len(done) > 1:
        console().print(claims_table(done).rich())
    console().print(f"papers: {len(done)} done, {len(failed)} failed; {root / 'papers.html'}", soft_wrap=True)
    for name, error_text in failed.items():
        log(f"error: {name}: {error_text}")
    return list(failed)


def short_name(name: str) -> str:
    """What a recipe is called in tables and folders: `slim/heads`, or of a file of one's own its name."""
    short = name.removesuffix(".yaml").removeprefix("recipes/").removeprefix(EVALUATIONS)
    return Path(name).stem if Path(name).is_file() else short


def folder_of(recipe: PaperRecipe, pair: Pair | None) -> Path:
    """Where a recipe's results lie unless another folder is given."""
    return Path(f"{recipe.out}-{pair.name}" if pair is not None else recipe.out)


def _report(folder: Path, result: dict[str, Any], used: PaperRecipe) -> None:
    """The page: of one evaluation its ordinary report, with the paper's numbers; else one with links to the runs'."""
    own = {run: results_of(folder, run) for run in (used.evaluations() if used.experiment == "evaluate" else ())}
    if "" in own:
        loaded = load_results(own[""])
        loaded["paper"] = {key: result[key] for key in ("name", "paper", "where", "theirs", "claims", "not_rerun")}
        write_results(own[""], loaded)
        write_report(folder / "report.html", [own[""]], [loaded])
    else:
        links = [str(path.with_name("report.html").relative_to(folder)) for path in own.values()]
        title = title_of(result)
        write_page(folder / "report.html", title, papers_body(title, [result], {}, links))


def _write(path: Path, value: dict[str, Any]) -> None:
    atomic_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
