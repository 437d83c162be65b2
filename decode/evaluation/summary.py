"""From runs to rows: what `results.json` says of each method, as a whole, by category and by prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..engine import Limits
from ..methods import Parts, build_method
from ..models.base import LanguageModel
from .energy import Energy
from .measure import BASELINE, REFERENCE, Entry, Run, profile_steps, steady
from .metrics import impossible, speedup_interval, tokens_per_step_interval, total
from .profile import StepFlops, drafting_cost, measured_flops
from .quality import nearly_tied, perplexity_of, rouge_l, self_consistency, surprisal


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt, and what is known of it beside its tokens."""

    ids: Sequence[int]
    name: str = ""
    category: str = ""
    references: tuple[str, ...] = ()


@dataclass
class Summary:
    """What an evaluation comes to."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """What is wrong with entries whose measurements cannot be true: an error of the report each, not a row of it."""
    broken: list[str] = field(default_factory=list)
    """Lossless methods that did not write what greedy decoding writes, near-ties apart."""
    same: list[int] | None = None
    """How many prompts `transformers.generate` decodes to greedy decoding's tokens, and of how many; None: not run."""


@dataclass
class _Quality:
    """Of one entry's texts, by prompt."""

    nats: list[float]
    rouge: list[float | None]
    consistency: list[float | None]


@dataclass(frozen=True)
class _Step:
    """Of one entry's steps."""

    flops: StepFlops
    drafting: float
    """A proposal's forwards in isolation, over a one-token forward of the target."""
    forwards: float
    """The share of their time that forwards of target, drafter and heads take, the median step's."""


@dataclass(frozen=True)
class Summariser:
    """Makes rows of runs.

    Args:
        limits, seed, batch: those of the runs, for what is decoded once more (see `measure.profile_steps`).
        text_of: decodes token ids, for ROUGE-L; None leaves it out.
        energies: joules a token by label, where they were counted.
    """

    target: LanguageModel
    parts: Parts
    asked: Sequence[EvalPrompt]
    runs: Mapping[str, Run]
    limits: Limits
    seed: int = 0
    text_of: Callable[[Sequence[int]], str] | None = None
    energies: Mapping[str, Energy] = field(default_factory=dict)
    batch: int = 1

    def summarise(self, entries: Sequence[Entry], progress: Callable[[int, int, str], None] | None = None) -> Summary:
        """A row an entry, with the metric names of `metrics.py`. Raises ValueError without an autoregressive entry to
        compare with, of the same warping."""
        bases = {entry.sampling: self.runs[entry.label] for entry in entries if entry.method == BASELINE}
        greedy = next((run for sampling, run in bases.items() if sampling.greedy), None)
        summary = Summary()
        if greedy is not None and REFERENCE in self.runs:
            summary.same = identical(self.runs[REFERENCE], greedy)
        for number, entry in enumerate(entries):
            if entry.sampling not in bases:
                raise ValueError(
                    f"{entry.label!r} needs {BASELINE!r} at temperature {entry.sampling.temperature:g} beside it"
                )
            if progress:
                progress(number, len(entries), entry.label)
            base = bases[entry.sampling]
            row = self._row(entry, base, greedy)
            counts = total(self.runs[entry.label].tallies)
            # a batch takes as long as its longest text: drafts may gain more where they shorten that one
            forwards = counts.steps / counts.rounds if self.batch == 1 else math.inf
            fault = self._check_text(entry, row, base, summary) or impossible(row, forwards)
            if fault:
                summary.errors.append(f"the measurement of {entry.label!r} cannot be true: {fault}")
            else:
                summary.rows.append(row)
        return summary

    def _row(self, entry: Entry, base: Run, greedy: Run | None) -> dict[str, Any]:
        run, prompts = self.runs[entry.label], [prompt.ids for prompt in self.asked]
        method = build_method(entry.method, self.parts, entry.sampling, **entry.options)
        counts = total(run.tallies)
        lengths = [len(prompt) + len(ids) / 2 for prompt, ids in zip(prompts, base.ids, strict=True)]
        nodes, context = counts.nodes / max(1, counts.rounds), round(statistics.mean(lengths))
        profile = profile_steps(self.target, self.parts, entry, prompts, self.limits, self.seed, self.batch)
        drafting, forwards = drafting_cost(self.target, method, nodes, context)
        flops = measured_flops(self.target, method, nodes, context)
        step = _Step(flops, drafting, statistics.median(profile.shares))
        quality = _Quality(
            [surprisal(self.target, prompt, ids) for prompt, ids in zip(prompts, run.ids, strict=True)],
            [
                rouge_l(self.text_of(ids), prompt.references) if self.text_of and prompt.references else None
                for prompt, ids in zip(self.asked, run.ids, strict=True)
            ],
            [self_consistency(ids, greedy.ids[index]) if greedy else None for index, ids in enumerate(run.ids)],
        )
        row: dict[str, Any] = {"label": entry.label, "method": entry.method, "options": entry.options}
        row |= {"temperature": entry.sampling.temperature, "lossless": method.verifier.lossless}
        chosen, joules = range(len(self.asked)), self.energies.get(entry.label)
        row |= self._measured(entry, chosen, base, quality, step)
        row |= {
            "runs": len(run.by_prompt[0]),
            "slowdown": run.slowdown(),
            "steady": steady(run, base),
            "near_ties": 0 if entry.sampling.greedy and method.verifier.lossless else None,
            "cost_ratio": drafting / forwards if forwards else None,
            "phases_us": profile.summary(),
            # None, never 0, where nothing counted
            "joules_per_token": joules.joules if joules else None,
            "energy_source": joules.source if joules else None,
            "energy": asdict(joules) if joules else None,
        }
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.asked):
            groups.setdefault(prompt.category, []).append(index)
        row["by_category"] = {
            name: {"prompts": len(group)} | self._measured(entry, group, base, quality, step)
            for name, group in groups.items()
        }
        row["by_prompt"] = [self._of_prompt(entry, index, base, quality) for index in chosen]
        return row

    def _measured(
        self, entry: Entry, chosen: Sequence[int], base: Run, quality: _Quality, step: _Step
    ) -> dict[str, Any]:
        """The metrics of some prompts: of all, or of a category."""
        run, base = self.runs[entry.label].only(chosen), base.only(chosen)
        counts = total(run.tallies)
        part: dict[str, Any] = counts.metrics()
        part["tokens_per_step_interval"] = tokens_per_step_interval(run.tallies)
        part |= _speeds(run, base)
        reference = self.runs.get(REFERENCE) if entry.sampling.greedy else None
        part["speedup_over_transformers"] = _speeds(run, reference.only(chosen))["speedup"] if reference else None
        part["identical_to_greedy"] = identical(run, base) if entry.sampling.greedy else None
        part |= _bounds(part["speedup"], run, step.forwards)
        part["ideal"] = counts.tokens / counts.rounds / (1 + step.drafting)
        part["flops_per_token"] = step.flops.per_token(counts.tokens / counts.rounds)
        part["perplexity"] = perplexity_of([quality.nats[index] for index in chosen], map(len, run.ids))
        part["rouge_l"] = _mean([quality.rouge[index] for index in chosen])
        part["self_consistency"] = _mean([quality.consistency[index] for index in chosen])
        return part

    def _of_prompt(self, entry: Entry, index: int, base: Run, quality: _Quality) -> dict[str, Any]:
        run, asked = self.runs[entry.label], self.asked[index]
        tally, seconds = run.tallies[index], run.median_seconds()[index]
        rates, theirs = tally.metrics(), base.median_seconds()[index]
        return {
            "prompt": asked.name,
            "category": asked.category,
            "tokens": tally.tokens,
            "steps": tally.steps,
            "accepted": tally.accepted,
            "examined": tally.examined,
            "seconds": seconds,
            "tokens_per_step": rates["tokens_per_step"],
            "acceptance_rate": rates["acceptance_rate"],
            "speedup": (tally.tokens / seconds) / (len(base.ids[index]) / theirs),
            "perplexity": perplexity_of([quality.nats[index]], [tally.tokens]),
            "rouge_l": quality.rouge[index],
            "self_consistency": quality.consistency[index],
        }

    def _check_text(self, entry: Entry, row: dict[str, Any], base: Run, summary: Summary) -> str | None:
        """Compare a lossless greedy method's text with greedy decoding's; every entry's text with its counts."""
        run = self.runs[entry.label]
        for index, (ids, tally) in enumerate(zip(run.ids, run.tallies, strict=True)):
            if len(ids) != tally.tokens:
                return f"prompt {self._named(index)} has {len(ids)} tokens, and its steps made {tally.tokens}"
        if not (entry.sampling.greedy and row["lossless"]):
            return None
        texts, greedy_texts = run.ids, base.ids
        different = [index for index, text in enumerate(texts) if text != greedy_texts[index]]
        wrong = [
            index
            for index in different
            if not nearly_tied(self.target, self.asked[index].ids, texts[index], greedy_texts[index])
        ]
        row["near_ties"] = len(different) - len(wrong)
        if not wrong:
            return None
        summary.broken.append(
            f"{entry.label!r} calls itself lossless, but differs from greedy decoding on {len(wrong)} of "
            f"{len(run.ids)} prompts, first on prompt {self._named(wrong[0])}"
        )
        for index in wrong:
            made, wanted = len(texts[index]), len(greedy_texts[index])
            if made != wanted:
                return f"prompt {self._named(index)} has {made} tokens, and of greedy decoding {wanted}"
        return None

    def _named(self, index: int) -> str:
        return f"{index} ({self.asked[index].name})" if self.asked[index].name else str(index)


def identical(run: Run, base: Run) -> list[int]:
    """How many prompts gave exactly the baseline's tokens, and of how many."""
    return [sum(mine == theirs for mine, theirs in zip(run.ids, base.ids, strict=True)), len(base.ids)]


def _speeds(run: Run, base: Run) -> dict[str, Any]:
    seconds, tokens = run.median_seconds(), [len(ids) for ids in run.ids]
    mine, theirs = (
        (each.together([len(ids) for ids in each.ids]), each.together(each.median_seconds())) for each in (run, base)
    )
    speedup, interval = speedup_interval(*mine, *theirs)
    return {
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "speedup": speedup,
        "speedup_interval": interval,
    }


def _bounds(speedup: float, run: Run, forwards: float) -> dict[str, float]:
    """What the speedup would be if steps took no longer than their forwards, that share of them, did within them: as a
    part of the very time that the speedup is of, they leave it no way to lie above."""
    efficiency = 1 - (1 - forwards) * sum(run.stepping_seconds()) / sum(run.median_seconds())
    return {"bound": speedup / efficiency, "efficiency": efficiency}


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
