"""The command line: it parses and forwards. `draftsmith`, `python -m draftsmith`, `accelerate launch -m draftsmith`."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ... import __version__
from ...train.parallel.interrupts import Interrupted, TrainingError
from ...train.parallel.processes import StoppedError, lost_another
from ..schema.evaluation import QuickstartRecipe, RegenerateRecipe
from ..schema.loading import (
    accelerate_configs,
    deepspeed_configs,
    find_recipe,
    first_sentence,
    load_recipe,
    shipped_recipes,
)
from ..schema.papers import PaperRecipe
from ..schema.training import DrafterRecipe, HeadsRecipe, TableRecipe
from ..session.launch import destroy_process_group, is_first, refuse_several, run_on_all
from ..session.terminal import console, log
from .artifacts.cli import artifact_app
from .artifacts.shipping import doctor, export, pull, push
from .artifacts.tables_cli import table_app

app = typer.Typer(
    help="Train drafters, prediction heads and bigram tables for speculative decoding; measure what each is worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="List, show and copy the recipes that come with the package.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(table_app, name="table")
app.add_typer(artifact_app, name="artifact")
for _command in (doctor, export, push, pull):
    app.command()(_command)

RecipeName = Annotated[str, typer.Argument(help="A recipe's file, or the name of a shipped one.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: key.path=value.")]
RecipeOrTarget = Annotated[str | None, typer.Argument(help="A recipe's file or name; without one, give --target.")]
TargetPlace = Annotated[str | None, typer.Option(help="Folder or hub id of the target.")]
DrafterPlace = Annotated[str | None, typer.Option(help="Folder or hub id of a drafter.")]
HeadsPlace = Annotated[str | None, typer.Option(help="Folder or hub id of prediction heads.")]
TablePlace = Annotated[str | None, typer.Option(help="Folder or hub id of a correlation table.")]
PromptsPlace = Annotated[str | None, typer.Option(help="Questions: a known set, a file, a folder, a hub id.")]
RESULTS_FILE = typer.Option(help="The results file (.json).")
Pair = Annotated[
    str | None,
    typer.Option(help="quickstart[=FOLDER]: on the embedded pair that the quickstart left, at small size."),
]


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if show:
        console().print(__version__)
        raise typer.Exit
    if context.invoked_subcommand not in (None, "train", "prepare"):  # which know when they are for several
        refuse_several(str(context.invoked_subcommand))


@app.command()
def quickstart(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A quickstart recipe.")] = "quickstart",
    minutes: Annotated[float | None, typer.Option(help="Training time to aim at on two cores; buys quality.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes corpus, weights and order.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of everything.")] = None,
) -> None:
    """The whole main job on text that is already here: nothing is downloaded."""
    options = {"minutes": minutes, "seed": seed, "out": out}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_recipe(recipe, [*given, *(overrides or [])], kinds=["quickstart"])
    from .quickstart import run_quickstart

    assert isinstance(loaded, QuickstartRecipe)
    run_quickstart(loaded)


@app.command()
def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    lint: Annotated[
        bool, typer.Option("--lint", help="Decode what every row teaches; show three; fail on faults.")
    ] = False,
    teacher: Annotated[
        bool,
        typer.Option("--teacher", help="Also write the cache of the target's most likely tokens, or hidden states."),
    ] = False,
) -> None:
    """Read, clean, render and pack a training recipe's data, and say what became of it."""
    if teacher and not lint:
        from ..assemble.teacher import prepare_teacher

        folder = prepare_teacher(run_on_all(lambda: _taught_recipe(recipe, overrides or [])))
        if is_first():
            console().print(f"{folder}")
        return
    refuse_several("prepare --lint" if lint else "prepare")
    loaded = load_recipe(recipe, overrides or [], kinds=["drafter", "heads", "table"])
    from ...data.tokenizers import load_tokenizer
    from ..assemble.data import lint_data, prepare_data

    assert isinstance(loaded, (DrafterRecipe, HeadsRecipe, TableRecipe))
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    if lint:
        failures = lint_data(loaded.data, tokenizer)
        for failure in failures:
            log(f"error: {failure}")
        raise typer.Exit(1 if failures else 0)
    console().print(f"{prepare_data(loaded.data, tokenizer).folder}")


def _taught_recipe(recipe: str, overrides: list[str]) -> DrafterRecipe | HeadsRecipe:
    loaded = load_recipe(recipe, overrides, kinds=["drafter", "heads", "table"])
    if isinstance(loaded, TableRecipe):
        raise ValueError(f"--teacher is for recipes of kind 'drafter' or 'heads', and {recipe} is of kind 'table'")
    assert isinstance(loaded, (DrafterRecipe, HeadsRecipe))
    return loaded


@app.command()
def corpora() -> None:
    """The corpora that are known by name: where they lie, what they are for, and on what terms."""
    from ...data.sources.registry import CORPORA

    table = Table(box=None)
    for heading in ("name", "hub id", "for", "licence", "note"):
        table.add_column(heading, no_wrap=heading == "name")
    for corpus in CORPORA.values():
        note = "; ".join(filter(None, ["gated" if corpus.gated else "", corpus.note]))
        table.add_row(corpus.name, corpus.hub or "–", corpus.use, corpus.licence, escape(note))
    console().print(table)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what it will take of memory, disk and time, and whether it fits.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="key.path=value,value: a run with each; given again, all combinations."),
    ] = None,
) -> None:
    """Run a training recipe: a drafter, prediction heads or a correlation table."""
    if sweep:
        from .training.sweep import plan_sweep, run_sweep, show_plans

        act = show_plans if plan else run_sweep
        act(run_on_all(lambda: plan_sweep(recipe, overrides or [], sweep)))
        return
    loaded = run_on_all(lambda: load_recipe(recipe, overrides or [], kinds=["drafter", "heads", "table"]))
    assert isinstance(loaded, (DrafterRecipe, HeadsRecipe, TableRecipe))
    if plan:
        from .training.plan import plan_recipe, show

        planned = plan_recipe(loaded)
        if is_first():
            show(planned)
        return
    from .training.train import run_train

    run_train(loaded)


@app.command()
def evaluate(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    drafter: DrafterPlace = None,
    heads: HeadsPlace = None,
    table: TablePlace = None,
    prompts: PromptsPlace = None,
    out: Annotated[str | None, RESULTS_FILE] = None,
    categories: Annotated[bool, typer.Option("--categories", help="Also print a table by category.")] = False,
    pair: Pair = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be decoded.")] = False,
) -> None:
    """Decode held-out prompts with several methods and compare them, or run a paper's table again; goes on where it
    was stopped."""
    from .evaluation.recipe import evaluation_or_paper, pair_folder
    from .papers.papers import run_paper, short_name

    folder = None if pair is None else pair_folder(pair)
    given = {"target": target, "drafter": drafter, "heads": heads, "table": table, "prompts": prompts, "out": out}
    loaded = evaluation_or_paper(recipe, overrides or [], given | {"show_categories": categories}, folder)
    if plan:
        from .papers.plan import show_plan

        show_plan(loaded, folder)
    elif isinstance(loaded, PaperRecipe):
        run_paper(loaded, short_name(str(recipe)), folder, Path(out) if out else None)
    else:
        from .evaluation.evaluate import run_evaluate

        run_evaluate(loaded)


@app.command()
def papers(
    names: Annotated[list[str] | None, typer.Argument(help="Recipes of kind paper; by default all shipped.")] = None,
    pair: Pair = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results.")] = None,
) -> None:
    """Run the papers' tables again and say which of their claims held; what is finished is kept."""
    from .evaluation.recipe import pair_folder
    from .papers.papers import run_papers

    if run_papers(names or [], None if pair is None else pair_folder(pair), out):
        raise typer.Exit(1)


@app.command()
def certify(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    drafter: DrafterPlace = None,
    heads: HeadsPlace = None,
    table: TablePlace = None,
    prompts: PromptsPlace = None,
    temperature: Annotated[list[float] | None, typer.Option(help="For all methods; again, for more of them.")] = None,
    tokens: Annotated[int, typer.Option(help="To judge for each method above temperature 0.")] = 10_000,
    power: Annotated[float | None, typer.Option(help="As many tokens as find this bias with 99 %.")] = None,
    level: Annotated[float, typer.Option(help="Probability of any false alarm.")] = 1e-6,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The certificate; by default beside the results.")] = None,
) -> None:
    """Test that methods write what the target alone would write; exit code 1 where one does not and should."""
    from .evaluation.recipe import evaluate_recipe

    given = {"target": target, "drafter": drafter, "heads": heads, "table": table, "prompts": prompts}
    loaded = evaluate_recipe(recipe, overrides or [], given, "certify")
    from .evaluation.certify import Asked, run_certify

    asked = Asked(tuple(temperature or ()), tokens, power, level, batch, out)
    if any(certificate.failed for certificate in run_certify(loaded, asked)):
        raise typer.Exit(1)


@app.command()
def tune(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    drafter: DrafterPlace = None,
    heads: HeadsPlace = None,
    table: TablePlace = None,
    prompts: PromptsPlace = None,
    out: Annotated[str | None, typer.Option(help="A results file (.json); what is found lies beside it.")] = None,
) -> None:
    """Find each method's best settings by replay under measured costs, and confirm the winners by decoding."""
    from .evaluation.recipe import evaluate_recipe

    given = {"target": target, "drafter": drafter, "heads": heads, "table": table, "prompts": prompts, "out": out}
    loaded = evaluate_recipe(recipe, overrides or [], given, "tune")
    from .evaluation.tune import run_tune

    run_tune(loaded)


@app.command()
def energy(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    batch: Annotated[str, typer.Option(help="Inputs of a forward, with commas between.")] = "1,2,4,8,16",
    runs: Annotated[int, typer.Option(help="Forwards to time at each batch size.")] = 300,
    context: Annotated[int, typer.Option(help="Tokens that each input has behind it.")] = 128,
    out: Annotated[Path | None, RESULTS_FILE] = None,
) -> None:
    """Joules and seconds of a target's forward by batch size, beside those that a paper found."""
    from .evaluation.energy import energy_command

    energy_command(recipe, overrides or [], target, batch=batch, runs=runs, context=context, out=out)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results files; others are compared with the first.")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html beside the first.")] = None,
) -> None:
    """Show results as one page that needs no network, and two or more of them side by side."""
    from ..report.page import run_report

    run_report(results, out)


@app.command()
def trace(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    drafter: DrafterPlace = None,
    heads: HeadsPlace = None,
    table: TablePlace = None,
    method: Annotated[list[str] | None, typer.Option(help="A row of the recipe, or a method; again for more.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A question, instead of the recipe's.")] = None,
    limit: Annotated[int, typer.Option(help="Of the recipe's prompts.")] = 2,
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
) -> None:
    """Decode a few prompts and show which tokens were accepted, rejected and corrected."""
    from .evaluation.recipe import evaluate_recipe

    given = {"target": target, "drafter": drafter, "heads": heads, "table": table}
    loaded = evaluate_recipe(recipe, overrides or [], given, "trace")
    from .evaluation.trace import run_trace

    run_trace(loaded, method or [], prompt, limit, html)


@app.command()
def diagnose(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: TargetPlace = None,
    drafter: DrafterPlace = None,
    heads: HeadsPlace = None,
    table: TablePlace = None,
    prompts: PromptsPlace = None,
    part: Annotated[list[str] | None, typer.Option(help="drafter, heads or table, alone; again for more.")] = None,
    out: Annotated[Path | None, typer.Option(help="The diagnosis (.json); by default beside the results.")] = None,
) -> None:
    """Find out why acceptance is lower than what training measured: where it is lost, and on which tokens."""
    from .evaluation.recipe import evaluate_recipe

    given = {"target": target, "drafter": drafter, "heads": heads, "table": table, "prompts": prompts}
    loaded = evaluate_recipe(recipe, overrides or [], given, "diagnose")
    from .diagnosis.diagnose import run_diagnose

    run_diagnose(loaded, part or [], out)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A drafter, a LoRA adapter or heads: a folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifact.")],
    target: Annotated[
        str | None, typer.Option(help="The model it is for; by default one that lies with heads.")
    ] = None,
    unpickle: Annotated[
        bool, typer.Option("--unpickle", help="Also read pickled files (.pt, .bin), of which only tensors are loaded.")
    ] = False,
    states: Annotated[
        str | None, typer.Option(help="Hidden states that they read, where their config is silent: before-norm.")
    ] = None,
) -> None:
    """Make an artifact of a drafter, or of prediction heads (Medusa) in any layout that FasterDecoding has used."""
    from .artifacts.import_drafter import import_published

    import_published(source, out, target, unpickle=unpickle, states=states)


@app.command()
def regenerate(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Replace a corpus's answers by a target's own, decoded here or asked of a server; goes on where it stopped."""
    loaded = load_recipe(recipe, overrides or [], kinds=["regenerate"])
    from .regenerate import run_regenerate

    assert isinstance(loaded, RegenerateRecipe)
    if run_regenerate(loaded).failed:
        raise typer.Exit(1)


@recipes_app.command("ls")
def recipes_list() -> None:
    """The shipped recipes, with the first sentence of their comment."""
    table = Table(show_header=False, box=None)
    for name, path in shipped_recipes().items():
        table.add_row(name, escape(first_sentence(path)))
    console().print(table)


@recipes_app.command("show")
def recipes_show(recipe: RecipeName) -> None:
    """A recipe as it stands in its file."""
    sys.stdout.write(find_recipe(recipe).read_text(encoding="utf-8"))


@recipes_app.command("copy")
def recipes_copy(recipe: RecipeName, to: Annotated[Path, typer.Argument(help="A new file, or a folder.")]) -> None:
    """Copy a recipe, or settings of accelerate or DeepSpeed (accelerate/zero2, deepspeed/zero2 …), to change it."""
    settings = accelerate_configs() | deepspeed_configs()
    source = settings.get(recipe.removesuffix(".yaml").removesuffix(".json")) or find_recipe(recipe)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ValueError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    console().print(f"copied to {target}")


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong input, 130 or 143 interrupted."""
    try:
        app()
    except Interrupted as stopped:
        sys.exit(128 + stopped.signal_number)
    except StoppedError as error:
        if not is_first():
            sys.exit(error.code)  # the first process tells it
        _fail(str(error), error.code)
    except TrainingError as error:
        _fail(str(error), 1)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        _fail(str(error), 2)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            written = error.filename2 or error.filename or "files"  # of a copy, not what is copied
            _fail(f"no space left on the disk while writing {written}; what was saved before is whole", 1)
        _fail(str(error), 1)
    except Exception as error:
        if lost_another(error):
            reason, rank = " ".join(str(error).split()), os.environ.get("RANK", "0")
            _end(f"process {rank} ended, because another one of this launch has, or does not answer: {reason}", 1)
        # safetensors and tokenizers report a full disk in exceptions of their own
        if "No space left" not in str(error):
            raise
        _fail(f"no space left on the disk: {error}; what was saved before is whole", 1)
    finally:
        destroy_process_group()


def _fail(message: str, code: int) -> None:
    _end(f"error: {message}", code)


def _end(message: str, code: int) -> None:
    if os.environ.get("DRAFTSMITH_TRACEBACK"):
        traceback.print_exc()
    log(message)
    sys.exit(code)
