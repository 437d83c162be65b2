"""The parts `load` and `lookup` of table.py: a table of ten million entries on the disk, in memory, and asked.

`load`: bytes of the file, seconds until `BigramTable.load` has read and checked it (from the page cache, and with the
file's pages dropped from it), and what the process holds afterwards that the system could not drop.

`lookup`: microseconds of SLiM's look-up of 4 x 10 x 10 pairs for a batch of 8, of a table of one and of ten million
entries: `warm`, the same pairs again; without a name, other pairs every time; `cold`, other pairs, and the processor's
caches overwritten in between. Also one row of the `bigram` drafter's distributions, beside the padded gathering that
devices other than the CPU use, and the greedy draft's look-up.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable
from draftsmith.checkpoints.table.views import SortedKeys

VOCAB = 32_000
SIZES = {"1m": 10**6, "10m": 10**7}
BATCH, LEVELS, WIDTH = 8, 4, 10

LOAD = """
import re, sys, time
from pathlib import Path
from draftsmith.checkpoints.table.table import BigramTable

def megabytes(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

folder = Path(sys.argv[1])
BigramTable.from_documents([], 10)
before, start = megabytes("RssAnon"), time.perf_counter()
table = BigramTable.load(folder)
print(time.perf_counter() - start, megabytes("RssAnon") - before)
"""


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Token ids, low ones more often, as tokenizers number them."""
    return (VOCAB * rng.random(shape, dtype=np.float32) ** 3).astype(np.int64)


def random_table(folder: Path, entries: int) -> Path:
    """The folder of a table of exactly so many entries, which is made once; counts have a long tail."""
    if (folder / str(entries) / TABLE_FILE).is_file():
        return folder / str(entries)
    rng, keys_E = np.random.default_rng(0), np.zeros(0, dtype=np.uint32)
    while len(keys_E) < entries:
        keys_X = (draw(rng, 2 * entries) * VOCAB + draw(rng, 2 * entries)).astype(np.uint32)
        keys_X = np.sort(np.concatenate((keys_E, keys_X)))
        keys_E = keys_X[np.append(True, keys_X[1:] != keys_X[:-1])]
    keep_E = np.ones(len(keys_E), dtype=bool)
    keep_E[rng.choice(len(keys_E), len(keys_E) - entries, replace=False)] = False
    counts_E = rng.zipf(1.6, entries).clip(max=10**6)
    unigram_V = np.bincount(keys_E[keep_E] // VOCAB, counts_E, VOCAB).astype(np.int64)
    write_table(folder / str(entries) / TABLE_FILE, VOCAB, [(keys_E[keep_E], counts_E)], unigram_V)
    return folder / str(entries)


def load(folder: Path, quick: bool) -> dict[str, Any]:
    """Loading ten million entries, each time in a process of its own."""
    place = random_table(folder, SIZES["10m"])
    file = place / TABLE_FILE
    found: dict[str, list[tuple[float, float]]] = {"load_sec": [], "load_disk_sec": []}
    for _ in range(3 if quick else 7):
        for name, series in found.items():
            if name == "load_disk_sec":
                _drop(file)
            output = subprocess.run([sys.executable, "-c", LOAD, str(place)], capture_output=True, check=True)
            seconds, megabytes = map(float, output.stdout.split())
            series.append((seconds, megabytes))
    results: dict[str, Any] = {"bytes_10m_entries": file.stat().st_size}
    results |= {name: round(statistics.median(sec for sec, _ in series), 4) for name, series in found.items()}
    results["load_held_mb"] = round(max(held for series in found.values() for _, held in series), 1)
    print(f"ten million entries: {results['bytes_10m_entries'] / 1e6:.1f} MB on the disk")
    print(f"  loaded and checked in {results['load_sec']:.3f} s, from the disk in {results['load_disk_sec']:.3f} s")
    print(f"  the process holds {results['load_held_mb']:.1f} MB more; the rest is the file, mapped")
    return results


def lookup(folder: Path, quick: bool) -> dict[str, Any]:
    """SLiM's look-ups and the drafter's distributions, of a table that was loaded from its file."""
    results: dict[str, Any] = {}
    for name, entries in SIZES.items():
        table = BigramTable.load(random_table(folder, entries))
        with torch.inference_mode():
            found = _lookups(table, 50 if quick else 400)
        print(
            f"{name} entries, {BATCH * LEVELS * WIDTH**2} pairs: " + ", ".join(f"{k} {v:g}" for k, v in found.items())
        )
        results |= {f"{key}_{name}_entries": value for key, value in found.items()}
    return results


def _lookups(table: BigramTable, runs: int) -> dict[str, float]:
    rng, log_unseen = np.random.default_rng(1), torch.tensor(-4.6)
    pairs = [_candidates(rng) for _ in range(64)]
    start = time.perf_counter()
    found = table.correlation()
    built = time.perf_counter() - start
    smoothed = table.correlation("kneser-ney")
    rows = [torch.from_numpy(draw(rng, 1, 1)) for _ in range(64)]
    after = table.distributions("cpu", 1.0)
    after.most_likely(rows[0])

    def padded(x_X: torch.Tensor) -> None:
        after._add_padded(torch.outer(after._base_V[x_X.flatten()], after._spread_V), x_X.flatten())

    keys = SortedKeys(table, torch.device("cpu"))
    jobs: dict[str, tuple[Callable[..., Any], Sequence[Any], bool]] = {
        "lookup_warm_us": (lambda x, y: found.look_up(x, y, log_unseen), pairs[:1], False),
        "lookup_us": (lambda x, y: found.look_up(x, y, log_unseen), pairs, False),
        "lookup_cold_us": (lambda x, y: found.look_up(x, y, log_unseen), pairs, True),
        "lookup_smoothed_us": (lambda x, y: smoothed.look_up(x, y, log_unseen), pairs, False),
        "next_us": (after.after, [(row,) for row in rows], False),
        "next_padded_us": (padded, [(row,) for row in rows], False),
        "next_greedy_us": (after.most_likely, [(row,) for row in rows], False),
    }
    results = {name: round(_microseconds(*job, runs), 1) for name, job in jobs.items()}
    results["lookup_build_sec"] = round(built, 3)
    results["lookup_mb"] = round((keys._keys_E.nbytes + found._log_r_E.nbytes) / 1e6, 1)
    return results


def _candidates(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of a step as SLiM asks for them: before [B, K, 1, C], candidates [B, K, C, 1]."""
    candidates_BKC = torch.from_numpy(draw(rng, BATCH, LEVELS, WIDTH))
    root_B11 = torch.from_numpy(draw(rng, BATCH, 1, 1))
    before_BKC = torch.cat((root_B11.expand(-1, 1, WIDTH), candidates_BKC[:, :-1]), 1)
    return before_BKC[:, :, None], candidates_BKC[..., None]


def _microseconds(job: Callable[..., Any], inputs: Sequence[Any], cold: bool, runs: int) -> float:
    """The median call."""
    caches = torch.zeros(1 << 24)
    series = []
    for number in range(runs):
        if cold:
            caches.add_(1)
        start = time.perf_counter()
        job(*inputs[number % len(inputs)])
        series.append(1e6 * (time.perf_counter() - start))
    return statistics.median(series)


def _drop(file: Path) -> None:
    """Take a file's pages out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
