"""`draftsmith forge`: a target in, the fastest lossless set-up out, within a budget.

It writes recipes and runs them by the commands' own code; what it decides, and why, is in `rules.py`. All that it knows
lies in the files of finished stages, so that a killed forge goes on, and decides as it would have.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.gguf import is_gguf
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json, sealed
from ....decode.evaluation.replay.costs import Curve, measure_forwards
from ....decode.methods import Parts
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...assemble.teacher import prepare_teacher
from ...report.forge import write_forge_page
from ...schema.forge import ForgeRecipe
from ...schema.loading import load_recipe, write_recipe
from ...schema.training import DrafterRecipe, HeadsRecipe
from ...session.launch import run_launched
from ...session.machine import machine
from ...session.terminal import duration, log
from ..artifacts.import_drafter import import_gguf
from ..artifacts.pair import pair_verdict
from ..evaluation.certify import run_certify
from ..evaluation.finished import evaluated
from ..training.regenerate import run_regenerate
from ..training.train import run_train
from .budget import BESIDE, Ledger, measured_groups
from .in_engine import OF_ENGINES, check_engine, worth_in_engine
from .quickstart import find_target, make_corpus
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
    measured_of,
    outlook,
    rivals,
    survivors,
    winner_of,
    worth_training,
)
from .stages import (
    GIVEN,
    PROPOSED,
    ROWS,
    UNTRAINED,
    WITH_TEXTS,
    Row,
    answers_of,
    base_of,
    evaluation_of,
    together,
    training_of,
)

_LOOKED_UP = "the target's own answers, looked up"
_PROBED = 24  # answers that show how fast the target answers
_TRIED = 16  # steps of training that show what a step takes
_CONTEXT = 200
_CERTIFIED = 1000  # tokens of the winner's certificate, each
_CERTIFYING = 4  # forwards that a token of it takes, with the small pair's, about


def run_forge(recipe: ForgeRecipe, plan_only: bool = False) -> dict[str, Any]:
    """Look, collect, choose, race, finish: what was decided and measured, as `forge.json` beside `forge.html` has it.
    With `plan_only` few answers are written, and nothing is trained. Raises ValueError: as the recipes that it writes,
    a folder of another forge, too few questions."""
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
        self.story: list[str] = []
        self.places = [Place(*each) for each in itertools.product(dict.fromkeys(recipe.batch), recipe.temperature)]
        self.untrained: dict[Place, list[Measured]] = {place: [] for place in self.places}
        self.history: dict[Place, dict[str, list[Measured]]] = {place: {} for place in self.places}
        self.forecasts: list[dict[str, Any]] = []
        """Of a candidate's speedup: by its ceiling, and from less training."""
        self.ceilings: dict[str, float] = {}
        self.prompts: dict[Place, int] = {}
        self.winners: dict[Place, Measured | None] = {}

    def run(self, plan_only: bool) -> dict[str, Any]:
        self._prepare()
        with self.ledger.stage("costs"):
            costs = self._costs()
        self.shape, self.curve = Shape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
        self._say(
            f"a token takes {1e3 * self.curve(1):.1f} ms, three more in the same forward "
            f"{1e3 * (self.curve(4) - self.curve(1)):.1f}"
        )
        chosen = self._choose(costs["eagle"])
        self._share_measuring(chosen)
        asked = min(self.questions, int(SHARES["answers"] * self.seconds / costs["seconds_per_answer"]))
        self._say(
            f"{asked:,} of {self.questions:,} questions can be answered, "
            f"{' or '.join(map(str, dict.fromkeys(self.prompts.values())))} held out are measured on"
        )
        parts = {"answers": min(asked * costs["seconds_per_answer"], SHARES["answers"] * self.seconds)}
        parts |= {"measuring": (SHARES["measure"] + SHARES["decide"]) * self.seconds}
        parts |= {"certificates": self._certifying() * len(self.places) * self._certifies()}
        priced = ", ".join(f"{duration(seconds)} for {name}" for name, seconds in parts.items())
        self._say(f"of {duration(self.seconds)} at most {priced}; the rest is for training")
        if plan_only:
            return self._write()
        self._look()
        left: list[tuple[Candidate, int]] = []
        if asked < LEAST_ANSWERS:
            self._say(f"nothing is trained: the budget pays for {asked} answers, to learn takes {LEAST_ANSWERS}")
        else:
            with self.ledger.stage("answers"):
                run_regenerate(answers_of(self.base, asked, "answers"))
                run_train(self.base.table)
            self._measure("table", WITH_TEXTS, _LOOKED_UP, 0, table=True)
            left = self._race([each for each in chosen if self._may_win(each)])
        self._finish(left)
        return self._write()

    def _say(self, text: str, place: Place | None = None) -> None:
        text = self._at(place) + text
        log(f"forge: {text}")
        self.story.append(text)

    def _at(self, place: Place | None) -> str:
        """What names one of several."""
        return "" if place is None or len(self.places) == 1 else f"{place.words}: "

    def _name(self, stem: str, place: Place) -> str:
        return stem if len(self.places) == 1 else f"{stem}-{place.slug}"

    def _prepare(self) -> None:
        """The target's folder and the questions."""
        written = self.out / "forge.yaml"
        if written.is_file():
            theirs = load_recipe(str(written), kinds=("forge",)).model_dump()
            mine, free = self.recipe.model_dump(), ("hours", "more_hours", "out", *OF_ENGINES)
            if changed := [name for name in mine if name not in free and mine[name] != theirs[name]]:
                raise ValueError(
                    f"{self.out} holds a forge with another `{changed[0]}` ({theirs[changed[0]]!r}, not "
                    f"{mine[changed[0]]!r}): choose another folder with --out"
                )
        write_recipe(self.recipe, written)
        target = self.out / "target"
        if not target.is_dir():
            assert isinstance(self.base.target, str)
            found = find_target(self.base.target)
            import_gguf(found, target) if is_gguf(found) else target.symlink_to(found.resolve())
        make_corpus(self.base, self.out / "corpus")
        report = load_json(self.out / "corpus" / "report.json", "conversations")
        self.held_out, self.questions = report["heldout"], report["conversations"] - report["heldout"]
        if self.held_out < 4 or self.questions < 20:
            raise ValueError(f"{self.questions} questions and {self.held_out} held out: at least 20 and 4 are needed")

    def _costs(self) -> dict[str, Any]:
        """What the target takes, measured once."""
        path, answers = self.out / "costs.json", min(_PROBED, self.questions)
        probe = answers_of(self.base, answers, "probe")
        if path.is_file():
            return dict(load_json(path, "seconds_per_answer"))
        model = load_target(self.base.evaluate)
        head, inner = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        count = sum(weight.numel() for weight in model.parameters())
        count -= head.numel() + (0 if head is inner else inner.numel())
        layers = model.config.num_hidden_layers
        shape = Shape(layers, count / layers, model.config.hidden_size, len(head))
        curve = measure_forwards(wrap_model(model), Parts(), _CONTEXT).target
        Path(probe.out).unlink(missing_ok=True)
        began = time.monotonic()
        run_regenerate(probe)
        found: dict[str, Any] = {"shape": asdict(shape), "nodes": curve.nodes, "seconds": curve.seconds}
        found |= {"seconds_per_answer": (time.monotonic() - began) / answers, "eagle": _has_eagle(model.config)}
        atomic_text(path, json.dumps(sealed(found), indent=1) + "\n")
        return found

    def _costs_at(self, place: Place) -> Callable[[float], float]:
        """Seconds of a forward over so many tokens of each text."""
        return lambda tokens: self.curve(place.batch * tokens)

    def _choose(self, has_eagle: bool) -> list[Candidate]:
        """Candidates that could gain anything, with what look-up would have to leave them."""
        chosen, batches = [], list(dict.fromkeys(self.recipe.batch))
        for candidate in candidates_of(self.shape, PROPOSED, has_eagle):
            self.ceilings[candidate.name] = max(ceiling(candidate, self._costs_at(place)) for place in self.places)
            found = [(each, *worth_training(candidate, self._costs_at(Place(each, 0.0)), 1.0)) for each in batches]
            for batch, _, said in found:
                self._say(said if len(batches) == 1 else f"{batch} at a time: {said}")
            if any(able for _, able, _ in found):
                chosen.append(candidate)
        return chosen

    def _share_measuring(self, chosen: Sequence[Candidate]) -> None:
        """How many prompts each place is measured on, by what all evaluations will take."""
        rows = [len(UNTRAINED), len(WITH_TEXTS), *(len(GIVEN) for _ in self.recipe.drafters)]
        most = sorted((len(ROWS[each.kind]) for each in chosen), reverse=True)
        for rung in range(RUNGS + 1):
            rows += most[: -(-len(most) // 2**rung)]
        for place in self.places:
            if place.batch > self.held_out:
                raise ValueError(f"{self.held_out} questions held out: `batch` {place.batch} needs as many at a time")
            each = self.recipe.new_tokens * self.curve(place.batch)
            share = SHARES["measure"] * self.seconds / len(self.places)
            groups = measured_groups(share, sum(rows) + len(rows), each, self.held_out // place.batch)
            self.prompts[place] = place.batch * groups

    def _may_win(self, candidate: Candidate) -> bool:
        known = [(place, self._best_untrained(place)) for place in self.places]
        found = [(place, *worth_training(candidate, self._costs_at(place), best)) for place, best in known]
        for place, able, said in found:
            if not able:
                self._say(said, place)
        return any(able for _, able, _ in found)

    def _best_untrained(self, place: Place) -> float:
        return max((each.speedup for each in self.untrained[place]), default=1.0)

    def _look(self) -> None:
        """What costs no training: look-up, and drafters that there are."""
        self._measure("look", UNTRAINED, "look-up in the text", 0)
        for number, drafter in enumerate(self.recipe.drafters, 1):
            try:
                if not is_eagle(folder_of(drafter)):
                    minds = pair_verdict(str(self.out / "target"), drafter, self.recipe.engine or "draftsmith")
                    if minds is not None:
                        self._say(f"{drafter}: {self.recipe.engine or 'the doctor'} says {minds}")
                self._measure(f"given-{number}", GIVEN, drafter, 0, drafters=[drafter])
            except ValueError as error:  # no pair with the target: that it is there was seen before anything
                self._say(f"{drafter}: left out, {error}")

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
            if (out / MANIFEST_FILE).is_file():
                return run_train(stage)
            if self.recipe.processes == 1:
                prepare_teacher(stage)
                return run_train(stage)
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
        if known:
            rates, seconds = self._rates(known)
            names, said = affordable(rates, seconds)
            known = {name: known[name] for name in names}
            if said:
                self._say(said)
        if not known:
            self._say("nothing is trained: no candidate could be faster than what there is, in time")
            return []
        finish = (1 - RACE) * seconds + 3600 * self.recipe.more_hours
        ends = {name: max(LEAST_STEPS, int(finish / rates[name])) for name in known}
        going: dict[str, None]
        first: dict[str, None] = {}
        for rung in range(1, RUNGS + 1):
            for name, candidate in known.items():
                each = RACE * seconds / (len(known) * RUNGS)
                steps = min(ends[name], max(LEAST_STEPS, int(each / rates[name])))
                artifact = self._train(candidate, steps)
                given = f"rung-{rung}-{candidate.slug}", ROWS[candidate.kind], name, steps
                self._forecast(candidate, self._measure(*given, **self._parts(candidate, artifact)))
            going, first = {}, {}
            for place in self.places:
                own = {name: self.history[place][name] for name in known}
                kept, said = survivors(own, ends, self._best_untrained(place))
                self._say(said, place)
                going |= dict.fromkeys(kept)
                first |= dict.fromkeys(kept[:1])
            known = {name: each for name, each in known.items() if name in going}
        return [(known[name], max(LEAST_STEPS, ends[name] // len(first))) for name in first]

    def _forecast(self, candidate: Candidate, found: dict[Place, Measured]) -> None:
        """Keep measurements beside what was expected of them: before any training, from plain decoding to the ceiling
        beside what look-up gains."""
        for place, each in found.items():
            known = self.history[place].setdefault(candidate.name, [])
            low, high = 1.0, ceiling(candidate, self._costs_at(place)) * max(1.0, self._best_untrained(place))
            if known:
                low, high = outlook(known, each.steps)
            if not known or each.steps > known[-1].steps:
                what = {"name": self._at(place) + candidate.name, "trained": known[-1].steps if known else 0}
                self.forecasts.append(what | {"steps": each.steps, "low": low, "high": high, "found": each.speedup})
            known.append(each)

    def _rates(self, known: Mapping[str, Candidate]) -> tuple[dict[str, float], float]:
        """Seconds of a step of each, and those that are left for training; measured once."""
        path = self.out / "race.json"
        if not path.is_file():
            trained = {name: load_manifest(self._train(each, _TRIED)).training for name, each in known.items()}
            each = {name: float(training["seconds"]) / _TRIED for name, training in trained.items()}
            atomic_text(path, json.dumps(sealed({"rates": each, "spent": self.ledger.spent}), indent=1) + "\n")
        found = load_json(path, "rates")
        names = [name for name in known if name in found["rates"]]
        kinds = sorted((len(ROWS[known[name].kind]) + 1 for name in names), reverse=True)
        rows = sum(sum(kinds[: -(-len(kinds) // 2**rung)]) for rung in range(RUNGS + 1))
        measuring = sum(
            BESIDE * rows * self.prompts[place] / place.batch * self.recipe.new_tokens * self.curve(place.batch)
            for place in self.places
        )
        certifying = self._certifying() * len(self.places) if self._certifies() else 0.0
        measuring += SHARES["decide"] * self.seconds
        left = max(0.0, self.seconds - found["spent"] - measuring - certifying)
        self._say(
            f"of {duration(self.seconds)} {duration(found['spent'])} are spent; measuring will take about "
            f"{duration(measuring)}, which leaves {duration(left)} for training"
        )
        return {name: found["rates"][name] for name in names}, left

    def _certifying(self) -> float:
        """Seconds of a certificate, about."""
        return _CERTIFYING * _CERTIFIED * self.curve(1)

    def _certifies(self) -> bool:
        """Whether there is time for certificates."""
        return self._certifying() * len(self.places) <= SHARES["certify"] * self.seconds

    def _finish(self, left: Sequence[tuple[Candidate, int]]) -> None:
        """Train those that lead somewhere to the end, and measure them beside what costs no training."""
        finalists = {place: [*found] for place, found in self.untrained.items()}
        parts: dict[str, dict[str, Any]] = {}
        for candidate, steps in left:
            parts[candidate.name] = self._parts(candidate, self._train(candidate, steps))
            name = f"final-{candidate.slug}-{steps}"
            found = self._measure(name, ROWS[candidate.kind], candidate.name, steps, **parts[candidate.name])
            self._forecast(candidate, found)
            for place in self.places:
                finalists[place].append(found[place])
        for place in self.places:
            self.winners[place], said = winner_of(self._decided(place, finalists[place], parts))
            self._say(said, place)
        for place, winner in self.winners.items():
            if winner is not None:
                self._hand_over(place, winner, parts)
        if self.recipe.engine is not None and left:
            self._write()  # should the engine not start
            for line in worth_in_engine(self.recipe, self._train(*left[0]), max(self.prompts.values())):
                self._say(line)

    def _decided(
        self, place: Place, finalists: list[Measured], trained: dict[str, dict[str, Any]]
    ) -> Sequence[Measured]:
        """What may be the fastest, measured again side by side on more prompts, where there are several."""
        close = rivals(finalists)
        if len(close) < 2:
            return finalists
        rows, given = together(close, trained, self.recipe.drafters)
        each = self.recipe.new_tokens * self.curve(place.batch)
        share = SHARES["decide"] * self.seconds / len(self.places)
        prompts = place.batch * measured_groups(share, len(rows) + 1, each, self.held_out // place.batch)
        name, labels = self._name("decide", place), [f"{one.label}, {one.name}" for one in close]
        recipe = evaluation_of(self.base, self.recipe, name, rows, place, prompts, **given, labels=labels)
        with self.ledger.stage(name):
            found = {row["label"]: row for row in evaluated(recipe)["methods"]}
        self._say(f"{len(close)} may be the fastest: measured side by side on {prompts} questions", place)
        return [
            replace(measured_of(one.name, one.steps, found[label]), label=one.label)
            for one, label in zip(close, labels, strict=True)
        ]

    def _hand_over(self, place: Place, winner: Measured, trained: dict[str, dict[str, Any]]) -> None:
        """The winner's recipe, and its certificate where there is time for one."""
        rows, given = together([winner], trained, self.recipe.drafters)
        name = self._name("winner", place)
        recipe = evaluation_of(self.base, self.recipe, name, rows, place, self.prompts[place], **given)
        write_recipe(recipe, file := self.out / f"{name}.yaml")
        self._say(f"to decode with it: draftsmith evaluate {file}", place)
        if self._certifies():
            with self.ledger.stage(f"certificate {name}"):
                certificates = run_certify(recipe, _CERTIFIED)
            self._say("; ".join(f"{each.label}: {each.verdict}" for each in certificates), place)
        else:
            self._say(f"to certify it: draftsmith certify {file}", place)

    def _write(self) -> dict[str, Any]:
        results = {
            "schema": 2,
            "kind": "forge",
            "machine": machine("cpu"),
            "recipe": self.recipe.recorded(),
            "story": self.story,
            "spent": self.ledger.seconds,
            "ceilings": self.ceilings,
            "places": [
                {
                    **asdict(place),
                    "untrained": [asdict(each) for each in self.untrained[place]],
                    "history": {name: [asdict(each) for each in found] for name, found in self.history[place].items()},
                    "winner": None if (best := self.winners.get(place)) is None else asdict(best),
                }
                for place in self.places
            ],
            "forecasts": self.forecasts,
        }
        atomic_text(self.out / "forge.json", json.dumps(sealed(results), indent=1, allow_nan=False) + "\n")
        page = write_forge_page(results, self.out / "forge.html")
        took = duration(self.ledger.spent)
        log(f"forge: {duration(self.seconds)} were given, it took {took}; {page} tells the story")
        return results


def _has_eagle(config: Any) -> bool:
    """Whether EAGLE-3's layer can be made for a target."""
    try:
        EagleHeads.for_target(config)
    except ValueError:
        return False
    return True
