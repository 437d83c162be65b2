"""`draftsmith doctor` without arguments: report on the hardware and the installed packages of this machine."""

import os
import platform
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

from ... import __version__
from ...checkpoints.storage.messages import install_hint


class Finding(NamedTuple):
    """Line of the report on this machine."""

    name: str
    state: str
    advice: str = ""


def findings() -> list[Finding]:
    """Return the package versions, missing packages, devices and supported data types of this machine."""
    from ...decode.evaluation.energy import open_meter

    rows = [Finding("draftsmith", __version__), Finding("python", platform.python_version())]
    for name, extra in _packages().items():
        version = version_of(name)
        rows.append(Finding(name, version or "missing", "" if version else install_hint(extra)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    processor = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.1f} GiB of memory"
    rows += [Finding("processor", processor), _load(), Finding("cpu number formats", _formats("cpu"))]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for gpu in gpus:
        free, whole = torch.cuda.mem_get_info(gpu)
        name = torch.cuda.get_device_name(gpu)
        rows.append(Finding(str(gpu), f"{name}, {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"))
        rows.append(Finding(f"{gpu} number formats", _formats(str(gpu))))
    if not gpus:
        rows.append(Finding("cuda", "no device", "models run on the CPU"))
    meter, covers = open_meter(gpus or [torch.device("cpu")])
    with meter or nullcontext():  # closes NVML and the sampling threads
        rows.append(Finding("energy", covers if meter else "not measured", "" if meter else covers))
    return rows


def _load() -> Finding:
    """Return the CPU load of the last minute, with advice if other processes slow down measurements."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    advice = "other processes slow down every step: wait for them, or set OMP_NUM_THREADS=1" if load > cores / 2 else ""
    return Finding("load (last minute)", f"{load:.1f} of {cores} cores", advice)


def has_bfloat16(on_cpu: bool = False) -> bool:
    """Return whether the GPU, or the CPU if there is no GPU or `on_cpu` is True, supports bfloat16 natively."""
    if torch.cuda.is_available() and not on_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.12
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _packages() -> dict[str, str]:
    """Return a mapping from dependencies to the extras that install them (empty if draftsmith is not installed)."""
    versions: dict[str, str] = {}
    with suppress(PackageNotFoundError):
        extras = [extra for extra in metadata("draftsmith").get_all("Provides-Extra") or () if extra != "test"]
        for needed in map(Requirement, requires("draftsmith") or ()):
            for extra in ("", *extras):
                if needed.name != "draftsmith" and (needed.marker is None or needed.marker.evaluate({"extra": extra})):
                    versions.setdefault(needed.name, extra)
    return versions


def version_of(name: str) -> str | None:
    """Return the version of a package, or None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _formats(device: str) -> str:
    """Return the floating-point data types in which a device can multiply matrices, separated by commas."""
    works = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with suppress(RuntimeError):
            torch.ones(2, 2, dtype=dtype, device=device).mm(torch.ones(2, 2, dtype=dtype, device=device))
            slow = dtype == torch.bfloat16 and device == "cpu" and not has_bfloat16(on_cpu=True)
            works.append(str(dtype).removeprefix("torch.") + " (emulated)" * slow)
    return ", ".join(works)


def machine(device: str) -> dict[str, Any]:
    """Describe the hardware and the library versions, which are stored with all measurements."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu_name()
    packages = ("draftsmith", "torch", "transformers", "accelerate", "deepspeed")
    versions = {package: version for package in packages if (version := version_of(package)) is not None}
    threads = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": device, "name": name, **threads, "python": platform.python_version(), "versions": versions}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
