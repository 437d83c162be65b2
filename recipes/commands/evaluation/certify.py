"""`draftsmith certify`: an evaluation's methods judged for losslessness; a table, `certificate.json`, a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text
from ....data.prompts import stop_ids
from ....decode.engine import Limits
from ....decode.evaluation.certify.certify import Certificate, Plan, certify_method
from ....decode.evaluation.certify.rescoring import Rounding, measure_rounding
from ....decode.evaluation.certify.uniformity import detectable_bias, tokens_for
from ....decode.evaluation.measure import Entry
from ....decode.methods import method_options
from ....decode.models.loading import wrap_model
from ....decode.proposers.head_trees import states_of
from ....decode.warpers import Sampling
from ....train.parallel.interrupts import StopSignals
from ...assemble.artifact import fingerprint_of
from ...assemble.evaluation import LoadedPair, artifact_hashes, entries_of, identity_of, open_recipe, prompts_of
from ...report.certificate import KIND, SCHEMA, certificate_beside, certificates_table, explanations
from ...schema.evaluation import EvaluateRecipe
from ...session.machine import machine
from ...session.terminal import Advance, console, log
from .journal import TextJournal
from .watch import stoppable_bar

STOPPED = "certify: stopped by signal {}; the same command resumes from here"
_WITHOUT_EFFECT = ("repeats", "compare_with_transformers")  # on a certificate


@dataclass(frozen=True)
class CertifyOptions:
    """What is asked of a certificate, besides the recipe."""

    temperatures: tuple[float, ...] = ()
    """Every method at each of them; none: as the recipe has them."""
    tokens: int = 10_000
    """Tokens to judge for each method above temperature 0."""
    power: float | None = None
    """A bias: as many tokens as find it with 99 %, in place of `tokens`."""
    level: float = 1e-6
    """Probability of a false alarm anywhere in the certificate."""
    batch: int = 1
    """Prompts decoded together."""
    out: Path | None = None
    """The file; by default beside the recipe's results."""


def run_certify(recipe: EvaluateRecipe, options: CertifyOptions) -> list[Certificate]:
    """Certify every method of a recipe, print a table and write the certificate after each; resume where a killed run
    stopped.

    Raises:
        ValueError: a missing or unfit artifact, no prompt short enough, a method without its part, an impossible plan,
            a damaged journal.
        Interrupted: a signal came; the texts that were written are kept.
    """
    entries = certified_entries(recipe, options.temperatures)
    plan = make_plan(options, len(entries), recipe.seed)
    opened = open_recipe(recipe)
    prompts = [ids for _, ids in prompts_of(recipe, opened.tokenizer)]
    if any(not entry.sampling.greedy for entry in entries):
        log(f"certify: {describe_plan(plan)}")
    mine = {"source": recipe.target, "hash": fingerprint_of(recipe.target, opened.model)}
    planned = asdict(plan) | {"whole_level": options.level}
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": machine(opened.device),
        "artifacts": artifact_hashes(recipe) | {"target": mine},
        "recipe": recipe.model_dump(mode="json"),
        "plan": planned,
    }
    out = options.out or certificate_beside(Path(recipe.out))
    whole = identity_of(recipe, prompts, opened.device) | {"plan": planned, "temperatures": options.temperatures}
    identity = {name: value for name, value in whole.items() if name not in _WITHOUT_EFFECT}
    certificates: list[Certificate] = []
    with StopSignals() as signals, TextJournal(out, identity) as journal:
        _log_finished(journal)
        with stoppable_bar("certifying", "tokens", signals, STOPPED) as advance:
            for certificate in _certify_all(recipe, opened, entries, prompts, plan, journal, advance):
                certificates.append(certificate)
                _write(out, head, certificates, len(entries))
        journal.remove()
    title = f"{recipe.target}, {len(prompts)} prompts of {recipe.prompts}"
    console().print(certificates_table(title, [one.as_dict() for one in certificates]).rich())
    for line in explanations(certificates):
        console().print(line, markup=False)
    console().print(f"certificate: {out}")
    return certificates


def _log_finished(journal: TextJournal) -> None:
    if journal.changed:
        changed = ", ".join(journal.changed)
        log(f"certify: {journal.path} holds texts of another certificate ({changed} differ): restarting")
    count = sum(len(each.outputs) for written in journal.finished.values() for each in written)
    if count:
        log(f"certify: resuming; {count} texts are written already, by an earlier process")


def _certify_all(
    recipe: EvaluateRecipe,
    opened: LoadedPair,
    entries: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    journal: TextJournal,
    advance: Advance,
) -> Iterator[Certificate]:
    """A certificate of each entry; rounding is measured once for each way of sampling."""
    target, parts = opened.target, opened.parts
    limits = Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer))
    # The judge is transformers' own forward: where the fast one of decoding were wrong, it would show.
    judge = wrap_model(opened.model, fast=False, graphs=False, states=states_of(parts.heads))
    rounding: dict[Sampling, Rounding] = {}
    greedy = min(plan.tokens, len(prompts) * limits.max_new_tokens)
    amounts = [greedy if entry.sampling.greedy else plan.tokens for entry in entries]
    before = 0
    for entry, amount in zip(entries, amounts, strict=True):
        advance(before, sum(amounts), entry.label)
        if entry.sampling not in rounding:
            rounding[entry.sampling] = measure_rounding(target, prompts, entry.sampling, reference=judge)

        def note(done: int, _: int, *, start: int = before, label: str = entry.label) -> None:
            advance(start + done, sum(amounts), label)

        shared: dict[str, Any] = {"reference": judge, "rounding": rounding[entry.sampling], "progress": note}
        shared |= {"written": journal.finished.get(entry.label, ()), "on_written": partial(journal.add, entry.label)}
        yield certify_method(target, parts, entry, prompts, limits, plan, **shared)
        before += amount


def certified_entries(recipe: EvaluateRecipe, temperatures: Sequence[float]) -> list[Entry]:
    """The recipe's rows, or each of its methods at each of some temperatures; what comes twice is done once."""
    entries = entries_of(recipe)
    if temperatures:
        entries = [
            replace(entry, label=_named(entry, temperature), sampling=replace(entry.sampling, temperature=temperature))
            for temperature in temperatures
            for entry in entries
        ]
    kept: dict[str, Entry] = {}
    for entry in entries:
        settings = method_options(entry.method, entry.options)
        kept.setdefault(json.dumps([entry.method, settings, asdict(entry.sampling)], sort_keys=True), entry)
    labels = [entry.label for entry in kept.values()]
    return [
        replace(entry, label=f"{entry.label}, {_settings(entry)}") if labels.count(entry.label) > 1 else entry
        for entry in kept.values()
    ]


def _settings(entry: Entry) -> str:
    """What distinguishes rows that a recipe distinguished by their temperatures."""
    return " ".join(f"{key}={value}" for key, value in entry.options.items()) or "default settings"


def _named(entry: Entry, temperature: float) -> str:
    own = f" T={entry.sampling.temperature:g}"
    return f"{entry.label.removesuffix(own)} T={temperature:g}"


def make_plan(options: CertifyOptions, methods: int, seed: int) -> Plan:
    """How much each method is tested, the level shared among them. Raises ValueError for numbers that cannot be."""
    if not 0 < options.level < 1:
        raise ValueError(f"the level must lie between 0 and 1, got {options.level}")
    plan = Plan(options.tokens, options.level / methods, options.batch, seed)
    if options.power is None:
        return plan
    return replace(plan, tokens=tokens_for(options.power, plan.test_level(orders=2), 0.99))


def describe_plan(plan: Plan) -> str:
    """What such a plan finds, whatever the distributions are."""
    level = plan.test_level(orders=2)
    found = [detectable_bias(plan.tokens, level, power) for power in (0.8, 0.99)]
    return (
        f"{plan.tokens:,} tokens a method above temperature 0 find a bias of {found[0]:.3f} with 80 % and of "
        f"{found[1]:.3f} with 99 % probability, or smaller ones (a bias of b moves the share b of all probability "
        "towards what a drafter prefers)"
    )


def _write(path: Path, head: dict[str, Any], certificates: Sequence[Certificate], of: int) -> None:
    """Whole or not at all. `complete` is false until all methods have their certificate."""
    failed = [certificate.label for certificate in certificates if certificate.failed]
    body = {"complete": len(certificates) == of, "not_lossless": failed}
    body["certificates"] = [certificate.as_dict() for certificate in certificates]
    atomic_text(path, json.dumps(head | body, indent=2, allow_nan=False) + "\n")
