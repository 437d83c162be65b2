"""`draftsmith bench`: measure the speedup of a server with speculative decoding over a server without it."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ....checkpoints.storage.atomic import check_writable
from ....data.conversations import Prompt
from ....data.prompts import load_questions
from ....decode.evaluation.serving import Block, Reply, load_rows
from ...report.page import report_path, verdict, write_report
from ...report.tables import BENCH_TERMINAL, method_table
from ...schema.loading import find_recipe, parse_recipe, read_extended, write_recipe
from ...schema.results import BENCH, write_results
from ...schema.serving import BenchRecipe
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console, log
from .client import Server, check_client, read_counters

_BLOCKS = 4  # number of blocks of prompts at each concurrency; the servers alternate
_WARM_UP = 4  # maximum number of warm-up requests to each server at each concurrency
_MIN_IDENTICAL = 0.5  # minimum share of identical greedy texts before a warning


def bench_recipe(
    name: str | None,
    overrides: Sequence[str] = (),
    *,
    concurrency: str | None = None,
    context: str | None = None,
    **options: str | None,
) -> BenchRecipe:
    """Load a recipe by file or name, or create one from options; raise ValueError if a value is invalid."""
    if name is not None and "=" in name and not Path(name).is_file():
        overrides, name = [name, *overrides], None
    values = {"kind": BENCH} if name is None else read_extended(find_recipe(name))
    changes = {key: value for key, value in options.items() if value is not None}
    for key, numbers in (("concurrency", concurrency), ("context", context)):
        if numbers is not None:
            overrides = [f"{key}=[{numbers}]", *overrides]
    return parse_recipe(values, name or "draftsmith bench", overrides, options=changes, kinds=[BenchRecipe])


def prompts_of(recipe: BenchRecipe) -> list[Prompt]:
    """Load the prompts; raise ValueError if they cannot be loaded or the results cannot be written."""
    check_writable(Path(recipe.out))
    check_client()
    return load_questions(recipe.prompts, recipe.limit, path=recipe.prompts_path, groups=recipe.groups or None)


def run_bench(recipe: BenchRecipe) -> dict[str, Any]:
    """Measure the servers, print the table, and write the results and the report.

    Raises ConnectionError if a server does not respond, and ValueError if all requests in a block of prompts fail.
    """
    out, prompts = Path(recipe.out), prompts_of(recipe)
    with Stoppable("bench", "") as signals:
        results = asyncio.run(_measure(recipe, prompts, signals))
    write_results(out, results)
    write_recipe(recipe, out.with_suffix(".recipe.yaml"))
    title = f"{recipe.server}, {len(prompts)} prompts of {recipe.prompts}"
    console().print(method_table(title, results["methods"], BENCH_TERMINAL).rich())
    for line in results["errors"]:
        log(f"bench: {line}")
    report = write_report(report_path(out), [out], [results])
    if recipe.baseline is not None:
        console().print(verdict(results["methods"]), soft_wrap=True)
    console().print(f"results: {out}; report: {report}", soft_wrap=True)
    return results


async def _measure(recipe: BenchRecipe, prompts: Sequence[Prompt], signals: Stoppable) -> dict[str, Any]:
    connection = recipe.timeout, recipe.key_variable
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(recipe.server, recipe.model, *connection))]
        if recipe.baseline is not None:
            servers.append(await stack.enter_async_context(Server(recipe.baseline, recipe.baseline_model, *connection)))
        named = [(prompt.id, prompt.category) for prompt in prompts]
        per_token = await _characters_per_token(recipe, servers[0], prompts)
        contexts: list[int | None] = [*recipe.context] or [None]
        for context, concurrency in itertools.product(contexts, recipe.concurrency):
            extended = prompts if context is None else extend_prompts(prompts, round(context * per_token))
            blocks = await _blocks(recipe, servers, concurrency, extended, signals)
            rows += load_rows(concurrency, named, blocks, recipe.temperature, context)
    models = [server.model for server in servers]
    return {
        "kind": BENCH,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine("cpu"),
        "recipe": recipe.model_dump(mode="json"),
        "models": models,
        "prompts": len(prompts),
        "categories": dict(Counter(prompt.category for prompt in prompts)),
        "methods": rows,
        "errors": _warnings(models, rows),
    }


def extend_prompts(prompts: Sequence[Prompt], characters: int) -> list[Prompt]:
    """Prepend texts of other prompts to the last turn of each prompt that has fewer than `characters` characters.

    Each prompt begins with another text, so that a server cannot reuse the cache of a common prefix.
    """
    texts, extended = [prompt.turns[-1].text for prompt in prompts], []
    for index, prompt in enumerate(prompts):
        filler = "\n\n".join((*texts[index + 1 :], *texts[: index + 1], ""))
        missing = max(0, characters - sum(len(turn.text) for turn in prompt.turns))
        *before, last = prompt.turns
        text = (filler * (missing // len(filler) + 1))[:missing] + last.text
        extended.append(replace(prompt, turns=(*before, replace(last, text=text))))
    return extended


async def _characters_per_token(recipe: BenchRecipe, server: Server, prompts: Sequence[Prompt]) -> float:
    """Measure the characters per token of extended prompts, as counted by a server; 4 if no prompt is extended."""
    if not recipe.context:
        return 4.0
    first, *_ = extend_prompts(prompts, 4 * min(recipe.context))
    block = await _send(recipe.model_copy(update={"max_new_tokens": 1}), server, [first], 1, lambda: None)
    if (failure := block.replies[0].failure) is not None:
        raise ValueError(f"{server.url} failed on a prompt of about {min(recipe.context)} tokens: {failure}")
    tokens = block.replies[0].prompt_tokens or min(recipe.context)
    return sum(len(turn.text) for turn in first.turns) / tokens


async def _blocks(
    recipe: BenchRecipe, servers: Sequence[Server], concurrency: int, prompts: Sequence[Prompt], signals: Stoppable
) -> list[list[Block]]:
    """Measure blocks of prompts on each server at one concurrency. The order of the servers alternates by block."""
    blocks: list[list[Block]] = [[] for _ in servers]
    for server in servers:
        await _send(recipe, server, prompts[: min(_WARM_UP, concurrency)], concurrency, lambda: None)
    with signals.bar(f"requests at concurrency {concurrency}", "requests") as advance:
        done = itertools.count(1)

        def progress() -> None:
            advance(next(done), len(prompts) * len(servers))

        for part, indices in enumerate(np.array_split(np.arange(len(prompts)), min(_BLOCKS, len(prompts)))):
            own, numbers = [prompts[index] for index in indices], range(len(servers))
            for number in reversed(numbers) if part % 2 else numbers:
                block = await _send(recipe, servers[number], own, concurrency, progress)
                if all(reply.failure is not None for reply in block.replies):
                    url, reason = servers[number].url, block.replies[0].failure
                    raise ValueError(f"{url} failed on all {len(block.replies)} prompts: {reason}")
                blocks[number].append(block)
    return blocks


async def _send(
    recipe: BenchRecipe, server: Server, prompts: Sequence[Prompt], concurrency: int, advance: Callable[[], None]
) -> Block:
    """Send prompts with at most `concurrency` requests in flight, and wait for all responses."""
    free = asyncio.Semaphore(concurrency)
    settings: dict[str, Any] = {"max_tokens": recipe.max_new_tokens, "temperature": recipe.temperature}

    async def ask(number: int, prompt: Prompt) -> Reply:
        async with free:
            own = {"seed": recipe.seed + number} if recipe.temperature > 0 else {}
            messages = [{"role": turn.role, "content": turn.text} for turn in prompt.turns]
            reply = await server.ask(messages, **settings, **own)
        advance()
        return reply

    before, start = await asyncio.to_thread(read_counters, server.url), time.perf_counter()
    replies = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    seconds = time.perf_counter() - start
    after = await asyncio.to_thread(read_counters, server.url)
    return Block(seconds, list(replies), {key: value - before.get(key, 0.0) for key, value in after.items()})


def _warnings(models: Sequence[str | None], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return warnings about failed requests and differences between the servers."""
    warnings = []
    if len(set(models)) > 1:
        warnings.append(f"server and baseline report different models: {' and '.join(map(str, models))}")
    for row in rows:
        label = row["label"]
        if row["failed"]:
            reasons = "; ".join(row["failures"])
            warnings.append(f"{label}: {row['failed']} of {row['requests']} requests failed: {reasons}")
        if row["method"] != "server" and row["drafted"]:
            warnings.append(f"{label}: the baseline server also uses speculative decoding")
        same = row["identical_to_greedy"]
        if same and same[0] < _MIN_IDENTICAL * same[1]:
            warnings.append(f"{label}: only {same[0]} of {same[1]} greedy texts equal the baseline's: check the models")
    return warnings
