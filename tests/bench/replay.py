"""Replay against decoding, and tuning against an exhaustive sweep, on a trained pair.

    python tests/bench/replay.py [--quick] [--pair runs/quickstart] [--prompts 60] [--tokens 64] [--threads 1]

First the tokens per step that replay predicts from one recording beside those that decoding takes: at temperature 0 on
the same texts, where they must be equal, and at temperature 1 on other ones. Then every γ of speculative decoding and
some k-configurations are decoded and timed, interleaved prompt by prompt. Of these measurements the choice sees, as in
`draftsmith tune`, only those of the three settings that replay holds fastest under the measured cost model. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from common import Pair, finish, parser_of
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.measure import BASELINE, Entry, Run, measure
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.replay.costs import CostModel, measure_forwards, measure_overheads
from draftsmith.decode.evaluation.replay.recording import Recording, record, sample_texts
from draftsmith.decode.evaluation.replay.replay import predict
from draftsmith.decode.evaluation.replay.tuning import Choice, Space, probes, tune_method, with_costs
from draftsmith.decode.methods import Method, build_method
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling

BATCH = 8
CONFIRMED = 3  # of the settings that replay holds fastest, those that are decoded, as `draftsmith tune` does
CHECKED: list[tuple[str, dict[str, Any]]] = [
    *(("speculative", {"gamma": gamma}) for gamma in (2, 4, 8)),
    *(("multi-candidate", {"k_config": config}) for config in ("2x1x1", "4x2x1", "3x2x2x1")),
    ("medusa", {"tree": "3x2x1"}),
    ("slim-s", {"sequences": 6}),
    ("bigram", {"gamma": 3}),
]
SWEPT: list[tuple[str, dict[str, Any]]] = [
    *(("speculative", {"gamma": gamma}) for gamma in range(1, 13)),
    *(
        ("multi-candidate", {"k_config": config})
        for config in ("2", "2x1", "2x1x1", "2x1x1x1", "2x1x1x1x1", "2x2x1", "2x2x1x1", "3x1x1", "4x1x1x1", "4x2x1")
    ),
]


class Bench(Pair):
    """A quickstart's models and prompts, and how many tokens they are to be followed by."""

    def __init__(self, folder: Path, prompts: int, tokens: int) -> None:
        super().__init__(folder, prompts)
        self.limits = Limits(tokens, self.stop)


def recorded(pair: Bench, sampling: Sampling) -> tuple[Recording, float]:
    """A recording, and its positions per second (the writing of the texts left out)."""
    texts = sample_texts(pair.target, pair.prompts, pair.limits, sampling)
    start = time.perf_counter()
    recording = record(pair.target, pair.parts, pair.prompts, texts, sampling)
    return recording, recording.positions / (time.perf_counter() - start)


def decoded(pair: Bench, method: Method, sampling: Sampling) -> Tally:
    """Counts of all prompts, decoded a few at a time: what a step accepts does not depend on that."""
    counts = Tally()
    for first in range(0, len(pair.prompts), BATCH):
        rows = pair.prompts[first : first + BATCH]
        rng = Rng.for_rows(10_000 + first, len(rows))
        for step in generate(pair.target, *method, rows, pair.limits, sampling, rng):
            for row in range(len(rows)):
                counts.add_step(step, row)
    return counts


def compare(pair: Bench, recording: Recording) -> list[dict[str, Any]]:
    """Predicted and measured tokens per step of every checked setting."""
    rows = []
    for name, options in CHECKED:
        start = time.perf_counter()
        prediction = predict(recording, pair.parts, name, options)
        seconds = time.perf_counter() - start
        assert prediction is not None
        method = build_method(name, pair.parts, recording.sampling, **options)
        counts = decoded(pair, method, recording.sampling)
        measured = counts.tokens / counts.steps
        row: dict[str, Any] = {"method": name, "options": options, "temperature": recording.sampling.temperature}
        row |= {"predicted": prediction.tokens_per_step, "measured": measured}
        row |= {"standard_error": prediction.standard_error, "positions_per_second": recording.positions / seconds}
        difference = prediction.tokens_per_step / measured - 1
        rows.append(row | {"difference": difference})
        print(
            f"{name:16} {' '.join(map(str, options.values())):10} T={recording.sampling.temperature:g}  "
            f"predicted {prediction.tokens_per_step:.3f} ± {prediction.standard_error:.3f}  measured {measured:.3f}  "
            f"difference {100 * difference:+.2f} %  {rows[-1]['positions_per_second']:,.0f} positions/s"
        )
    return rows


def tuned(pair: Bench, recording: Recording, count: int, repeats: int) -> dict[str, Any]:
    """The choice among the swept settings, and how far its measured speed lies behind the best's."""
    forwards = measure_forwards(pair.target, pair.parts, 100)
    choices = {name: tune_method(recording, pair.parts, forwards, name, space=Space(nodes=32)) for name, _ in SWEPT}
    timed = [(choice.method, choice.options) for tried in choices.values() for choice in probes(tried)]
    costs = measure_overheads(
        forwards, pair.target, pair.parts, timed, pair.prompts[:6], pair.limits, recording.sampling, repeats=repeats
    )
    entries = [Entry(json.dumps([name, options]), name, options, recording.sampling) for name, options in SWEPT]
    plain = Entry(BASELINE, BASELINE, {}, recording.sampling)
    runs = measure(pair.target, pair.parts, [plain, *entries], pair.prompts[:count], pair.limits, repeats=repeats)
    return judged(pair, recording, costs, choices, runs)


def judged(
    pair: Bench, recording: Recording, costs: CostModel, choices: dict[str, list[Choice]], runs: dict[str, Run]
) -> dict[str, Any]:
    """By method, and over both: the predicted best of what was swept, and the measured best."""
    speeds = {
        label: run.stepping_rate() / runs[BASELINE].stepping_rate() for label, run in runs.items() if label != BASELINE
    }
    found: dict[str, Any] = {}
    swept: list[Choice] = []
    for name, tried in choices.items():
        known = [choice for choice in tried if json.dumps([name, choice.options]) in speeds]
        swept += with_costs(known, pair.parts, recording.sampling, costs)
    for name in (*choices, "all"):
        own = [choice for choice in swept if name in (choice.method, "all")]
        ranked = sorted(own, key=lambda choice: -choice.speedup)[:CONFIRMED]
        labels = {json.dumps([choice.method, choice.options]): choice for choice in ranked}
        label = max(labels, key=lambda each: speeds[each])
        chosen, first = labels[label], next(iter(labels))
        best = max((json.dumps([choice.method, choice.options]) for choice in own), key=lambda each: speeds[each])
        found[name] = {"chosen": label, "predicted": chosen.speedup, "measured": speeds[label]}
        found[name] |= {"best": best, "best_measured": speeds[best], "behind": 1 - speeds[label] / speeds[best]}
        found[name]["unconfirmed_behind"] = 1 - speeds[first] / speeds[best]
        print(
            f"{name:16} chosen {label}: predicted {chosen.speedup:.2f}x, measured {speeds[label]:.2f}x; "
            f"best of the sweep {best} {speeds[best]:.2f}x; behind by {100 * found[name]['behind']:.1f} %, "
            f"before decoding by {100 * found[name]['unconfirmed_behind']:.1f} %"
        )
    return found


def main() -> None:
    """Run it."""
    sizes = {"prompts": 60, "tokens": 64, "repeats": 3, "threads": 1}
    parser = parser_of(__doc__, "a few prompts: within a minute", pair=True, **sizes)
    parser.add_argument("--swept", type=int, default=16, help="prompts of the timed sweep")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.tokens, arguments.repeats = 6, 32, 1
    torch.set_num_threads(arguments.threads)
    pair = Bench(arguments.pair, arguments.prompts, arguments.tokens)
    rows, rates, greedy = [], {}, None
    for temperature in (0.0, 1.0):
        recording, rates[f"recorded_positions_per_second_t{temperature:g}"] = recorded(pair, Sampling(temperature))
        greedy = greedy or recording
        print(f"T={temperature:g}: {recording.positions:,} positions")
        rows += compare(pair, recording)
    assert greedy is not None
    choice = tuned(pair, greedy, arguments.swept, arguments.repeats)
    by_temperature = {
        f"largest_difference_t{temperature:g}": max(
            abs(row["difference"]) for row in rows if row["temperature"] == temperature
        )
        for temperature in (0.0, 1.0)
    }
    result = {"prompts": len(pair.prompts), "rows": rows, "tuned": choice} | rates | by_temperature
    finish(result | {"chosen_behind_best": choice["all"]["behind"]})


if __name__ == "__main__":
    main()
