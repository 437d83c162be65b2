"""`draftsmith evaluate --server URL`: what a server makes of its drafts, beside one without, under a given load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....data.conversations import Prompt
from ....data.prompts import load_questions
from ...report.page import report_beside
from ...report.served import load_name, load_table, run_served_report
from ...schema.loading import find_recipe, parse_recipe, read_extended, write_recipe
from ...schema.serving import ServedRecipe
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console, log
from ..evaluation.journal import Journal, Kept
from .asking import Reply, Server, check_client
from .counters import counted, read_counters
from .expected import Expected, compared, expected_of
from .summary import Block, beside, numbers_of

_BLOCKS = 4  # in which a load's prompts are asked, of the two servers in turns
_WARMING = 4  # requests to each server before a load, at most
_ALIKE = 0.5  # of greedy texts: fewer the same, and the two are hardly one model
_BLOCK = TypeAdapter(Block)


class _Load(NamedTuple):
    """So many requests at a time, or begun a second."""

    concurrency: int | None
    rate: float | None

    @property
    def name(self) -> str:
        return load_name(self._asdict())


def served_recipe(
    name: str | None,
    overrides: Sequence[str] = (),
    *,
    server: str | None = None,
    concurrency: str | None = None,
    **given: str | None,
) -> ServedRecipe | None:
    """What the command asks for: a recipe of this kind by its file or name, or a server's address; None for a recipe of
    another kind, or for none. Raises ValueError: a fault."""
    if name is not None and "=" in name and not Path(name).is_file():
        overrides, name = [name, *overrides], None
    values = {"kind": "served"} if name is None else read_extended(find_recipe(name))
    if (name is None and server is None) or (server is None and values.get("kind") != "served"):
        return None
    changes: dict[str, Any] = {"server": server} | given
    if concurrency is not None:
        try:
            changes["concurrency"] = [int(number) for number in concurrency.split(",")]
        except ValueError:
            raise ValueError(f"--concurrency {concurrency}: give whole numbers with commas between") from None
    changes = {key: value for key, value in changes.items() if value is not None}
    recipe = parse_recipe(values, name or "--server", overrides, given=changes, kinds=("served",))
    assert isinstance(recipe, ServedRecipe)
    return recipe


def questions_of(recipe: ServedRecipe) -> list[Prompt]:
    """What is asked. Raises ValueError: it cannot be, or its results could not be written."""
    check_writable(Path(recipe.out))
    check_client()
    return load_questions(recipe.prompts, recipe.limit, path=recipe.prompts_path, groups=recipe.groups or None)


def run_served(recipe: ServedRecipe) -> dict[str, Any]:
    """Ask, print the table and write the results; resume where a killed run stopped. Raises ConnectionError: a server
    that is not there; ValueError: one that answered nothing."""
    out = Path(recipe.out)
    prompts = questions_of(recipe)
    expected = expected_of(recipe, prompts)
    identity = recipe.model_dump(mode="json", exclude={"out", "expect"}) | {
        "prompts": [prompt.id for prompt in prompts]
    }
    with Stoppable("evaluate") as signals, Journal(out, "blocks", identity) as journal:
        results = asyncio.run(_measured(recipe, prompts, expected, Kept(journal, signals), signals))
        atomic_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        journal.remove()
    console().print(load_table(results).rich())
    for line in results["warnings"]:
        log(f"evaluate: {line}")
    page = report_beside(out)
    run_served_report([out], page)
    console().print(f"results: {out}; report: {page}", soft_wrap=True)
    return results


async def _measured(
    recipe: ServedRecipe, prompts: Sequence[Prompt], expected: Expected | None, kept: Kept, signals: Stoppable
) -> dict[str, Any]:
    asked = recipe.timeout, recipe.key_variable
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(recipe.server, recipe.model, *asked))]
        if recipe.baseline is not None:
            servers.append(await stack.enter_async_context(Server(recipe.baseline, recipe.baseline_model, *asked)))
        loads = [_Load(None, rate) for rate in recipe.rate] or [_Load(number, None) for number in recipe.concurrency]
        rows = []
        for load in loads:
            blocks = await _blocks(recipe, servers, load, prompts, kept, signals)
            row = _row(recipe, load, prompts, blocks)
            rows.append(row if expected is None else row | {"expected": compared(expected, row["server"])})
    results = {
        "kind": "served",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine("cpu"),
        "recipe": recipe.model_dump(mode="json"),
        "models": [server.model for server in servers],
        "prompts": len(prompts),
        "loads": rows,
    }
    return results | {"warnings": _warnings(results)}


async def _blocks(
    recipe: ServedRecipe,
    servers: Sequence[Server],
    load: _Load,
    prompts: Sequence[Prompt],
    kept: Kept,
    signals: Stoppable,
) -> list[list[Block]]:
    """A load's blocks of each server; the servers take turns, and the one that begins changes with each block."""
    found: list[list[Block]] = [[] for _ in servers]
    warm = False
    bounds = np.linspace(0, len(prompts), _BLOCKS + 1).astype(int)
    done = 0
    with signals.bar(f"asking, {load.name}", "requests") as advance:

        def further(requests: int) -> None:
            nonlocal done
            done += requests
            advance(done, len(prompts) * len(servers))

        for part in range(_BLOCKS):
            own = prompts[bounds[part] : bounds[part + 1]]
            order = range(len(servers)) if part % 2 == 0 else reversed(range(len(servers)))
            for number in order if own else ():
                name = f"{load.name}, {('server', 'baseline')[number]} {part}"
                if name in kept:
                    found[number].append(kept.known(name, _BLOCK))
                    further(len(own))
                    continue
                signals.check()
                if not warm:
                    few = prompts[: min(_WARMING, load.concurrency or _WARMING)]
                    for server in servers:
                        await _together(recipe, server, few, load, 0, lambda done: None)
                    warm = True
                block = await _together(recipe, servers[number], own, load, part, further)
                _check_answers(servers[number], block)
                kept.add(name, _BLOCK, block)
                found[number].append(block)
    return found


async def _together(
    recipe: ServedRecipe,
    server: Server,
    prompts: Sequence[Prompt],
    load: _Load,
    part: int,
    advance: Callable[[int], None],
) -> Block:
    """Ask prompts under a load."""
    free = asyncio.Semaphore(load.concurrency or len(prompts))
    draws = np.random.default_rng([recipe.seed, part])
    pauses = np.zeros(len(prompts)) if load.rate is None else draws.exponential(1 / load.rate, len(prompts)).cumsum()
    settings: dict[str, Any] = {"max_tokens": recipe.max_new_tokens, "temperature": recipe.temperature}

    async def one(number: int, prompt: Prompt) -> Reply:
        await asyncio.sleep(pauses[number])
        async with free:
            own = {"seed": recipe.seed + number} if recipe.temperature > 0 else {}
            messages = [{"role": turn.role, "content": turn.text} for turn in prompt.turns]
            reply = await server.ask(messages, **settings, **own)
        advance(1)
        return reply

    before, start = await asyncio.to_thread(read_counters, server.url), time.perf_counter()
    waiting: list[Awaitable[Reply]] = [one(number, prompt) for number, prompt in enumerate(prompts)]
    replies = list(await asyncio.gather(*waiting))
    seconds = time.perf_counter() - start
    return Block(seconds, replies, counted(before, await asyncio.to_thread(read_counters, server.url)))


def _check_answers(server: Server, block: Block) -> None:
    if all(reply.failure is not None for reply in block.replies):
        raise ValueError(f"{server.url} answered none of {len(block.replies)} prompts: {block.replies[0].failure}")


def _row(
    recipe: ServedRecipe, load: _Load, prompts: Sequence[Prompt], blocks: Sequence[Sequence[Block]]
) -> dict[str, Any]:
    """What is known of a load, over all prompts and by category."""
    sides = ["server", "baseline"][: len(blocks)]
    row: dict[str, Any] = load._asdict() | {
        side: numbers_of(of_side) for side, of_side in zip(sides, blocks, strict=True)
    }
    replies = (reply for block in blocks[0] for reply in block.replies)
    lengths = {each.id: reply.prompt_tokens for each, reply in zip(prompts, replies, strict=True)}
    row["server"]["prompt_tokens"] = {name: length for name, length in lengths.items() if length is not None}
    if len(blocks) > 1:
        mine, theirs = (
            dict(zip((each.id for each in prompts), (reply for block in side for reply in block.replies), strict=True))
            for side in blocks
        )
        greedy = recipe.temperature == 0
        categories = dict.fromkeys(prompt.category for prompt in prompts)
        of_category = {name: {each.id for each in prompts if each.category == name} for name in categories}
        by_category = {name: beside({i: mine[i] for i in ids}, theirs, greedy) for name, ids in of_category.items()}
        rates = [row[side]["tokens_per_second"] for side in sides]
        throughput = rates[0] / rates[1] if all(rates) else None
        row["beside"] = beside(mine, theirs, greedy) | {"by_category": by_category, "throughput": throughput}
    return row


def _warnings(results: dict[str, Any]) -> list[str]:
    """What makes the numbers mean something else than they seem to."""
    said = []
    if len(set(results["models"])) > 1:
        said.append(f"the two call their models differently: {' and '.join(results['models'])}")
    for row in results["loads"]:
        load = load_name(row)
        for side in ("server", "baseline"):
            found = row.get(side)
            if found and (found["failed"] or found["retried"]):
                why = f": {'; '.join(found['failures'])}" if found["failures"] else ""
                said.append(
                    f"{load}: the {side} failed at {found['failed']} of {found['requests']} requests, and "
                    f"{found['retried']} were asked again{why}"
                )
        if row.get("baseline") and row["baseline"]["drafted"]:
            said.append(f"{load}: the baseline drafts, too")
        said += [f"{load}: {why}" for why in row.get("expected", {}).get("why", ())]
        same = (row.get("beside") or {}).get("same")
        if same and same[0] < _ALIKE * same[1]:
            said.append(
                f"{load}: only {same[0]} of {same[1]} greedy texts are the baseline's: another model, template, "
                "number format or context length"
            )
    return said
