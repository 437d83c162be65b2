"""Methods measured side by side: the same prompts, one process, runs interleaved; the clock is read here.

Shape letters: B batch.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..engine import Limits, decode_texts, generate
from ..methods import Method, Parts, build_method
from ..models.base import LanguageModel
from ..models.graphs import STRIDE, round_up
from ..rng import Rng
from ..warpers import Sampling
from .energy import Energy, EnergyMeter
from .metrics import Tally
from .profile import FirstStep, StepProfile, synchronise

BASELINE = "autoregressive"
REFERENCE = "transformers"
PROFILED = 3
"""Prompts that are decoded once more to see where the time of a step goes, and again and again to count joules."""
STEADY = 1.25
"""Rows whose `Run.slowdown` exceeds this are unsteady. Undisturbed rows lie at 1.03 to 1.10 (quickstart's ten rows on
two cores, in turn with other work: eight of them there, the two that the other work fell upon at 1.6 and 1.9)."""
_JUDGED = 4
"""Prompts that a quartile needs."""
_Job = Callable[[int, Sequence[Sequence[int]], Limits], list["Decoded"]]


@dataclass(frozen=True)
class Entry:
    """A method with its settings, as one row of the table."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)


class Decoded(NamedTuple):
    """One prompt decoded."""

    ids: list[int]
    tally: Tally
    seconds: float
    """Of the whole."""
    reading: float
    """Of them, those before the first step. 0: not known."""


class RunKey(NamedTuple):
    """One run of an evaluation: which entry, which prompt, which time."""

    label: str
    prompt: int
    repeat: int


@dataclass(frozen=True)
class Run:
    """What one entry did: by prompt, every time that it was decoded; tokens and counts are those of the first."""

    by_prompt: list[list[Decoded]]
    groups: Sequence[int] = ()
    """By prompt, which of them were decoded together; each has the same share of the time. Empty: none were."""

    @property
    def ids(self) -> list[list[int]]:
        """Tokens of each prompt."""
        return [runs[0].ids for runs in self.by_prompt]

    @property
    def tallies(self) -> list[Tally]:
        """Counts of each prompt."""
        return [runs[0].tally for runs in self.by_prompt]

    def only(self, prompts: Sequence[int]) -> Run:
        """These prompts alone."""
        return Run(
            [self.by_prompt[prompt] for prompt in prompts],
            [self.groups[prompt] for prompt in prompts] if self.groups else (),
        )

    def together(self, values: Sequence[float]) -> list[float]:
        """Sums of what prompts have over those that were decoded together."""
        return [float(sum(some)) for some in self._grouped(values)]

    def _grouped(self, values: Sequence[float]) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for group, value in zip(self.groups or range(len(values)), values, strict=True):
            found.setdefault(group, []).append(value)
        return list(found.values())

    def median_seconds(self) -> list[float]:
        """Seconds of each prompt."""
        return [statistics.median(run.seconds for run in runs) for runs in self.by_prompt]

    def stepping_seconds(self) -> list[float]:
        """The same of the steps alone."""
        return [statistics.median(run.seconds - run.reading for run in runs) for runs in self.by_prompt]

    def stepping_rate(self) -> float:
        """Tokens per second of the steps alone."""
        return sum(len(ids) for ids in self.ids) / sum(self.stepping_seconds())

    def slowdown(self) -> float | None:
        """How much longer the steps took than undisturbed ones, as far as the runs tell: something else running on the
        machine only ever makes a run longer, and not all alike.

        Runs of one prompt do the same work: the median of each prompt's over its fastest. Where each prompt was decoded
        once, steps are taken to be alike: over as many at the lower quartile of a step's time; None for a few prompts.
        """
        runs = zip(*([run.seconds - run.reading for run in each] for each in self.by_prompt), strict=True)
        times = list(zip(*(self.together(each) for each in runs), strict=True))
        if len(times[0]) > 1:
            undisturbed = sum(map(min, times))
        elif len(times) < _JUDGED:
            return None
        else:
            steps = [max(some) for some in self._grouped([tally.rounds for tally in self.tallies])]
            each = [seconds / count for (seconds,), count in zip(times, steps, strict=True)]
            undisturbed = float(np.quantile(each, 0.25)) * sum(steps)
        return sum(self.stepping_seconds()) / undisturbed

    def unsteady(self) -> bool:
        """Whether the times are known to be disturbed."""
        return (self.slowdown() or 1.0) > STEADY


def steady(run: Run, base: Run) -> bool | None:
    """Whether the times of an entry and of its baseline are; None: not known of both."""
    if run.unsteady() or base.unsteady():
        return False
    return None if None in (run.slowdown(), base.slowdown()) else True


def decode(
    target: LanguageModel,
    method: Method,
    sampling: Sampling,
    seed: int,
    prompt: Sequence[int],
    limits: Limits,
    profile: StepProfile | None = None,
) -> Decoded:
    """One prompt with one method."""
    return decode_together(target, method, sampling, seed, [prompt], limits, profile)[0]


def decode_together(
    target: LanguageModel,
    method: Method,
    sampling: Sampling,
    seed: int,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    profile: StepProfile | None = None,
) -> list[Decoded]:
    """Prompts in one batch, each with the same share of the time; prompt b draws from seed + b."""
    ids: list[list[int]] = [[] for _ in prompts]
    tallies = [Tally() for _ in prompts]
    synchronise(target)
    start = time.perf_counter()
    rng, first = Rng.for_rows(seed, len(prompts), target.device), FirstStep(partial(synchronise, target))
    for step in generate(target, *method, prompts, limits, sampling, rng, profile or first):
        for row, new in enumerate(step.new_ids):
            ids[row] += new
            tallies[row].add_step(step, row)
    synchronise(target)
    seconds = (time.perf_counter() - start) / len(prompts)
    reading = 0.0 if profile else (first.at - start) / len(prompts)
    return [Decoded(*text, seconds, reading) for text in zip(ids, tallies, strict=True)]


class DecodedTexts(NamedTuple):
    """Texts decoded in one batch, and their counts."""

    texts: list[list[int]]
    rejections_B: np.ndarray
    """float64 [B]; of drafts whose replacement is in the text: one that the limit cut off is not counted."""
    tally: list[Tally]


def decode_side_by_side(
    target: LanguageModel,
    method: Method,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    rng: Rng,
) -> DecodedTexts:
    """Decode all prompts in one batch, and count rejections as arXiv 2411.00841 does."""
    rejections_B = np.zeros(len(prompts))
    texts: list[list[int]] = [[] for _ in prompts]
    tallies = [Tally() for _ in prompts]
    for step in generate(target, *method, prompts, limits, sampling, rng):
        kept_B = np.array([len(ids) for ids in step.new_ids])
        rejections_B += step.active & step.rejected & (kept_B == step.accepted + 1)
        for row, new in enumerate(step.new_ids):
            texts[row] += new
            tallies[row].add_step(step, row)
    return DecodedTexts(texts, rejections_B, tallies)


def sample_texts(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    *,
    seed: int = 0,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The target's own continuation of each prompt, decoded plainly; prompt b draws from seed + b."""
    texts: list[list[int]] = []
    method = build_method(BASELINE, Parts(), sampling)
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        texts += decode_texts(
            target, *method, rows, limits, sampling, Rng.for_rows(seed + first, len(rows), target.device)
        )
        if progress:
            progress(len(texts), len(prompts))
    return texts


def decode_reference(model: Any, prompt: Sequence[int], limits: Limits) -> Decoded:
    """One prompt with `transformers.generate`, greedily."""
    ids = torch.tensor([list(prompt)], device=model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=limits.max_new_tokens,
            eos_token_id=list(limits.stop_ids) or None,
            pad_token_id=0,
        )
    new = output[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    seconds = time.perf_counter() - start
    count = len(new)
    return Decoded(new, Tally(tokens=count, steps=count, nodes=count, iterations=count), seconds, 0.0)


def measure(
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    *,
    reference: Any = None,
    repeats: int = 1,
    again: int = 0,
    batch: int = 1,
    seed: int = 0,
    finished: Mapping[RunKey, Decoded] | None = None,
    on_run: Callable[[RunKey, Decoded], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Run]:
    """Decode every prompt with every entry, `repeats` times, in an order that changes from prompt to prompt (see
    `turn`); then entries whose times are unsteady once more, in turn with their baselines, `again` times at most.
    Returns runs by label.

    A prompt's tokens are drawn by `seed` and its index alone: each repeat writes the same.

    Args:
        reference: a transformers model, run greedily by prompt as one more row where an entry is greedy.
        batch: prompts decoded together.
        finished: runs of an interrupted evaluation; they are not done again. `on_run` gets every other.
    """
    jobs, done = _jobs(target, parts, entries, reference, seed), dict(finished or {})
    first = warm_ups(prompts, limits, target.device.type, target.supports_any_length)
    labels, sizes = list(jobs), {min(batch, len(prompts)), len(prompts) % batch} - {0}
    keys = [key for repeat in range(repeats) for key in _round(labels, len(prompts), batch, repeat)]

    def runs() -> dict[str, Run]:
        """All of `keys`, done if they are not yet."""
        left = _first_of_batches(keys, done, batch)
        for label in dict.fromkeys(key.label for key in left):
            for rows, (prompt, until) in itertools.product(sizes, first):
                jobs[label](0, [prompt] * rows, until)
        for number, key in enumerate(left):
            if progress:
                progress(max(0, len(keys) - batch * (len(left) - number)), len(keys), key.label)
            found = jobs[key.label](key.prompt, prompts[key.prompt : key.prompt + batch], limits)
            for place, each in enumerate(found, key.prompt):
                done[own := key._replace(prompt=place)] = each
                if on_run:
                    on_run(own, each)
        return _by_label(labels, keys, done, batch)

    found = runs()
    for repeat in range(repeats, repeats + again):
        if not (chosen := _unsteady(entries, found)):
            break
        keys += _round(chosen, len(prompts), batch, repeat)
        found = runs()
    if progress:
        progress(len(keys), len(keys), "")
    return found


def warm_ups(
    prompts: Sequence[Sequence[int]], limits: Limits, device: str, supports_any_length: bool = False
) -> list[tuple[Sequence[int], Limits]]:
    """What is decoded before anything is timed: on a GPU a prompt of each length that graphs tell apart, to its end, so
    that none is captured while a clock runs, and the longest first, whose cache then serves them all."""
    if device == "cpu":
        return [(prompts[0], Limits(min(8, limits.max_new_tokens), limits.stop_ids))]
    if supports_any_length:
        return [(max(prompts, key=len), Limits(limits.max_new_tokens))]
    by_length = {round_up(len(prompt), STRIDE): prompt for prompt in sorted(prompts, key=len)}
    return [(prompt, Limits(limits.max_new_tokens)) for prompt in reversed(by_length.values())]


def _first_of_batches(keys: Sequence[RunKey], done: Mapping[RunKey, Decoded], batch: int) -> list[RunKey]:
    """The first run of each batch of which not all is done."""
    missing = {key._replace(prompt=key.prompt // batch * batch) for key in keys if key not in done}
    return [key for key in keys if key in missing]


def _by_label(
    labels: Sequence[str], keys: Sequence[RunKey], done: Mapping[RunKey, Decoded], batch: int
) -> dict[str, Run]:
    count = 1 + max(key.prompt for key in keys)
    found: dict[str, list[list[Decoded]]] = {label: [[] for _ in range(count)] for label in labels}
    for key in keys:
        found[key.label][key.prompt].append(done[key])
    groups = [prompt // batch for prompt in range(count)] if batch > 1 else ()
    return {label: Run(by_prompt, groups) for label, by_prompt in found.items()}


def _unsteady(entries: Sequence[Entry], runs: Mapping[str, Run]) -> list[str]:
    """Entries of unsteady times, and what they are compared with."""
    unsteady = [entry for entry in entries if runs[entry.label].unsteady()]
    ways = [entry.sampling for entry in unsteady]
    return [each.label for each in entries if each in unsteady or (each.method == BASELINE and each.sampling in ways)]


def _round(labels: Sequence[str], prompts: int, batch: int, repeat: int) -> list[RunKey]:
    """Every prompt once with every label, those of a batch one after the other."""
    together = [range(first, min(first + batch, prompts)) for first in range(0, prompts, batch)]
    orders = [turn(len(labels), repeat * len(together) + number) for number in range(len(together))]
    pairs = zip(together, orders, strict=True)
    return [RunKey(labels[job], prompt, repeat) for some, order in pairs for job in order for prompt in some]


def _jobs(target: LanguageModel, parts: Parts, entries: Sequence[Entry], reference: Any, seed: int) -> dict[str, _Job]:
    """What decodes prompts together, given the first one's index, by label."""

    def job(method: Method, sampling: Sampling) -> _Job:
        return lambda index, prompts, limits: decode_together(target, method, sampling, seed + index, prompts, limits)

    jobs = {
        entry.label: job(build_method(entry.method, parts, entry.sampling, **entry.options), entry.sampling)
        for entry in entries
    }
    if reference is not None and any(entry.sampling.greedy for entry in entries):
        jobs[REFERENCE] = lambda index, prompts, limits: [decode_reference(reference, each, limits) for each in prompts]
    return jobs


def turn(count: int, number: int) -> list[int]:
    """The order of `count` jobs at turn `number`, of which each follows every other equally often over `count` turns,
    or twice as many where `count` is odd (Williams 1949, designs balanced for what was done just before)."""
    zigzag = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    order = [(step + number) % count for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def profile_steps(
    target: LanguageModel,
    parts: Parts,
    entry: Entry,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    seed: int = 0,
    batch: int = 1,
) -> StepProfile:
    """Where the time of a step goes, over the first prompts, or the first batch of them, decoded once more.

    Measured runs read no clock within a step; these are for this alone.
    """
    method = build_method(entry.method, parts, entry.sampling, **entry.options)
    whole = StepProfile(target.device)
    for first in range(0, min(PROFILED, len(prompts)), batch):
        profile, together = StepProfile(target.device), prompts[first : first + batch]
        with profile.timing_forwards(target, parts.drafter, *parts.more_drafters, parts.heads):
            decode_together(target, method, entry.sampling, seed + first, together, limits, profile)
        whole.add(profile)
    return whole


def energy_of(
    target: LanguageModel,
    parts: Parts,
    entry: Entry,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    meter: EnergyMeter,
    idle_watts: float,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Energy:
    """Joules a token of an entry: the first prompts decoded over and over, their reading included, in whole rounds.
    Raises CounterError: the counter failed."""
    method = build_method(entry.method, parts, entry.sampling, **entry.options)

    def decode_all() -> float:
        found = (
            decode(target, method, entry.sampling, seed + index, prompt, limits)
            for index, prompt in enumerate(prompts[:PROFILED])
        )
        return float(sum(len(each.ids) for each in found))

    return meter.measure(decode_all, idle_watts, seed=seed, progress=progress)


def check_capacity(
    target: LanguageModel, parts: Parts, entries: Sequence[Entry], prompts: Mapping[str, Sequence[int]], limits: Limits
) -> None:
    """Refuse a prompt that leaves no positions for its answer, of the target or of a drafter that some row runs. Raises
    ValueError: the tightest row is named."""
    found = []
    for entry in entries:
        proposer = build_method(entry.method, parts, entry.sampling, **entry.options).proposer
        nodes, ahead = proposer.capacity(limits)
        for model in (target, *(model for model, _ in proposer.forwards(nodes) if isinstance(model, LanguageModel))):
            most = model.max_positions - limits.max_new_tokens + 1 - ahead
            found.append((most, entry.label, model.max_positions, "target" if model is target else "drafter"))
    name, longest = max(prompts.items(), key=lambda item: len(item[1]))
    most, label, positions, which = min(found)
    if len(longest) > most:
        raise ValueError(
            f"prompt {name} has {len(longest)} tokens; with {limits.max_new_tokens} new ones and the look-ahead of "
            f"{label} they do not fit into the {which}'s {positions} positions: "
            + (f"`max_prompt_tokens={most}` leaves such prompts out" if most > 0 else "ask for fewer `max_new_tokens`")
        )


def devices_of(target: LanguageModel, parts: Parts) -> list[torch.device]:
    """Where a target and its parts lie, each device once."""
    models = [target, *filter(None, (parts.drafter, *parts.more_drafters))]
    found = [device for model in models for device in (model.device, *(model.layer_devices or ()))]
    if isinstance(parts.heads, nn.Module):
        found += [parameter.device for parameter in parts.heads.parameters()]
    return list(dict.fromkeys(found))
