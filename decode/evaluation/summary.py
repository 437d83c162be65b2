"""From runs to rows: what `results.json` says of each method, as a whole, by category and by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine import Limits
from ..methods import Parts, build_method
from ..models.base import LanguageModel
from .energy import Energy
from .measure import BASELINE, REFERENCE, Costs, Entry, Run, phases, raw_costs
from .metrics import impossible, speedup_interval, tokens_per_step_interval, total
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


@dataclass
class _Quality:
    """Of one entry's texts, by prompt."""

    nats: list[float]
    rouge: list[float | None]
    consistency: list[float | None]

    def only(self, prompts: Sequence[int]) -> _Quality:
        columns = (self.nats, self.rouge, self.consistency)
        return _Quality(*([column[prompt] for prompt in prompts] for column in columns))  # type: ignore[arg-type]


class Summariser:
    """Makes rows of runs.

    Args:
        limits, seed: those of the runs, for what is decoded once more (see `measure.phases`).
        text_of: decodes token ids, for ROUGE-L; None leaves it out.
        energies: joules a token by label, where they were counted.
    """

    def __init__(
        self,
        target: LanguageModel,
        parts: Parts,
        asked: Sequence[EvalPrompt],
        runs: dict[str, Run],
        limits: Limits,
        *,
        seed: int = 0,
        text_of: Callable[[Sequence[int]], str] | None = None,
        energies: Mapping[str, Energy] | None = None,
    ) -> None:
        self._target, self._parts, self._asked, self._runs = target, parts, asked, runs
        self._limits, self._seed, self._text_of, self._energies = limits, seed, text_of, energies or {}
        self._prompts = [prompt.ids for prompt in asked]

    def summarise(self, entries: Sequence[Entry], progress: Callable[[int, int, str], None] | None = None) -> Summary:
        """A row an entry, with the metric names of `metrics.py`. Raises ValueError without an autoregressive entry to
        compare with, of the same warping."""
        bases = {entry.sampling: self._runs[entry.label] for entry in entries if entry.method == BASELINE}
        greedy = next((bases[sampling] for sampling in bases if sampling.greedy), None)
        summary = Summary()
        for number, entry in enumerate(entries):
            if entry.sampling not in bases:
                raise ValueError(
                    f"{entry.label!r} needs {BASELINE!r} at temperature {entry.sampling.temperature:g} beside it"
                )
            if progress:
                progress(number, len(entries), entry.label)
            base = bases[entry.sampling]
            row = self._row(entry, base, greedy)
            fault = self._check_text(entry, row, base, summary) or impossible(row)
            if fault:
                summary.errors.append(f"the measurement of {entry.label!r} cannot be true: {fault}")
            else:
                summary.rows.append(row)
        if progress:
            progress(len(entries), len(entries), "")
        return summary

    def _row(self, entry: Entry, base: Run, greedy: Run | None) -> dict[str, Any]:
        run = self._runs[entry.label]
        method = build_method(entry.method, self._parts, entry.sampling, **entry.options)
        counts = total(run.tallies)
        lengths = [len(prompt) + len(ids) / 2 for prompt, ids in zip(self._prompts, base.ids, strict=True)]
        nodes, context = counts.nodes / max(1, counts.steps), round(statistics.mean(lengths))
        costs = raw_costs(self._target, method, nodes, context)
        quality = self._quality(run, greedy)
        row: dict[str, Any] = {"label": entry.label, "method": entry.method, "options": entry.options}
        row |= {"temperature": entry.sampling.temperature, "lossless": method.verifier.lossless}
        chosen = range(len(self._asked))
        row |= self._measured(entry, chosen, base, quality, costs)
        row |= {
            "near_ties": 0 if entry.sampling.greedy and method.verifier.lossless else None,
            "cost_ratio": _cost_ratio(costs),
            "milliseconds": {"one": 1e3 * costs.one, "tree": 1e3 * costs.tree, "propose": 1e3 * costs.propose},
            "phases_us": phases(self._target, self._parts, entry, self._prompts, self._limits, self._seed),
            "prediction": None,
        }
        row |= energy(self._energies.get(entry.label))
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(self._asked):
            groups.setdefault(prompt.category, []).append(index)
        row["by_category"] = {
            name: {"prompts": len(group)} | self._measured(entry, group, base, quality, costs)
            for name, group in groups.items()
        }
        row["by_prompt"] = [self._of_prompt(entry, index, base, quality) for index in chosen]
        return row

    def _quality(self, run: Run, greedy: Run | None) -> _Quality:
        nats = [surprisal(self._target, prompt, ids) for prompt, ids in zip(self._prompts, run.ids, strict=True)]
        rouge = [
            rouge_l(self._text_of(ids), prompt.references) if self._text_of and prompt.references else None
            for prompt, ids in zip(self._asked, run.ids, strict=True)
        ]
        consistency = [
            self_consistency(ids, greedy.ids[index]) if greedy else None for index, ids in enumerate(run.ids)
        ]
        return _Quality(nats, rouge, consistency)

    def _measured(
        self, entry: Entry, chosen: Sequence[int], base: Run, quality: _Quality, costs: Costs
    ) -> dict[str, Any]:
        """The metrics of some prompts: of all, or of a category."""
        run, base, quality = self._runs[entry.label].only(chosen), base.only(chosen), quality.only(chosen)
        counts = total(run.tallies)
        part: dict[str, Any] = counts.metrics()
        part["tokens_per_step_interval"] = tokens_per_step_interval(run.tallies)
        part |= _speeds(run, base)
        reference = self._runs.get(REFERENCE) if entry.sampling.greedy else None
        part["speedup_over_transformers"] = _speeds(run, reference.only(chosen))["speedup"] if reference else None
        part["identical_to_greedy"] = identical(run, base) if entry.sampling.greedy else None
        part |= _bounds(counts.tokens / counts.steps, costs, run.stepping_rate() / base.stepping_rate())
        part["flops_per_token"] = flops_per_token(costs, counts.tokens / counts.steps)
        part["perplexity"] = perplexity_of(quality.nats, map(len, run.ids))
        part["rouge_l"] = _mean(quality.rouge)
        part["self_consistency"] = _mean(quality.consistency)
        return part

    def _of_prompt(self, entry: Entry, index: int, base: Run, quality: _Quality) -> dict[str, Any]:
        run, asked = self._runs[entry.label], self._asked[index]
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
        run = self._runs[entry.label]
        for index, (ids, tally) in enumerate(zip(run.ids, run.tallies, strict=True)):
            if len(ids) != tally.tokens:
                return f"prompt {self._named(index)} has {len(ids)} tokens, and its steps made {tally.tokens}"
        if not (entry.sampling.greedy and row["lossless"]):
            return None
        different = [index for index, ids in enumerate(run.ids) if ids != base.ids[index]]
        wrong = [
            index
            for index in different
            if not nearly_tied(self._target, self._prompts[index], run.ids[index], base.ids[index])
        ]
        row["near_ties"] = len(different) - len(wrong)
        if not wrong:
            return None
        summary.broken.append(
            f"{entry.label!r} calls itself lossless, but differs from greedy decoding on {len(wrong)} of "
            f"{len(run.ids)} prompts, first on prompt {self._named(wrong[0])}"
        )
        for index in wrong:
            if len(run.ids[index]) != len(base.ids[index]):
                counts = f"{len(run.ids[index])} tokens on prompt {self._named(index)}, and greedy decoding makes"
                return f"it is lossless, makes {counts} {len(base.ids[index])}"
        return None

    def _named(self, index: int) -> str:
        return f"{index} ({self._asked[index].name})" if self._asked[index].name else str(index)


def identical(run: Run, base: Run) -> list[int]:
    """How many prompts gave exactly the baseline's tokens, and of how many."""
    return [sum(mine == theirs for mine, theirs in zip(run.ids, base.ids, strict=True)), len(base.ids)]


def same_as_reference(entries: Sequence[Entry], runs: dict[str, Run]) -> list[int] | None:
    """How many prompts `transformers.generate` decodes to the same tokens, and of how many; None if it was not run."""
    if REFERENCE not in runs:
        return None
    base = next(entry.label for entry in entries if entry.method == BASELINE and entry.sampling.greedy)
    return identical(runs[REFERENCE], runs[base])


def flops_per_token(costs: Costs, tokens_per_step: float) -> dict[str, float]:
    """FLOPs of a step's forwards by the tokens that a step keeps; `checked` is shapes over torch's counter, left out
    where the FLOPs are the counter's."""
    flops = {
        "verification": costs.tree_flops / tokens_per_step,
        "drafting": costs.propose_flops / tokens_per_step,
        "total": (costs.tree_flops + costs.propose_flops) / tokens_per_step,
    }
    return flops if costs.flops_checked is None else flops | {"checked": costs.flops_checked}


def energy(found: Energy | None) -> dict[str, Any]:
    """Joules a token, what counted them, and all that is known of them; None, never 0, where nothing did."""
    if found is None:
        return {"joules_per_token": None, "energy_source": None, "energy": None}
    return {"joules_per_token": found.joules, "energy_source": found.source, "energy": found.as_dict()}


def _speeds(run: Run, base: Run) -> dict[str, Any]:
    seconds, tokens = run.median_seconds(), [len(ids) for ids in run.ids]
    speedup, interval = speedup_interval(tokens, seconds, [len(ids) for ids in base.ids], base.median_seconds())
    return {
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "speedup": speedup,
        "speedup_interval": interval,
    }


def _cost_ratio(costs: Costs) -> float | None:
    return costs.propose / costs.forwards / costs.one if costs.forwards else None


def _bounds(per_step: float, costs: Costs, stepping: float) -> dict[str, Any]:
    """`stepping` is the speedup of the steps alone: the bound knows of no prompts that are read."""
    ratio = _cost_ratio(costs)
    bound = per_step * costs.one / (costs.tree + costs.propose)
    return {
        "ideal": per_step / (1 + ratio * costs.forwards) if ratio is not None else per_step,
        "bound": bound,
        "efficiency": stepping / bound,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
