"""Interleaved measurement of methods on the same prompts in one process.

Shape letters: B batch.
"""

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
from transformers import GenerationConfig

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
NUM_PROFILED = 3
"""Number of prompts that are decoded again to profile steps and to measure energy."""
MAX_STEADY_SLOWDOWN = 1.25
"""Maximum `Run.slowdown` of a steady measurement. Undisturbed measurements reach 1.03 to 1.10."""
_MIN_PROMPTS = 4  # minimum for a quartile
_Job = Callable[[int, Sequence[Sequence[int]], Limits], list["Decoded"]]


@dataclass(frozen=True)
class Entry:
    """Method and its settings. An evaluation returns one row of results for each entry."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)


class Decoded(NamedTuple):
    """Output tokens, counts and times of one prompt."""

    ids: list[int]
    tally: Tally
    seconds: float
    prefill_seconds: float
    """Seconds before the first step (prefill). 0 if unknown."""


class RunKey(NamedTuple):
    """Key of one run: label of the entry, index of the prompt, and number of the repeat."""

    label: str
    prompt: int
    repeat: int


@dataclass(frozen=True)
class Run:
    """Measurements of one entry, grouped by prompt. Tokens and counts come from the first repeat."""

    by_prompt: list[list[Decoded]]
    groups: Sequence[int] = ()
    """Batch number of each prompt. Prompts share the time of their batch equally. Empty for batch size 1."""

    @property
    def ids(self) -> list[list[int]]:
        return [runs[0].ids for runs in self.by_prompt]

    @property
    def tallies(self) -> list[Tally]:
        return [runs[0].tally for runs in self.by_prompt]

    def select(self, prompts: Sequence[int]) -> "Run":
        groups = [self.groups[prompt] for prompt in prompts] if self.groups else ()
        return Run([self.by_prompt[prompt] for prompt in prompts], groups)

    def by_batch(self, values: Sequence[float]) -> list[list[float]]:
        """Group a list of values, with one value per prompt, by batch."""
        batches: dict[int, list[float]] = {}
        for group, value in zip(self.groups or range(len(values)), values, strict=True):
            batches.setdefault(group, []).append(value)
        return list(batches.values())

    def median_seconds(self) -> list[float]:
        """Return the decoding time of each prompt in seconds, as the median over all repeats."""
        return [statistics.median(run.seconds for run in runs) for runs in self.by_prompt]

    def stepping_seconds(self) -> list[float]:
        """Return the decoding time of each prompt without prefill in seconds, as the median over all repeats."""
        return [statistics.median(run.seconds - run.prefill_seconds for run in runs) for runs in self.by_prompt]

    def slowdown(self) -> float | None:
        """Return the time of all steps relative to an estimate of the undisturbed time (None for too few prompts).

        Other processes can only slow down a run. The estimate therefore uses the fastest repeat of each batch or, if
        there is only one repeat, the lower quartile of the time per step.
        """
        runs = zip(*([run.seconds - run.prefill_seconds for run in row] for row in self.by_prompt), strict=True)
        times = list(zip(*(map(sum, self.by_batch(row)) for row in runs), strict=True))
        if len(times[0]) > 1:
            undisturbed = sum(map(min, times))
        elif len(times) < _MIN_PROMPTS:
            return None
        else:
            steps = [max(rounds) for rounds in self.by_batch([tally.rounds for tally in self.tallies])]
            row = [seconds / count for (seconds,), count in zip(times, steps, strict=True)]
            undisturbed = float(np.quantile(row, 0.25)) * sum(steps)
        return sum(self.stepping_seconds()) / undisturbed

    def is_disturbed(self) -> bool:
        """Return whether the slowdown is above `MAX_STEADY_SLOWDOWN`."""
        return (self.slowdown() or 1.0) > MAX_STEADY_SLOWDOWN


def are_steady(run: Run, base: Run) -> bool | None:
    """Return whether the times of an entry and its baseline are steady, or None if this is unknown."""
    if run.is_disturbed() or base.is_disturbed():
        return False
    return None if None in (run.slowdown(), base.slowdown()) else True


def decode_batch(
    target: LanguageModel,
    method: Method,
    sampling: Sampling,
    seed: int,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    profile: StepProfile | None = None,
) -> list[Decoded]:
    """Decode prompts in one batch, and assign each an equal share of the time. Prompt b uses the seed `seed + b`."""
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
    prefill = 0.0 if profile else (first.at - start) / len(prompts)
    return [Decoded(*text, seconds, prefill) for text in zip(ids, tallies, strict=True)]


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
    """Generate a continuation of each prompt by autoregressive decoding. Prompt b uses the seed `seed + b`."""
    texts: list[list[int]] = []
    method = build_method(BASELINE, Parts(), sampling)
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        rng = Rng.for_rows(seed + first, len(rows), target.device)
        texts += decode_texts(target, *method, rows, limits, sampling, rng)
        if progress:
            progress(len(texts), len(prompts))
    return texts


_NOT_APPLIED = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("stop_strings", "penalty_alpha", "dola_layers", "watermarking_config")),
}
"""Settings of `transformers.generate` that change greedy output, with their neutral values."""


def ignored_settings(generation_config: Any) -> dict[str, Any]:
    """Return the active settings that change greedy output in `transformers.generate` but not in this engine."""
    values = {name: getattr(generation_config, name, None) for name in _NOT_APPLIED}
    if getattr(generation_config, "cache_implementation", None) == "quantized":
        values["cache_implementation"] = "quantized"
    return {name: value for name, value in values.items() if value not in (None, [], {}, _NOT_APPLIED.get(name))}


def decode_reference(model: Any, prompt: Sequence[int], limits: Limits) -> Decoded:
    """Decode one prompt greedily with `transformers.generate`, without the model's `ignored_settings`."""
    ids, generation_config = torch.tensor([list(prompt)], device=model.device), model.generation_config
    names = {"bos_token_id", "decoder_start_token_id", "cache_implementation"} - {*ignored_settings(generation_config)}
    plain = GenerationConfig(**{name: getattr(generation_config, name, None) for name in names})
    start = time.perf_counter()
    model.generation_config = plain
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=limits.max_new_tokens,
                eos_token_id=list(limits.stop_ids) or None,
                pad_token_id=0,
            )
    finally:
        model.generation_config = generation_config
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
    batch: int = 1,
    seed: int = 0,
    finished: Mapping[RunKey, Decoded] | None = None,
    on_run: Callable[[RunKey, Decoded], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Run]:
    """Decode every prompt `repeats` times with every entry. Return a mapping from labels to runs.

    The order of the entries changes from batch to batch (see `job_order`). The tokens of a prompt depend only on the
    seed and the prompt's index, so all repeats give the same tokens. If an entry is greedy, the transformers model
    `reference` is measured too. Runs in `finished`, from an interrupted evaluation, are not repeated. `on_run` receives
    all other runs.
    """
    jobs, done = _jobs(target, parts, entries, reference, seed), dict(finished or {})
    first = warm_up_prompts(prompts, limits, target.device.type, target.supports_any_length)
    labels, sizes = list(jobs), {min(batch, len(prompts)), len(prompts) % batch} - {0}
    keys = [key for repeat in range(repeats) for key in _round(labels, len(prompts), batch, repeat)]

    incomplete = {key._replace(prompt=key.prompt // batch * batch) for key in keys if key not in done}
    pending = [key for key in keys if key in incomplete]  # first key of each incomplete batch
    for label in dict.fromkeys(key.label for key in pending):
        for rows, (prompt, until) in itertools.product(sizes, first):
            jobs[label](0, [prompt] * rows, until)
    for number, key in enumerate(pending):
        if progress:
            progress(max(0, len(keys) - batch * (len(pending) - number)), len(keys), key.label)
        results = jobs[key.label](key.prompt, prompts[key.prompt : key.prompt + batch], limits)
        for index, result in enumerate(results, key.prompt):
            done[run_key := key._replace(prompt=index)] = result
            if on_run:
                on_run(run_key, result)
    if progress:
        progress(len(keys), len(keys), "")
    by_prompt = {label: [[done[RunKey(label, prompt, repeat)] for repeat in range(repeats)]
                         for prompt in range(len(prompts))] for label in labels}  # fmt: skip
    groups = [prompt // batch for prompt in range(len(prompts))] if batch > 1 else ()
    return {label: Run(runs, groups) for label, runs in by_prompt.items()}


def warm_up_prompts(
    prompts: Sequence[Sequence[int]], limits: Limits, device: str, supports_any_length: bool = False
) -> list[tuple[Sequence[int], Limits]]:
    """Return the prompts and limits to decode before timing starts.

    On a GPU, there is one prompt for each length that needs its own CUDA graph. It is decoded up to the limit, so that
    no graph is captured during measurement. The longest prompt comes first, so that the others can reuse its cache.
    """
    if device == "cpu":
        return [(prompts[0], Limits(min(8, limits.max_new_tokens), limits.stop_ids))]
    if supports_any_length:
        return [(max(prompts, key=len), Limits(limits.max_new_tokens))]
    by_length = {round_up(len(prompt), STRIDE): prompt for prompt in sorted(prompts, key=len)}
    return [(prompt, Limits(limits.max_new_tokens)) for prompt in reversed(by_length.values())]


def _round(labels: Sequence[str], prompts: int, batch: int, repeat: int) -> list[RunKey]:
    """Return the keys of all runs of one repeat. The prompts of a batch are adjacent."""
    groups = [range(first, min(first + batch, prompts)) for first in range(0, prompts, batch)]
    orders = [job_order(len(labels), repeat * len(groups) + number) for number in range(len(groups))]
    pairs = zip(groups, orders, strict=True)
    return [RunKey(labels[job], prompt, repeat) for prompts_, order in pairs for job in order for prompt in prompts_]


def _jobs(target: LanguageModel, parts: Parts, entries: Sequence[Entry], reference: Any, seed: int) -> dict[str, _Job]:
    """Return a mapping from labels to functions that decode a batch, given the index of its first prompt."""

    def job(entry: Entry) -> _Job:
        method, sampling = build_method(entry.method, parts, entry.sampling, **entry.options), entry.sampling
        return lambda index, prompts, limits: decode_batch(target, method, sampling, seed + index, prompts, limits)

    jobs = {entry.label: job(entry) for entry in entries}
    if reference is not None and any(entry.sampling.greedy for entry in entries):
        jobs[REFERENCE] = lambda index, prompts, limits: [
            decode_reference(reference, prompt, limits) for prompt in prompts
        ]
    return jobs


def job_order(count: int, number: int) -> list[int]:
    """Return the order in which `count` jobs run in round `number`.

    Each job follows every other job equally often in `count` rounds, or twice as many for odd counts (Williams 1949).
    """
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
    """Decode the first prompts or batches again, and measure the time of each phase of their steps."""
    method = build_method(entry.method, parts, entry.sampling, **entry.options)
    whole = StepProfile(target.device)
    for first in range(0, min(NUM_PROFILED, len(prompts)), batch):
        profile, rows = StepProfile(target.device), prompts[first : first + batch]
        with profile.timing_forwards(target, parts.drafter, *parts.more_drafters, parts.heads):
            decode_batch(target, method, entry.sampling, seed + first, rows, limits, profile)
        whole.add(profile)
    return whole


def measure_entry_energy(
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
    """Measure the joules per token of an entry, including prefill, by decoding the first prompts repeatedly.

    Raises:
        CounterError: The counter fails.
    """
    method = build_method(entry.method, parts, entry.sampling, **entry.options)

    def decode_all() -> float:
        count = 0
        for index, prompt in enumerate(prompts[:NUM_PROFILED]):
            (result,) = decode_batch(target, method, entry.sampling, seed + index, [prompt], limits)
            count += len(result.ids)
        return float(count)

    return meter.measure(decode_all, idle_watts, seed=seed, progress=progress)


def check_capacity(
    target: LanguageModel, parts: Parts, entries: Sequence[Entry], prompts: Mapping[str, Sequence[int]], limits: Limits
) -> None:
    """Raise ValueError if the longest prompt and its response exceed the maximum length of the target or a drafter."""
    limits_by_entry = []
    for entry in entries:
        proposer = build_method(entry.method, parts, entry.sampling, **entry.options).proposer
        nodes, lookahead = proposer.capacity(limits)
        for model in (target, *(model for model, _ in proposer.forwards(nodes) if isinstance(model, LanguageModel))):
            most = model.max_positions - limits.max_new_tokens + 1 - lookahead
            limits_by_entry.append((most, entry.label, model.max_positions, "target" if model is target else "drafter"))
    name, longest = max(prompts.items(), key=lambda item: len(item[1]))
    most, label, positions, which = min(limits_by_entry)
    if len(longest) > most:
        raise ValueError(
            f"prompt {name} has {len(longest)} tokens; with {limits.max_new_tokens} new tokens and the draft tokens of "
            f"{label} it exceeds the {which}'s {positions} positions: "
            + (f"set `max_prompt_tokens={most}` to drop such prompts" if most > 0 else "reduce `max_new_tokens`")
        )


def devices_of(target: LanguageModel, parts: Parts) -> list[torch.device]:
    """Return the devices of a target, its drafters and its heads."""
    models = [target, *filter(None, (parts.drafter, *parts.more_drafters))]
    devices = [device for model in models for device in (model.device, *(model.layer_devices or ()))]
    if isinstance(parts.heads, nn.Module):
        devices += [parameter.device for parameter in parts.heads.parameters()]
    return list(dict.fromkeys(devices))
