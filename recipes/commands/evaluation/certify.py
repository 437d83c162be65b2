"""`draftsmith certify`: an evaluation's methods judged for losslessness; a table, `certificate.json`, verdicts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....decode.engine import Limits
from ....decode.evaluation.certify.certify import Certificate, DecodedBatch, Plan, certify_method
from ....decode.evaluation.certify.rescoring import Rounding, judge_of, measure_rounding
from ....decode.evaluation.certify.stress import SHARE, stress_method
from ....decode.evaluation.measure import Entry
from ....decode.methods import Parts, build_method
from ....decode.proposers.head_trees import states_of
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, entries_of, open_case
from ...report.certificate import KIND, SCHEMA, VERDICTS, certificates_table, explanations
from ...report.tables import Cell, Column, Table, number_cell
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import beside
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import Advance, console, log
from .journal import Journal, Kept

LEVEL = 1e-6
"""Probability of a false alarm anywhere in the certificate."""
TOKENS, BATCH = 4_000, 8
_TEXTS = TypeAdapter(DecodedBatch)
_SHORT = 16  # tokens of a text that only says how long others will take


def run_certify(
    recipe: EvaluateRecipe, tokens: int = TOKENS, batch: int = BATCH, out: Path | None = None, plan_only: bool = False
) -> list[Certificate]:
    """Certify every method of a recipe, first on a small pair of its own (`stress.py`), then on the recipe's; rows are
    decoded at temperature 1 too where all are at 0. Print a table and write the certificate after each, by default
    beside the results; resume where a killed run stopped. With `plan_only` print how long each would take, and no more.

    Args:
        tokens: to judge for each method above temperature 0; on the small pair `SHARE` times as many a check.
        batch: prompts decoded together.
    """
    out = out or beside(Path(recipe.out), KIND)
    check_writable(out)
    case = open_case(recipe)
    entries = _distinct(_both_ways(entries_of(recipe), case.opened.parts))
    small = _distinct([replace(entry, label=f"{entry.label}, small pair", sampling=Sampling()) for entry in entries])
    plan = Plan(tokens, LEVEL / (len(entries) + len(small)), batch, recipe.seed)
    work = _Work(**vars(case), plan=plan)
    work.say_how_long(small, entries, plan_only)
    if plan_only:
        return []
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": machine(case.opened.device),
        "artifacts": case.opened.artifacts(),
        "recipe": recipe.recorded(),
        "plan": asdict(plan) | {"whole_level": LEVEL},
    }
    certificates: list[Certificate] = []
    with Stoppable("certify") as signals, Journal(out, "texts", case.identity | {"plan": head["plan"]}) as journal:
        with signals.bar("certifying on a small pair", "methods") as advance:
            tried = work.small(small, advance)
        with signals.bar("certifying", "tokens") as advance:
            for certificate in _certify_all(entries, work, Kept(journal, signals), advance):
                certificates.append(_with(certificate, tried))
                body = {
                    "complete": len(certificates) == len(entries),
                    "not_lossless": [one.label for one in tried + certificates if one.failed],
                    "stress": [one.as_dict() for one in tried],
                    "certificates": [one.as_dict() for one in certificates],
                }
                atomic_text(out, json.dumps(head | body, indent=2, allow_nan=False) + "\n")
        journal.remove()
    dicts = [[one.as_dict() for one in some] for some in (certificates, tried)]
    console().print(certificates_table(case.title, *dicts).rich())
    for line in explanations(certificates, tried):
        console().print(line)
    console().print(f"certificate: {out}")
    return certificates


def _with(certificate: Certificate, tried: Sequence[Certificate]) -> Certificate:
    """A certificate whose verdict is no better than that of the same method on the small pair."""
    greedy = certificate.sampling["temperature"] == 0
    same = [
        one.verdict
        for one in tried
        if (one.method, one.options) == (certificate.method, certificate.options)
        and (one.sampling["temperature"] == 0) == greedy
    ]
    return replace(certificate, verdict=max([certificate.verdict, *same], key=VERDICTS.index))


def _both_ways(entries: list[Entry], parts: Parts) -> list[Entry]:
    """Rows; where all are at temperature 0, those of lossless methods once more at 1."""
    drawn = [
        replace(entry, label=f"{entry.label} T=1", sampling=replace(entry.sampling, temperature=1.0))
        for entry in entries
        if all(each.sampling.greedy for each in entries)
    ]
    return entries + [
        entry for entry in drawn if build_method(entry.method, parts, entry.sampling, **entry.options).verifier.lossless
    ]


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that decode as an earlier one does, under another label."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(json.dumps([entry.method, entry.options, asdict(entry.sampling)], sort_keys=True), entry)
    return list(found.values())


@dataclass(frozen=True)
class _Work(Case):
    """What is certified."""

    plan: Plan
    rounding: dict[Sampling, Rounding] = field(default_factory=dict)

    @cached_property
    def judge(self) -> Any:
        """transformers' own forward: where the fast one of decoding were wrong, it would show."""
        return judge_of(self.opened.model, states_of(self.opened.parts.heads))

    def amount(self, entry: Entry) -> int:
        """Tokens that are judged of an entry, unless something is found."""
        most = len(self.prompts) * self.limits.max_new_tokens if entry.sampling.greedy else self.plan.tokens
        return min(self.plan.tokens, most)

    def certify(self, entry: Entry, plan: Plan, limits: Limits, **hooks: Any) -> Certificate:
        """Judge an entry; rounding is measured once for each way of sampling."""
        target, sampling = self.opened.target, entry.sampling
        if sampling not in self.rounding:
            self.rounding[sampling] = measure_rounding(target, self.prompts, sampling, reference=self.judge)
        hooks |= {"reference": self.judge, "rounding": self.rounding[sampling]}
        return certify_method(target, self.opened.parts, entry, self.prompts, limits, plan, **hooks)

    def say_how_long(self, small: Sequence[Entry], entries: Sequence[Entry], each: bool) -> None:
        """Say how many minutes all of it may take, and `each` of it, by trying a little."""
        limits = replace(self.limits, max_new_tokens=min(_SHORT, self.limits.max_new_tokens))
        minutes = dict.fromkeys([entry.label for entry in [*small, *entries]], 0.0)
        for entry in small:  # by the first of the checks above temperature 0
            for one in itertools.islice(stress_method(entry, replace(self.plan, tokens=1), self.opened.device), 1):
                minutes[entry.label] = one.seconds / 60 * max(3.0, 3 * SHARE * self.plan.tokens / one.tokens)
        for entry in entries:
            tried = self.certify(entry, replace(self.plan, tokens=1), limits)
            minutes[entry.label] = tried.seconds / 60 * self.amount(entry) / max(1, tried.tokens)
        if each:
            rows = [[Cell(label), number_cell(value)] for label, value in minutes.items()]
            console().print(Table("", [Column("method", numeric=False), Column("minutes", "about")], rows).rich())
        log(f"certify: about {sum(minutes.values()):.1f} minutes on {self.opened.device}")

    def small(self, entries: Sequence[Entry], advance: Advance) -> list[Certificate]:
        """Methods on the small pair."""
        found: list[Certificate] = []
        for number, entry in enumerate(entries):

            def progress(*_: int, number: int = number, label: str = entry.method) -> None:
                advance(number, len(entries), label)

            found += stress_method(entry, self.plan, self.opened.device, progress)
        return found


def _certify_all(entries: Sequence[Entry], work: _Work, kept: Kept, advance: Advance) -> Iterator[Certificate]:
    """A certificate of each entry."""
    amounts = [work.amount(entry) for entry in entries]
    before = 0
    for entry, amount in zip(entries, amounts, strict=True):
        label = entry.label
        advance(before, sum(amounts), label)

        def progress(done: int, _: int, *, start: int = before, label: str = label) -> None:
            advance(start + done, sum(amounts), label)

        keep = kept.each(f"texts of {label}", _TEXTS)
        yield work.certify(entry, work.plan, work.limits, keep=keep, progress=progress)
        before += amount
