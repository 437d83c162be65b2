"""Counts random documents into a folder, from wherever it stands; a test kills it and starts it again.

python counting_worker.py FOLDER VOCABULARY DOCUMENTS MEMORY_MB
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from draftsmith.train.table.counting import PairCounter

BATCH = 16


def document(number: int, vocab_size: int) -> np.ndarray:
    """Tokens of the document of this number, the same in each process."""
    rng = np.random.default_rng(number)
    return (rng.zipf(1.5, size=int(rng.integers(0, 200))) % vocab_size).astype(np.int32)


def main(folder: Path, vocab_size: int, documents: int, memory_mb: float) -> None:
    with PairCounter(vocab_size, folder, memory_mb) as counter:
        first = 0 if counter.position is None else counter.position["document"]
        print("from", first, flush=True)
        for at in range(first, documents, BATCH):
            batch = [document(number, vocab_size) for number in range(at, min(at + BATCH, documents))]
            starts = np.cumsum([0, *map(len, batch)])[:-1]
            counter.add(np.concatenate(batch), starts, {"document": at + len(batch)})
            print(at, flush=True)
        counter.spill()
        print("done", counter.position["document"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
