"""Energy measurement with the energy counters of GPUs and processors.

A counter covers a whole device with all its processes: a GPU board with its memory, or the processor packages. Main
memory is included if the machine has a counter for it. Fans, disks and power supplies are not included.

The procedure follows Yang, Adámek and Armour (arXiv 2312.02741) and arXiv 2407.09722, appendix B. GPU sensors report a
mean over a window once per period. The sensors of the A100 and H100 sample 25 ms of every 100 ms.

1. Windows last at least `Timing.seconds`, which spans many periods. If the sensor samples only part of the time, eight
   pauses shift the work relative to the samples. The idle energy of the pauses is subtracted (error at most 4 %).
2. Each trial starts after a random wait. Results are the mean over the trials and its standard error.
3. Measurements are discarded while the power still rises. A window begins and ends when the counter has just changed,
   so that both ends have the same lag.
"""

import importlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..models.base import LanguageModel
from .profile import raw_forward, synchronise, time_in_turns

POWERCAP = Path("/sys/class/powercap")
_PAUSES = 8
_MAX_SILENCE = 2.0
"""Minimum number of seconds without a change before a counter is reported as stuck."""


class CounterError(Exception):
    """Error raised if an energy counter cannot be read, does not change, or decreases."""


@dataclass(frozen=True)
class Timing:
    """Durations in seconds for measurements with one type of energy counter."""

    seconds: float
    """Minimum length of the window of one trial."""
    discard: float
    """Time at the start of a trial that is not measured."""
    period: float
    """Maximum time between two changes of the counter."""
    pause: float
    """Length of the pauses that shift the work relative to the sensor's samples. 0 for continuous sensors."""
    trials: int = 4


NVML = Timing(seconds=5.0, discard=1.5, period=0.1, pause=0.025)
RAPL = Timing(seconds=1.0, discard=0.2, period=0.01, pause=0.0)


@dataclass(frozen=True)
class Energy:
    """Measured energy per unit of work. A unit is a token or a forward pass."""

    source: str
    """Counter: "nvml" or "rapl"."""
    joules: float
    """Joules per unit, including idle power. This is the mean over the trials."""
    error: float
    """Standard error of `joules`."""
    above_idle: float | None
    """Joules per unit above idle power. None if negative, for example if other processes used the device."""
    watts: float
    """Mean power during the work."""
    idle_watts: float
    seconds: float
    """Seconds per unit of work."""
    trials: list[float]
    """Joules per unit in each trial."""


class _Window(NamedTuple):
    """Counter state at the end of a measurement window."""

    at: float
    joules: float
    units: float
    paused: float


class EnergyMeter:
    """Energy meter that measures work with an energy counter. The module docstring describes the procedure.

    `joules` returns the energy that all devices have used since a fixed moment, or raises CounterError. `clock` and
    `sleep` can replace the functions of `time`.
    """

    def __init__(
        self,
        joules: Callable[[], float],
        source: str,
        covers: str,
        timing: Timing,
        *,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.joules, self.source, self.covers, self.timing = joules, source, covers, timing
        self._close, self._clock, self._sleep = close, clock, sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def idle_watts(self) -> float:
        """Measure the power of the devices while this process is idle.

        Raises:
            CounterError: The counter fails.
        """

        def rest() -> float:
            self._sleep(self.timing.period / 20)
            return 0.0

        self._sleep(self.timing.discard)
        begin = self._run(rest, 0.0)
        self._sleep(max(1.0, 10 * self.timing.period))
        end = self._run(rest, 0.0)
        return (end.joules - begin.joules) / (end.at - begin.at)

    def measure(
        self,
        work: Callable[[], float],
        idle_watts: float,
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Energy:
        """Measure the energy per unit of work. `seed` determines the random waits.

        `work` runs one piece of work, waits until the devices have finished, and returns the number of units.

        Raises:
            CounterError: The counter fails.
        """
        rng, timing = random.Random(seed), self.timing
        trials, times = [], []
        for trial in range(timing.trials):
            if progress:
                progress(trial, timing.trials)
            self._sleep(rng.uniform(0, timing.period))
            begin = self._run(work, timing.discard)
            end = self._run(work, timing.seconds, timing.pause)
            trials.append((end.joules - begin.joules - idle_watts * end.paused) / end.units)
            times.append((end.at - begin.at - end.paused) / end.units)
        joules, seconds = statistics.fmean(trials), statistics.fmean(times)
        error = statistics.stdev(trials) / len(trials) ** 0.5 if len(trials) > 1 else 0.0
        excess = joules - idle_watts * seconds
        watts = joules / seconds
        return Energy(self.source, joules, error, excess if excess >= 0 else None, watts, idle_watts, seconds, trials)

    def _run(self, work: Callable[[], float], seconds: float, pause: float = 0.0) -> _Window:
        """Repeat `work` for at least `seconds`, until the counter changes, with waits of `pause` seconds."""
        clock, period = self._clock, self.timing.period
        begin = changed_at = clock()
        value, units, paused, pauses = self.joules(), 0.0, 0.0, 0
        while True:
            # Reading the counter interrupts the work, so it is read often only when a window may end.
            due = clock() + period * (2.5 if begin + seconds - clock() > 3 * period else 0.1)
            units += work()
            while clock() < due:
                units += work()
            last, value, now = value, self.joules(), clock()
            if value < last:
                raise CounterError(f"the energy counter of {self.covers} decreased by {last - value:g} J")
            if value > last:
                changed_at = now
                if now - begin >= seconds:
                    return _Window(now, value, units, paused)
            elif now - changed_at > max(_MAX_SILENCE, 20 * period):
                raise CounterError(f"the energy counter of {self.covers} did not change for {now - changed_at:.1f} s")
            if pause and pauses < _PAUSES and now - begin >= (pauses + 0.5) * seconds / _PAUSES:
                self._sleep(pause)
                pauses, paused = pauses + 1, paused + clock() - now


class RaplCounter:
    """Energy counter of Linux power capping zones (RAPL), which wraps around and must be read often.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file contains no number.
    """

    def __init__(self, zones: Sequence[Path]) -> None:
        self._zones, self._total = zones, 0
        self._ranges = [int((zone / "max_energy_range_uj").read_text(encoding="ascii")) for zone in zones]
        self._last = self._read()

    def _read(self) -> list[int]:
        return [int((zone / "energy_uj").read_text(encoding="ascii")) for zone in self._zones]

    def __call__(self) -> float:
        """Return the joules used since this object was created."""
        try:
            now = self._read()
        except (OSError, ValueError) as error:
            raise CounterError(f"the processor's energy counter can no longer be read: {error}") from error
        self._total += sum((new - old) % most for new, old, most in zip(now, self._last, self._ranges, strict=True))
        self._last = now
        return self._total * 1e-6


def open_meter(devices: Sequence[torch.device]) -> tuple[EnergyMeter | None, str]:
    """Open an energy meter for the GPUs among the devices, or for the processor if there are none.

    Returns the meter and a description of the measured devices, or None and the reason why there is no counter.
    """
    kinds = {device.type for device in devices} - {"meta"}
    if "cuda" in kinds:
        return _open_nvml(sorted({cuda_uuid(device) for device in devices if device.type == "cuda"}))
    if kinds != {"cpu"}:
        return None, f"energy counters are not supported for devices of type {', '.join(sorted(kinds)) or 'none'}"
    return _open_rapl()


def cuda_uuid(device: torch.device) -> str:
    """Return the UUID that identifies a device in NVML, whose device order differs from PyTorch's."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _open_rapl() -> tuple[EnergyMeter | None, str]:
    try:
        zones = sorted(POWERCAP.glob("intel-rapl:*"))
        names = {zone: (zone / "name").read_text(encoding="ascii").strip() for zone in zones}
        packages = [zone for zone, name in names.items() if name.startswith("package")]
        # The counter of a package includes its cores but not the memory. `psys` (the platform) includes both.
        memory = [zone for zone, name in names.items() if name == "dram"]
        if not packages:
            return None, f"the processor has no energy counter (RAPL): {POWERCAP}/intel-rapl:* has no package zone"
        counter = RaplCounter([*packages, *memory])
    except PermissionError as error:
        return None, f"only root can read {error.filename}: run `sudo chmod a+r {POWERCAP}/intel-rapl:*/energy_uj`"
    except (OSError, ValueError) as error:
        return None, f"the processor's energy counter (RAPL) cannot be read: {error}"
    covers = f"processor packages ({len(packages)})" + (" and their memory" if memory else "")
    return EnergyMeter(counter, "rapl", covers, RAPL), covers


def _open_nvml(uuids: Sequence[str]) -> tuple[EnergyMeter | None, str]:
    """Open NVML's counter, which counts millijoules since the driver was loaded (Volta and later)."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None, "measuring the energy of GPUs requires NVML: run `pip install nvidia-ml-py`"

    def joules() -> float:
        try:
            return sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) * 1e-3
        except nvml.NVMLError as error:
            raise CounterError(f"NVML's energy counter can no longer be read: {error}") from error

    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        joules()
    except (nvml.NVMLError, CounterError) as error:
        return None, f"NVML does not report the energy of these devices: {error}"
    covers = f"GPU boards ({len(handles)}), without the processor"
    return EnergyMeter(joules, "nvml", covers, NVML, close=nvml.nvmlShutdown), covers


@torch.inference_mode()
def measure_batches(
    model: LanguageModel, batches: Sequence[int], runs: int, context: int, meter: EnergyMeter | None, seed: int = 0
) -> dict[str, Any]:
    """Measure the time and energy of one-token forwards after `context` tokens, at several batch sizes.

    Returns a dictionary with the arguments, the counter's `source`, `idle_watts`, `failure` (the reason if the counter
    failed) and `rows`. The row of a batch size contains the median seconds and the mean joules per run and per input,
    with standard errors. Joules include idle power, except in `joules_per_run_above_idle`.
    """
    sizes = sorted(batches)
    calls = [raw_forward(model, 1, context, batch=batch, seed=seed, fill_cache=True) for batch in sizes]
    seconds, energies, failure, idle = time_in_turns(model, calls, runs), dict[int, Energy](), None, None

    def forward(call: Callable[[], Tensor]) -> float:
        call()
        synchronise(model)
        return 1.0

    try:
        if meter is not None:
            idle = meter.idle_watts()
            for batch, call in zip(sizes, calls, strict=True):
                energies[batch] = meter.measure(partial(forward, call), idle, seed=seed)
    except CounterError as error:
        failure = str(error)
    rows = [batch_row(batch, series, energies.get(batch)) for batch, series in zip(sizes, seconds, strict=True)]
    source = meter.source if meter is not None and energies else None
    about = {"runs": runs, "context": context, "source": source, "idle_watts": idle, "failure": failure}
    return about | {"rows": rows}


def batch_row(batch: int, seconds: Sequence[float], energy: Energy | None) -> dict[str, Any]:
    """Create the result row of one batch size from the seconds and the energy of its forwards."""
    error = statistics.stdev(seconds) / len(seconds) ** 0.5 if len(seconds) > 1 else 0.0
    median, joules = statistics.median(seconds), energy.joules if energy else None
    return {
        "label": f"batch {batch}",
        "batch": batch,
        "seconds_per_run": median,
        "seconds_per_input": median / batch,
        "joules_per_run": joules,
        "joules_per_input": None if joules is None else joules / batch,
        "joules_per_run_above_idle": energy.above_idle if energy else None,
        "watts": energy.watts if energy else None,
        "errors": {"seconds_per_run": error, "joules_per_run": energy.error if energy else None},
    }
