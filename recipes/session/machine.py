"""`draftsmith doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...decode.evaluation.energy import open_meter

CORE = ("torch", "transformers", "safetensors", "scipy", "numpy", "pydantic", "typer", "rich")
OPTIONAL = {
    "accelerate": ("train", "training recipes"),
    "peft": ("train", "LoRA"),
    "datasets": ("train", "hub data sets"),
    "pyarrow": ("train", "parquet files"),
    "sentencepiece": ("train", "LLaMA's tokenizer files"),
    "google.protobuf": ("train", "LLaMA's tokenizer files"),
    "markdownify": ("clean", "HTML in conversations"),
    "py3langid": ("clean", "languages of conversations"),
    "openai": ("regenerate", "answers from a server"),
    "deepspeed": ("deepspeed", "ZeRO"),
    "bitsandbytes": ("cuda", "teachers in 8 bits"),
    "liger_kernel": ("cuda", "Liger's kernels"),
    "pynvml": ("cuda", "the energy of GPUs"),
    "tensorboard": ("track", "logs in tensorboard"),
    "matplotlib": ("report", "plots"),
}
_DISTRIBUTIONS = {"google.protobuf": "protobuf", "liger_kernel": "liger-kernel", "pynvml": "nvidia-ml-py"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    advice: str = ""


def findings() -> list[Finding]:
    """Versions, devices, number formats and missing parts of this machine."""
    rows = [
        Finding("draftsmith", _version("draftsmith") or "not installed"),
        Finding("python", platform.python_version()),
    ]
    rows += [Finding(name, _version(name) or "missing") for name in CORE]
    for name, (extra, purpose) in OPTIONAL.items():
        found = _version(_DISTRIBUTIONS.get(name, name)) if _present(name) else None
        advice = "" if found else f"for {purpose}: pip install 'draftsmith[{extra}]'"
        rows.append(Finding(name, found or "missing", advice))
    memory = _memory()
    rows.append(Finding("processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory}"))
    rows.append(Finding("cpu number formats", ", ".join(_formats("cpu"))))
    if torch.cuda.is_available():
        for place in range(torch.cuda.device_count()):
            free, whole = torch.cuda.mem_get_info(place)
            name = torch.cuda.get_device_name(place)
            rows.append(Finding(f"cuda:{place}", f"{name}, {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"))
        rows.append(Finding("cuda number formats", ", ".join(_formats("cuda"))))
    else:
        rows.append(Finding("cuda", "no device", "models decode and train on the processor"))
    gpus = [torch.device("cuda", place) for place in range(torch.cuda.device_count())]
    meter, covers = open_meter(gpus or [torch.device("cpu")])
    with meter or nullcontext():  # what was opened is let go of: NVML, and threads that sample
        rows.append(Finding("energy", covers if meter else "not counted", "" if meter else covers))
    return rows


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _present(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _formats(device: str) -> list[str]:
    """Floating-point types in which a small product works here."""
    works = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one: Any = torch.ones(2, 2, dtype=dtype, device=device)
        try:
            _ = one @ one
        except RuntimeError:
            continue
        works.append(str(dtype).removeprefix("torch."))
    return works


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "memory unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB of memory"


def machine(device: str) -> dict[str, Any]:
    """Hardware and library versions that numbers were measured with."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu_name()
    versions = {}
    for package in ("draftsmith", "torch", "transformers", "accelerate", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    threads = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": device, "name": name, **threads, "python": platform.python_version(), "versions": versions}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
