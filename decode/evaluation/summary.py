"""Rows of `results.json`: metrics of each method over all prompts, for each category and for each prompt."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..engine import Limits
from ..methods import Parts, build_method
from ..models.base import LanguageModel
from .energy import Energy
from .measure import BASELINE, REFERENCE, Entry, Run, are_steady, profile_steps
from .metrics import find_impossible_value, speedup_interval, tokens_per_step_interval, total
from .profile import StepFlops, drafting_cost, measured_flops
from .quality import nearly_tied, perplexity_of, rouge_l, surprisal


@dataclass(frozen=True)
class EvalPrompt:
    """Prompt with its name, category and reference answers."""

    ids: Sequence[int]
    name: str = ""
    category: str = ""
    references: tuple[str, ...] = ()


@dataclass
class Summary:
    """Result rows and error messages of an evaluation."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Messages about entries with impossible measurements, which have no row."""
    lossless_violations: list[str] = field(default_factory=list)
    """Messages about lossless methods whose output differs from greedy decoding by more than near-ties."""
    identical_to_transformers: list[int] | None = None
    """Number of prompts for which `transformers.generate` gives the same output as greedy decoding, up to near-ties,
    and total number of prompts. None if `transformers.generate` was not run."""


@dataclass(frozen=True)
class _Entry:
    """Entry with its runs, its baseline, the quality of each output, and the costs of its steps."""

    entry: Entry
    run: Run
    base: Run
    nats: list[float]
    rouge: list[float | None]
    flops: StepFlops
    drafting: float
    """Time of a step's drafting forwards in isolation relative to a one-token forward of the target."""
    share: float
    """Median share of a step's time spent in forwards of the target, drafter and heads."""


@dataclass(frozen=True)
class Summariser:
    """Builder of result rows from measured runs.

    Args:
        limits, seed, batch: Settings of the runs, used to decode prompts again for profiles of their steps.
        text_of: Function that decodes token ids to text for ROUGE-L. None omits ROUGE-L.
        energies: Mapping from labels to the energy per token, if measured.
    """

    target: LanguageModel
    parts: Parts
    prompts: Sequence[EvalPrompt]
    runs: Mapping[str, Run]
    limits: Limits
    seed: int = 0
    text_of: Callable[[Sequence[int]], str] | None = None
    energies: Mapping[str, Energy] = field(default_factory=dict)
    batch: int = 1
    _nats: dict[tuple[int, ...], float] = field(default_factory=dict, init=False)
    """Surprisal of each text, by its prompt's number and its tokens."""

    def summarise(self, entries: Sequence[Entry], progress: Callable[[int, int, str], None] | None = None) -> Summary:
        """Build a row for each entry.

        Raises:
            ValueError: An entry has no autoregressive baseline with the same sampling settings.
        """
        bases = {entry.sampling: self.runs[entry.label] for entry in entries if entry.method == BASELINE}
        greedy = next((run for sampling, run in bases.items() if sampling.greedy), None)
        summary = Summary()
        if greedy is not None and REFERENCE in self.runs:
            wrong = self._compare(self.runs[REFERENCE], greedy)[1]
            summary.identical_to_transformers = [len(self.prompts) - len(wrong), len(self.prompts)]
        done, steps = 0, len(entries) * (len(self.prompts) + 3)

        def advance(label: str) -> None:
            nonlocal done
            if progress:
                progress(done, steps, label)
            done += 1

        for entry in entries:
            if entry.sampling not in bases:
                raise ValueError(
                    f"{entry.label!r} requires {BASELINE!r} at temperature {entry.sampling.temperature:g} as "
                    "baseline: add it to the methods"
                )
            base = bases[entry.sampling]
            row = self._row(entry, base, partial(advance, entry.label))
            counts = total(self.runs[entry.label].tallies)
            # a batch takes as long as its longest output, so its speedup is not limited by the tokens per iteration
            forwards = counts.steps / counts.rounds if self.batch == 1 else math.inf
            fault = self._check_text(entry, row, base, summary) or find_impossible_value(row, forwards)
            if fault:
                summary.errors.append(f"the measurement of {entry.label!r} has an impossible value: {fault}")
            else:
                summary.rows.append(row)
        return summary

    def _row(self, entry: Entry, base: Run, advance: Callable[[], None]) -> dict[str, Any]:
        run, prompts = self.runs[entry.label], [prompt.ids for prompt in self.prompts]
        method = build_method(entry.method, self.parts, entry.sampling, **entry.options)
        counts = total(run.tallies)
        lengths = [len(prompt) + len(ids) / 2 for prompt, ids in zip(prompts, base.ids, strict=True)]
        nodes, context = counts.nodes / max(1, counts.rounds), round(statistics.mean(lengths))
        advance()
        profile = profile_steps(self.target, self.parts, entry, prompts, self.limits, self.seed, self.batch)
        advance()
        drafting, forwards = drafting_cost(self.target, method, nodes, context)
        nats = list[float]()
        for number, ids in enumerate(run.ids):
            advance()
            if (key := (number, *ids)) not in self._nats:  # lossless methods write the same texts
                self._nats[key] = surprisal(self.target, prompts[number], ids)
            nats.append(self._nats[key])
        advance()
        entry_costs = _Entry(
            entry,
            run,
            base,
            nats=nats,
            rouge=[
                rouge_l(self.text_of(ids), prompt.references) if self.text_of and prompt.references else None
                for prompt, ids in zip(self.prompts, run.ids, strict=True)
            ],
            flops=measured_flops(self.target, method, nodes, context),
            drafting=drafting,
            share=statistics.median(profile.shares),
        )
        joules = self.energies.get(entry.label)
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            groups.setdefault(prompt.category, []).append(index)
        return {
            "label": entry.label,
            "method": entry.method,
            "options": entry.options,
            "temperature": entry.sampling.temperature,
            "lossless": method.verifier.lossless,
            **self._metrics(entry_costs, range(len(self.prompts))),
            "runs": len(run.by_prompt[0]),
            "slowdown": run.slowdown(),
            "steady": are_steady(run, base),
            "near_ties": 0 if entry.sampling.greedy and method.verifier.lossless else None,
            "cost_ratio": drafting / forwards if forwards else None,
            "phases_us": profile.summary(),
            # None instead of 0 if no counter is available
            "joules_per_token": joules.joules if joules else None,
            "energy_source": joules.source if joules else None,
            "energy": asdict(joules) if joules else None,
            "by_category": {
                name: {"prompts": len(group)} | self._metrics(entry_costs, group) for name, group in groups.items()
            },
            "by_prompt": [self._prompt_row(entry_costs, index) for index in range(len(self.prompts))],
        }

    def _metrics(self, costs: _Entry, indices: Sequence[int]) -> dict[str, Any]:
        """Return the metrics over the prompts with the given indices."""
        run, base = costs.run.select(indices), costs.base.select(indices)
        counts, greedy = total(run.tallies), costs.entry.sampling.greedy
        reference = self.runs.get(REFERENCE) if greedy else None
        speeds = _speeds(run, base)
        # `bound` is the speedup if only forwards took time in each step. Forwards take a share of the measured time, so
        # the speedup cannot exceed `bound`.
        efficiency = 1 - (1 - costs.share) * sum(run.stepping_seconds()) / sum(run.median_seconds())
        return {
            **counts.metrics(),
            "tokens_per_step_interval": tokens_per_step_interval(run.tallies),
            **speeds,
            "speedup_over_transformers": _speeds(run, reference.select(indices))["speedup"] if reference else None,
            "identical_to_greedy": count_identical(run, base) if greedy else None,
            "bound": speeds["speedup"] / efficiency,
            "efficiency": efficiency,
            "ideal": counts.tokens / counts.rounds / (1 + costs.drafting),
            "flops_per_token": costs.flops.per_token(counts.tokens / counts.rounds),
            "perplexity": perplexity_of([costs.nats[index] for index in indices], map(len, run.ids)),
            "rouge_l": _mean([costs.rouge[index] for index in indices]),
        }

    def _prompt_row(self, costs: _Entry, index: int) -> dict[str, Any]:
        tally, seconds = costs.run.tallies[index], costs.run.median_seconds()[index]
        rates, base = tally.metrics(), costs.base
        return {
            "prompt": self.prompts[index].name,
            "category": self.prompts[index].category,
            **{name: getattr(tally, name) for name in ("tokens", "steps", "accepted", "examined")},
            "seconds": seconds,
            "decoding_seconds": costs.run.stepping_seconds()[index],
            "tokens_per_step": rates["tokens_per_step"],
            "acceptance_rate": rates["acceptance_rate"],
            "speedup": (tally.tokens / seconds) / (len(base.ids[index]) / base.median_seconds()[index]),
            "perplexity": perplexity_of([costs.nats[index]], [tally.tokens]),
            "rouge_l": costs.rouge[index],
        }

    def _check_text(self, entry: Entry, row: dict[str, Any], base: Run, summary: Summary) -> str | None:
        """Return a message if an entry's output is impossible, for example if token counts differ, or None."""
        run = self.runs[entry.label]
        for index, (ids, tally) in enumerate(zip(run.ids, run.tallies, strict=True)):
            if len(ids) != tally.tokens:
                return f"prompt {self._named(index)} has {len(ids)} output tokens, but its steps counted {tally.tokens}"
        if not (entry.sampling.greedy and row["lossless"]):
            return None
        different, wrong = self._compare(run, base)
        row["near_ties"] = len(different) - len(wrong)
        if not wrong:
            return None
        summary.lossless_violations.append(
            f"{entry.label!r} claims to be lossless, but differs from greedy decoding on {len(wrong)} of "
            f"{len(run.ids)} prompts, first on prompt {self._named(wrong[0])}"
        )
        for index in wrong:
            length, expected = len(run.ids[index]), len(base.ids[index])
            if length != expected:
                return f"prompt {self._named(index)} has {length} output tokens, but {expected} in greedy decoding"
        return None

    def _compare(self, run: Run, base: Run) -> tuple[list[int], list[int]]:
        """Return the prompts whose output differs from the baseline's, and those that near-ties do not explain."""
        different = [index for index, ids in enumerate(run.ids) if ids != base.ids[index]]
        return different, [
            index
            for index in different
            if not nearly_tied(self.target, self.prompts[index].ids, run.ids[index], base.ids[index])
        ]

    def _named(self, index: int) -> str:
        return f"{index} ({self.prompts[index].name})" if self.prompts[index].name else str(index)


def count_identical(run: Run, base: Run) -> list[int]:
    """Return the number of prompts whose output is identical to the baseline's, and the total number of prompts."""
    return [sum(ids == base_ids for ids, base_ids in zip(run.ids, base.ids, strict=True)), len(base.ids)]


def _speeds(run: Run, base: Run) -> dict[str, Any]:
    seconds, tokens = sum(run.median_seconds()), sum(map(len, run.ids))
    speedup, interval = speedup_interval(*_by_batch(run), *_by_batch(base))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": speedup,
        "speedup_interval": interval,
    }


def _by_batch(run: Run) -> tuple[list[float], list[float]]:
    tokens, seconds = [float(len(ids)) for ids in run.ids], run.median_seconds()
    return [sum(values) for values in run.by_batch(tokens)], [sum(values) for values in run.by_batch(seconds)]


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None
