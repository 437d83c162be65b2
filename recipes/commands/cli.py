"""Command-line interface: `draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`."""

import errno
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from ... import __version__
from ...checkpoints.storage.messages import error_text
from ...train.parallel.processes import Interrupted, TrainingError, is_peer_failure
from ..session.launch import destroy_process_group, is_first, refuse_several
from ..session.terminal import console, log
from ..session.typed import typed_command
from .artifacts.shipping import export, push
from .artifacts.show import show
from .diagnosis.doctor import doctor
from .evaluation_cli import EngineName, MethodsCommand, Overrides, bench, certify, evaluate, report, tune

app = typer.Typer(
    help="Train draft models, prediction heads and bigram tables for speculative decoding; benchmark and export them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="List or copy the recipes that come with the package.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")

_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")
RecipeName = Annotated[str, typer.Argument(help="Recipe file, or name of a shipped recipe.")]


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if show:
        console().print(__version__)
        raise typer.Exit
    if context.invoked_subcommand not in (None, "train", "prepare"):  # these support several processes
        refuse_several(str(context.invoked_subcommand))


@app.command()
def quickstart(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET [DRAFTER]] [KEY=VALUE]...",
            help="Directories, hub ids or GGUF files of the target and of a drafter, and recipe values to change.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe file, or a recipe name: quickstart, realpair or coder.")
    ] = "quickstart",
    minutes: Annotated[float | None, typer.Option(help="Time budget in minutes (default: from the recipe).")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for data and weights (default: 0).")] = None,
    out: Annotated[str | None, typer.Option(help="Output directory (default: from the recipe).")] = None,
) -> None:
    """Train and measure a small target/drafter pair offline.

    The default recipe takes about 8 minutes on two cores. `--recipe realpair` trains drafters for SmolLM2 instead, and
    `--recipe coder` for Qwen2.5-Coder. Examples: `quickstart --minutes 4`, `quickstart --recipe coder TARGET.gguf
    DRAFTER.gguf`.
    """
    from ..schema.evaluation import QuickstartRecipe
    from ..schema.loading import load_recipe

    models = [word for word in arguments or [] if "=" not in word]
    if len(models) > 2:
        raise ValueError(f"quickstart takes at most 2 models, a target and a drafter, got {len(models)}: {models}")
    named = dict(zip(("target", "small_model"), models, strict=False))
    options = {"minutes": minutes, "seed": seed, "out": out} | named
    changes = {key: value for key, value in options.items() if value is not None}
    overrides = [word for word in arguments or [] if "=" in word]
    loaded = load_recipe(recipe, overrides, options=changes, kinds=[QuickstartRecipe])
    from .pairs.quickstart import run_quickstart

    run_quickstart(loaded)


@app.command()
def forge(
    target: Annotated[str, typer.Argument(help="Directory or hub id of a model, or a GGUF file.")],
    overrides: Overrides = None,
    hours: Annotated[float | None, typer.Option(help="Time budget in hours (default: 2).")] = None,
    more_hours: Annotated[float | None, typer.Option(help="Additional hours of training (default: 0).")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="File with prompts of your workload (repeatable).")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Existing drafter to compare (repeatable).")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes to optimise for, such as 1,8 (default: 1).")] = None,
    temperature: Annotated[
        str | None, typer.Option(help="Temperatures to optimise for, such as 0,1 (default: 0).")
    ] = None,
    engine: EngineName = None,
    out: Annotated[str | None, typer.Option(help="Output directory (default: runs/forge).")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and exit.")] = False,
) -> None:
    """Find and measure the fastest lossless setup for a model.

    Example: `forge Qwen/Qwen3-0.6B --hours 1 --prompts questions.jsonl`. An interrupted run resumes.
    """
    from ..schema.forge import ForgeRecipe
    from ..schema.loading import parse_recipe

    changes: dict[str, Any] = {"hours": hours, "more_hours": more_hours, "engine": engine, "out": out}
    changes |= {"prompts": prompts or None, "drafters": drafter or None}
    lists = [f"{name}=[{text}]" for name, text in (("batch", batch), ("temperature", temperature)) if text is not None]
    values = {"kind": "forge", "target": target} | {key: value for key, value in changes.items() if value is not None}
    recipe = parse_recipe(values, "forge", [*lists, *(overrides or [])], kinds=[ForgeRecipe])
    from .pairs.forge import run_forge

    run_forge(recipe, plan)


@app.command()
def prepare(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or name of a shipped recipe.")] = "",
    overrides: Overrides = None,
    lint: Annotated[bool, typer.Option("--lint", help="Check the rendered documents, and print examples.")] = False,
    teacher: Annotated[bool, typer.Option("--teacher", help="Also cache the target's outputs for training.")] = False,
    list_corpora: Annotated[bool, typer.Option("--list", help="List the known corpora, and exit.")] = False,
) -> None:
    """Prepare the data of a training recipe.

    The corpus is read, cleaned, rendered with a chat template and packed into blocks. With --lint, the exit code is 1
    if faults are found. Example: `prepare drafter/vicuna-68m data.path=sharegpt.json --lint`.
    """
    from ..schema.loading import load_training

    if list_corpora:
        _list_corpora()
        return
    if not recipe:
        raise ValueError("the recipe is missing: pass its file or name, or list the known corpora with --list")
    if lint or not teacher:
        refuse_several("prepare --lint" if lint else "prepare")
    loaded = load_training(recipe, overrides or [])
    if teacher and not lint:
        from ..assemble.teacher import prepare_teacher

        folder = prepare_teacher(loaded)
        if is_first():
            console().print(f"{folder}")
        return
    from ...data.tokenizers import load_tokenizer
    from ..assemble.data import lint_data, prepare_data

    tokenizer = load_tokenizer(loaded.tokenizer_source)
    if lint:
        failures = lint_data(loaded.data, tokenizer)
        for failure in failures:
            log(f"error: {failure}")
        raise typer.Exit(1 if failures else 0)
    console().print(f"{prepare_data(loaded.data, tokenizer).folder}")


def _list_corpora() -> None:
    """Print a table of the known corpora with hub id, use and licence."""
    from ...data.sources.registry import CORPORA

    table = Table(Column("name", no_wrap=True), "hub id", "for", "licence", "note", box=None)
    for corpus in CORPORA.values():
        note = "; ".join(filter(None, ["gated" if corpus.gated else "", corpus.note]))
        table.add_row(corpus.name, corpus.hub or "–", corpus.use, corpus.licence, note)
    console().print(table)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the required memory, disk and time, and exit.")] = False,
) -> None:
    """Train a draft model, prediction heads or a bigram table.

    Examples: `train drafter/vicuna-68m train.steps=1000`, `train heads/dflash models/qwen3-8b --plan`. An interrupted
    run resumes.
    """
    from ..schema.loading import load_training
    from ..schema.training import DrafterRecipe, HeadsRecipe

    loaded = load_training(recipe, overrides or [])
    if plan:
        from .training.estimate import missing_model, print_estimate
        from .training.plan import plan_recipe, show

        if isinstance(loaded, DrafterRecipe) or (isinstance(loaded, HeadsRecipe) and loaded.architecture != "medusa"):
            if is_first():
                print_estimate(loaded)
            if (missing := missing_model(loaded)) is not None:
                log(f"not measured: {missing} is not on this machine")
                return
        planned = plan_recipe(loaded)
        if is_first():
            show(planned)
        return
    from .training.train import run_train

    run_train(loaded)


for _command in (evaluate, bench, certify, tune, report, doctor, export, push, show):
    app.command(cls=MethodsCommand)(_command)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(help="Directory or hub id of a model, a LoRA adapter or heads, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    target: Annotated[str | None, typer.Option(help="Target; required unless the source contains it.")] = None,
    unpickle: Annotated[
        bool, typer.Option("--unpickle", help="Also load tensors from pickled files (.pt, .bin).")
    ] = False,
    states: Annotated[
        str | None,
        typer.Option(
            help="Target states that Medusa heads use as input, before or after the final norm: before-norm or "
            "after-norm (default: from the files of the heads, else after-norm)."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type for the weights of a GGUF file: float32, bfloat16 or float16 (default: bfloat16 if the "
            "file is quantised or contains bfloat16, else float32)."
        ),
    ] = None,
) -> None:
    """Convert published drafters, heads or GGUF files.

    Drafters, Medusa heads, EAGLE-3 heads and DFlash drafters become artifacts. A GGUF file becomes a model directory.
    Example: `import user/eagle3-heads --target Qwen/Qwen3-8B --out runs/heads`.
    """
    from .artifacts.imports import import_published

    import_published(source, out, target, unpickle=unpickle, states=states, dtype=dtype)


@app.command()
def regenerate(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Replace the answers of a corpus with responses of the target.

    The responses are generated by draftsmith or by a server. Example: `regenerate regenerate/vicuna-7b
    source=sharegpt.json out=answers.jsonl`. An interrupted run resumes.
    """
    from ..schema.evaluation import RegenerateRecipe
    from ..schema.loading import load_recipe

    loaded = load_recipe(recipe, overrides or [], kinds=[RegenerateRecipe])
    from .training.regenerate import run_regenerate

    if run_regenerate(loaded).failed:
        raise typer.Exit(1)


@recipes_app.command("ls")
def recipes_list() -> None:
    """List the shipped recipes."""
    from ..schema.loading import first_sentence, shipped_models, shipped_recipes

    table = Table(show_header=False, box=None)
    for name, path in (shipped_recipes() | shipped_models()).items():
        table.add_row(name, first_sentence(path))
    console().print(table)


@recipes_app.command("copy")
def recipes_copy(recipe: RecipeName, to: Annotated[Path, typer.Argument(help="Output file or directory.")]) -> None:
    """Copy a recipe or a launch configuration for editing.

    Examples: `recipes copy drafter/vicuna-68m mine.yaml`, `recipes copy accelerate/zero2 zero2.yaml`.
    """
    from ..schema.loading import find_recipe, launch_settings, shipped_models

    others = launch_settings() | shipped_models()
    source = others.get(recipe.removesuffix(".yaml").removesuffix(".json")) or find_recipe(recipe)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ValueError(f"{target} already exists: choose another file")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    console().print(f"copied to {target}")


def main() -> None:
    """Run the command-line interface. Exit codes: 0 success, 1 failure, 2 invalid input, 130 or 143 interrupted."""
    warnings.showwarning = lambda message, *_: log(f"warning: {message}")
    try:
        app()
    except Interrupted as stopped:
        _log_resume_command()
        sys.exit(128 + stopped.signal_number)
    except SystemExit as ended:
        if ended.code == 128 + signal.SIGINT:  # typer's exit code for Ctrl-C in commands without a handler
            _log_resume_command()
        raise
    except TrainingError as error:
        _fail(f"error: {error}", 1)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        _fail(f"error: {error_text(error)}", 2)
    except Exception as error:
        if "No space left" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            _fail(f"error: no space left on the disk: {error_text(error)}; files that were saved earlier are intact", 1)
        if isinstance(error, OSError):
            _fail(f"error: {error_text(error)}", 1)
        if is_peer_failure(error):
            reason, rank = " ".join(str(error).split()), os.environ.get("RANK", "0")
            _fail(f"process {rank} ended because another process of this launch ended or does not respond: {reason}", 1)
        log(traceback.format_exc())
        sys.exit(1)
    finally:
        destroy_process_group()


def _log_resume_command() -> None:
    if is_first():
        log(f"to resume: {typed_command() or 'the same command'}")


def _fail(message: str, code: int) -> None:
    if os.environ.get("DRAFTSMITH_TRACEBACK"):
        log(traceback.format_exc())
    log(_ERROR_NUMBER.sub("", message))  # the number is noise in messages of libraries
    sys.exit(code)
