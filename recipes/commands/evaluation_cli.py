"""Commands that decode with trained artifacts: evaluate, bench, certify, tune, report."""

from __future__ import annotations

import functools
import inspect
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
    """Typer command that replaces `{methods}` in its help texts with the names of all decoding methods."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ...decode.methods import METHODS

        for param in self.params:
            if (text := getattr(param, "help", None)) is not None:
                param.help = text.replace("{methods}", ", ".join(METHODS))  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


Overrides = Annotated[list[str] | None, typer.Argument(help="Recipe values to change, as key.path=value.")]
ResultsFile = Annotated[str | None, typer.Option(help="Results file (.json).")]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Method, or label of a recipe row (repeatable). Methods: {methods}."),
]
Concurrency = Annotated[str | None, typer.Option(help="Numbers of concurrent requests, such as 1,8 (default: 1).")]
Context = Annotated[
    str | None, typer.Option(help="Approximate prompt lengths in tokens, such as 1024,4096 (default: unchanged).")
]
EngineName = Annotated[str | None, typer.Option(help="Engine to tune for: vllm, sglang or llama.cpp.")]
EngineOptions = Annotated[str, typer.Option(help="Additional engine options, such as '--dtype float32'.")]
ENERGY_BATCHES = [1, 2, 4, 8, 16]


@dataclass(frozen=True)
class Evaluation:
    """Command-line arguments that `evaluate`, `certify` and `tune` share."""

    recipe: Annotated[str | None, typer.Argument(help="Recipe file or name; if omitted, pass --target.")] = None
    overrides: Overrides = None
    target: Annotated[str | None, typer.Option(help="Directory or hub id of the target.")] = None
    drafter: Annotated[str | None, typer.Option(help="Directory or hub id of a draft model.")] = None
    heads: Annotated[str | None, typer.Option(help="Directory or hub id of prediction heads.")] = None
    table: Annotated[str | None, typer.Option(help="Directory or hub id of a bigram table.")] = None
    prompts: Annotated[str | None, typer.Option(help="Prompt set such as spec-bench, or a file or hub id.")] = None

    def load(self, command: str, method: list[str] | None = None, out: str | None = None) -> EvaluateRecipe:
        """Load the evaluation recipe, and apply the command-line arguments."""
        from .evaluation.recipe import evaluate_recipe

        options = {name: getattr(self, name) for name in ("target", "drafter", "heads", "table", "prompts")}
        return evaluate_recipe(self.recipe, self.overrides or [], options | {"out": out}, command, method or ())


def _takes_evaluation(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter of a command, an `Evaluation`, with one parameter for each field of the class."""
    common = inspect.signature(Evaluation, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def invoke(**values: Any) -> None:
        command(Evaluation(**{name: values.pop(name) for name in common}), **values)

    del invoke.__wrapped__  # otherwise typer reads the parameters of `command`
    parameters = [*common.values(), *own]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return invoke


@_takes_evaluation
def evaluate(
    evaluation: Evaluation,
    out: ResultsFile = None,
    method: Methods = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also measure energy and time of forward passes by batch size.")
    ] = False,
) -> None:
    """Decode held-out prompts with several methods and compare them.

    Without a recipe, the command runs autoregressive decoding and one method for each artifact. With `methods=all`, it
    runs all methods that the artifacts support. An interrupted evaluation resumes. Example: `evaluate --target
    Qwen/Qwen3-0.6B --drafter runs/drafter --prompts spec-bench limit=20`.
    """
    loaded = evaluation.load("evaluate", method, out)
    from .evaluation.evaluate import run_evaluate

    run_evaluate(loaded.model_copy(update={"energy_batches": ENERGY_BATCHES}) if energy else loaded)


def bench(
    source: Annotated[
        str | None, typer.Argument(help="Directory of an export (with --engine), or recipe file or name.")
    ] = None,
    overrides: Overrides = None,
    server: Annotated[str | None, typer.Option(help="Base URL of the server, such as http://host:8000/v1.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Base URL of a server without speculative decoding.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Start this engine (vllm, sglang, llama.cpp) with and without the export.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="With --engine: serve until Ctrl-C, without a benchmark.")
    ] = False,
    target: Annotated[str | None, typer.Option(help="With --engine: target model (default: from the export).")] = None,
    speculative_tokens: Annotated[
        int | None, typer.Option(min=1, max=64, help="With --engine: draft tokens per step (default: from the export).")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="With --engine: port; the baseline uses the next port.")
    ] = 8000,
    engine_options: EngineOptions = "",
    prompts: Annotated[
        str | None, typer.Option(help="Prompt set such as spec-bench, or a file, directory or hub id.")
    ] = None,
    concurrency: Concurrency = None,
    context: Context = None,
    out: ResultsFile = None,
) -> None:
    """Measure the speedup of speculative decoding on a server.

    The command sends prompts to running servers, or starts an engine with an export and without it. Examples: `bench
    --server http://host:8000/v1 --baseline http://host:8001/v1`, `bench EXPORT --engine vllm`.
    """
    options = {"server": server, "baseline": baseline, "prompts": prompts, "out": out}
    options |= {"concurrency": concurrency, "context": context}
    if engine is None:
        if serve:
            raise ValueError("--serve requires --engine and an export: pass both")
        from .serving.bench import bench_recipe, run_bench

        run_bench(bench_recipe(source, overrides or [], **options))
        return
    from .serving.engines import commands_of, engine_recipe, measure_engine, serve_engine

    export = None if source is None else Path(source).expanduser()
    sides, more = commands_of(export, engine, target, speculative_tokens), shlex.split(engine_options)
    if serve:
        serve_engine(sides[0], port, more, f"serve-{engine}")
    else:
        measure_engine(engine_recipe(overrides or [], options, port), sides, more, f"serve-{engine}")


@_takes_evaluation
def certify(
    evaluation: Evaluation,
    tokens: Annotated[int, typer.Option(help="Number of tokens per method at temperatures above 0.")] = 4_000,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Certificate file (default: next to the results).")] = None,
    method: Methods = None,
) -> None:
    """Test whether decoding methods are lossless.

    The output of each method is compared with the distribution of the target, first for a small model pair with six
    tokens in its vocabulary, and then for the given models. The exit code is 1 if a lossless method fails or remains
    undecided. Example: `certify --target T --drafter D --prompts questions.jsonl`.
    """
    loaded = evaluation.load("certify", method)
    from .evaluation.certify import run_certify

    if any(certificate.is_suspect for certificate in run_certify(loaded, tokens, batch, out)):
        raise typer.Exit(1)


@_takes_evaluation
def tune(
    evaluation: Evaluation,
    out: ResultsFile = None,
    method: Methods = None,
    concurrency: Concurrency = None,
    context: Context = None,
    engine: EngineName = None,
    engine_options: EngineOptions = "",
) -> None:
    """Find the fastest settings of each method.

    Every setting is measured on a few prompts, and the fastest settings are measured again on more prompts. With
    --engine, the command finds the best number of draft tokens for each concurrency and prompt length, and from which
    load on to switch speculative decoding off; pass the directory of an export with --drafter or --heads. An
    interrupted run resumes. Example: `tune --target T --drafter D --method speculative`.
    """
    if engine is not None:
        from .serving.engines import commands_of, engine_recipe
        from .serving.lengths import max_draft_tokens, run_tune_lengths

        asking = {"prompts": evaluation.prompts, "out": out or f"tune-{engine}.json"}
        asking |= {"concurrency": concurrency, "context": context}
        served = engine_recipe([*filter(None, [evaluation.recipe]), *(evaluation.overrides or [])], asking)
        export = evaluation.drafter or evaluation.heads or ""
        commands = partial(commands_of, export or None, engine, evaluation.target)
        commands()  # raises early if the export cannot be served
        more = shlex.split(engine_options)
        run_tune_lengths(served, engine, commands, max_draft_tokens(export), more, f"serve-{engine}")
        return
    loaded = evaluation.load("tune", method, out)
    from .evaluation.tune import run_tune

    run_tune(loaded)


def report(
    results: Annotated[list[Path], typer.Argument(help="Results files; the first one is the baseline.")],
    out: Annotated[Path | None, typer.Option(help="HTML file (default: report.html next to the first file).")] = None,
) -> None:
    """Write results to an HTML page, and compare results files.

    The page is self-contained. Other files are compared with the first file. Example: `report results.json other.json
    --out report.html`.
    """
    from ..report.page import run_report

    run_report(results, out)
