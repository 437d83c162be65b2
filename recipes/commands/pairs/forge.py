"""`draftsmith forge`: a target in, the fastest lossless set-up out, within a budget.

It writes recipes and runs them by the commands' own code; what it decides, and why, is in `rules.py`. All that it knows
lies in the files of finished stages, so that a killed forge goes on, and decides as it would have.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.gguf import is_gguf
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json, sealed
from ....decode.evaluation.replay.costs import Curve, measure_forwards
from ....decode.methods import Parts, needs_of
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...assemble.teacher import prepare_teacher
from ...report.forge import write_forge_page
from ...schema.forge import ForgeRecipe
from ...schema.loading import load_recipe, write_recipe
from ...session.launch import run_launched
from ...session.machine import machine
from ...session.terminal import duration, log
from ..artifacts.import_drafter import import_gguf
from ..evaluation.certify import run_certify
from ..evaluation.finished import evaluated
from ..training.regenerate import run_regenerate
from ..training.train import run_train
from .in_engine import OF_ENGINES, check_engine, worth_in_engine
from .quickstart import find_target, make_corpus
from .rules import (
    RUNGS,
    SHARES,
    Candidate,
    Measured,
    Shape,
    best_row,
    candidates_of,
    ceiling,
    outlook,
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
    label_of,
    training_of,
)

_LOOKED_UP = "the target's own answers, looked up"
_PROBED = 24  # answers that show how fast the target answers
_TRIED = 16  # steps of training that show what a step takes
_CONTEXT = 200
_EVALUATIONS = 8  # among which the time of measuring is divided
_ROWS = 4  # of one, about
_CERTIFIED_FROM = 1.0  # hours: a certificate takes minutes
_CERTIFIED = 1000  # tokens of it


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
        self.story: list[str] = []
        self.history: dict[str, list[Measured]] = {}
        self.forecasts: list[dict[str, Any]] = []
        """Of a candidate's speedup, from less training."""
        self.untrained: list[Measured] = []
        self.ceilings: dict[str, float] = {}

    def run(self, plan_only: bool) -> dict[str, Any]:
        self._prepare()
        costs = self._costs()
        self.shape, self.curve = Shape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
        each = self.recipe.new_tokens * self.curve(1) * _ROWS
        self.prompts = max(4, min(self.held_out, int(SHARES["measure"] * self.seconds / _EVALUATIONS / each)))
        asked = max(20, min(self.questions, int(SHARES["answers"] * self.seconds / costs["seconds_per_answer"])))
        self._say(
            f"a token takes {1e3 * self.curve(1):.1f} ms, three more in the same forward "
            f"{1e3 * (self.curve(4) - self.curve(1)):.1f}; {asked:,} of {self.questions:,} questions are answered, "
            f"{self.prompts} held out are measured on"
        )
        chosen = self._choose(costs["eagle"])
        if plan_only:
            return self._write(None)
        self._look()
        run_regenerate(answers_of(self.base, asked, "answers"))
        run_train(self.base.table)
        self._measure("table", WITH_TEXTS, _LOOKED_UP, 0, table=True)
        left = self._race([each for each in chosen if self._may_win(each)])
        return self._write(self._finish(left))

    def _say(self, text: str) -> None:
        log(f"forge: {text}")
        self.story.append(text)

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

    def _choose(self, has_eagle: bool) -> list[Candidate]:
        """Candidates that could gain anything, with what look-up would have to leave them."""
        chosen = []
        for candidate in candidates_of(self.shape, PROPOSED, has_eagle):
            self.ceilings[candidate.name] = ceiling(candidate, self.curve)
            able, said = worth_training(candidate, self.curve, 1.0)
            self._say(said)
            if able:
                chosen.append(candidate)
        return chosen

    def _may_win(self, candidate: Candidate) -> bool:
        able, said = worth_training(candidate, self.curve, self._best_untrained())
        if not able:
            self._say(said)
        return able

    def _best_untrained(self) -> float:
        return max((each.speedup for each in self.untrained), default=1.0)

    def _look(self) -> None:
        """What costs no training: look-up, and drafters that there are."""
        self._measure("look", UNTRAINED, "look-up in the text", 0)
        for number, drafter in enumerate(self.recipe.drafters, 1):
            try:
                self._measure(f"given-{number}", GIVEN, drafter, 0, drafters=[drafter])
            except ValueError as error:  # no pair with the target: that it is there was seen before anything
                self._say(f"{drafter}: left out, {error}")

    def _measure(self, name: str, rows: Sequence[Row], what: str, steps: int, **parts: Any) -> Measured:
        results = evaluated(evaluation_of(self.base, self.recipe, name, rows, self.prompts, **parts))
        found = best_row(what, steps, results)
        self._say(f"{what}: {found.label}, {found.tokens_per_step:.2f} tokens a step, {found.speedup:.2f} x")
        if not steps:
            self.untrained.append(found)
        return found

    def _train(self, candidate: Candidate, steps: int) -> Path:
        out = self.out / "trained" / f"{_slug(candidate)}-{steps}"
        stage = training_of(self.base, candidate, self.shape.vocabulary, steps, out, self.recipe.processes)
        if (out / MANIFEST_FILE).is_file():
            return run_train(stage)
        if self.recipe.processes == 1:
            prepare_teacher(stage)
            return run_train(stage)
        file = out.with_suffix(".yaml")
        write_recipe(stage, file)
        gc.collect()
        torch.cuda.empty_cache()  # the first process is on the same device
        for words in (("prepare", str(file), "--teacher"), ("train", str(file))):
            run_launched(f"--num_processes {self.recipe.processes} {self.recipe.launch}", *words)
        if (found := load_manifest(out).training["processes"]) != self.recipe.processes:
            raise ValueError(
                f"{found} process trained, where `processes` says {self.recipe.processes}: accelerate finds no device "
                "for each; `launch=--multi_gpu` insists, `launch='--config_file FILE'` says how"
            )
        return out

    def _parts(self, candidate: Candidate, artifact: Path) -> dict[str, Any]:
        named = {"heads": str(artifact)} if candidate.kind == "heads" else {"drafters": [str(artifact)]}
        return {"table": True, **named}

    def _race(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
        """Train all a little, the better half more; those that are left, with the steps that finish them."""
        # What EAGLE-3's layer reads of the target holds what the others read.
        known = {each.name: each for each in sorted(candidates, key=lambda each: each.kind != "eagle")}
        if not known:
            self._say("nothing is trained: no candidate could be faster than what there is")
            return []
        rates = {name: self._seconds_per_step(each) for name, each in known.items()}
        ends = {name: self._steps("finish", rates[name], 1, self.recipe.more_hours) for name in known}
        for rung in range(1, RUNGS + 1):
            for name, candidate in known.items():
                steps = min(ends[name], self._steps("race", rates[name], len(known) * RUNGS))
                artifact = self._train(candidate, steps)
                given = f"rung-{rung}-{_slug(candidate)}", ROWS[candidate.kind], name, steps
                found = self._measure(*given, **self._parts(candidate, artifact))
                self._forecast(name, found)
            own = {name: self.history[name] for name in known}
            kept, said = survivors(own, ends, self._best_untrained())
            self._say(said)
            known = {name: known[name] for name in kept}
        return [(each, ends[name]) for name, each in known.items()]

    def _forecast(self, name: str, found: Measured) -> None:
        """Keep a measurement beside what was expected of it."""
        known = self.history.setdefault(name, [])
        if known and found.steps > known[-1].steps:
            low, high = outlook(known, found.steps)
            self.forecasts.append(
                {"name": name, "steps": found.steps, "low": low, "high": high, "found": found.speedup}
            )
        known.append(found)

    def _seconds_per_step(self, candidate: Candidate) -> float:
        training = load_manifest(self._train(candidate, _TRIED)).training
        return float(training["seconds"]) / _TRIED

    def _steps(self, share: str, seconds: float, among: int, more_hours: float = 0.0) -> int:
        """Of a candidate, in its part of a share of the budget."""
        return max(2 * _TRIED, int((SHARES[share] * self.seconds / among + 3600 * more_hours) / seconds))

    def _finish(self, left: Sequence[tuple[Candidate, int]]) -> Measured | None:
        """Train the first of those that are left to the end, and measure it beside what costs no training."""
        finalists = [*self.untrained]
        parts: dict[str, dict[str, Any]] = {}
        for candidate, steps in left[:1]:
            artifact = self._train(candidate, steps)
            name = f"final-{_slug(candidate)}-{steps}"
            given = self._parts(candidate, artifact)
            found = self._measure(name, ROWS[candidate.kind], candidate.name, steps, **given)
            self._forecast(candidate.name, found)
            finalists.append(found)
            parts[candidate.name] = given
        winner, said = winner_of(finalists)
        self._say(said)
        if winner is not None:
            self._hand_over(winner, parts)
        if self.recipe.engine is not None and left:
            self._write(winner)  # should the engine not start
            for line in worth_in_engine(self.recipe, self._train(*left[0]), self.prompts):
                self._say(line)
        return winner

    def _hand_over(self, winner: Measured, parts: dict[str, dict[str, Any]]) -> None:
        """The winner's recipe, and its certificate where there is time for one."""
        known = {_LOOKED_UP: {"table": True}, **parts}
        known |= {drafter: {"drafters": [drafter]} for drafter in self.recipe.drafters}
        rows = [*UNTRAINED, *WITH_TEXTS, *GIVEN, *(row for kind in ROWS.values() for row in kind)]
        row = next(row for row in rows if label_of(row) == winner.label)
        given = {**known.get(winner.name, {}), "table": "table" in needs_of(*row)}
        recipe = evaluation_of(self.base, self.recipe, "winner", [row], self.prompts, **given)
        write_recipe(recipe, self.out / "winner.yaml")
        self._say(f"to decode with it: draftsmith evaluate {self.out / 'winner.yaml'}")
        if self.recipe.hours >= _CERTIFIED_FROM:
            certificates = run_certify(recipe, _CERTIFIED)
            self._say("; ".join(f"{each.label}: {each.verdict}" for each in certificates))
        else:
            self._say(f"to certify it: draftsmith certify {self.out / 'winner.yaml'}")

    def _write(self, winner: Measured | None) -> dict[str, Any]:
        results = {
            "schema": 1,
            "kind": "forge",
            "machine": machine("cpu"),
            "recipe": self.recipe.recorded(),
            "story": self.story,
            "ceilings": self.ceilings,
            "untrained": [asdict(each) for each in self.untrained],
            "history": {name: [asdict(each) for each in found] for name, found in self.history.items()},
            "forecasts": self.forecasts,
            "winner": None if winner is None else asdict(winner),
        }
        atomic_text(self.out / "forge.json", json.dumps(sealed(results), indent=1, allow_nan=False) + "\n")
        page = write_forge_page(results, self.out / "forge.html")
        log(f"forge: {duration(self.seconds)} were given; {page} tells the story")
        return results


def _slug(candidate: Candidate) -> str:
    return f"{candidate.kind}-{len(candidate.layers)}" if candidate.layers else candidate.kind


def _has_eagle(config: Any) -> bool:
    """Whether EAGLE-3's layer can be made for a target."""
    try:
        EagleHeads.for_target(config)
    except ValueError:
        return False
    return True
