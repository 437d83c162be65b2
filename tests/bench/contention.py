"""Measure the throughput of training and decoding next to busy processes, for several OpenMP settings.

    python tests/bench/contention.py [--pair runs/quickstart] [--rounds 3] [--busy 1]

Measures tokens per second of training steps and of greedy decoding with all threads, without other load and next to
`--busy` busy processes. Each measurement runs in a separate process, and the settings are interleaved. Prints medians
and their ratio to the speed of the default setting without load. The last line of the output is one JSON object.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import finish, parser_of

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "spin 100": {"GOMP_SPINCOUNT": "100"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "by idle cores": {},  # the thread count that the command line chooses
}
CHILD = """
import sys, time
if "by idle cores" in sys.argv:
    sys.argv[1:1] = ["evaluate"]
    from draftsmith.recipes.session.threads import choose_threads
    choose_threads()
    del sys.argv[1]
from pathlib import Path
import torch
from pair import Pair
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import build_method
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
pair = Pair(Path(sys.argv[1]), 4)
model, greedy = pair.target_model, Sampling(0.0)
method = build_method("autoregressive", pair.parts, greedy)
rates = []
for number in range(2):
    start, count = time.perf_counter(), 0
    for prompt in pair.prompts:
        rng = Rng.for_rows(0, 1, pair.target.device)
        count += len(decode_texts(pair.target, *method, [prompt], Limits(48), greedy, rng)[0])
    decoding = count / (time.perf_counter() - start)
    ids = torch.randint(0, 1000, (4, 256))
    start = time.perf_counter()
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
    training = 4 * ids.numel() / (time.perf_counter() - start)
print(decoding, training)
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes during the context."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    options = parser_of(__doc__, "measure one round", pair=True, rounds=3, busy=1).parse_args()
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    rates: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(1 if options.quick else options.rounds):
        for busy_count in (0, options.busy):
            with busy(busy_count):
                for name, setting in SETTINGS.items():
                    command = [sys.executable, "-c", CHILD, str(options.pair.resolve()), name]
                    settings: dict[str, Any] = {"cwd": Path(__file__).parent, "env": free | setting}
                    output = subprocess.check_output(command, text=True, **settings)
                    measured = tuple(map(float, output.splitlines()[-1].split()))
                    rates.setdefault(f"{name}, {busy_count} busy", []).append(measured)
    results = {}
    reference = [statistics.median(column) for column in zip(*rates["default, 0 busy"], strict=True)]
    for name, series in rates.items():
        decoding, training = (statistics.median(column) for column in zip(*series, strict=True))
        results[name] = {"decoding": decoding, "training": training}
        shares = f"{decoding / reference[0]:6.1%} {training / reference[1]:6.1%}"
        print(f"{name:22} {decoding:8.0f} {training:8.0f} tokens/s   {shares}")
    finish({"tokens_per_sec": results})


if __name__ == "__main__":
    main()
