"""Energy counters of devices with known power, compared with the expected joules.

`World` is a simulated clock and device: work and sleep advance the time, and power is integrated exactly. A fake NVML
module updates its counter every 100 ms, as GPUs do. A fake RAPL tree rewrites its files whenever the time advances.
"""

import bisect
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation import energy as counting
from draftsmith.decode.evaluation.energy import CounterError, EnergyMeter, Timing, open_meter
from draftsmith.decode.evaluation.measure import Entry, measure_entry_energy
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import wrap_model
from transformers import LlamaForCausalLM

PERIOD = 0.1
IDLE = 40.0
GPU = [torch.device("cuda:0")]


class World:
    """Simulated clock that only advances by work and sleep, with the energy of a device of known power."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._times, self._joules = [self.now], [0.0]
        self.worked = 0.0
        self.on_pass: list[Callable[[], None]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.spend(seconds, IDLE)

    def spend(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self._times.append(self.now)
        self._joules.append(self._joules[-1] + seconds * watts)
        for callback in self.on_pass:
            callback()

    def joules(self, time: float | None = None) -> float:
        """Return the energy in joules used until `time` (default: now)."""
        time = self.now if time is None else time
        index = bisect.bisect_right(self._times, time)
        if index == len(self._times):
            return self._joules[-1]
        (t0, t1), (j0, j1) = self._times[index - 1 : index + 1], self._joules[index - 1 : index + 1]
        return j0 + (j1 - j0) * (time - t0) / (t1 - t0)

    def work(self, seconds: float, watts: float) -> Callable[[], float]:
        def do() -> float:
            self.spend(seconds, watts)
            self.worked += 1
            return 1.0

        return do

    def by(self, meter: EnergyMeter | None, timing: Timing | None = None) -> EnergyMeter:
        """Return a meter that reads the counter of `meter` but uses the simulated clock."""
        assert meter is not None
        settings = (meter.joules, meter.source, meter.covers, timing or meter.timing)
        return EnergyMeter(*settings, clock=self.clock, sleep=self.sleep)


def fake_nvml(world: World, devices: dict[str, float] | None = None, window: float = PERIOD) -> Any:
    """Return a `pynvml` for GPUs whose counters change every 100 ms.

    Args:
        devices: Factors, by UUID, with which the simulated power gives the power of each GPU.
        window: Seconds at the end of each period that the sensor samples; it extrapolates them to the whole period.
    """
    module: Any = types.ModuleType("pynvml")
    module.calls = []
    shares = devices or {"GPU-a": 1.0}

    class NVMLError(Exception):
        pass

    def find(uuid: str) -> str:
        if uuid not in shares:
            raise NVMLError(f"{uuid} Not Found")
        return uuid

    def sensor_value(period: int) -> float:
        end = 1000.0 + PERIOD * (period + 1)
        return (world.joules(end) - world.joules(end - window)) * PERIOD / window

    totals = [0.0]

    def total(handle: str) -> int:
        while len(totals) <= int((world.now - 1000.0) / PERIOD + 1e-9):
            totals.append(totals[-1] + sensor_value(len(totals) - 1))
        return 5_000_000 + round(1000 * shares[handle] * totals[-1])

    module.NVMLError = NVMLError
    module.nvmlInit = lambda: module.calls.append("init")
    module.nvmlShutdown = lambda: module.calls.append("shutdown")
    module.nvmlDeviceGetHandleByUUID = find
    module.nvmlDeviceGetTotalEnergyConsumption = total
    return module


def refuses(module: Any, name: str) -> None:
    def refuse(*_: Any) -> int:
        raise module.NVMLError("Not Supported")

    setattr(module, name, refuse)


Install = Callable[..., Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that replaces `pynvml` by `fake_nvml` for devices GPU-a and GPU-b."""
    monkeypatch.setattr(counting, "cuda_uuid", lambda device: f"GPU-{'ab'[device.index]}")

    def put(world: World, **options: Any) -> Any:
        module = fake_nvml(world, **options)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


@pytest.fixture
def gpu_meter(install: Install) -> Callable[..., EnergyMeter]:
    def build(world: World, **options: Any) -> EnergyMeter:
        install(world, **options)
        meter, covers = open_meter(GPU)
        assert covers == "GPU boards (1), without the processor"
        return world.by(meter)

    return build


@pytest.mark.parametrize("seconds", [0.0003, 0.007, 0.03, 0.35, 2.0, 7.0, 11.0])
def test_constant_power(gpu_meter: Any, seconds: float) -> None:
    world = World()
    meter = gpu_meter(world)
    idle = meter.idle_watts()
    assert idle == pytest.approx(IDLE, rel=0.01)
    energy = meter.measure(world.work(seconds, 130.0), idle)
    assert energy.source == "nvml"
    assert energy.joules == pytest.approx(130.0 * seconds, rel=0.015)
    assert energy.seconds == pytest.approx(seconds, rel=0.01)
    assert energy.above_idle == pytest.approx(90.0 * seconds, rel=0.03)
    assert meter.measure(world.work(seconds, 30.0), idle).above_idle is None, "power below idle is not counted"
    assert energy.watts == pytest.approx(130.0, rel=0.015)
    assert energy.idle_watts == idle
    assert len(energy.trials) == 4
    assert abs(energy.joules - 130.0 * seconds) <= max(4 * energy.error, 1e-3 * energy.joules)


class SlowWorld(World):
    """Device whose power follows its work with a time constant of 0.3 s."""

    watts = IDLE

    def spend(self, seconds: float, watts: float) -> None:
        step = seconds / 10
        for _ in range(10):
            self.watts += (watts - self.watts) * (1 - math.exp(-step / 0.3))
            super().spend(step, self.watts)


def test_rising_power_is_not_counted(gpu_meter: Any) -> None:
    world = SlowWorld()
    energy = gpu_meter(world).measure(world.work(0.02, 200.0), IDLE)
    assert 1.0 < energy.joules / 4.0 < 1.04, "only the pauses, in which power has not yet fallen, add energy"


def test_a_sensor_that_samples_part_time_measures_all_work(gpu_meter: Any) -> None:
    """Without pauses, the sensor would always or never sample the 25 ms at 300 W in every 100 ms."""

    def bursts(world: World) -> Callable[[], float]:
        def work() -> float:
            world.spend(0.025, 300.0)
            world.spend(0.075, 60.0)
            return 1.0

        return work

    true = 0.025 * 300 + 0.075 * 60
    world = World()
    with_pauses = gpu_meter(world, window=0.025).measure(bursts(world), IDLE)
    assert abs(with_pauses.joules / true - 1) < 0.12


def test_devices_are_summed(install: Install) -> None:
    world = World()
    nvml = install(world, devices={"GPU-a": 1.0, "GPU-b": 0.5})
    devices = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:0"), torch.device("cpu")]
    meter, covers = open_meter(devices)
    assert covers == "GPU boards (2), without the processor"
    energy = world.by(meter).measure(world.work(0.05, 100.0), 1.5 * IDLE)
    assert energy.joules == pytest.approx(1.5 * 5.0, rel=0.01)
    assert meter is not None
    with meter:
        pass
    assert nvml.calls == ["init", "shutdown"]


def test_counters_that_fail_are_errors_and_not_numbers(install: Install) -> None:
    world = World()
    nvml = install(world)
    meter, name = world.by(open_meter(GPU)[0]), "nvmlDeviceGetTotalEnergyConsumption"
    count = getattr(nvml, name)
    for broken, message in ((lambda handle: 77, r"2\.\d s"), (lambda handle: -count(handle), "GPU boards")):
        setattr(nvml, name, broken)
        with pytest.raises(CounterError, match=message):
            meter.measure(world.work(0.01, 100.0), IDLE)
    refuses(nvml, name)
    with pytest.raises(CounterError, match="Not Supported"):
        meter.idle_watts()


def test_a_missing_counter_has_a_reason(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, cpu = install(World(), devices={"GPU-b": 1.0}), torch.device("cpu")

    def reason_for(device: torch.device, tree: Path = tmp_path / "none") -> str:
        monkeypatch.setattr(counting, "POWERCAP", tree)
        meter, reason = open_meter([device])
        assert meter is None
        return reason

    assert "GPU-a" in reason_for(GPU[0])
    refuses(nvml, "nvmlInit")
    assert "Not Supported" in reason_for(GPU[0])
    assert "mps" in reason_for(torch.device("mps"))
    assert "none/intel-rapl:*" in reason_for(cpu)
    tree = powercap(World(), tmp_path / "core", 10**9, {"intel-rapl:0:0": ("core", 1.0)})
    assert f"{tree}/intel-rapl:*" in reason_for(cpu, tree)
    tree = powercap(World(), tmp_path / "broken", 10**9, {"intel-rapl:0": ("package-0", 1.0)})
    (tree / "intel-rapl:0" / "energy_uj").write_text("many\n")
    assert "'many\\n'" in reason_for(cpu, tree)


def powercap(world: World, folder: Path, wrap: int, zones: dict[str, tuple[str, float]]) -> Path:
    """Write Linux's power-zone files, which wrap at `wrap` µJ; `zones` maps folders to names and factors of power."""

    def write() -> None:
        for zone, (_, share) in zones.items():
            microjoules = round(1e6 * share * world.joules()) + wrap - 3_000_000
            (folder / zone / "energy_uj").write_text(f"{microjoules % wrap}\n")

    for zone, (name, _) in zones.items():
        (folder / zone).mkdir(parents=True)
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "max_energy_range_uj").write_text(f"{wrap}\n")
    write()
    world.on_pass.append(write)
    return folder


ZONES = {
    "intel-rapl:0": ("package-0", 1.0),
    "intel-rapl:0:0": ("core", 0.7),
    "intel-rapl:0:1": ("dram", 0.125),
    "intel-rapl:1": ("package-1", 0.5),
    "intel-rapl:2": ("psys", 5.0),
    "intel-rapl-mmio:0": ("package-0", 1.0),
}


def test_packages_and_memory_are_counted_across_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    tree = powercap(world, tmp_path, 200_000_000, ZONES)
    monkeypatch.setattr(counting, "POWERCAP", tree)
    meter, covers = open_meter([torch.device("cpu"), torch.device("meta")])
    assert covers == "processor packages (2) and their memory"
    timed = world.by(meter)
    idle = timed.idle_watts()
    assert idle == pytest.approx(1.625 * IDLE, rel=1e-3)
    energy = timed.measure(world.work(0.1, 96.0), idle)
    assert energy.source == "rapl"
    assert world.joules() > 2 * 200.0, "the counters have wrapped"
    assert energy.joules == pytest.approx(1.625 * 0.1 * 96.0, rel=1e-3)
    assert energy.above_idle == pytest.approx(1.625 * 0.1 * (96.0 - IDLE), rel=1e-2)
    world.on_pass.clear()
    (tree / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(CounterError, match="energy_uj"):
        timed.measure(world.work(0.1, 96.0), idle)


def test_energy_is_per_token(make_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    target, world = wrap_model(make_llama(48)), World()
    forward = target._forward

    def timed(*arguments: Any) -> Any:
        """Run the target's forward, which takes 2 ms at 10 W."""
        world.spend(0.002, 10.0)
        return forward(*arguments)

    timing = Timing(seconds=0.1, discard=0.02, period=0.001, pause=0.0, trials=2)
    meter = EnergyMeter(world.joules, "rapl", "a counter", timing, clock=world.clock, sleep=world.sleep)
    assert meter.idle_watts() == pytest.approx(IDLE)
    monkeypatch.setattr(target, "_forward", timed)
    energy = measure_entry_energy(
        target, Parts(), Entry("plain", "autoregressive"), [[3, 5, 7], [8, 2]], Limits(6), meter, 4.0
    )
    assert energy.seconds == pytest.approx(0.002 * 7 / 6), "seven forwards decode six tokens per prompt"
    assert energy.joules == pytest.approx(10.0 * energy.seconds)
    assert energy.above_idle == pytest.approx(6.0 * energy.seconds)
