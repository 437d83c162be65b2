"""Measure bigram tables: speed and memory of counting, and the latency of loading and of lookups.

    python tests/bench/table.py [--quick] [--parts count zipf load lookup text]

`count`: a `PairCounter` counts a stream from memory that follows Zipf's law (exponent 1), for three vocabularies, in
documents of 1,000 and of 20 tokens; millions of tokens per second, best of three. `count_mtok_per_sec` covers the time
from the first `add` to the last run on disk for 32,000 tokens and documents of 1,000. `with_table` also covers the
merge to the finished file. `by_cpu` divides by half the processor time, for two threads.

`zipf`: 10 million, 100 million and one billion tokens (not with `--quick`) are counted into a finished file, each in a
separate process. The results are the seconds and the peak resident size (`peak_mb`).

`load`: bytes of a file with ten million entries, seconds until `BigramTable.load` has read and checked it (with and
without its pages in the page cache), and the memory that the process then holds apart from mapped files.

`lookup`: microseconds of SLiM's lookup of 4 x 10 x 10 pairs at batch size 8, in tables of one and of ten million
entries. `warm` repeats the same pairs, the unnamed value uses other pairs each time, and `cold` also overwrites the
processor's caches in between. `next` and `next_greedy` are the lookups of the `bigram` drafter for one row.

`text_vs_tokenizer`: tokens per second of the whole recipe from the file of conversations to the artifact, over those of
the fastest tokenizer for the vocabulary on all cores with all messages in memory; interleaved, median of the ratios.
The recipe also counts the template's tokens, so `text_time_vs_tokenizer` divides only the times, as
`prepare_vs_tokenizer` of data.py does, and `text_cpu_vs_tokenizer` the processor times. The last line is one JSON
object.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import against_tokenizers, finish, own_process, parser_of, processor_seconds
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.table import TABLE_FILE, BigramTable
from draftsmith.data.conversations import write_conversations
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.table.count import run_table
from draftsmith.recipes.commands.training.train import accelerator_for
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.run_files import merge_counts

from data import defaults, raw_tokenizers, repeated

VOCABULARIES = (32_000, 128_256, 151_936)
LENGTHS = (1000, 20)
BATCH = 1 << 20
THREADS = 2
VOCAB = 32_000
SIZES = {"1m": 10**6, "10m": 10**7}
ROWS, LEVELS, WIDTH = 8, 4, 10


def zipf_tokens(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """Return independent tokens, int32 [size]; the token of rank k has a probability proportional to 1 / k."""
    cumulated_V = np.cumsum(1 / np.arange(1, vocab_size + 1))
    id_of_rank_V = np.random.default_rng(0).permutation(vocab_size).astype(np.int32)
    drawn_T = np.random.default_rng(seed).random(size) * cumulated_V[-1]
    return id_of_rank_V[np.searchsorted(cumulated_V, drawn_T)]


def count(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure the speed of counting bigrams of tokens in memory, by vocabulary size and document length."""
    batches = 48 if quick else 256
    result: dict[str, Any] = {}
    for vocab_size in VOCABULARIES:
        stream = zipf_tokens(vocab_size, batches * BATCH, seed=1).reshape(batches, BATCH)
        for length in LENGTHS:
            starts = np.arange(0, BATCH, length)
            runs = [_counted_once(folder, vocab_size, stream, starts) for _ in range(1 if quick else 3)]
            best = {name: max(run[name] for run in runs) for name in runs[0]}
            name = f"{vocab_size}, documents of {length}"
            result[name] = best
            print(f"count {name:28s} " + "   ".join(f"{key} {value:6.1f}" for key, value in best.items()), flush=True)
    return {"count": result, "count_mtok_per_sec": result["32000, documents of 1000"]["counted"]}


def _counted_once(folder: Path, vocab_size: int, stream: np.ndarray, starts: np.ndarray) -> dict[str, float]:
    """Count a stream once; return millions of tokens per second with and without the final merge."""
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


def zipf(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure the time and memory of counting bigrams, for several numbers of tokens."""
    points = []
    for tokens in (10**7, 10**8, *(() if quick else (10**9,))):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            points.append({"tokens": tokens} | own_process("children.count_zipf", name, tokens))
        print("zipf " + "   ".join(f"{key} {value:,.6g}" for key, value in points[-1].items()), flush=True)
    return {"zipf": points, "peak_mb": points[-1]["peak_mb"]}


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random token ids; low ids are more frequent, as in real tokenizers."""
    return (VOCAB * rng.random(shape, dtype=np.float32) ** 3).astype(np.int64)


def random_table(folder: Path, entries: int) -> Path:
    """Write a table with exactly `entries` entries and long-tailed counts; return its folder."""
    rng, keys_E = np.random.default_rng(0), np.zeros(0, dtype=np.uint32)
    while len(keys_E) < entries:
        keys_X = (draw(rng, 2 * entries) * VOCAB + draw(rng, 2 * entries)).astype(np.uint32)
        keys_E = np.unique(np.concatenate((keys_E, keys_X)))
    keys_E = np.delete(keys_E, rng.choice(len(keys_E), len(keys_E) - entries, replace=False))
    counts_E = rng.zipf(1.6, entries).clip(max=10**6)
    unigram_V = np.bincount(keys_E // VOCAB, counts_E, VOCAB).astype(np.int64)
    write_table(folder / str(entries) / TABLE_FILE, VOCAB, [(keys_E, counts_E)], unigram_V)
    return folder / str(entries)


def load(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure loading a table of ten million entries, each time in a separate process."""
    path = random_table(folder, SIZES["10m"])
    times: dict[str, list[tuple[float, float]]] = {"load_sec": [], "load_disk_sec": []}
    for _ in range(3 if quick else 7):
        for name, series in times.items():
            if name == "load_disk_sec":
                _drop(path / TABLE_FILE)
            series.append(own_process("children.load_table", str(path)))
    results: dict[str, Any] = {"bytes_10m_entries": (path / TABLE_FILE).stat().st_size}
    results |= {name: round(statistics.median(sec for sec, _ in series), 4) for name, series in times.items()}
    results["load_held_mb"] = round(max(memory_mb for series in times.values() for _, memory_mb in series), 1)
    print("ten million entries: " + "   ".join(f"{key} {value:,}" for key, value in results.items()))
    return results


def _drop(file: Path) -> None:
    """Remove a file's pages from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def lookup(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure SLiM's lookups and the bigram drafter's distributions."""
    results: dict[str, Any] = {}
    for name, entries in SIZES.items():
        table = BigramTable.load(random_table(folder, entries))
        with torch.inference_mode():
            times = _lookups(table, 50 if quick else 400)
        print(f"{name} entries, {ROWS * LEVELS * WIDTH**2} pairs: " + ", ".join(f"{k} {v:g}" for k, v in times.items()))
        results |= {f"{key}_{name}_entries": value for key, value in times.items()}
    return results


def _lookups(table: BigramTable, runs: int) -> dict[str, float]:
    rng, log_unseen = np.random.default_rng(1), torch.tensor(-4.6)
    pairs = [_candidates(rng) for _ in range(64)]
    start = time.perf_counter()
    correlation = table.correlation()
    built = time.perf_counter() - start
    smoothed = table.correlation(add_k=0.01)
    rows = [(torch.from_numpy(draw(rng, 1, 1)),) for _ in range(64)]
    after = table.distributions("cpu", 1.0)
    after.most_likely(*rows[0])
    jobs: dict[str, tuple[Callable[..., Any], Sequence[Any], bool]] = {
        "lookup_warm_us": (lambda x, y: correlation.look_up(x, y, log_unseen), pairs[:1], False),
        "lookup_us": (lambda x, y: correlation.look_up(x, y, log_unseen), pairs, False),
        "lookup_cold_us": (lambda x, y: correlation.look_up(x, y, log_unseen), pairs, True),
        "lookup_smoothed_us": (lambda x, y: smoothed.look_up(x, y, log_unseen), pairs, False),
        "next_us": (after.after, rows, False),
        "next_greedy_us": (after.most_likely, rows, False),
    }
    results = {name: round(_microseconds(*job, runs), 1) for name, job in jobs.items()}
    return results | {"lookup_build_sec": round(built, 3)}


def _candidates(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token pairs that SLiM looks up in a step: previous tokens [B, K, 1, C] and candidates [B, K, C, 1]."""
    candidates_BKC = torch.from_numpy(draw(rng, ROWS, LEVELS, WIDTH))
    root_B11 = torch.from_numpy(draw(rng, ROWS, 1, 1))
    before_BKC = torch.cat((root_B11.expand(-1, 1, WIDTH), candidates_BKC[:, :-1]), 1)
    return before_BKC[:, :, None], candidates_BKC[..., None]


def _microseconds(job: Callable[..., Any], inputs: Sequence[Any], cold: bool, runs: int) -> float:
    caches, series = torch.zeros(1 << 24), []
    for number in range(runs):
        if cold:
            caches.add_(1)
        start = time.perf_counter()
        job(*inputs[number % len(inputs)])
        series.append(1e6 * (time.perf_counter() - start))
    return statistics.median(series)


def text(folder: Path, quick: bool) -> dict[str, Any]:
    """Compare the speed of counting a table from text with the speed of tokenisation only."""
    corpus, tokenizer_folder = defaults(folder)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    file = folder / "repeated.jsonl"
    write_conversations(repeated(corpus, 4 if quick else 24), file)
    texts = [turn.text for chat in read_conversations(str(file)) for turn in chat.turns]
    # held-out conversations are not counted, so almost none are held out
    data = {"source": str(file), "heldout_share": 1e-9, "cache": str(folder / "cache")}
    numbers = iter(range(1_000_000))

    def count() -> int:
        out = folder / f"table-{next(numbers)}"
        recipe = TableRecipe(kind="table", out=str(out), tokenizer=str(tokenizer_folder), data=data)
        run_table(recipe, accelerator_for(recipe))
        return int(load_manifest(out).data["tokens"])

    tokenizers = raw_tokenizers(tokenizer, tokenizer_folder, texts)
    fastest, ratios, rates = against_tokenizers(tokenizers, "count", count, 2 if quick else 9)
    print(f"text_vs_tokenizer {ratios['rate']:.2f}")
    return {
        "text_vs_tokenizer": ratios["rate"],
        "text_time_vs_tokenizer": ratios["time"],
        "text_cpu_vs_tokenizer": ratios["cpu"],
        "text_fastest_tokenizer": fastest,
        "text_mtok_per_sec": rates,
    }


def main() -> None:
    parts = {"count": count, "zipf": zipf, "load": load, "lookup": lookup, "text": text}
    parser = parser_of(__doc__, "take a few minutes; skip the billion tokens")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="default: all")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as name:
            result |= parts[part](Path(name), arguments.quick)
    finish(result)


if __name__ == "__main__":
    main()
