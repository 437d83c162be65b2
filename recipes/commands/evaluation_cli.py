"""Commands that decode with finished artifacts: evaluate, certify, tune, energy, report, trace."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

if TYPE_CHECKING:
    from ..schema.evaluation import EvaluateRecipe


class MethodsCommand(typer.core.TyperCommand):
    """Command whose help lists the registered methods in place of `{methods}`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ...decode.methods import METHODS

        for param in self.params:
            if (text := getattr(param, "help", None)) is not None:
                param.help = text.replace("{methods}", ", ".join(METHODS))  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: key.path=value.")]
RecipeOrTarget = Annotated[str | None, typer.Argument(help="A recipe's file or name; without one, give --target.")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target.")]
ResultsFile = Annotated[str | None, typer.Option(help="The results file (.json).")]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Method, or label of a row; repeat for more. Methods: {methods}."),
]
Every = Annotated[bool, typer.Option("--all", help="Every method that the artifacts allow.")]
Plan = Annotated[bool, typer.Option("--plan", help="Only say what would be decoded, and how long it takes.")]
Concurrency = Annotated[str | None, typer.Option(help="Of a server: requests at a time, with commas between.")]
EngineName = Annotated[
    str | None, typer.Option(help="Instead, start this one with an export (--drafter or --heads), and one without.")
]
EngineOptions = Annotated[str, typer.Option(help="More for the engine, such as '--dtype float32'.")]


@dataclass(frozen=True)
class Evaluation:
    """What the commands that evaluate are given: a recipe with changes, and what replaces its own by name."""

    recipe: RecipeOrTarget = None
    overrides: Overrides = None
    target: Target = None
    drafter: Annotated[str | None, typer.Option(help="Folder or hub id of a drafter.")] = None
    heads: Annotated[str | None, typer.Option(help="Folder or hub id of prediction heads.")] = None
    table: Annotated[str | None, typer.Option(help="Folder or hub id of a correlation table.")] = None
    prompts: Annotated[str | None, typer.Option(help="Questions: a known set, a file, a folder, a hub id.")] = None

    @property
    def given(self) -> dict[str, str | None]:
        """What replaces the recipe's own."""
        return {name: getattr(self, name) for name in ("target", "drafter", "heads", "table", "prompts")}

    def load(
        self, command: str, method: list[str] | None = None, every: bool = False, **more: str | bool | None
    ) -> EvaluateRecipe:
        from .evaluation.recipe import Rows, evaluate_recipe

        rows = Rows(tuple(method or ()), every)
        return evaluate_recipe(self.recipe, self.overrides or [], self.given | more, command, rows)


def _takes_evaluation(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of an `Evaluation` in place of its first parameter, which gets that."""
    common = inspect.signature(Evaluation, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        command(Evaluation(**{name: values.pop(name) for name in common}), **values)

    del called.__wrapped__  # typer would read its parameters
    parameters = [*common.values(), *own]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


@_takes_evaluation
def evaluate(
    asked: Evaluation,
    out: ResultsFile = None,
    categories: Annotated[bool, typer.Option("--categories", help="Also print a table by category.")] = False,
    predict: Annotated[bool, typer.Option("--predict", help="Also predict tokens per step by replay.")] = False,
    method: Methods = None,
    every: Every = False,
    plan: Plan = False,
    server: Annotated[str | None, typer.Option(help="Instead, measure this server: where its API begins.")] = None,
    baseline: Annotated[str | None, typer.Option(help="With --server: one without drafts, asked in turns.")] = None,
    concurrency: Concurrency = None,
    engine: EngineName = None,
    engine_options: EngineOptions = "",
) -> None:
    """Decode held-out prompts with several methods and compare them; resumes where it was stopped. Without a recipe:
    plain decoding and one method of each artifact. Or measure a server."""
    from .serving.served import run_served, served_recipe

    asking = {"server": server, "baseline": baseline, "concurrency": concurrency, "prompts": asked.prompts, "out": out}
    if engine is not None:
        from .serving.engines import commands_of, measure_engine, measured_recipe

        sides = commands_of(asked.drafter or asked.heads, engine, asked.target)
        recipe = measured_recipe(asked.recipe, asked.overrides or [], asking)
        measure_engine(recipe, sides, shlex.split(engine_options), f"serve-{engine}")
        return
    served = served_recipe(asked.recipe, asked.overrides or [], **asking)
    if served is not None:
        run_served(served)
        return
    loaded = asked.load("evaluate", method, every, out=out, show_categories=categories, predict=predict)
    if plan:
        from .evaluation.estimate import show_plan

        show_plan(loaded)
    else:
        from .evaluation.evaluate import run_evaluate

        run_evaluate(loaded)


@_takes_evaluation
def certify(
    asked: Evaluation,
    tokens: Annotated[int, typer.Option(help="To test for each method above temperature 0.")] = 4_000,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    out: Annotated[Path | None, typer.Option(help="The certificate; by default beside the results.")] = None,
    method: Methods = None,
    every: Every = False,
    plan: Plan = False,
) -> None:
    """Test that methods write what the target alone would write, on a small pair of six tokens and on yours; exit code
    1 where one should and does not, or where that stays undecided."""
    loaded = asked.load("certify", method, every)
    from .evaluation.certify import run_certify

    if any(certificate.failed for certificate in run_certify(loaded, tokens, batch, out, plan)):
        raise typer.Exit(1)


@_takes_evaluation
def tune(
    asked: Evaluation,
    out: ResultsFile = None,
    method: Methods = None,
    every: Every = False,
    plan: Plan = False,
    concurrency: Concurrency = None,
    engine: EngineName = None,
    engine_options: EngineOptions = "",
) -> None:
    """Find each method's best settings by replay under measured costs, and confirm the winners by decoding; what is
    found lies beside the results file. Resumes where it was stopped. With --engine: how many tokens a step that should
    draft under each load."""
    if engine is not None:
        from .serving.engines import commands_of, measured_recipe
        from .serving.lengths import max_draft_tokens, tune_lengths

        asking = {"prompts": asked.prompts, "out": out or f"tune-{engine}.json", "concurrency": concurrency}
        served = measured_recipe(asked.recipe, asked.overrides or [], asking)
        export = asked.drafter or asked.heads or ""
        commands = partial(commands_of, export or None, engine, asked.target)
        commands()  # report what cannot be served first
        tune_lengths(served, engine, commands, max_draft_tokens(export), shlex.split(engine_options), f"serve-{engine}")
        return
    loaded = asked.load("tune", method, every, out=out)
    from .evaluation.tune import run_tune, show_plan

    if plan:
        show_plan(loaded)
    else:
        run_tune(loaded)


def energy(
    recipe: RecipeOrTarget = None,
    overrides: Overrides = None,
    target: Target = None,
    batch: Annotated[str, typer.Option(help="Inputs of a forward, with commas between.")] = "1,2,4,8,16",
    runs: Annotated[int, typer.Option(help="Forwards to time at each batch size.")] = 300,
    context: Annotated[int, typer.Option(help="Tokens that each input has behind it.")] = 128,
) -> None:
    """Joules and seconds of a target's forward by batch size."""
    from .evaluation.energy import energy_command

    energy_command(recipe, overrides or [], target, batch, runs, context)


def report(
    results: Annotated[list[Path], typer.Argument(help="Results files; others are compared with the first.")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html beside the first.")] = None,
    vllm: Annotated[
        str | None, typer.Option(metavar="ROW", help="Instead, print a row's acceptance as vLLM pretends one.")
    ] = None,
) -> None:
    """Show results as one page that needs no network, and two or more of them side by side."""
    if vllm is not None:
        from ..schema.results import load_results
        from ..session.terminal import write_json
        from .serving.profile import vllm_profile

        write_json(json.dumps(vllm_profile(load_results(results[0]), vllm)) + "\n")
        return
    from ..report.page import report_beside, run_report
    from ..report.served import is_served, run_served_report
    from ..session.terminal import console

    if is_served(results[0]):
        page = out or report_beside(results[0])
        run_served_report(results, page)
        console().print(f"report: {page}", soft_wrap=True)
    else:
        run_report(results, out)


@_takes_evaluation
def trace(
    asked: Evaluation,
    method: Methods = None,
    prompt: Annotated[str | None, typer.Option(help="A question, instead of the recipe's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Of the recipe's prompts.")] = 2,
) -> None:
    """Decode a few prompts and show which tokens were accepted, rejected and corrected."""
    loaded = asked.load("trace", every=bool(method))
    from .evaluation.trace import run_trace

    run_trace(loaded, method or [], prompt, limit)
