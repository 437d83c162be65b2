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
from typing import Any

import torch
from common import finish, parser_of, per_step, timed
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import BASELINE, Entry, measure, sample_texts
from draftsmith.decode.evaluation.tuning.costs import measure_forwards, measure_overheads
from draftsmith.decode.evaluation.tuning.recording import Recording, record
from draftsmith.decode.evaluation.tuning.replay import predict
from draftsmith.decode.evaluation.tuning.search import apply_costs, search_by_replay, select_probes
from draftsmith.decode.evaluation.tuning.space import Setting, Space
from draftsmith.decode.warpers import Sampling
from pair import Pair

CONFIRMED = 3  # of the settings that replay holds fastest, those that are decoded, as `draftsmith tune` does
CHECKED: list[tuple[str, dict[str, Any]]] = [
    *(("speculative", {"gamma": gamma}) for gamma in (2, 4, 8)),
    *(("multi-candidate", {"k_config": config}) for config in ("2x1x1", "4x2x1", "3x2x2x1")),
    ("medusa", {"tree": "3x2x1"}),
    ("slim-s", {"num_sequences": 6}),
    ("bigram", {"gamma": 3}),
]
CONFIGS = ("2", "2x1", "2x1x1", "2x1x1x1", "2x1x1x1x1", "2x2x1", "2x2x1x1", "3x1x1", "4x1x1x1", "4x2x1")
SWEPT: list[tuple[str, dict[str, Any]]] = [
    *(("speculative", {"gamma": gamma}) for gamma in range(1, 13)),
    *(("multi-candidate", {"k_config": config}) for config in CONFIGS),
]


def compare(pair: Pair, recording: Recording, tokens: int) -> list[dict[str, Any]]:
    """Predicted and measured tokens per step of every checked setting."""
    rows, temperature = [], recording.sampling.temperature
    for name, options in CHECKED:
        prediction, seconds, _ = timed(lambda name=name, options=options: predict(recording, pair.parts, name, options))
        measured = per_step(pair.counts(name, pair.parts, temperature, tokens, seed=10_000, **options)[0])
        row: dict[str, Any] = {"method": name, "options": options, "temperature": temperature}
        row |= {"predicted": prediction.tokens_per_step, "measured": measured}
        row |= {"standard_error": prediction.standard_error, "positions_per_second": recording.positions / seconds}
        row |= {"difference": prediction.tokens_per_step / measured - 1}
        rows.append(row)
        print(
            f"{name:16} {' '.join(map(str, options.values())):10} T={temperature:g}  predicted {row['predicted']:.3f} "
            f"± {row['standard_error']:.3f}  measured {measured:.3f}  difference {row['difference']:+.2%}  "
            f"{row['positions_per_second']:,.0f} positions/s"
        )
    return rows


def label_of(method: str, options: dict[str, Any]) -> str:
    return json.dumps([method, options])


def tuned(pair: Pair, recording: Recording, limits: Limits, count: int, repeats: int) -> dict[str, Any]:
    """The choice among the swept settings, and how far its measured speed lies behind the best's."""
    forwards, sampling = measure_forwards(pair.target, pair.parts, 100), recording.sampling
    choices = {
        name: search_by_replay(recording, pair.parts, forwards, name, space=Space(nodes=32)) for name, _ in SWEPT
    }
    probed = [(choice.method, choice.options) for tried in choices.values() for choice in select_probes(tried)]
    costs = measure_overheads(forwards, pair.target, pair.parts, probed, pair.prompts[:6], limits, sampling)
    entries = [Entry(BASELINE, BASELINE, {}, sampling)]
    entries += [Entry(label_of(name, options), name, options, sampling) for name, options in SWEPT]
    runs = measure(pair.target, pair.parts, entries, pair.prompts[:count], limits, repeats=repeats)
    rates = {label: sum(map(len, run.ids)) / sum(run.stepping_seconds()) for label, run in runs.items()}
    speeds = {label: rate / rates[BASELINE] for label, rate in rates.items()}
    swept: list[Setting] = []
    for tried in choices.values():
        known = [choice for choice in tried if label_of(choice.method, choice.options) in speeds]
        swept += apply_costs(known, pair.parts, sampling, costs)
    found = {}
    for name in (*choices, "all"):
        found[name] = judged([choice for choice in swept if name in (choice.method, "all")], speeds)
        shown = (f"{key} {value if isinstance(value, str) else round(value, 3)}" for key, value in found[name].items())
        print(f"{name:16} {'   '.join(shown)}")
    return found


def judged(choices: list[Setting], speeds: dict[str, float]) -> dict[str, Any]:
    """The predicted best of what was swept, and the measured best."""
    ranked = {label_of(one.method, one.options): one for one in sorted(choices, key=lambda one: -one.speedup)}
    confirmed = list(ranked)[:CONFIRMED]
    label, best = (max(labels, key=speeds.__getitem__) for labels in (confirmed, ranked))
    found = {"chosen": label, "predicted": ranked[label].speedup, "measured": speeds[label]}
    found |= {"best": best, "best_measured": speeds[best], "behind": 1 - speeds[label] / speeds[best]}
    return found | {"unconfirmed_behind": 1 - speeds[confirmed[0]] / speeds[best]}


def main() -> None:
    sizes = {"prompts": 60, "tokens": 64, "repeats": 3, "threads": 1}
    parser = parser_of(__doc__, "a few prompts: within a minute", pair=True, **sizes)
    parser.add_argument("--swept", type=int, default=16, help="prompts of the timed sweep")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.tokens, arguments.repeats = 6, 32, 1
    torch.set_num_threads(arguments.threads)
    pair = Pair(arguments.pair, arguments.prompts)
    limits, result = Limits(arguments.tokens, pair.stop), {"prompts": len(pair.prompts), "rows": []}
    recordings = []
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature)
        texts = sample_texts(pair.target, pair.prompts, limits, sampling)
        recording, seconds, _ = timed(lambda s=sampling, t=texts: record(pair.target, pair.parts, pair.prompts, t, s))
        print(f"T={temperature:g}: {recording.positions:,} positions")
        rows = compare(pair, recording, arguments.tokens)
        result["rows"] += rows
        result[f"recorded_positions_per_second_t{temperature:g}"] = recording.positions / seconds
        result[f"largest_difference_t{temperature:g}"] = max(abs(row["difference"]) for row in rows)
        recordings.append(recording)
    result["tuned"] = tuned(pair, recordings[0], limits, arguments.swept, arguments.repeats)
    finish(result | {"chosen_behind_best": result["tuned"]["all"]["behind"]})


if __name__ == "__main__":
    main()
