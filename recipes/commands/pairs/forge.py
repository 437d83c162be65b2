"""`draftsmith forge`: a target in, the fastest lossless set-up out, within a budget.

It writes recipes and runs them by the commands' own code; what it decides, and why, is in `rules.py`. All that it knows
lies in the files of finished stages, so that a killed forge goes on, and decides as it would have.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ....decode.evaluation.replay.costs import Curve
from ...assemble.evaluation import device_of
from ...assemble.teacher import prepare_teacher
from ...report.certificate import KIND
from ...report.forge import write_forge_page
from ...schema.forge import ForgeRecipe
from ...schema.loading import write_recipe
from ...schema.results import beside
from ...schema.training import DrafterRecipe, HeadsRecipe
from ...session.launch import run_launched
from ...session.machine import machine
from ...session.terminal import duration, log
from ..artifacts.pair import pair_verdict
from ..evaluation.evaluate import NotLosslessError
from ..evaluation.finished import certified, evaluated
from ..training.regenerate import run_regenerate
from ..training.train import run_train
from .budget import BESIDE, Ledger, measured_groups, race_rows
from .in_engine import check_engine, drafts_of, worth_in_engine
from .rules import (
    LEAST_ANSWERS,
    LEAST_STEPS,
    RACE,
    RUNGS,
    SHARES,
    Candidate,
    Measured,
    Place,
    Shape,
    affordable,
    best_row,
    candidates_of,
    ceiling,
    floor,
    measured_of,
    merged,
    outlook,
    rivals,
    share_of,
    survivors,
    winner_of,
    worth_training,
)
from .stages import (
    PROPOSED,
    ROWS,
    UNTRAINED,
    WITH_TEXTS,
    Row,
    answers_of,
    around,
    base_of,
    evaluation_of,
    given_rows,
    together,
    training_of,
)
from .start import FROM_THE_END, costs_of, prepared

_LOOKED_UP = "the target's own answers, looked up"
_GIVEN_ROWS = 3  # of a drafter that there is, at most
_TRIED = 16  # steps of training that show what a step takes
_CERTIFIED = range(1000, 4001)  # tokens of a certificate: fewer say nothing, more are not needed
_CERTIFYING = 4  # forwards that a token of it takes, with the small pair's, about


def run_forge(recipe: ForgeRecipe, plan_only: bool = False) -> dict[str, Any]:
    """Look, collect, choose, race, finish: what was decided and measured, as `forge.json` beside `forge.html` has it.
    With `plan_only` few answers are written, and nothing is trained: `plan.json`. Raises ValueError: as the
    recipes that it writes, a folder of another forge, too few questions."""
    out = Path(recipe.out)
    check_writable(out)
    check_engine(recipe)
    for drafter in recipe.drafters:
        folder_of(drafter)
    with sole_writer(out):
        return _Forge(recipe, out).run(plan_only)


class _Forge:
    """One of them; methods in the order in which they run."""

    def __init__(self, recipe: ForgeRecipe, out: Path) -> None:
        self.recipe, self.out, self.base = recipe, out, base_of(recipe)
        self.seconds = 3600 * recipe.hours
        self.ledger = Ledger(out / "spent.json")
        self.story: dict[str, list[str]] = {}
        """By chapter."""
        batches, temperatures = dict.fromkeys(recipe.batch), dict.fromkeys(recipe.temperature)
        self.places = [Place(batch, heat) for batch, heat in itertools.product(batches, temperatures)]
        self.untrained: dict[Place, list[Measured]] = {place: [] for place in self.places}
        self.history: dict[Place, dict[str, list[Measured]]] = {place: {} for place in self.places}
        self.forecasts: list[dict[str, Any]] = []
        """Of a candidate's speedup: by its ceiling, and from less training."""
        self.ceilings: dict[str, float] = {}
        self.prompts: dict[Place, int] = {}
        self.side_by_side: dict[Place, list[Measured]] = {}
        self.winners: dict[Place, Measured | None] = {}
        self.verdicts: dict[Place, dict[str, str]] = {}
        """Of a winner's certificate, by row."""

    def run(self, plan_only: bool) -> dict[str, Any]:
        with self.ledger.stage("corpus"):
            self.questions = prepared(self.recipe, self.base, self.out)
        with self.ledger.stage("costs"):
            costs = costs_of(self.base, self.out, self.questions.answered)
        self.chapter = "What a token takes, what could be trained, and how far that could go"
        self.shape, self.curve = Shape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
        self._say(
            f"a token takes {1e3 * self.curve(1):.1f} ms, three more in the same forward "
            f"{1e3 * (self.curve(4) - self.curve(1)):.1f}"
        )
        chosen = self._choose(costs["eagle"])
        self.reading = self.questions.tokens * costs["seconds"][-1] / costs["nodes"][-1]
        asked = min(self.questions.answered, int(SHARES["answers"] * self.seconds / costs["seconds_per_answer"]))
        self._plan(chosen, asked, costs["seconds_per_answer"])
        if plan_only:
            return self._end("plan")
        self._look()
        left: list[tuple[Candidate, int]] = []
        if asked < LEAST_ANSWERS:
            self._say(f"nothing is trained: the budget pays for {asked} answers, to learn takes {LEAST_ANSWERS}")
        else:
            counted = self.base.table.model_copy(update={"out": f"{self.out}/table-{asked}"})
            self.base = self.base.model_copy(update={"table": counted})
            with self.ledger.stage("answers"):
                run_regenerate(answers_of(self.base, asked, "answers"))
                run_train(counted)
            self._measure("table", WITH_TEXTS, _LOOKED_UP, 0, table=True)
            left = self._race(chosen)
        self._finish(left)
        return self._end("forge")

    def _say(self, text: str, place: Place | None = None) -> None:
        text = self._at(place) + text
        log(f"forge: {text}")
        self.story.setdefault(self.chapter, []).append(text)

    def _at(self, place: Place | None) -> str:
        """What names one of several."""
        return "" if place is None or len(self.places) == 1 else f"{place.words}: "

    def _name(self, stem: str, place: Place) -> str:
        return stem if len(self.places) == 1 else f"{stem}-{place.slug}"

    def _costs_at(self, place: Place) -> Callable[[float], float]:
        """Seconds of a forward over so many tokens of each text."""
        return lambda tokens: self.curve(place.batch * tokens)

    def _choose(self, has_eagle: bool) -> list[Candidate]:
        """Candidates that could gain anything, with what look-up would have to leave them."""
        chosen, batches = [], list(dict.fromkeys(self.recipe.batch))
        self.known = {each.name: each for each in candidates_of(self.shape, PROPOSED, has_eagle)}
        for candidate in self.known.values():
            self.ceilings[candidate.name] = max(ceiling(candidate, self._costs_at(place)) for place in self.places)
            found = [(each, *worth_training(candidate, self.curve, each)) for each in batches]
            for batch, _, said in found:
                self._say(said if len(batches) == 1 else f"{batch} at a time: {said}")
            if any(able for _, able, _ in found):
                chosen.append(candidate)
        return chosen

    def _plan(self, chosen: Sequence[Candidate], asked: int, seconds_per_answer: float) -> None:
        """How many prompts each place is measured on, by what all evaluations will take; and what all costs."""
        looks = [len(UNTRAINED), len(WITH_TEXTS), *(_GIVEN_ROWS for _ in self.recipe.drafters)]
        race = race_rows([len(ROWS[each.kind]) for each in chosen], RUNGS, len(self.places))
        rows = race + sum(looks) + len(looks)
        for place in self.places:
            share = SHARES["measure"] * self.seconds / len(self.places)
            self.prompts[place] = self._prompts(place, share, rows)
        parts = {"answers": asked * seconds_per_answer, "measuring": self._measuring(rows)}
        parts |= {"certificates": len(self.places) * self._certifying()}
        priced = ", ".join(f"{duration(seconds)} for {name}" for name, seconds in parts.items() if seconds)
        self._say(
            f"{asked:,} of {self.questions.answered:,} questions can be answered, "
            f"{' or '.join(map(str, dict.fromkeys(self.prompts.values())))} held out are measured on"
        )
        beside = f"; measuring in {self.recipe.engine} comes on top" if self.recipe.engine is not None else ""
        self._say(f"of {duration(self.seconds)} about {priced}; the rest is for training{beside}")

    def _prompts(self, place: Place, share: float, rows: int) -> int:
        """That so many rows can be measured on in a share of the budget."""
        each, held_out = self._seconds_at(place), self.questions.held_out
        return place.batch * measured_groups(share, rows, each, held_out // place.batch)

    def _seconds_at(self, place: Place) -> float:
        """Of a batch in plain decoding: its questions, and an answer's tokens."""
        return place.batch * self.reading + self.recipe.new_tokens * self.curve(place.batch)

    def _measuring(self, rows: int) -> float:
        """Seconds of so many rows at each place, and of what is measured side by side in the end."""
        batches = (self.prompts[place] / place.batch * self._seconds_at(place) for place in self.places)
        return BESIDE * rows * sum(batches) + SHARES["decide"] * self.seconds

    def _best_untrained(self, place: Place) -> float:
        """At least plain decoding."""
        return max([1.0, *(each.speedup for each in self.untrained[place])])

    def _look(self) -> None:
        """What costs no training: look-up, and drafters that there are."""
        self.chapter = "What costs no training"
        self._measure("look", UNTRAINED, "look-up in the text", 0)
        reader = self.recipe.engine or "draftsmith"
        for number, drafter in enumerate(dict.fromkeys(self.recipe.drafters), 1):
            try:
                if not is_eagle(folder_of(drafter)):
                    minds = pair_verdict(str(self.out / "target"), drafter, reader)
                    if minds is not None:
                        self._say(f"{drafter}: doctor, for {reader}: {minds}")
                self._measure(f"given-{number}", given_rows(folder_of(drafter)), drafter, 0, drafters=[drafter])
            except NotLosslessError:
                raise
            except ValueError as error:  # no pair with the target: that it is there was seen before anything
                self._say(f"{drafter}: left out, {error}")
                for place in self.places:
                    self.untrained[place] = [each for each in self.untrained[place] if each.name != drafter]

    def _measure(self, name: str, rows: Sequence[Row], what: str, steps: int, **parts: Any) -> dict[Place, Measured]:
        """By place."""
        return {place: self._measure_at(place, name, rows, what, steps, **parts) for place in self.places}

    def _measure_at(
        self, place: Place, name: str, rows: Sequence[Row], what: str, steps: int, **parts: Any
    ) -> Measured:
        given = (self._name(name, place), rows, place, self.prompts[place])
        with self.ledger.stage(self._name(name, place)):
            results = evaluated(evaluation_of(self.base, self.recipe, *given, **parts))
        found = best_row(what, steps, results)
        self._say(f"{what}: {found.label}, {found.tokens_per_step:.2f} tokens a step, {found.speedup:.2f} x", place)
        if not steps:
            self.untrained[place].append(found)
        return found

    def _train(self, candidate: Candidate, steps: int) -> Path:
        name = f"{candidate.slug}-{steps}"
        out = self.out / "trained" / name
        stage = training_of(self.base, candidate, self.shape.vocabulary, steps, out, self.recipe.processes)
        with self.ledger.stage(f"training {name}"):
            if self.recipe.processes == 1:
                if not (out / MANIFEST_FILE).is_file():
                    prepare_teacher(stage)
                return run_train(stage)
            if not (out / MANIFEST_FILE).is_file():
                self._launch(stage, out.with_suffix(".yaml"))
        if (found := load_manifest(out).training["processes"]) != self.recipe.processes:
            raise ValueError(
                f"{found} process trained, where `processes` says {self.recipe.processes}: accelerate finds no device "
                "for each; `launch=--multi_gpu` insists, `launch='--config_file FILE'` says how"
            )
        return out

    def _launch(self, stage: DrafterRecipe | HeadsRecipe, file: Path) -> None:
        write_recipe(stage, file)
        gc.collect()
        torch.cuda.empty_cache()  # the first process is on the same device
        for words in (("prepare", str(file), "--teacher"), ("train", str(file))):
            run_launched(f"--num_processes {self.recipe.processes} {self.recipe.launch}", *words)

    def _parts(self, candidate: Candidate, artifact: Path) -> dict[str, Any]:
        named = {"heads": str(artifact)} if candidate.kind == "heads" else {"drafters": [str(artifact)]}
        return {"table": True, **named}

    def _race(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
        """Train all a little, the better half more; the first of each place, with the steps that finish it."""
        # What EAGLE-3's layer reads of the target holds what the others read.
        known = {each.name: each for each in sorted(candidates, key=lambda each: each.kind != "eagle")}
        self.chapter = "What was trained a little, and what went on"
        if not known:
            self._say("nothing is trained: no candidate could be faster than plain decoding")
            return []
        rates = {name: self._seconds_per_step(each) for name, each in known.items()}
        rows = race_rows([len(ROWS[each.kind]) for each in known.values()], RUNGS, len(self.places))
        seconds = self._left(self._spent("race"), rows)
        names, said = affordable(rates, seconds)
        if said:
            self._say(said)
        known = {name: known[name] for name in names}
        ends = {name: max(LEAST_STEPS, int((1 - RACE) * seconds / rates[name])) for name in known}
        first: list[str] = []
        for rung in range(1, RUNGS + 1):
            for name, candidate in known.items():
                each = RACE * seconds / (len(known) * RUNGS)
                steps = min(ends[name], max(LEAST_STEPS, int(each / rates[name])))
                artifact = self._train(candidate, steps)
                given = f"rung-{rung}-{candidate.slug}", ROWS[candidate.kind], name, steps
                self._forecast(candidate, self._measure(*given, **self._parts(candidate, artifact)))
            ranked = []
            for place in self.places if known else ():
                own = {name: self.history[place][name] for name in known}
                kept, said = survivors(own, ends, self._best_untrained(place))
                self._say(said, place)
                ranked.append(kept)
            left = merged(ranked, -(-len(known) // 2))
            if left and rung < RUNGS:
                self._say(f"{', '.join(left)} go{'es' * (len(left) == 1)} on")
            first = merged([each[:1] for each in ranked], 0)
            known = {name: known[name] for name in left}
        if not first:
            self._say("nothing is trained to the end")
            return []
        seconds = self._left(self._spent("finish"), race_rows([len(ROWS[known[name].kind]) for name in first], 0, 1))
        each = (seconds + 3600 * self.recipe.more_hours) / len(first)
        last = self.history[self.places[0]]  # where no more is left, that stands
        return [(known[name], max(last[name][-1].steps, int(each / rates[name]))) for name in first]

    def _forecast(self, candidate: Candidate, found: dict[Place, Measured]) -> None:
        """Keep measurements beside what was expected of them: before any training, from drafts of which nothing is kept
        to the ceiling beside what look-up gains."""
        for place, each in found.items():
            known = self.history[place].setdefault(candidate.name, [])
            costs = self._costs_at(place)
            low, high = floor(candidate, costs), ceiling(candidate, costs) * self._best_untrained(place)
            if known:
                low, high = outlook(known, each.steps)
            if not known or each.steps > known[-1].steps:
                what = {"name": self._at(place) + candidate.name, "trained": known[-1].steps if known else 0}
                self.forecasts.append(what | {"steps": each.steps, "low": low, "high": high, "found": each.speedup})
            known.append(each)

    def _spent(self, moment: str) -> float:
        """What was spent when a moment came first under this budget: a forge that goes on decides as it would have."""
        path, budget = self.out / f"{moment}.json", f"{self.recipe.hours:g} hours"
        spent: dict[str, float] = load_json(path, "spent")["spent"] if path.is_file() else {}
        if budget not in spent:
            spent[budget] = self.ledger.spent
            atomic_text(path, json.dumps({"spent": spent}, indent=1) + "\n")
        return spent[budget]

    def _seconds_per_step(self, candidate: Candidate) -> float:
        return float(load_manifest(self._train(candidate, _TRIED)).training["seconds"]) / _TRIED

    def _left(self, spent: float, rows: int) -> float:
        """Seconds of the budget that are for training, where so many rows will be measured."""
        measuring, certifying = self._measuring(rows), len(self.places) * self._certifying()
        left = max(0.0, self.seconds - spent - measuring - certifying)
        self._say(
            f"of {duration(self.seconds)} {duration(spent)} are spent; measuring will take about "
            f"{duration(measuring)}, which leaves {duration(left)} for training"
        )
        return left

    def _certified(self) -> int:
        """Tokens of each certificate that the budget pays for; 0: of none."""
        share = SHARES["certify"] * self.seconds / len(self.places)
        tokens = min(int(share / (_CERTIFYING * self.curve(1))), _CERTIFIED[-1])
        return tokens if tokens in _CERTIFIED else 0

    def _certifying(self) -> float:
        """Seconds of a certificate, about."""
        return _CERTIFYING * self._certified() * self.curve(1)

    def _finish(self, left: Sequence[tuple[Candidate, int]]) -> None:
        """Train those that lead somewhere to the end, and measure them beside all others as they were left."""
        self.chapter = "What was trained to the end, and what was chosen"
        finalists = {place: [*found] for place, found in self.untrained.items()}
        for candidate, steps in left:
            given = self._parts(candidate, self._train(candidate, steps))
            name = f"final-{candidate.slug}-{steps}"
            self._forecast(candidate, self._measure(name, ROWS[candidate.kind], candidate.name, steps, **given))
        parts: dict[str, dict[str, Any]] = {}
        for place, known in self.history.items():
            for candidate, last in ((self.known[name], found[-1]) for name, found in known.items()):
                name = f"{candidate.name}, {last.steps:,} steps"
                finalists[place].append(replace(last, name=name))
                parts[name] = self._parts(candidate, self.out / "trained" / f"{candidate.slug}-{last.steps}")
        for place in self.places:
            self.winners[place], said = winner_of(self._decided(place, finalists[place], parts))
            self._say(said, place)
        self._write()
        for place, winner in self.winners.items():
            (self.out / f"{self._name('winner', place)}.yaml").unlink(missing_ok=True)
            if winner is not None:
                self._hand_over(place, winner, parts)
        if self.recipe.engine is not None:
            self._serve(self.recipe.engine, left, parts)

    def _serve(
        self, engine: str, left: Sequence[tuple[Candidate, int]], parts: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """What won, and what was trained to the end, in the engine that shall run them."""
        self.chapter = f"What it is worth in {engine}"
        best = [winner for winner in self.winners.values() if winner is not None]
        for candidate, steps in left:
            final = self.history[self.places[0]][candidate.name][-1]
            best.append(replace(final, name=f"{candidate.name}, {steps:,} steps"))
        for name, draft in drafts_of(best, parts, self.recipe.drafters).items():
            self._write()  # should the engine not start
            with self.ledger.stage(f"{engine} {name}"):
                lines = worth_in_engine(self.recipe, name, draft, max(self.prompts.values()))
            for line in lines:
                self._say(line)

    def _decided(
        self, place: Place, finalists: list[Measured], trained: dict[str, dict[str, Any]]
    ) -> Sequence[Measured]:
        """What may be the fastest, the first with other lengths of its drafts, measured again side by side on questions
        that chose none of them, as far as there are."""
        if not (first := rivals(finalists)):
            return finalists
        close = around(first)
        rows, given = together(close, trained, self.recipe.drafters)
        prompts = self._prompts(place, SHARES["decide"] * self.seconds / len(self.places), len(rows) + 1)
        name, labels = self._name("decide", place), [f"{one.label}, {one.name}" for one in close]
        given |= {"labels": labels, "asked": FROM_THE_END}
        recipe = evaluation_of(self.base, self.recipe, name, rows, place, prompts, **given)
        try:
            with self.ledger.stage(name):
                found = {row["label"]: row for row in evaluated(recipe)["methods"]}
        except NotLosslessError:
            raise
        except ValueError as error:  # drafters that fit the target, not each other
            self._say(f"{len(close)} may be the fastest, and cannot be measured side by side: {error}", place)
            return finalists
        self._say(f"{len(close)} may be the fastest: measured side by side on {prompts} questions", place)
        able, base = [], found.get(labels[0])
        self.side_by_side[place] = []
        for number, (one, label) in enumerate(zip(close, labels, strict=True)):
            if label not in found:  # a row that cannot be true is none
                continue
            self.side_by_side[place].append(replace(measured_of(one.name, one.steps, found[label]), label=one.label))
            # Of many lengths some seem faster: one that is not surely faster does not take the place of the first.
            if number < len(first) or (base and (share_of(found[label], base, place.batch)[1] or [0])[0] > 1):
                able.append(self.side_by_side[place][-1])
        return able or finalists

    def _hand_over(self, place: Place, winner: Measured, trained: dict[str, dict[str, Any]]) -> None:
        """The winner's recipe, and its certificate where there is time for one."""
        rows, given = together([winner], trained, self.recipe.drafters)
        name, tokens = self._name("winner", place), self._certified()
        enough = min(self.questions.held_out, max(self.prompts[place], 2 * tokens // self.recipe.new_tokens))
        recipe = evaluation_of(self.base, self.recipe, name, rows, place, enough, **given)
        write_recipe(recipe, file := self.out / f"{name}.yaml")
        self._say(f"to decode with it: draftsmith evaluate {file}", place)
        if not tokens:
            self._say(f"to certify it: draftsmith certify {file}", place)
            return
        with self.ledger.stage(f"certificate {name}"):
            verdicts = self.verdicts[place] = certified(recipe, tokens)
        self._say("; ".join(f"{label}: {verdict}" for label, verdict in verdicts.items()), place)
        if broken := [label for label, verdict in verdicts.items() if verdict == "not lossless"]:
            self._write()
            raise NotLosslessError(f"{broken[0]} is not lossless: {beside(Path(recipe.out), KIND)} has the evidence")

    def _write(self, name: str = "forge") -> dict[str, Any]:
        results = {
            "schema": 2,
            "kind": "forge",
            "machine": machine(device_of(self.base.evaluate)),
            "recipe": self.recipe.recorded(),
            "story": self.story,
            "spent": self.ledger.seconds,
            "ceilings": self.ceilings,
            "places": [
                {
                    **asdict(place),
                    "untrained": [asdict(each) for each in self.untrained[place]],
                    "history": {name: [asdict(each) for each in found] for name, found in self.history[place].items()},
                    "side_by_side": [asdict(each) for each in self.side_by_side.get(place, [])],
                    "certificate": self.verdicts.get(place),
                    "winner": None if (best := self.winners.get(place)) is None else asdict(best),
                }
                for place in self.places
            ],
            "forecasts": self.forecasts,
        }
        atomic_text(self.out / f"{name}.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        write_forge_page(results, self.out / f"{name}.html")
        return results

    def _end(self, name: str) -> dict[str, Any]:
        took, page = duration(self.ledger.spent), self.out / f"{name}.html"
        log(f"forge: {duration(self.seconds)} were given, it took {took}; {page} tells the story")
        return self._write(name)
