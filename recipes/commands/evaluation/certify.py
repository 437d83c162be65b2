"""`draftsmith certify`: test whether the methods of an evaluation are lossless, and write `certificate.json`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....decode.evaluation.certify.certify import Certificate, DecodedBatch, Plan, certify_method
from ....decode.evaluation.certify.rescoring import Rounding, make_judge, measure_rounding
from ....decode.evaluation.certify.stress import stress_method
from ....decode.evaluation.measure import Entry
from ....decode.methods import Parts, build_method
from ....decode.proposers.head_trees import states_of
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, entries_of, open_case
from ...report.certificate import KIND, SCHEMA, VERDICTS, certificates_table, explanations
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import derive_path
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console
from .journal import Journal

LEVEL = 1e-6
"""Maximum probability of one or more false positives in a certificate (family-wise significance level)."""
_TEXTS = TypeAdapter(DecodedBatch)


def run_certify(
    recipe: EvaluateRecipe, tokens: int = 4_000, batch: int = 8, out: Path | None = None
) -> list[Certificate]:
    """Test whether each method of a recipe is lossless, first on a small pair (`stress.py`), then on the given pair.

    If all rows are at temperature 0, lossless methods are also tested at temperature 1. Above temperature 0, `tokens`
    tokens are tested for each method, and more on the small pair. The certificate file (`out`, by default next to the
    results) is updated after each method, and an interrupted run resumes.
    """
    out = out or derive_path(Path(recipe.out), KIND)
    check_writable(out)
    case = open_case(recipe)
    pair = case.pair
    entries = _drop_duplicates(_add_sampled(entries_of(recipe), pair.parts))
    small = [replace(entry, label=f"{entry.label}, small pair", sampling=Sampling()) for entry in entries]
    small = _drop_duplicates(small)
    plan, certify = Plan(tokens, LEVEL / (len(entries) + len(small)), batch, recipe.seed), _certifier(case)
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": machine(pair.device),
        "artifacts": pair.artifacts(),
        "recipe": recipe.recorded(),
        "plan": asdict(plan) | {"whole_level": LEVEL},
    }
    stress: list[Certificate] = []
    certificates: list[Certificate] = []
    identity = case.identity | {"plan": head["plan"]}
    with Stoppable("certify") as signals, Journal(out, "texts", identity, signals) as journal:
        with signals.bar("certifying on a small pair", "methods") as advance:
            for number, entry in enumerate(small):
                step = (number, len(small), entry.method)
                stress += stress_method(entry, plan, pair.device, lambda *_, step=step: advance(*step))
        with signals.bar("certifying", "tokens") as advance:
            amounts = [_planned_tokens(case, plan, entry) for entry in entries]
            for number, entry in enumerate(entries):
                before, load = sum(amounts[:number]), journal.numbered(f"texts of {entry.label}", _TEXTS)

                def progress(done: int, _: int, before: int = before, label: str = entry.label) -> None:
                    advance(before + done, sum(amounts), label)

                progress(0, 0)
                certificates.append(_with_stress(certify(entry, plan, load_or_decode=load, progress=progress), stress))
                body: dict[str, Any] = {
                    "complete": len(certificates) == len(entries),
                    "not_lossless": [one.label for one in stress + certificates if one.is_suspect],
                    "stress": [asdict(one) for one in stress],
                    "certificates": [asdict(one) for one in certificates],
                }
                atomic_text(out, json.dumps(head | body, indent=2, allow_nan=False) + "\n")
        journal.remove()
    console().print(certificates_table(case.title, body["certificates"], body["stress"]).rich())
    for line in [*explanations(certificates, stress), f"certificate: {out}"]:
        console().print(line)
    return certificates


def _certifier(case: Case) -> Callable[..., Certificate]:
    """Return a function that tests one method. It measures the rounding error once for each sampling configuration."""
    pair = case.pair
    # The judge uses the forward pass of transformers, so that errors in the optimised forward pass are detected too.
    judge = make_judge(pair.model, states_of(pair.parts.heads))

    @cache
    def rounding(sampling: Sampling) -> Rounding:
        return measure_rounding(pair.target, case.prompts, sampling, reference=judge)

    def certify(entry: Entry, plan: Plan, **hooks: Any) -> Certificate:
        hooks |= {"reference": judge, "rounding": rounding(entry.sampling)}
        return certify_method(pair.target, pair.parts, entry, case.prompts, case.limits, plan, **hooks)

    return certify


def _planned_tokens(case: Case, plan: Plan, entry: Entry) -> int:
    most = len(case.prompts) * case.limits.max_new_tokens if entry.sampling.greedy else plan.tokens
    return min(plan.tokens, most)


def _with_stress(certificate: Certificate, stress: Sequence[Certificate]) -> Certificate:
    """Replace the verdict of a certificate if the same method has a worse verdict on the small pair."""
    greedy = certificate.sampling["temperature"] == 0
    same = [
        one.verdict
        for one in stress
        if (one.method, one.options) == (certificate.method, certificate.options)
        and (one.sampling["temperature"] == 0) == greedy
    ]
    return replace(certificate, verdict=max([certificate.verdict, *same], key=VERDICTS.index))


def _add_sampled(entries: list[Entry], parts: Parts) -> list[Entry]:
    """Add entries at temperature 1 for the lossless methods if all entries are at temperature 0."""
    if not all(entry.sampling.greedy for entry in entries):
        return entries
    return entries + [
        replace(entry, label=f"{entry.label} T=1", sampling=sampling)
        for entry in entries
        for sampling in [replace(entry.sampling, temperature=1.0)]
        if build_method(entry.method, parts, sampling, **entry.options).verifier.lossless
    ]


def _drop_duplicates(entries: Sequence[Entry]) -> list[Entry]:
    """Remove entries that differ from an earlier entry only in the label."""
    distinct: dict[str, Entry] = {}
    for entry in entries:
        distinct.setdefault(json.dumps([entry.method, entry.options, asdict(entry.sampling)], sort_keys=True), entry)
    return list(distinct.values())
