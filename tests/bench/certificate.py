"""Measure the detection rate and the false alarms of the certificate, with faults planted in the real code.

    python tests/bench/certificate.py [--quick] [--clean 200] [--start 0]

Each fault of `tests/helpers/planted.yaml` is planted separately, and its method is certified with the small pair and
the default settings. Times are CPU times on one core. Clean runs certify the unchanged methods in turn, each with a
different seed; any verdict other than lossless is a false alarm. `--quick` runs every eighth fault and two clean runs.
The last line of the output is one JSON object.
"""

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from common import finish, parser_of
from draftsmith.decode.evaluation.certify.certify import Plan
from draftsmith.decode.evaluation.certify.stress import make_small_pair, stress_method
from draftsmith.decode.evaluation.measure import Entry
from draftsmith.decode.methods import METHODS, build_method
from draftsmith.decode.warpers import Sampling

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.planted import FAULTS, Fault

LEVEL = 1e-6 / 8  # significance level of `draftsmith certify` with four rows


def find(fault: Fault) -> tuple[str | None, float]:
    """Certify a method with a planted fault; return the first failed verdict (or None) and the CPU seconds."""
    start, entry = time.process_time(), Entry(fault.method, fault.method, fault.options, Sampling(1.0))
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        verdict = next((result.verdict for result in stress_method(entry, Plan(level=LEVEL)) if result.failed), None)
    return verdict, time.process_time() - start


def clean(name: str, seed: int) -> tuple[set[str], float, float]:
    """Certify an unchanged method; return its verdicts, smallest corrected p-value and CPU seconds."""
    start = time.process_time()
    certificates = list(stress_method(Entry(name, name, {}, Sampling(1.0)), Plan(level=LEVEL, seed=seed)))
    tests = [test["p_value"] for certificate in certificates for test in certificate.tests]
    return {certificate.verdict for certificate in certificates}, min(tests) * len(tests), time.process_time() - start


def main() -> None:
    options = parser_of(__doc__, "run every eighth fault and two clean runs", clean=0, start=0).parse_args()
    small_pair = make_small_pair()
    by_kind: dict[str, list[tuple[str | None, float]]] = defaultdict(list)
    for fault in FAULTS[options.start :: 8 if options.quick else 1]:
        verdict, seconds = find(fault)
        by_kind[fault.kind].append((verdict, seconds))
        print(f"{fault.kind:18}{fault.name:44}{fault.method:24}{verdict or 'MISSED':14}{seconds:6.1f} s", flush=True)
    print("\n| class | planted | found | median seconds | maximum |\n|---|---|---|---|---|")
    rows = {}
    for kind, outcomes in by_kind.items():
        seconds = [taken for _, taken in outcomes]
        rows[kind] = {"planted": len(outcomes), "found": sum(verdict is not None for verdict, _ in outcomes)}
        rows[kind] |= {"median_seconds": statistics.median(seconds), "most_seconds": max(seconds)}
        print("| {} | {planted} | {found} | {median_seconds:.1f} | {most_seconds:.1f} |".format(kind, **rows[kind]))
    names = [name for name in METHODS if build_method(name, small_pair.parts, Sampling(1.0)).verifier.lossless]
    alarms, times = 0, []
    for number in range(2 if options.quick else options.clean):
        verdicts, smallest, seconds = clean(names[number % len(names)], 1_000_003 * (1 + number))
        alarms += verdicts != {"lossless"}
        times.append(seconds)
        print(
            f"unchanged: {names[number % len(names)]:24}{', '.join(sorted(verdicts)):12}{smallest:8.2g}{seconds:7.1f} s"
        )
    finish({"faults": rows, "clean_runs": len(times), "false_alarms": alarms, "clean_seconds": sum(times)})


if __name__ == "__main__":
    main()
