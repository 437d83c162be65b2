"""Decoding beside others with the same models, in turns, each way at its best γ: see realpair.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from common import bootstrap, per_step
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import Decoded, decode, decode_reference
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import Case
from draftsmith.recipes.commands.evaluation.journal import Journal
from pydantic import TypeAdapter

from decode import assisted

GAMMAS = (2, 3, 4, 5)
TUNED = 6
"""Prompts, one of each group of Spec-Bench, on which γ is chosen."""
RUN: TypeAdapter[tuple[list[int], int, float]] = TypeAdapter(tuple[list[int], int, float])
"""Tokens, steps and seconds of a run."""
QUIET = 0.5
"""Seconds before each run: threads of an engine that has ended its work go on looking for more for a fifth of one."""
Job = Callable[[Sequence[int], Limits], Decoded]


class Peer(NamedTuple):
    """A way of decoding, at a γ: its job; plain ones have γ 0."""

    name: str
    gamma: int
    job: Job

    @property
    def label(self) -> str:
        return f"{self.name} {self.gamma}" if self.gamma else self.name


def looked_up(target: Any, gamma: int) -> Job:
    """`transformers.generate(prompt_lookup_num_tokens=…)`."""
    generate = partial(target.generate, prompt_lookup_num_tokens=gamma)
    return partial(decode_reference, SimpleNamespace(generate=generate, device=target.device, config=target.config))


def ways(folder: Path, exported: Path, dtype: str, gammas: Sequence[int]) -> list[Peer]:
    """All ways of decoding with a pair's models in a number format; `exported`: the drafter for transformers."""
    load = partial(load_model, dtype=dtype)
    theirs, assistant, drafter = (load(str(one)) for one in (folder / "target", exported, folder / "drafter"))
    table = BigramTable.load(folder / "table") if (folder / "table").is_dir() else None
    target, parts, sampling = wrap_model(theirs), Parts(wrap_model(drafter), table=table), Sampling()

    def own(name: str, **given: Any) -> Job:
        return partial(decode, target, build_method(name, parts, sampling, **given), sampling, 0)

    def with_assistant(gamma: int, prompt: Sequence[int], limits: Limits) -> Decoded:
        return assisted(theirs, assistant, gamma)(prompt, limits)  # γ lies in the assistant's settings

    found = [Peer("draftsmith", 0, own("autoregressive")), Peer("transformers", 0, partial(decode_reference, theirs))]
    if table is not None and table.texts is not None:
        found.append(Peer("draftsmith, suffix", 0, own("suffix", datastore="table")))
    for gamma in gammas:
        found += [
            Peer("draftsmith, drafter", gamma, own("speculative", gamma=gamma)),
            Peer("transformers, drafter", gamma, partial(with_assistant, gamma)),
            Peer("draftsmith, prompt look-up", gamma, own("prompt-lookup", gamma=gamma)),
            Peer("transformers, prompt look-up", gamma, looked_up(theirs, gamma)),
        ]
    return found


@dataclass(frozen=True)
class Runs:
    """Runs of one number format, those that an earlier process did among them."""

    case: Case
    own: Peer
    """Whose texts say where all end: this engine's, plain."""
    name: str
    """Of the format and the drafter."""
    kept: Journal
    known: dict[str, tuple[list[int], int, float]] = field(default_factory=dict)

    def run(self, peer: Peer, place: int, turn: int) -> tuple[list[int], int, float]:
        """Tokens, steps and seconds of a prompt."""
        name = f"{self.name} {peer.label} {place} {turn}"
        if name in self.known:
            return self.known[name]
        length = self.case.limits.max_new_tokens if peer is self.own else len(self.run(self.own, place, 0)[0])

        def work() -> tuple[list[int], int, float]:
            time.sleep(QUIET)
            done = peer.job(self.case.prompts[place], Limits(length, self.case.limits.stop_ids))
            return done.ids, done.tally.steps, done.seconds

        return self.known.setdefault(name, self.kept(name, RUN, work))

    def counts(self, peer: Peer, prompts: int, turns: int = 1) -> np.ndarray:
        """[1, prompts, 3]: tokens, steps and median seconds."""
        found = [[self.run(peer, place, turn) for turn in range(turns)] for place in range(prompts)]
        rows = [(len(each[0][0]), each[0][1], statistics.median(one[2] for one in each)) for each in found]
        return np.array([rows], dtype=np.float64)


def of_format(known: Sequence[Peer], case: Case, kept: Journal, name: str, repeats: int) -> dict[str, Any]:
    """Rates of one number format: γ of each way by the first prompts, then the best of each in turns."""
    for peer in known:  # the first call of each is no measure
        peer.job(case.prompts[0], Limits(4))
    runs, count = Runs(case, known[0], name, kept), len(case.prompts)
    first = min(TUNED, count)
    for place in range(first):
        for peer in turned(known, place):
            runs.run(peer, place, 0)
    tried = {peer.label: rate(runs.counts(peer, first)) for peer in known}
    names = dict.fromkeys(peer.name for peer in known)
    best = {name: max((p for p in known if p.name == name), key=lambda peer: tried[peer.label]) for name in names}
    for turn in range(repeats):
        for place in range(count):
            for peer in turned(list(best.values()), place + turn):
                runs.run(peer, place, turn)
    counts = {name: runs.counts(peer, count, repeats) for name, peer in best.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, peer in best.items():
        same = sum(runs.run(peer, place, 0)[0] == runs.run(known[0], place, 0)[0] for place in range(count))
        rows[name] = {"gamma": peer.gamma, "tokens_per_second": rate(counts[name]), "same_text": same}
        if name.startswith("draftsmith"):
            rows[name]["tokens_per_step"] = per_step(counts[name])
    return {"prompts": count, "first_prompts": tried, "rows": rows, **compared(counts)}


def turned(known: Sequence[Peer], by: int) -> list[Peer]:
    """An order that changes from prompt to prompt: nobody is always the first."""
    by %= len(known)
    return [*known[by:], *known[:by]]


def rate(counts_SP3: np.ndarray) -> float:
    """Tokens per second over prompts."""
    tokens, _, seconds = counts_SP3.reshape(-1, 3).sum(0)
    return float(tokens / seconds)


def compared(counts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """How much faster this engine is than the others: like against like, and the fastest of all; with intervals."""

    def over(ours: str, theirs: str) -> list[float]:
        def ratio(chosen: Any) -> float:
            return rate(counts[ours][chosen]) / rate(counts[theirs][chosen])

        return [ratio(np.s_[:]), *bootstrap(ratio, 1, counts[ours].shape[1])]

    theirs = [name for name in counts if not name.startswith("draftsmith")]
    mine, best = (max(names, key=lambda name: rate(counts[name])) for names in (set(counts) - {*theirs}, theirs))
    like = {name: over("".join(("draftsmith", *name.partition(",")[1:])), name) for name in theirs}
    return {"over": like, "fastest": {"ours": mine, "theirs": best, "over": over(mine, best)}}


def print_peers(dtype: str, found: Mapping[str, Any]) -> None:
    print(f"{dtype}, {found['prompts']} prompts")
    for name, row in found["rows"].items():
        speed = f"{row['tokens_per_second']:7.1f} tokens/s"
        print(f"{name:30} gamma {row['gamma']}  {speed}  same text {row['same_text']}/{found['prompts']}")
    fastest = found["fastest"]
    interval = "{:.2f} ({:.2f}–{:.2f})".format(*fastest["over"])
    print(f"{fastest['ours']} over {fastest['theirs']}: {interval}")
