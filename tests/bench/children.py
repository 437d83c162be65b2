"""Functions that benchmarks run in separate processes (`common.own_process`), each with only the imports it needs."""

import time
from pathlib import Path
from typing import Any


def kilobytes(name: str) -> int:
    """Return the field `name` of `/proc/self/status` in kB; `ru_maxrss` would include the parent's peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def prepare_limited(megabytes: int, corpus: str, tokenizer_folder: str, out: str) -> dict[str, Any]:
    """Prepare a corpus with limited memory; return the memory peaks in MB and the size of the prepared data."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 1_000_000, megabytes * 1_000_000))
    from draftsmith.data.blocks.prepared import prepare
    from draftsmith.data.rendering.templates import get_template
    from draftsmith.data.sources.reading import read_conversations
    from draftsmith.data.tokenizers import load_tokenizer

    tokenizer, template = load_tokenizer(tokenizer_folder), get_template("vicuna-v1.1")
    before = kilobytes("VmHWM")
    data = prepare(read_conversations(corpus), tokenizer, template, 2048, Path(out), source={})
    numbers = {key: data.manifest[key] for key in ("rows", "tokens", "packing_density")}
    return {"peak_mb": kilobytes("VmHWM") / 1e3, "before_mb": before / 1e3} | numbers


def count_zipf(name: str, tokens: int) -> dict[str, float]:
    """Count the bigrams of Zipf-distributed tokens and write the table; return times and peak memory.

    The tokens are drawn from a precomputed table, because exact sampling takes far longer than counting.
    """
    import numpy as np
    from draftsmith.train.table.counting import PairCounter
    from draftsmith.train.table.run_files import merge_counts

    vocab, batch, length, folder = 32000, 1 << 20, 1000, Path(name)
    cumulated = np.cumsum(1 / np.arange(1, vocab + 1))
    ranks = np.searchsorted(cumulated, (np.arange(1 << 22) + 0.5) / (1 << 22) * cumulated[-1])
    table, rng = np.random.default_rng(0).permutation(vocab).astype(np.int32)[ranks], np.random.default_rng(1)
    start, drawing = time.perf_counter(), 0.0
    with PairCounter(vocab, folder / "runs") as counter:
        for first in range(0, tokens, batch):
            begin = time.perf_counter()
            size = min(batch, tokens - first)
            ids = table[rng.integers(0, 1 << 22, size, dtype=np.uint32)]
            drawing += time.perf_counter() - begin
            counter.add(ids, np.arange(0, size, length), first)
        counter.spill()
    counting = time.perf_counter() - start
    merge_counts([folder / "runs"], vocab, folder / "table")
    total = time.perf_counter() - start
    return {
        "peak_mb": kilobytes("VmHWM") / 1e3, "sec": total, "making_sec": drawing, "counting_sec": counting - drawing,
        "merging_sec": total - counting, "ns_per_token": (total - drawing) / tokens * 1e9,
        "file_mb": (folder / "table").stat().st_size / 1e6,
    }  # fmt: skip


def load_table(name: str) -> tuple[float, float]:
    """Return the seconds to load and check a table, and its memory in MB without memory-mapped files."""
    from draftsmith.checkpoints.table.table import BigramTable

    BigramTable.from_documents([], 10)
    before, start = kilobytes("RssAnon"), time.perf_counter()
    table = BigramTable.load(Path(name))
    seconds = time.perf_counter() - start
    memory_mb = (kilobytes("RssAnon") - before) / 1e3
    del table
    return seconds, memory_mb
