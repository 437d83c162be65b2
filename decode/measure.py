"""Methods measured side by side: the same prompts, one process, runs interleaved; the clock is read here.

Shape letters: B batch, N nodes, D hidden.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .engine import Limits, generate
from .methods import Method, Parts, build_method
from .metrics import Tally, impossible, speedup_interval, total
from .models import LanguageModel
from .profile import FirstStep, StepProfile
from .rng import Rng
from .warpers import Sampling

BASELINE = "autoregressive"
REFERENCE = "transformers"


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


@dataclass
class Run:
    """What one entry did: by prompt, the tokens of its first run, its counts, and the seconds of every run.

    `reading` are those of them that passed before the first step, while prompts were read.
    """

    ids: list[list[int]]
    tallies: list[Tally]
    seconds: list[list[float]]
    reading: list[list[float]]

    def median_seconds(self) -> list[float]:
        return [statistics.median(times) for times in self.seconds]

    def stepping_rate(self) -> float:
        """Tokens per second of the steps alone."""
        steps = [
            statistics.median(whole - read for whole, read in zip(*times, strict=True))
            for times in zip(self.seconds, self.reading, strict=True)
        ]
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
    _synchronise(target)
    start = time.perf_counter()
    rng, first = Rng.for_rows(seed, 1, target.device), FirstStep(partial(_synchronise, target))
    for step in generate(target, *method, [prompt], limits, sampling, rng, profile or first):
        ids += step.new_ids[0]
        tally.add_step(step, 0)
    _synchronise(target)
    end = time.perf_counter()
    return Decoded(ids, tally, end - start, 0.0 if profile else first.at - start)


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
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Run]:
    """Decode every prompt with every entry, `repeats` times, one after another prompt by prompt.

    Args:
        reference: a transformers model; it is run greedily as one more row where an entry is greedy.

    Returns:
        Runs by label.
    """
    jobs: dict[str, Callable[[Sequence[int], Limits], Decoded]] = {}
    for entry in entries:
        method = build_method(entry.method, parts, entry.sampling, **entry.options)
        jobs[entry.label] = partial(decode, target, method, entry.sampling, seed)
    if reference is not None and any(entry.sampling.greedy for entry in entries):
        jobs[REFERENCE] = partial(decode_reference, reference)
    warm_up = Limits(min(8, limits.max_new_tokens), limits.stop_ids)
    for job in jobs.values():
        job(prompts[0], warm_up)
    runs = {label: Run([], [], [[] for _ in prompts], [[] for _ in prompts]) for label in jobs}
    done, work = 0, repeats * len(prompts) * len(jobs)
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            for label, job in jobs.items():
                decoded = job(prompt, limits)
                runs[label].seconds[place].append(decoded.seconds)
                runs[label].reading[place].append(decoded.reading)
                if repeat == 0:
                    runs[label].ids.append(decoded.ids)
                    runs[label].tallies.append(decoded.tally)
                done += 1
                if progress:
                    progress(done, work)
    return runs


@dataclass(frozen=True)
class Costs:
    """Raw seconds of forwards in isolation."""

    one: float
    """A target forward of one token."""
    tree: float
    """A target forward of as many nodes as the method's trees hold."""
    propose: float
    """The forwards of one proposal: the drafter's, or the heads'."""
    forwards: int
    """How many forwards a proposal takes."""
    tree_flops: int
    """Of the tree forward, as torch's counter has them."""
    propose_flops: int
    """Of the proposal's forwards."""


class RawCosts:
    """Times the forwards that a step of a method needs, and nothing else.

    A few one-token forwards and a few steps alternate, so that drift touches both alike. The forwards of a step follow
    one another as they do in decoding: what one leaves in the caches of the machine is what the next finds.

    Args:
        nodes: how many nodes the target scores a step.
        context: how many tokens are committed.
    """

    def __init__(self, target: LanguageModel, method: Method, nodes: float, context: int) -> None:
        self._target = target
        self._calls: list[Callable[[], Any]] = [
            _forward(target, 1, context),
            _forward(target, max(1, round(nodes)), context),
        ]
        drafts = method.proposer.forwards(nodes)
        for model, count in drafts:
            if model is None or isinstance(model, LanguageModel):
                self._calls.append(_forward(model or target, count, context))
            else:
                hidden_BD = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
                self._calls.append(partial(model, hidden_BD))
        self._forwards = len(drafts)
        self._seconds: list[list[float]] = [[] for _ in self._calls]

    @torch.inference_mode()
    def sample(self, runs: int) -> RawCosts:
        """Time every forward `2 runs` times more."""
        places = range(len(self._calls))
        for _ in range(runs):
            for step in ([0], [*places[2:], 1]):
                for repeat in range(3):
                    for place in step:
                        _synchronise(self._target)
                        start = time.perf_counter()
                        self._calls[place]()
                        _synchronise(self._target)
                        if repeat:  # the first finds what other forwards have left
                            self._seconds[place].append(time.perf_counter() - start)
        return self

    @torch.inference_mode()
    def costs(self) -> Costs:
        """Medians of all samples."""
        medians = [statistics.median(seconds) for seconds in self._seconds]
        flops = [_flops(call) for call in self._calls]
        return Costs(medians[0], medians[1], sum(medians[2:]), self._forwards, flops[1], sum(flops[2:]))


def raw_costs(target: LanguageModel, method: Method, nodes: float, context: int, runs: int = 12) -> Costs:
    """`RawCosts` of `runs` samples."""
    return RawCosts(target, method, nodes, context).sample(runs).costs()


def _flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def _forward(model: LanguageModel, nodes: int, context: int) -> Callable[[], Tensor]:
    with torch.inference_mode():
        _, cache = model.begin([[0] * context], context + nodes)
    cache.set_lengths([context])
    tokens_BN = torch.zeros(1, nodes, dtype=torch.int64, device=model.device)
    return lambda: model.logits(model.extend(cache, tokens_BN))


@torch.inference_mode()
def perplexity(
    target: LanguageModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> float | None:
    """exp of the mean negative log-likelihood of the outputs under the unwarped target (`mjsd.txt`, eq. 1).

    None where there is no output, or one that the target holds impossible.
    """
    loss, count = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output:
            continue
        start, cache = target.begin([prompt], len(output))
        ids, first = torch.tensor([[*start[0], *output]], device=target.device), len(start[0])
        hidden_BTD = target.extend(cache, ids[:, :-1])[:, first - 1 :]
        log_probs_BTV = target.logits(hidden_BTD).float().log_softmax(-1)
        loss -= log_probs_BTV.gather(2, ids[:, first:, None]).sum().item()
        count += len(output)
    return math.exp(loss / count) if count and loss / count < 700 else None


def summarise(
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    runs: dict[str, Run],
) -> tuple[list[dict[str, Any]], list[str]]:
    """One dictionary an entry, with the metric names of `metrics.py` and of DESIGN: what `results.json` holds.

    Speedups are over autoregressive decoding with the same warping.

    Returns:
        The rows, and what is wrong with the entries whose measurements cannot be true (see `metrics.impossible`): an
        error of the report each, not a row of it.

    Raises:
        ValueError: no autoregressive entry to compare with.
    """
    bases = {entry.sampling: runs[entry.label] for entry in entries if entry.method == BASELINE}
    rows, errors = [], []
    for entry in entries:
        if entry.sampling not in bases:
            raise ValueError(
                f"{entry.label!r} needs {BASELINE!r} at temperature {entry.sampling.temperature:g} beside it"
            )
        run, base = runs[entry.label], bases[entry.sampling]
        method = build_method(entry.method, parts, entry.sampling, **entry.options)
        counts = total(run.tallies)
        row: dict[str, Any] = {"label": entry.label, "method": entry.method, "options": entry.options}
        row |= {"temperature": entry.sampling.temperature, "lossless": method.verifier.lossless} | counts.metrics()
        row |= _speeds(run, base, runs.get(REFERENCE) if entry.sampling.greedy else None)
        row["identical_to_greedy"] = _identical(run, base) if entry.sampling.greedy else None
        lengths = [len(prompt) + len(ids) / 2 for prompt, ids in zip(prompts, base.ids, strict=True)]
        costs = raw_costs(target, method, counts.nodes / max(1, counts.steps), round(statistics.mean(lengths)))
        row |= _bounds(row, costs, run.stepping_rate() / base.stepping_rate())
        row["perplexity"] = perplexity(target, prompts, run.ids)
        fault = impossible(row)
        if fault:
            errors.append(f"the measurement of {entry.label!r} cannot be true: {fault}")
        else:
            rows.append(row)
    return rows, errors


def _speeds(run: Run, base: Run, reference: Run | None) -> dict[str, Any]:
    seconds, base_seconds = run.median_seconds(), base.median_seconds()
    tokens, base_tokens = [len(ids) for ids in run.ids], [len(ids) for ids in base.ids]
    speedup, interval = speedup_interval(tokens, seconds, base_tokens, base_seconds)
    row: dict[str, Any] = {
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "speedup": speedup,
        "speedup_interval": interval,
    }
    if reference is not None:
        reference_tokens = [len(ids) for ids in reference.ids]
        row["speedup_over_transformers"] = speedup_interval(
            tokens, seconds, reference_tokens, reference.median_seconds()
        )[0]
    return row


def _identical(run: Run, base: Run) -> list[int]:
    """How many prompts gave exactly the baseline's tokens, and of how many."""
    return [sum(mine == theirs for mine, theirs in zip(run.ids, base.ids, strict=True)), len(base.ids)]


def _bounds(row: dict[str, Any], costs: Costs, stepping: float) -> dict[str, Any]:
    """`stepping` is the speedup of the steps alone: the bound knows of no prompts that are read."""
    per_step = row["tokens_per_step"]
    bound = per_step * costs.one / (costs.tree + costs.propose)
    cost_ratio = costs.propose / costs.forwards / costs.one if costs.forwards else None
    return {
        "cost_ratio": cost_ratio,
        "ideal": per_step / (1 + cost_ratio * costs.forwards) if cost_ratio is not None else per_step,
        "bound": bound,
        "efficiency": stepping / bound,
        "flops_per_token": {
            "verification": costs.tree_flops / per_step,
            "drafting": costs.propose_flops / per_step,
            "total": (costs.tree_flops + costs.propose_flops) / per_step,
        },
        "joules_per_token": None,
        "rouge_l": None,
        "milliseconds": {"one": 1e3 * costs.one, "tree": 1e3 * costs.tree, "propose": 1e3 * costs.propose},
    }


def same_as_reference(entries: Sequence[Entry], runs: dict[str, Run]) -> list[int] | None:
    """How many prompts `transformers.generate` decodes to the same tokens, and of how many; None if it was not run."""
    if REFERENCE not in runs:
        return None
    base = next(entry.label for entry in entries if entry.method == BASELINE and entry.sampling.greedy)
    return _identical(runs[REFERENCE], runs[base])


def _synchronise(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
