"""Tables: how fast pairs are counted, in what memory, and what a finished table costs to load and to ask.

    python tests/bench/table.py [--quick] [--parts count zipf load lookup text ranks]

`count`: a `PairCounter` is fed a stream of Zipf's law (exponent 1) from memory, at three vocabularies, in documents of
1,000 and of 20 tokens; millions of tokens a second, the best of three. `count_mtok_per_sec`: from the first `add` to
the last run on the disk, at 32,000 tokens and documents of 1,000; `with_table` goes on to the finished file; `by_cpu`:
tokens by processor time, doubled; `sort_only`: the same keys sorted by numpy in as many threads.

`zipf`: 10 million, 100 million and a billion tokens (not with --quick), each to a finished file in a process of its
own: seconds, and `peak_mb`, its largest resident size.

`load`, `lookup`, `text`, `ranks`: see table_parts.py, table_text.py, table_ranks.py. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parser_of, processor_seconds
from draftsmith.checkpoints.table.runs import key_dtype, write_keys
from draftsmith.recipes.session.restart import restart_where_sorting_is_slow
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.run_files import merge_counts
from table_parts import load, lookup
from table_ranks import ranks
from table_text import text

PARTS = ("count", "zipf", "load", "lookup", "text", "ranks")
VOCABULARIES = (32_000, 128_256, 151_936)
LENGTHS = (1000, 20)
BATCH = 1 << 20
THREADS = 2


def zipf_tokens(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """int32 [size]: independent tokens; that of rank k has a probability proportional to 1 / k."""
    cumulated_V = np.cumsum(1 / np.arange(1, vocab_size + 1))
    id_of_rank_V = np.random.default_rng(0).permutation(vocab_size).astype(np.int32)
    drawn_T = np.random.default_rng(seed).random(size) * cumulated_V[-1]
    return id_of_rank_V[np.searchsorted(cumulated_V, drawn_T)]


def count(folder: Path, quick: bool) -> dict[str, Any]:
    """Counting from memory, by vocabulary and length of documents."""
    batches = 48 if quick else 256
    result: dict[str, Any] = {}
    for vocab_size in VOCABULARIES:
        stream = zipf_tokens(vocab_size, batches * BATCH, seed=1).reshape(batches, BATCH)
        for length in LENGTHS:
            starts = np.arange(0, BATCH, length)
            found = [_counted_once(folder, vocab_size, stream, starts) for _ in range(1 if quick else 3)]
            best = {name: max(run[name] for run in found) for name in found[0]}
            name = f"{vocab_size}, documents of {length}"
            result[name] = best
            print(f"count {name:28s} " + "   ".join(f"{key} {value:6.1f}" for key, value in best.items()), flush=True)
        result[f"{vocab_size}, sort_only"] = _sort_only(vocab_size, stream)
        print(f"count {vocab_size}, sort_only {result[f'{vocab_size}, sort_only']:.1f} M keys/s", flush=True)
    return {"count": result, "count_mtok_per_sec": result["32000, documents of 1000"]["counted"]}


def _counted_once(folder: Path, vocab_size: int, stream: np.ndarray, starts: np.ndarray) -> dict[str, float]:
    """Millions of tokens a second."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        start, used = time.perf_counter(), processor_seconds()
        with PairCounter(vocab_size, Path(name) / "runs", threads=THREADS) as counter:
            for number, tokens_T in enumerate(stream):
                counter.add(tokens_T, starts, number)
            counter.spill()
            done = time.perf_counter()
        used = processor_seconds() - used
        merge_counts([Path(name) / "runs"], vocab_size, Path(name) / "table")
        seconds = {"counted": done - start, "with_table": time.perf_counter() - start, "by_cpu": used / THREADS}
    return {key: stream.size / value / 1e6 for key, value in seconds.items()}


def _sort_only(vocab_size: int, stream: np.ndarray) -> float:
    """Millions of keys a second, sorted here in chunks by as many threads."""
    chunks = [np.empty(4 * BATCH - 1, key_dtype(vocab_size)) for _ in range(2 * THREADS)]
    for number, chunk in enumerate(chunks):
        write_keys(stream[4 * number : 4 * number + 4].reshape(-1), vocab_size, chunk)
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(np.ndarray.sort, chunks))
    return sum(map(len, chunks)) / (time.perf_counter() - start) / 1e6


def zipf(folder: Path, quick: bool) -> dict[str, Any]:
    """Time and memory against the number of tokens."""
    points = []
    for tokens in (10**7, 10**8, *(() if quick else (10**9,))):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            command = [sys.executable, "-c", CHILD, name, str(tokens), str(Path(__file__).parent)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        points.append({"tokens": tokens} | json.loads(done.stdout.splitlines()[-1]))
        shown = "   ".join(f"{key} {value:,.6g}" for key, value in points[-1].items())
        print(f"zipf {shown}", flush=True)
    return {"zipf": points, "peak_mb": points[-1]["peak_mb"]}


# run by `zipf` in a process of its own, which loads no more than counting needs; the stream is drawn by a small table
# of ranks, since drawing exactly takes far longer than counting
CHILD = """
import json, sys, time
from pathlib import Path
import numpy as np
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.run_files import merge_counts
VOCAB, BATCH, LENGTH = 32000, 1 << 20, 1000
folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1e3
cumulated = np.cumsum(1 / np.arange(1, VOCAB + 1))
drawn = np.searchsorted(cumulated, (np.arange(1 << 22) + 0.5) / (1 << 22) * cumulated[-1])
table = np.random.default_rng(0).permutation(VOCAB).astype(np.int32)[drawn]
rng = np.random.default_rng(1)
start, making = time.perf_counter(), 0.0
with PairCounter(VOCAB, folder / "runs") as counter:
    for first in range(0, tokens, BATCH):
        begin = time.perf_counter()
        size = min(BATCH, tokens - first)
        batch = table[rng.integers(0, 1 << 22, size, dtype=np.uint32)]
        making += time.perf_counter() - begin
        counter.add(batch, np.arange(0, size, LENGTH), first)
    counter.spill()
    spilled = counter.spilled_bytes
counting = time.perf_counter() - start
merge_counts([folder / "runs"], VOCAB, folder / "table")
whole = time.perf_counter() - start
print(json.dumps({
    "peak_mb": peak(), "sec": whole, "making_sec": making,
    "counting_sec": counting - making, "merging_sec": whole - counting, "ns_per_token": (whole - making) / tokens * 1e9,
    "spilled_mb": spilled / 1e6, "file_mb": (folder / "table").stat().st_size / 1e6,
}))
"""


def main() -> None:
    restart_where_sorting_is_slow()  # as `draftsmith train` does
    parser = parser_of(__doc__, "some minutes; leaves out the billion tokens")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    ways = {"count": count, "zipf": zipf, "load": load, "lookup": lookup, "text": text, "ranks": ranks}
    result: dict[str, Any] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as name:
            result |= ways[part](Path(name), arguments.quick)
    finish(result)


if __name__ == "__main__":
    main()
