"""Joules: the energy counters of devices, and the rules by which they are read.

Counted is the whole of a device, whoever uses it: a GPU's board with its memory, or a processor's packages and the
memory behind them where the machine counts that too; never fans, disks and power supplies.

The rules are the three of Yang, Adámek and Armour (arXiv 2312.02741), which `mjsd.txt` follows in appendix B. Sensors
of GPUs show a mean over a window, a new one every period; the A100's and H100's look at 25 ms of every 100 ms.

1. Long: at least `Timing.seconds`, many periods. Where the sensor does not look all the time, eight pauses of its
   window's length shift the work against it; their energy at idle power is taken off: joules are too high by 4 % at
   most.
2. Several times: four trials, each after a wait of random length; given are their mean and its standard error.
3. Without transients: what runs while the power rises is discarded. A window begins and ends at readings at which the
   counter has just changed, so that both ends lag alike.

Shape letters: B batch, T positions.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..models.base import LanguageModel
from ..models.seq2seq import Seq2SeqModel
from .profile import synchronise, time_call

POWERCAP = Path("/sys/class/powercap")
_SILENCE = 2.0
"""Seconds without a change, and periods too, after which a counter is taken to stand still."""
_IDLE_SECONDS = 1.0
_ROUNDS = 10
Progress = Callable[[int, int, str], None]
"""Gets how many are done, of how many, and what is next."""


class CounterError(Exception):
    """A counter that was there cannot be read any more, stands still, or runs backward."""


class Counter(Protocol):
    """Joules of one device since some moment."""

    def joules(self) -> float:
        """Raises CounterError where it cannot be read."""


@dataclass(frozen=True)
class Timing:
    """How long a kind of counter must be looked at. Seconds, all but the last two."""

    seconds: float
    """A window of one trial lasts at least so long."""
    discard: float
    """What runs first in a trial is not counted for so long."""
    period: float
    """Between two changes of the counter, at most."""
    pause: float
    """Length of the pauses that shift the work against the sensor; 0: it looks all the time, and none are made."""
    pauses: int = 8
    trials: int = 4

    @property
    def least(self) -> float:
        """Seconds that one measurement takes, of work that a window holds many times."""
        return self.trials * (self.discard + self.seconds + self.pauses * self.pause)


NVML = Timing(seconds=5.0, discard=1.5, period=0.1, pause=0.025)
RAPL = Timing(seconds=1.0, discard=0.2, period=0.01, pause=0.0)


@dataclass(frozen=True)
class Energy:
    """What a unit of work takes: a token, or a forward."""

    source: str
    """What counted: "nvml" or "rapl"."""
    joules: float
    """A unit's, idle power included: the mean of the trials."""
    error: float
    """Standard error of that mean."""
    above_idle: float | None
    """A unit's joules without those that the device would have taken idle; None if it took no more than that, as where
    something else ran on it meanwhile."""
    watts: float
    """Mean power while working."""
    idle_watts: float
    seconds: float
    """A unit's, in the windows."""
    trials: tuple[float, ...]
    """Joules of a unit by trial."""

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self) | {"trials": list(self.trials)}


@dataclass(frozen=True)
class _Reading:
    at: float
    joules: float
    units: float
    paused: float


class EnergyMeter:
    """One or more counters, added up, and read by the rules above.

    Args:
        source, covers: see `Energy`; what is counted, for people.
        closing: closes the counters.
        clock, sleep: of the time that the counters live in.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        source: str,
        covers: str,
        timing: Timing,
        *,
        closing: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.counters, self.source, self.covers, self.timing = tuple(counters), source, covers, timing
        self._closing, self._clock, self._sleep = closing, clock, sleep
        self._silence = max(_SILENCE, 20 * timing.period)

    def joules(self) -> float:
        """Of all devices since some moment. Raises CounterError."""
        return sum(counter.joules() for counter in self.counters)

    def idle_watts(self) -> float:
        """Power while this process does nothing, after what ran before has faded. Raises CounterError."""
        self._sleep(self.timing.discard)
        begin, first = self._next_change()
        self._sleep(max(_IDLE_SECONDS, 10 * self.timing.period))
        end, last = self._next_change()
        return (last - first) / (end - begin)

    def measure(
        self,
        work: Callable[[], float],
        idle_watts: float,
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Energy:
        """Joules of a unit of work, by the three rules. Raises CounterError.

        Args:
            work: does some and returns how many units; it has waited for the devices when it returns.
            seed: of the random waits before the trials.
            progress: gets how many trials are done, of how many.
        """
        rng, spans = random.Random(seed), []
        for trial in range(self.timing.trials):
            if progress:
                progress(trial, self.timing.trials)
            self._sleep(rng.uniform(0, self.timing.period))
            spans.append(self._trial(work))
        trials, times = [], []
        for first, last in spans:
            units, paused = last.units - first.units, last.paused - first.paused
            trials.append((last.joules - first.joules - idle_watts * paused) / units)
            times.append((last.at - first.at - paused) / units)
        joules, seconds = statistics.fmean(trials), statistics.fmean(times)
        error = statistics.stdev(trials) / len(trials) ** 0.5 if len(trials) > 1 else 0.0
        above = joules - idle_watts * seconds
        watts = joules / seconds
        return Energy(
            self.source, joules, error, above if above >= 0 else None, watts, idle_watts, seconds, tuple(trials)
        )

    def close(self) -> None:
        """Let go of the counters."""
        if self._closing is not None:
            self._closing()

    def __enter__(self) -> EnergyMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trial(self, work: Callable[[], float]) -> tuple[_Reading, _Reading]:
        """The readings that begin and end a window."""
        timing, clock = self.timing, self._clock
        begin = changed_at = clock()
        value, units, paused, pauses = self.joules(), 0.0, 0.0, 0
        first: _Reading | None = None
        while True:
            # To read a counter takes time of the work's: it is read often only where a window may begin or end.
            near = first is None or clock() - first.at >= timing.seconds
            due = clock() + timing.period * (0.1 if near else 2.5)
            units += work()
            near |= clock() >= due
            while clock() < due:
                units += work()
            assert units > 0
            last, value, now = value, self.joules(), clock()
            self._check(value - last, now - changed_at)
            if value != last:
                changed_at, reading = now, _Reading(now, value, units, paused)
                if first is None and now - begin >= timing.discard:
                    first = reading
                elif first is not None and near and now - first.at >= timing.seconds:
                    return first, reading
            spread = (pauses + 0.5) * timing.seconds / timing.pauses
            if timing.pause and first is not None and pauses < timing.pauses and now - first.at >= spread:
                self._sleep(timing.pause)
                slept = clock() - now
                pauses, paused, changed_at = pauses + 1, paused + slept, changed_at + slept

    def _next_change(self) -> tuple[float, float]:
        """When the counter changes next, and to what."""
        begin, last = self._clock(), self.joules()
        while True:
            self._sleep(self.timing.period / 20)
            value, now = self.joules(), self._clock()
            self._check(value - last, now - begin)
            if value != last:
                return now, value

    def _check(self, step: float, silence: float) -> None:
        if step < 0:
            raise CounterError(f"the counter of {self.covers} went back by {-step:g} J")
        if not step and silence > self._silence:
            raise CounterError(f"the counter of {self.covers} has stood still for {silence:.1f} s")


class RaplZone:
    """A zone of Linux's power capping interface: a processor's package, or its memory.

    `energy_uj` begins again at 0 after `max_energy_range_uj`, every few minutes to hours: it must be read more often.

    Raises:
        OSError, ValueError: a file that may not be read, or holds no number.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last = self._read()
        self._total = 0

    def joules(self) -> float:
        """Since this was made."""
        try:
            now = self._read()
        except (OSError, ValueError) as error:
            raise CounterError(f"{self._file} cannot be read any more: {error}") from error
        step = now - self._last
        self._total += step if step >= 0 else step + self._range
        self._last = now
        return self._total * 1e-6

    def _read(self) -> int:
        return int(self._file.read_text(encoding="ascii"))


class NvmlEnergy:
    """A GPU's own counter: millijoules since its driver was loaded (Volta and later)."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def joules(self) -> float:
        """Since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._nvml.NVMLError as error:
            raise CounterError(f"NVML's energy counter cannot be read any more: {error}") from error


def cuda_uuid(device: torch.device) -> str:
    """NVML's name of a device: it counts GPUs in an order of its own, hidden ones too."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def open_meter(
    devices: Sequence[torch.device],
    *,
    nvml: Any = None,
    uuid_of: Callable[[torch.device], str] = cuda_uuid,
    powercap: Path | None = None,
) -> tuple[EnergyMeter | None, str]:
    """What counts the energy of these devices: GPUs without their processor where there are any, else the processor.

    Args:
        nvml: the module `pynvml`; by default the installed one, if there is one.
        uuid_of: names a GPU for it.
        powercap: where Linux shows its power zones; by default `POWERCAP`.

    Returns:
        The meter and what it covers; or None, and why there is none.
    """
    kinds = {device.type for device in devices} - {"meta"}
    if "cuda" in kinds:
        gpus = dict.fromkeys(uuid_of(device) for device in devices if device.type == "cuda")
        return _open_nvml(list(gpus), nvml)
    if kinds != {"cpu"}:
        return None, f"no counter of energy is known for devices of type {', '.join(sorted(kinds)) or 'none'}"
    return _open_rapl(powercap or POWERCAP)


def _open_rapl(powercap: Path) -> tuple[EnergyMeter | None, str]:
    zones: list[Counter] = []
    names = []
    try:
        for folder in sorted(powercap.glob("intel-rapl:*")):
            name = (folder / "name").read_text(encoding="ascii").strip()
            # A package holds its cores; the memory beside it does not belong to it. `psys`, the platform, holds both.
            if name.startswith("package") or name == "dram":
                zones.append(RaplZone(folder))
                names.append(name)
    except PermissionError as error:
        return None, f"{error.filename} may be read by root alone: `sudo chmod a+r {powercap}/intel-rapl:*/energy_uj`"
    except (OSError, ValueError) as error:
        return None, f"the processor's energy counter (RAPL) cannot be read: {error}"
    if not any(name.startswith("package") for name in names):
        return None, f"the processor's energy counter (RAPL) is not there: no package among {powercap}/intel-rapl:*"
    covers = f"processor packages ({len(names) - names.count('dram')})"
    if "dram" in names:
        covers += " and their memory"
    return EnergyMeter(zones, "rapl", covers, RAPL), covers


def _open_nvml(uuids: Sequence[str], nvml: Any) -> tuple[EnergyMeter | None, str]:
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return None, "GPUs are counted through NVML: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML, which comes with NVIDIA's driver, could not be opened: {error}"
    try:
        counters = [NvmlEnergy(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
        for counter in counters:
            counter.joules()
    except (nvml.NVMLError, CounterError) as error:
        nvml.nvmlShutdown()
        return None, f"NVML counts no energy of these devices: {error}"
    covers = f"GPU boards ({len(counters)}), without the processor"
    return EnergyMeter(counters, "nvml", covers, NVML, closing=nvml.nvmlShutdown), covers


def batch_forward(model: LanguageModel, batch: int, context: int, seed: int = 0) -> Callable[[], Tensor]:
    """A forward of one new token for each of `batch` inputs with `context` random tokens behind them, ready to be run.

    The tokens were really read: the energy of a product depends on the numbers in it.
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
    """Seconds of `runs` forwards by batch size and by round; all sizes have a turn in each round, so that drift is
    shared."""
    rounds = min(_ROUNDS, runs)
    seconds: dict[int, list[list[float]]] = {batch: [] for batch in calls}
    done = 0
    for number in range(rounds):
        for batch, call in calls.items():
            progress(done, runs * len(calls), f"batch {batch}")
            call()  # finds what other forwards have left
            turns = runs * (number + 1) // rounds - runs * number // rounds
            times = [time_call(model, call) for _ in range(turns)]
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
