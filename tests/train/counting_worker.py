"""Counts random documents into a folder, from wherever it stands; a test kills it and starts it again.

SIGINT and SIGTERM make it spill and end.

python counting_worker.py FOLDER VOCABULARY DOCUMENTS MEMORY_MB PROCESSES
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
from draftsmith.train.table.counting import PairCounter

BATCH = 16


def document(number: int, vocab_size: int) -> np.ndarray:
    """Tokens of the document of this number, the same in each process."""
    rng = np.random.default_rng(number)
    return (rng.zipf(1.5, size=int(rng.integers(0, 200))) % vocab_size).astype(np.int32)


def main(folder: Path, vocab_size: int, documents: int, memory_mb: float, processes: bool) -> None:
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    with PairCounter(vocab_size, folder, memory_mb, processes=processes) as counter:
        print("from", 0 if counter.place is None else counter.place["document"], flush=True)
        while not stop and (at := 0 if counter.place is None else counter.place["document"]) < documents:
            batch = [document(number, vocab_size) for number in range(at, min(at + BATCH, documents))]
            starts = np.cumsum([0, *map(len, batch)])[:-1]
            counter.add(np.concatenate(batch), starts, {"document": at + len(batch)})
            print(at, flush=True)
        counter.spill()
        print("stopped" if stop else "done", counter.place["document"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "1")
