"""Methods measured side by side: the same prompts, one process, runs interleaved; the clock is read here.

Shape letters: B batch, N nodes, D hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..engine import Limits, generate
from ..methods import Method, Parts, build_method
from ..models.base import LanguageModel
from ..rng import Rng
from ..warpers import Sampling
from .energy import Energy, EnergyMeter
from .flops import count_flops, part_flops, step_flops
from .metrics import Tally
from .profile import FirstStep, StepProfile, synchronise, time_call

BASELINE = "autoregressive"
REFERENCE = "transformers"
PROFILED = 3
"""Prompts that are decoded once more to see where the time of a step goes, and again and again to count joules."""


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
        return Run([self.by_prompt[prompt] for prompt in prompts])

    def median_seconds(self) -> list[float]:
        """Seconds of each prompt."""
        return [statistics.median(run.seconds for run in runs) for runs in self.by_prompt]

    def stepping_rate(self) -> float:
        """Tokens per second of the steps alone."""
        steps = [statistics.median(run.seconds - run.reading for run in runs) for runs in self.by_prompt]
        return sum(len(ids) for ids in self.ids) / sum(steps)


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
    ids: list[int] = []
    tally = Tally()
    synchronise(target)
    start = time.perf_counter()
    rng, first = Rng.for_rows(seed, 1, target.device), FirstStep(partial(synchronise, target))
    for step in generate(target, *method, [prompt], limits, sampling, rng, profile or first):
        ids += step.new_ids[0]
        tally.add_step(step, 0)
    synchronise(target)
    end = time.perf_counter()
    return Decoded(ids, tally, end - start, 0.0 if profile else first.at - start)


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
    """Decode all prompts in one batch, and count rejections as `theory.md` does (Yin et al. 2024)."""
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
    return Decoded(new, Tally(tokens=len(new), steps=len(new), nodes=len(new)), seconds, 0.0)


def measure(
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    *,
    reference: Any = None,
    repeats: int = 1,
    seed: int = 0,
    finished: Mapping[RunKey, Decoded] | None = None,
    on_run: Callable[[RunKey, Decoded], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Run]:
    """Decode every prompt with every entry, `repeats` times, in an order that changes from prompt to prompt (see
    `turn`).

    A prompt's tokens are drawn by `seed` and its index alone: each repeat writes the same.

    Args:
        reference: a transformers model; it is run greedily as one more row where an entry is greedy.
        finished: runs of an interrupted evaluation; they are not done again.
        on_run: gets every run that was done.
        progress: gets how many runs are done, of how many, and the label of the next.

    Returns:
        Runs by label.
    """
    jobs = _jobs(target, parts, entries, reference, seed)
    labels, done = list(jobs), dict(finished or {})
    keys = [
        RunKey(labels[job], prompt, repeat)
        for repeat in range(repeats)
        for prompt in range(len(prompts))
        for job in turn(len(labels), repeat * len(prompts) + prompt)
    ]
    left = [key for key in keys if key not in done]
    warm_up = Limits(min(8, limits.max_new_tokens), limits.stop_ids)
    for label in dict.fromkeys(key.label for key in left):
        jobs[label](0, prompts[0], warm_up)
    for number, key in enumerate(left):
        if progress:
            progress(len(keys) - len(left) + number, len(keys), key.label)
        done[key] = jobs[key.label](key.prompt, prompts[key.prompt], limits)
        if on_run:
            on_run(key, done[key])
    if progress:
        progress(len(keys), len(keys), "")
    return {
        label: Run([[done[RunKey(label, prompt, each)] for each in range(repeats)] for prompt in range(len(prompts))])
        for label in labels
    }


def _jobs(
    target: LanguageModel, parts: Parts, entries: Sequence[Entry], reference: Any, seed: int
) -> dict[str, Callable[[int, Sequence[int], Limits], Decoded]]:
    """What decodes a prompt, given its index, by label."""

    def job(method: Method, sampling: Sampling) -> Callable[[int, Sequence[int], Limits], Decoded]:
        return lambda index, prompt, limits: decode(target, method, sampling, seed + index, prompt, limits)

    jobs = {
        entry.label: job(build_method(entry.method, parts, entry.sampling, **entry.options), entry.sampling)
        for entry in entries
    }
    if reference is not None and any(entry.sampling.greedy for entry in entries):
        jobs[REFERENCE] = lambda index, prompt, limits: decode_reference(reference, prompt, limits)
    return jobs


def turn(count: int, number: int) -> list[int]:
    """The order of `count` jobs at turn `number`, of which each follows every other equally often over `count` turns,
    or twice as many where `count` is odd (Williams 1949, designs balanced for what was done just before)."""
    zigzag = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    order = [(step + number) % count for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def phases(
    target: LanguageModel, parts: Parts, entry: Entry, prompts: Sequence[Sequence[int]], limits: Limits, seed: int = 0
) -> dict[str, float]:
    """Where the time of a step goes: `StepProfile.summary` over the first prompts, decoded once more.

    Measured runs read no clock within a step; these are for this alone.
    """
    method = build_method(entry.method, parts, entry.sampling, **entry.options)
    whole = StepProfile(target.device)
    for index, prompt in enumerate(prompts[:PROFILED]):
        profile = StepProfile(target.device)
        decode(target, method, entry.sampling, seed + index, prompt, limits, profile)
        whole.steps += profile.steps
        for phase, seconds in profile.seconds.items():
            whole.seconds[phase] += seconds
    return whole.summary()


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

    Raises:
        CounterError: the counter failed.
    """
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
    """Refuse a prompt that leaves no positions for its answer, of the target or of a drafter that some row runs.

    Raises:
        ValueError: the tightest row is named.
    """
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


@dataclass(frozen=True)
class Costs:
    """What forwards cost in isolation: raw seconds, and FLOPs."""

    one: float
    """A target forward of one token."""
    tree: float
    """A target forward of as many nodes as the method's trees hold."""
    propose: float
    """The forwards of one proposal: the drafter's, or the heads'."""
    forwards: int
    """How many forwards a proposal takes."""
    tree_flops: float
    """Of the target's forward of a step, by `flops.step_flops`; as torch's counter has them where that knows not."""
    propose_flops: float
    """Of the proposal's forwards."""
    flops_checked: float | None = None
    """Of the very forwards that were timed, FLOPs by shapes over those that torch's counter saw; None: not compared."""


class RawCosts:
    """Times the forwards of a step of a method and nothing else, in turn with one-token forwards of the target.

    The forwards of a step follow one another as in decoding: what one leaves in the machine's caches the next finds.

    Args:
        nodes: how many nodes the target scores a step.
        context: how many tokens are committed.
    """

    def __init__(self, target: LanguageModel, method: Method, nodes: float, context: int) -> None:
        self._target = target
        self._calls: list[Callable[[], Any]] = [
            raw_forward(target, 1, context),
            raw_forward(target, max(1, round(nodes)), context),
        ]
        self._method, self._nodes, self._context = method, nodes, context
        drafts = method.proposer.forwards(nodes)
        self._forwards = [(target, max(1, round(nodes))), *((model or target, count) for model, count in drafts)]
        for model, count in drafts:
            if model is None or isinstance(model, LanguageModel):
                self._calls.append(raw_forward(model or target, count, context))
            else:
                hidden_BD = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
                self._calls.append(partial(model, hidden_BD))
        self._seconds: list[list[float]] = [[] for _ in self._calls]

    @torch.inference_mode()
    def sample(self, runs: int) -> RawCosts:
        """Time every forward `2 runs` times more."""
        for _ in range(runs):
            for step in ([0], [*range(2, len(self._calls)), 1]):
                for repeat in range(3):
                    for call in step:
                        seconds = time_call(self._target, self._calls[call])
                        if repeat:  # the first finds what other forwards have left
                            self._seconds[call].append(seconds)
        return self

    @torch.inference_mode()
    def costs(self) -> Costs:
        """Medians of all samples, and FLOPs."""
        medians = [statistics.median(seconds) for seconds in self._seconds]
        times = medians[0], medians[1], sum(medians[2:]), len(self._forwards) - 1
        counted = [count_flops(call) for call in self._calls[1:]]
        step = step_flops(self._target, self._method, self._nodes, self._context)
        if step is None:
            return Costs(*times, counted[0], sum(counted[1:]))
        found = [part_flops(part, count, self._context) for part, count in self._forwards]
        known = sum(flops["total"] for flops in found if flops is not None)
        return Costs(*times, *step, known / sum(counted) if sum(counted) else None)


def raw_costs(target: LanguageModel, method: Method, nodes: float, context: int, runs: int = 12) -> Costs:
    """`RawCosts` of `runs` samples."""
    return RawCosts(target, method, nodes, context).sample(runs).costs()


def raw_forward(model: LanguageModel, nodes: int, context: int) -> Callable[[], Tensor]:
    """A forward of `nodes` tokens behind `context` committed ones, ready to be timed."""
    with torch.inference_mode():
        _, cache = model.begin([[0] * context], context + nodes)
    cache.set_lengths([context])
    tokens_BN = torch.zeros(1, nodes, dtype=torch.int64, device=model.device)
    return lambda: model.logits(model.extend(cache, tokens_BN))
