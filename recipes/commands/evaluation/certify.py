"""`draftsmith certify`: an evaluation's methods judged for losslessness; a table, `certificate.json`, a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text
from ....data.prompts import stop_ids
from ....decode.engine import Limits
from ....decode.evaluation.certify.certify import Certificate, DecodedBatch, Plan, certify_method
from ....decode.evaluation.certify.rescoring import Rounding, measure_rounding
from ....decode.evaluation.measure import Entry
from ....decode.models.loading import wrap_model
from ....decode.proposers.head_trees import states_of
from ....decode.warpers import Sampling
from ....train.parallel.interrupts import StopSignals
from ...assemble.evaluation import LoadedPair, entries_of, identity_of, open_recipe, prompts_of
from ...report.certificate import KIND, SCHEMA, certificate_beside, certificates_table, explanations
from ...schema.evaluation import EvaluateRecipe
from ...session.machine import machine
from ...session.terminal import Advance, console
from .journal import Journal, stoppable_bar

LEVEL = 1e-6
"""Probability of a false alarm anywhere in the certificate."""
STOPPED = "certify: stopped by signal {}; the same command resumes from here"


def run_certify(
    recipe: EvaluateRecipe, tokens: int = 10_000, batch: int = 1, out: Path | None = None
) -> list[Certificate]:
    """Certify every method of a recipe, print a table and write the certificate after each; resume where a killed run
    stopped.

    Args:
        tokens: to judge for each method above temperature 0.
        batch: prompts decoded together.
        out: the file; by default beside the recipe's results.

    Raises:
        ValueError: a missing or unfit artifact, no prompt short enough, a method without its part, an impossible plan,
            a damaged journal.
        Interrupted: a signal came; the texts that were written are kept.
    """
    entries = _distinct(entries_of(recipe))
    plan = Plan(tokens, LEVEL / len(entries), batch, recipe.seed)
    opened = open_recipe(recipe)
    prompts = [ids for _, ids in prompts_of(recipe, opened.tokenizer)]
    planned = asdict(plan) | {"whole_level": LEVEL}
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": machine(opened.device),
        "artifacts": opened.artifacts(),
        "recipe": recipe.recorded(),
        "plan": planned,
    }
    out = out or certificate_beside(Path(recipe.out))
    identity = identity_of(recipe, prompts, opened) | {"plan": planned}
    certificates: list[Certificate] = []
    with StopSignals() as signals, Journal(out, "texts", identity) as journal:
        with stoppable_bar("certifying", "tokens", signals, STOPPED) as advance:
            for certificate in _certify_all(entries, recipe.max_new_tokens, opened, prompts, plan, journal, advance):
                certificates.append(certificate)
                body = {
                    "complete": len(certificates) == len(entries),
                    "not_lossless": [one.label for one in certificates if one.failed],
                    "certificates": [one.as_dict() for one in certificates],
                }
                atomic_text(out, json.dumps(head | body, indent=2, allow_nan=False) + "\n")
        journal.remove()
    title = f"{recipe.target}, {len(prompts)} prompts of {recipe.prompts}"
    console().print(certificates_table(title, [one.as_dict() for one in certificates]).rich())
    for line in explanations(certificates):
        console().print(line)
    console().print(f"certificate: {out}")
    return certificates


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that decode as an earlier one does, under another label."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(json.dumps([entry.method, entry.options, asdict(entry.sampling)], sort_keys=True), entry)
    return list(found.values())


class _TextsLine(NamedTuple):
    """Of the journal: what a method wrote. Which prompts it belongs to follows from those before it."""

    label: str
    outputs: list[list[int]]
    seconds: float


def _certify_all(
    entries: Sequence[Entry],
    max_new_tokens: int,
    opened: LoadedPair,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    journal: Journal,
    advance: Advance,
) -> Iterator[Certificate]:
    """A certificate of each entry; rounding is measured once for each way of sampling."""
    target, parts, texts = opened.target, opened.parts, journal.parsed(TypeAdapter(_TextsLine))
    limits = Limits(max_new_tokens, stop_ids(opened.tokenizer))
    # The judge is transformers' own forward: where the fast one of decoding were wrong, it would show.
    judge = wrap_model(opened.model, fast=False, graphs=False, states=states_of(parts.heads))
    rounding: dict[Sampling, Rounding] = {}
    greedy = min(plan.tokens, len(prompts) * limits.max_new_tokens)
    amounts = [greedy if entry.sampling.greedy else plan.tokens for entry in entries]
    before = 0
    for entry, amount in zip(entries, amounts, strict=True):
        label = entry.label
        advance(before, sum(amounts), label)
        if entry.sampling not in rounding:
            rounding[entry.sampling] = measure_rounding(target, prompts, entry.sampling, reference=judge)

        def progress(done: int, _: int, *, start: int = before, label: str = label) -> None:
            advance(start + done, sum(amounts), label)

        def on_written(written: DecodedBatch, label: str = label) -> None:
            journal.add([label, *written])

        yield certify_method(
            target,
            parts,
            entry,
            prompts,
            limits,
            plan,
            reference=judge,
            rounding=rounding[entry.sampling],
            written=[DecodedBatch(line.outputs, line.seconds) for line in texts if line.label == label],
            on_written=on_written,
            progress=progress,
        )
        before += amount
