"""`draftsmith papers` and `draftsmith evaluate` with recipes of kind `paper`: the papers' tables, run again.

Each recipe leaves a folder with `report.html` and `paper.json`: `schema` (1) and `kind` ("paper"); `name`, `paper`,
`where`, `experiment`, `not_rerun` and `theirs` as in the recipe; `identity`, sha256 of the settings, of what they name
and of the machine (the same is not run twice); `pair`, the embedded pair's folder, or null; `machine` as in
`results.json`; `rows`: label, metrics, and their numbers by prompt (see `claims.judge`); `claims`: says, where, holds,
ours (the sides in numbers), status, why, and paper, paper_status, paper_why: the same by the paper's own numbers.

`papers.json` holds those of all recipes that have finished there, without what is by prompt, and the errors of those
that failed.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .... import __version__
from ....checkpoints.storage.atomic import atomic_text
from ...report.papers import claims_table, markdown, numbers_table, paper_section, title_of
from ...schema.claims import judge, parse_claim
from ...schema.loading import read_extended, shipped_recipes, write_recipe
from ...schema.papers import PaperRecipe
from ...schema.results import load_results, write_results
from ...session.terminal import console, log
from ..evaluation.recipe import EVALUATIONS, PAIR, paper_recipe

SCHEMA = 1
FOLDER = "runs/papers"


def shipped_papers() -> list[str]:
    """Names of the shipped recipes of kind `paper`."""
    return [name for name, path in shipped_recipes().items() if read_extended(path).get("kind") == "paper"]


def run_paper(recipe: PaperRecipe, name: str, pair: str | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Run a paper's table, judge its claims, print both and write `paper.json` and `report.html`. A recipe that has
    finished with the same settings and artifacts is only read and judged again.

    Args:
        pair: folder of the embedded pair, to run on that at small size.
        folder: of the results; by default the recipe's, with `-quickstart` for a pair.

    Raises:
        ValueError: what the experiment raises; a claim about a row or metric that there is not.
    """
    from ....checkpoints.artifact.fingerprints import source_state
    from .experiments import EXPERIMENTS, machine_of

    used = recipe.on_pair(pair) if pair is not None else recipe
    folder = folder or folder_of(recipe, pair)
    on = machine_of(used.evaluate)
    settings = used.model_dump(mode="json", include={"experiment", "settings", "evaluate"})
    states = {source: source_state(source) for source in used.sources()}
    known = [__version__, settings, used.counts_joules(), states, on]
    identity = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    result = _read(folder / "paper.json")
    if result is None or result.get("identity") != identity:
        log(f"papers: {name}, {recipe.where}")
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder / "recipe.yaml")
        rows = EXPERIMENTS[used.experiment](used, folder)
        result = {"schema": SCHEMA, "kind": "paper", "identity": identity, "machine": on, "rows": rows, "claims": []}
        _write(folder / "paper.json", result)
    else:
        log(f"papers: {name} had finished already")
    about = recipe.model_dump(mode="json", include={"paper", "where", "experiment", "not_rerun", "theirs"})
    result |= about | {"name": name, "pair": pair, "claims": judged(recipe, result["rows"])}
    _write(folder / "paper.json", result)
    _report(folder, result, used)
    on_pair = " on the embedded pair" if pair is not None else ""
    console().print(f"{name}: {title_of(result)}{on_pair}", markup=False)
    console().print(numbers_table(result, result["rows"]).rich())
    if result["claims"]:
        console().print(claims_table([result]).rich())
    console().print(f"results: {folder / 'paper.json'}, and {folder / 'report.html'} to look at", soft_wrap=True)
    return result


def judged(recipe: PaperRecipe, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recipe's claims, judged by our rows and by the paper's own numbers.

    Raises:
        ValueError: a claim about a row or metric that there is not.
    """
    claims = [parse_claim(section.holds) for section in recipe.claims]
    named = {reference for claim in claims for reference in claim.references()}
    # labels were checked when the recipe was read: one that is absent has no prompts, or no run here
    known = [*recipe.theirs, *(reference.label for reference in named)]
    unknown = dict.fromkeys(reference.metric for reference in named)
    paper_rows = [{"label": label} | unknown | numbers for label, numbers in recipe.theirs.items()]
    found = []
    for section, claim in zip(recipe.claims, claims, strict=True):
        ours = judge(claim, rows, tolerance=section.tolerance, known=known)
        paper = judge(claim, paper_rows, tolerance=section.tolerance, known=known)
        found.append(
            {
                "says": section.says, "where": section.where or recipe.where, "holds": section.holds,
                "status": ours.status, "ours": ours.numbers, "why": ours.why,
                "paper": paper.numbers, "paper_status": paper.status, "paper_why": paper.why,
            }
        )  # fmt: skip
    return found


def run_papers(names: Sequence[str], pair: str | None, out: Path | None) -> list[str]:
    """Run all shipped paper recipes, or those named; one that fails does not keep the others from running.

    Writes `papers.json` and `papers.md`, after each recipe again, with those that have finished before.

    Returns:
        The names of those that failed.

    Raises:
        ValueError: an unknown recipe, or two that would write over each other, before anything is run.
    """
    recipes, folders = _named(names or shipped_papers(), pair, out)
    root = out or Path(f"{FOLDER}-{PAIR}" if pair is not None else FOLDER)
    done: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for index, (name, recipe) in enumerate(recipes.items(), 1):
        log(f"papers: {index} of {len(recipes)}")
        try:
            done.append(run_paper(recipe, name, pair, folders[name]))
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            failed[name] = str(error)
            log(f"papers: {name} failed: {error}")
        _summary(root, out or Path(FOLDER), pair, done, failed)
    if len(done) > 1:
        console().print(claims_table(done).rich())
    console().print(f"papers: {len(done)} done, {len(failed)} failed; {root / 'papers.md'}", soft_wrap=True)
    for name, error_text in failed.items():
        log(f"error: {name}: {error_text}")
    return list(failed)


def short_name(name: str) -> str:
    """What a recipe is called in tables and folders: `slim/heads`, or of a file of one's own its name."""
    short = name.removesuffix(".yaml").removeprefix("recipes/").removeprefix(EVALUATIONS)
    return Path(name).stem if Path(name).is_file() else short


def folder_of(recipe: PaperRecipe, pair: str | None) -> Path:
    """Where a recipe's results lie unless another folder is given."""
    return Path(f"{recipe.out}-{PAIR}" if pair is not None else recipe.out)


def _named(names: Sequence[str], pair: str | None, out: Path | None) -> tuple[dict[str, PaperRecipe], dict[str, Path]]:
    """Recipes and folders by short names.

    Raises:
        ValueError: an unknown recipe; two of one name or folder, with both.
    """
    recipes: dict[str, PaperRecipe] = {}
    folders: dict[str, Path] = {}
    given: dict[str, str] = {}
    for name in names:
        short, recipe = short_name(name), paper_recipe(name)
        folder = out / short if out is not None else folder_of(recipe, pair)
        other = next((known for known in folders if known == short or folders[known] == folder), None)
        if other is not None:
            raise ValueError(f"{given[other]!r} and {name!r} would both write to {folders[other]}: run them one by one")
        recipes[short], folders[short], given[short] = recipe, folder, name
    return recipes, folders


def _report(folder: Path, result: dict[str, Any], used: PaperRecipe) -> None:
    """The page: of one evaluation its ordinary report, with the paper's numbers; else one with links to the runs'.

    What other settings have left in the folder is none of this recipe's.
    """
    from ...report.page import write_page, write_report
    from .experiments import is_finished, results_of

    evaluations = used.evaluations() if used.experiment == "evaluate" else {}
    paths = {run: results_of(folder, run) for run in evaluations}
    own = {run: path for run, path in paths.items() if is_finished(evaluations[run], path)}
    if "" in own:
        loaded = load_results(own[""])
        loaded["paper"] = {key: result[key] for key in ("name", "paper", "where", "theirs", "claims", "not_rerun")}
        write_results(own[""], loaded)
        write_report(folder / "report.html", [own[""]], [loaded])
        return
    links = [str(path.with_name("report.html").relative_to(folder)) for path in own.values()]
    body = f"<h1>{html.escape(result['name'])}</h1>{paper_section(result, result['rows'], links)}"
    write_page(folder / "report.html", title_of(result), body)


def _summary(
    root: Path, results: Path, pair: str | None, done: Sequence[dict[str, Any]], failed: dict[str, str]
) -> None:
    """Write the tables of this run and, after them, of the recipes that earlier ones have finished.

    Args:
        results: the folder that holds the recipes' folders.
    """
    named = {result["name"] for result in done} | set(failed)
    paths = sorted([*results.glob("*/paper.json"), *results.glob("*/*/paper.json")])
    earlier = [found for found in map(_read, paths) if found is not None and "name" in found]  # else it was not judged
    before = [found for found in earlier if found["name"] not in named and _same(found["pair"], pair)]
    papers = [
        result | {"rows": [{key: row[key] for key in row if key != "pairs"} for row in result["rows"]]}
        for result in [*done, *before]
    ]
    _write(root / "papers.json", {"schema": SCHEMA, "kind": "papers", "papers": papers, "failed": failed})
    atomic_text(root / "papers.md", markdown(papers, failed))


def _same(one: str | None, other: str | None) -> bool:
    """Whether two runs were on the same pair, or both on none."""
    return one == other if one is None or other is None else Path(one).resolve() == Path(other).resolve()


def _read(path: Path) -> dict[str, Any] | None:
    """The result of an earlier run; None where there is none, or it is damaged: it is run again rather than trusted."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA and "rows" in found else None


def _write(path: Path, value: dict[str, Any]) -> None:
    atomic_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
