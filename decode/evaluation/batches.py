"""What a forward costs by the number of inputs that it serves: seconds, and joules where something counts them.

Shape letters: B batch, T positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.base import LanguageModel
from ..models.seq2seq import Seq2SeqModel
from .energy import CounterError, Energy, EnergyMeter
from .measure import synchronise

_ROUNDS = 10
Progress = Callable[[int, int, str], None]
"""Gets how many are done, of how many, and what is next."""


def batch_forward(model: LanguageModel, batch: int, context: int, seed: int = 0) -> Callable[[], Tensor]:
    """A forward of one new token for each of `batch` inputs with `context` tokens behind them, ready to be run.

    The tokens are random and were really read: the energy of a product depends on the numbers in it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(model.vocab_size, (batch, context + 1), generator=generator).to(model.device)
    with torch.inference_mode():
        # An encoder-decoder reads them as its source, and decodes as many.
        capacity = context + 1 if isinstance(model, Seq2SeqModel) else 1
        _, cache = model.begin(tokens_BT[:, :context].tolist(), capacity)
        model.extend(cache, tokens_BT[:, :context])
    cache.set_lengths([context] * batch)
    return lambda: model.logits(model.extend(cache, tokens_BT[:, context:]))


@torch.inference_mode()
def time_forwards(
    model: LanguageModel, calls: dict[int, Callable[[], Tensor]], runs: int, progress: Progress
) -> dict[int, list[list[float]]]:
    """Seconds of `runs` forwards by batch size and by round; in each round all sizes have a turn, so that drift touches
    all alike."""
    rounds = min(_ROUNDS, runs)
    seconds: dict[int, list[list[float]]] = {batch: [] for batch in calls}
    done = 0
    for number in range(rounds):
        for batch, call in calls.items():
            progress(done, runs * len(calls), f"batch {batch}")
            call()  # finds what other forwards have left
            times = []
            for _ in range(runs * (number + 1) // rounds - runs * number // rounds):
                synchronise(model)
                start = time.perf_counter()
                call()
                synchronise(model)
                times.append(time.perf_counter() - start)
            seconds[batch].append(times)
            done += len(times)
    progress(done, runs * len(calls), "")
    return seconds


def count_joules(
    model: LanguageModel, meter: EnergyMeter, calls: dict[int, Callable[[], Tensor]], seed: int, progress: Progress
) -> tuple[dict[int, Energy], str]:
    """Joules of a forward by batch size, as far as the counter gives them; and what kept it from the rest."""
    found: dict[int, Energy] = {}
    trials = meter.timing.trials

    def forward(call: Callable[[], Tensor]) -> float:
        with torch.inference_mode():
            call()
        synchronise(model)
        return 1.0

    def trial_done(batch: int, trial: int, _: int) -> None:
        progress(len(found) * trials + trial, len(calls) * trials, f"batch {batch}")

    try:
        idle = meter.idle_watts()
        for batch, call in calls.items():
            found[batch] = meter.measure(partial(forward, call), idle, seed=seed, progress=partial(trial_done, batch))
    except CounterError as error:
        return found, str(error)
    progress(len(calls) * trials, len(calls) * trials, "")
    return found, ""


def batch_row(batch: int, rounds: Sequence[Sequence[float]], energy: Energy | None) -> dict[str, Any]:
    """A row, of the seconds of its forwards by round and of the energy of one of them."""
    runs = sum(map(len, rounds))
    one = statistics.median(second for times in rounds for second in times)
    medians = [statistics.median(times) for times in rounds]
    spread = statistics.stdev(medians) / len(medians) ** 0.5 if len(medians) > 1 else 0.0
    row: dict[str, Any] = {"label": f"batch {batch}", "batch": batch, "inputs": runs * batch}
    row |= {"seconds": runs * one, "seconds_per_run": one, "seconds_per_input": one / batch}
    row |= dict.fromkeys(("joules", "joules_per_run", "joules_per_input", "joules_per_run_above_idle", "watts"))
    errors = {"seconds": runs * spread, "seconds_per_run": spread, "seconds_per_input": spread / batch}
    if energy is not None:
        joules, error = energy.joules, energy.error
        row |= {"joules": runs * joules, "joules_per_run": joules, "joules_per_input": joules / batch}
        row |= {"joules_per_run_above_idle": energy.above_idle, "watts": energy.watts}
        errors |= {"joules": runs * error, "joules_per_run": error, "joules_per_input": error / batch}
    return row | {"errors": errors}
