"""`draftsmith forge`: find the fastest lossless setup for a target within a time budget.

A forge writes recipes and runs them like the commands do. All its state is in the files of finished stages, so that an
interrupted forge resumes and decides as it would have.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Sequence
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
from ....decode.evaluation.tuning.costs import Curve
from ....decode.evaluation.tuning.plan import (
    EVALUATION_OVERHEAD,
    MIN_ANSWERS,
    MIN_STEPS,
    RACE,
    RUNGS,
    SHARES,
    Candidate,
    Kind,
    ModelShape,
    affordable_candidates,
    count_batches,
    count_rows,
    is_worth_training,
    list_candidates,
)
from ....decode.evaluation.tuning.tuner import (
    DecodingBackend,
    Measurement,
    Workload,
    choose_winner,
    interleave_rankings,
    tune,
    within_interval_of_best,
)
from ....decode.methods import method_config
from ...assemble.evaluation import device_of
from ...report.certificate import KIND
from ...report.forge import write_forge_page
from ...schema.forge import ForgeRecipe
from ...schema.loading import write_recipe
from ...schema.results import beside
from ...schema.training import DrafterRecipe, HeadsRecipe
from ...session.launch import run_launched
from ...session.machine import machine
from ...session.terminal import duration, log
from ..diagnosis.pair import pair_verdict
from ..evaluation.evaluate import NotLosslessError, certify_once, evaluate_once
from ..evaluation.tune import search_settings
from .in_engine import check_engine, drafts_of, tune_in_engine
from .quickstart import run_stage
from .stages import (
    DRAFT_VOCABULARY,
    REVERSED_HELDOUT,
    UNTRAINED,
    WITH_ANSWERS,
    Ledger,
    Row,
    affordable_space,
    answers_of,
    base_of,
    combine_rows,
    evaluation_of,
    kind_of,
    label_of,
    list_rows,
    measure_costs,
    prepare_prompts,
    training_of,
    tuning_of,
)

_MAX_ROWS = 3  # of a candidate
_TRIED = 16  # training steps that show how long a step takes
_CERTIFIED = range(1000, 4001)  # tokens of a certificate
_CERTIFYING = 4  # forwards per token of a certificate, with those of the small pair
_TUNED = 2  # searched settings of each finalist that are confirmed


def run_forge(recipe: ForgeRecipe, plan_only: bool = False) -> dict[str, Any]:
    """Find the fastest setup; return the decisions and measurements that `forge.json` and `forge.html` hold.

    With `plan_only`, a few answers are generated and nothing is trained; the results are in `plan.json`.

    Raises:
        ValueError: As the recipes that it writes; a folder of another forge; too few prompts.
    """
    out = Path(recipe.out)
    check_writable(out)
    check_engine(recipe)
    for drafter in recipe.drafters:
        folder_of(drafter)
    with sole_writer(out):
        return _Forge(recipe, out).run(plan_only)


class _Forge:
    """A forge; its methods are in the order in which they run."""

    def __init__(self, recipe: ForgeRecipe, out: Path) -> None:
        self.recipe, self.out, self.base = recipe, out, base_of(recipe)
        self.seconds = 3600 * recipe.hours
        self.ledger = Ledger(out / "spent.json")
        self.decision_log: dict[str, list[str]] = {}
        """Decisions and reasons by section."""
        batches, temperatures = dict.fromkeys(recipe.batch), dict.fromkeys(recipe.temperature)
        self.workloads = [Workload(*each) for each in itertools.product(batches, temperatures)]
        self.untrained: dict[Workload, list[Measurement]] = {each: [] for each in self.workloads}
        self.history: dict[Workload, dict[str, list[Measurement]]] = {each: {} for each in self.workloads}
        self.confirmed: dict[Workload, list[Measurement]] = {}
        self.winners: dict[Workload, Measurement | None] = {}
        self.verdicts: dict[Workload, dict[str, str]] = {}
        self.prompts: dict[Workload, int] = {}
        self.trained: dict[str, dict[str, Any]] = {}
        """Artifacts of trained candidates, by name and steps."""

    def run(self, plan_only: bool) -> dict[str, Any]:
        """Run all stages."""
        with self.ledger.stage("corpus"):
            self.questions = prepare_prompts(self.recipe, self.base, self.out)
        with self.ledger.stage("costs"):
            costs = measure_costs(self.base, self.out, self.questions.answered)
        self.section = "Plan: costs, candidates and budget"
        self.shape, self.curve = ModelShape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
        self.prefill = self.questions.tokens * costs["seconds"][-1] / costs["nodes"][-1]
        asked = min(self.questions.answered, int(SHARES["answers"] * self.seconds / costs["seconds_per_answer"]))
        chosen = self._plan(costs["eagle"], asked, costs["seconds_per_answer"])
        if plan_only:
            return self._end("plan")
        self._measure_untrained()
        finalists: list[tuple[Candidate, int]] = []
        if asked < MIN_ANSWERS:
            self._note(f"nothing is trained: the budget pays for {asked} answers, training needs {MIN_ANSWERS}")
        else:
            table = self.base.table.model_copy(update={"out": f"{self.out}/table-{asked}"})
            self.base = self.base.model_copy(update={"table": table})
            with self.ledger.stage("answers"):
                run_stage(answers_of(self.base, asked, "answers"))
                run_stage(table)
            self._measure("table", "suffix decoding over the target's answers", WITH_ANSWERS, table=True)
            finalists = self._race(chosen)
        self._finish(finalists)
        return self._end("forge")

    def _note(self, text: str, workload: Workload | None = None) -> None:
        text = text if workload is None or len(self.workloads) == 1 else f"{workload}: {text}"
        log(f"forge: {text}")
        self.decision_log.setdefault(self.section, []).append(text)

    def _name(self, stem: str, workload: Workload) -> str:
        return stem if len(self.workloads) == 1 else f"{stem}-{workload.slug}"

    def _forward_seconds(self, workload: Workload) -> Callable[[float], float]:
        """Return the time of a forward by its number of tokens per sequence."""
        return lambda tokens: self.curve(workload.batch * tokens)

    def _plan(self, supports_eagle: bool, asked: int, seconds_per_answer: float) -> list[Candidate]:
        """Choose the candidates that could gain anything, and the number of prompts to measure with."""
        more = self.curve(4) - self.curve(1)
        self._note(f"a forward takes {1e3 * self.curve(1):.1f} ms, {1e3 * more:.1f} ms more with three more tokens")
        chosen, batches = [], dict.fromkeys(self.recipe.batch)
        for candidate in list_candidates(self.shape, DRAFT_VOCABULARY, supports_eagle):
            found = {batch: is_worth_training(candidate, self.curve, batch) for batch in batches}
            for batch, (_, reason) in found.items():
                self._note(reason if len(batches) == 1 else f"batch {batch}: {reason}")
            chosen += [candidate] if any(able for able, _ in found.values()) else []
        looks = [len(UNTRAINED), len(WITH_ANSWERS), *(_MAX_ROWS for _ in self.recipe.drafters)]
        rows = count_rows([_MAX_ROWS] * len(chosen), RUNGS, len(self.workloads)) + sum(looks) + len(looks)
        for workload in self.workloads:
            self.prompts[workload] = self._count_prompts(workload, "measure", rows)
        parts = {"answers": asked * seconds_per_answer, "measuring": self._measuring(rows)}
        parts["certificates"] = len(self.workloads) * self._certifying()
        prompts = " or ".join(map(str, dict.fromkeys(self.prompts.values())))
        self._note(f"{asked:,} of {self.questions.answered:,} prompts are answered, {prompts} held out for measuring")
        costs = ", ".join(f"{duration(seconds)} for {name}" for name, seconds in parts.items() if seconds)
        extra = "; measuring in the engine is not included" if self.recipe.engine is not None else ""
        self._note(f"of {duration(self.seconds)} about {costs}; the rest is for training{extra}")
        return chosen

    def _count_prompts(self, workload: Workload, share: str, rows: int) -> int:
        """Count the prompts with which so many rows can be measured in a share of the budget."""
        seconds = SHARES[share] * self.seconds / len(self.workloads)
        most = self.questions.held_out // workload.batch
        return workload.batch * count_batches(seconds, rows, self._batch_seconds(workload), most)

    def _batch_seconds(self, workload: Workload) -> float:
        """Return the time of a batch in autoregressive decoding."""
        return workload.batch * self.prefill + self.recipe.new_tokens * self.curve(workload.batch)

    def _measuring(self, rows: int) -> float:
        """Return the time of so many rows on each workload, and of tuning and confirmation."""
        batches = (self.prompts[each] / each.batch * self._batch_seconds(each) for each in self.workloads)
        return EVALUATION_OVERHEAD * rows * sum(batches) + (SHARES["tune"] + SHARES["confirm"]) * self.seconds

    def _certified_tokens(self) -> int:
        """Return the tokens of each certificate that the budget pays for; 0 for no certificate."""
        share = SHARES["certify"] * self.seconds / len(self.workloads)
        tokens = min(int(share / (_CERTIFYING * self.curve(1))), _CERTIFIED[-1])
        return tokens if tokens in _CERTIFIED else 0

    def _certifying(self) -> float:
        return _CERTIFYING * self._certified_tokens() * self.curve(1)

    def _measure_untrained(self) -> None:
        """Measure prompt lookup and the drafters that are given."""
        self.section = "Methods without training"
        self._measure("look", "prompt lookup", UNTRAINED)
        reader = self.recipe.engine or "draftsmith"
        for number, drafter in enumerate(dict.fromkeys(self.recipe.drafters), 1):
            try:
                folder = folder_of(drafter)
                doubts = None if is_eagle(folder) else pair_verdict(str(self.out / "target"), drafter, reader)
                if doubts is not None:
                    self._note(f"{drafter}: doctor, for {reader}: {doubts}")
                self._measure(f"given-{number}", drafter, kind_of(folder), drafters=[drafter])
            except NotLosslessError:
                raise
            except ValueError as error:  # the drafter does not fit the target
                self._note(f"{drafter}: left out, {error}")
                for workload, found in self.untrained.items():
                    self.untrained[workload] = [each for each in found if each.name != drafter]

    def _measure(
        self, stage: str, name: str, what: Sequence[Row] | Kind, steps: int = 0, cost: float | None = None, **parts: Any
    ) -> None:
        """Measure rows, or the settings of a kind of drafter, on each workload; keep the fastest."""
        for workload in self.workloads:
            listed = what
            if isinstance(listed, str):
                listed = list_rows(listed, self._forward_seconds(workload), self.shape, cost)
            rows = [row for row in listed if parts.get("table") or "table" not in method_config(*row).needs]
            recipe = evaluation_of(
                self.base, self.recipe, self._name(stage, workload), rows, workload, self.prompts[workload], **parts
            )
            with self.ledger.stage(self._name(stage, workload)):
                results = evaluate_once(recipe)
            baseline, *others = [Measurement.of_row(name, row, steps) for row in results["methods"]]
            # Without rows, their measurements could not be true.
            best = max(others, key=lambda each: (each.is_steady, each.speedup), default=baseline)
            self._note(
                f"{name}: {best.label}, {best.tokens_per_step:.2f} tokens per step, {best.speedup:.2f}x", workload
            )
            if steps:
                self.history[workload].setdefault(name, []).append(best)
            else:
                self.untrained[workload].append(best)

    def _train(self, candidate: Candidate, steps: int) -> Path:
        name = f"{candidate.slug}-{steps}"
        out = self.out / "trained" / name
        stage = training_of(self.base, candidate, self.shape.vocabulary, steps, out, self.recipe.processes)
        with self.ledger.stage(f"training {name}"):
            if self.recipe.processes == 1:
                run_stage(stage)
            elif not (out / MANIFEST_FILE).is_file():
                self._launch(stage, out.with_suffix(".yaml"))
        if (found := load_manifest(out).training["processes"]) != self.recipe.processes:
            raise ValueError(
                f"{found} process trained, but `processes` is {self.recipe.processes}: accelerate finds no device "
                "for each; set `launch=--multi_gpu`, or `launch='--config_file FILE'`"
            )
        return out

    def _launch(self, stage: DrafterRecipe | HeadsRecipe, file: Path) -> None:
        write_recipe(stage, file)
        gc.collect()
        torch.cuda.empty_cache()  # the first process is on the same device
        for words in (("prepare", str(file), "--teacher"), ("train", str(file))):
            run_launched(f"--num_processes {self.recipe.processes} {self.recipe.launch}", *words)

    def _train_and_measure(self, candidate: Candidate, steps: int, stage: str) -> None:
        artifact = str(self._train(candidate, steps))
        named = {"heads": artifact} if candidate.kind == "heads" else {"drafters": [artifact]}
        self.trained[f"{candidate.name}, {steps:,} steps"] = named
        self._measure(stage, candidate.name, candidate.kind, steps, candidate.cost, table=True, **named)

    def _race(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
        """Train by successive halving; return the first candidate of each workload with its remaining steps."""
        # EAGLE-3 is first: the hidden states that it caches include those of the others.
        known = {each.name: each for each in sorted(candidates, key=lambda each: each.kind != "eagle")}
        self.section = "Short training of all candidates, longer training of the better ones"
        if not known:
            self._note("nothing is trained: no candidate could be faster than autoregressive decoding")
            return []
        rates = {name: self._seconds_per_step(each) for name, each in known.items()}
        rows = count_rows([_MAX_ROWS] * len(known), RUNGS, len(self.workloads))
        seconds = self._training_seconds(self._spent("race"), rows)
        names, reason = affordable_candidates(rates, seconds)
        if reason:
            self._note(reason)
        if not names:
            return []
        for rung in range(1, RUNGS + 1):
            share = RACE * seconds / (len(names) * RUNGS)
            for name in names:
                steps = max(MIN_STEPS, int(share / rates[name]))
                self._train_and_measure(known[name], steps, f"rung-{rung}-{known[name].slug}")
            rankings = []
            for workload in self.workloads:
                ranked = sorted((self.history[workload][name][-1] for name in names), key=lambda each: -each.speedup)
                self._note("; ".join(f"{each.name} {each.speedup:.2f}x" for each in ranked), workload)
                rankings.append([each.name for each in ranked])
            names = interleave_rankings(rankings, -(-len(names) // 2))
            if rung < RUNGS:
                self._note(f"{', '.join(names)} continue")
        first = list(dict.fromkeys(ranked[0] for ranked in rankings))
        seconds = self._training_seconds(self._spent("finish"), _MAX_ROWS * len(first))
        share = (seconds + 3600 * self.recipe.more_hours) / len(first)
        last = self.history[self.workloads[0]]
        return [(known[name], max(last[name][-1].steps, int(share / rates[name]))) for name in first]

    def _seconds_per_step(self, candidate: Candidate) -> float:
        return float(load_manifest(self._train(candidate, _TRIED)).training["seconds"]) / _TRIED

    def _spent(self, moment: str) -> float:
        """Return what was spent when a moment was first reached, so that a forge that resumes decides the same."""
        path, budget = self.out / f"{moment}.json", f"{self.recipe.hours:g} hours"
        spent: dict[str, float] = load_json(path, "spent")["spent"] if path.is_file() else {}
        if budget not in spent:
            spent[budget] = self.ledger.spent
            atomic_text(path, json.dumps({"spent": spent}, indent=1) + "\n")
        return spent[budget]

    def _training_seconds(self, spent: float, rows: int) -> float:
        """Return the time for training, if so many rows are still to be measured."""
        measuring = self._measuring(rows)
        left = max(0.0, self.seconds - spent - measuring - len(self.workloads) * self._certifying())
        self._note(
            f"of {duration(self.seconds)} {duration(spent)} are spent; measuring takes about {duration(measuring)}, "
            f"which leaves {duration(left)} for training"
        )
        return left

    def _finish(self, finalists: Sequence[tuple[Candidate, int]]) -> None:
        """Train the finalists, tune the settings that may be the fastest, and choose."""
        self.section = "Full training, tuning and choice"
        for candidate, steps in finalists:
            if steps > self.history[self.workloads[0]][candidate.name][-1].steps:
                self._train_and_measure(candidate, steps, f"final-{candidate.slug}-{steps}")
        for workload in self.workloads:
            trained = [found[-1] for found in self.history[workload].values()]
            named = [replace(each, name=f"{each.name}, {each.steps:,} steps") for each in trained]
            self.winners[workload], reason = choose_winner(self._tuned(workload, [*self.untrained[workload], *named]))
            self._note(reason, workload)
        self._write()
        for workload, winner in self.winners.items():
            (self.out / f"{self._name('winner', workload)}.yaml").unlink(missing_ok=True)
            if winner is not None:
                self._certify(workload, winner)
        if self.recipe.engine is not None:
            best = [winner for winner in self.winners.values() if winner is not None]
            final = [self.history[self.workloads[0]][candidate.name][-1] for candidate, _ in finalists]
            self._serve([*best, *(replace(each, name=f"{each.name}, {each.steps:,} steps") for each in final)])

    def _tuned(self, workload: Workload, measured: list[Measurement]) -> Sequence[Measurement]:
        """Tune the settings that may be the fastest, and confirm them side by side on prompts that chose none."""
        if not (close := within_interval_of_best(measured)):
            return measured
        predicted: dict[str, float] = {}
        settings = {f"{each.label}, {each.name}": each for each in close}
        for name in dict.fromkeys(each.name for each in close):
            own = [each for each in close if each.name == name]
            for each in self._search(workload, own):
                label = f"{label_of((each.method, each.options))}, {name}"
                predicted[label] = each.speedup
                settings.setdefault(label, each)
        rows, parts = combine_rows(list(settings.values()), self.trained, self.recipe.drafters)
        prompts, name = self._count_prompts(workload, "confirm", len(rows) + 1), self._name("confirm", workload)
        parts |= {"labels": list(settings), "source": REVERSED_HELDOUT}
        recipe = evaluation_of(self.base, self.recipe, name, rows, workload, prompts, **parts)

        def confirm(labels: Sequence[str]) -> dict[str, Measurement]:
            with self.ledger.stage(name):
                found = {row["label"]: row for row in evaluate_once(recipe)["methods"] if row["label"] in labels}
            about = {label: (settings[label].name, row, settings[label].steps) for label, row in found.items()}
            return {label: Measurement.of_row(*each) for label, each in about.items()}

        try:
            (ranked,) = tune(DecodingBackend(workload, predicted, list(settings), confirm), rounds=1).values()
        except NotLosslessError:
            raise
        except ValueError as error:  # drafters that fit the target, but not each other
            self._note(f"{len(settings)} settings cannot be measured side by side: {error}", workload)
            return measured
        self._note(f"{len(settings)} settings are confirmed side by side on {prompts} prompts", workload)
        confirmed = [(each.measured, settings[each.setting]) for each in ranked if each.measured is not None]
        self.confirmed[workload] = [
            replace(found, label=label_of((own.method, own.options)), options=own.options) for found, own in confirmed
        ]
        return self.confirmed[workload] or measured

    def _search(self, workload: Workload, close: Sequence[Measurement]) -> list[Measurement]:
        """Return the settings of a candidate's methods that the tuner predicts to be the fastest."""
        candidate = close[0].name
        stem = f"tune-{'-'.join(candidate.rpartition('/')[2].split())}"
        name = self._name("".join(each for each in stem if each.isalnum() or each in "-_."), workload)
        recipe = tuning_of(self.base, self.recipe, name, close, self.trained, workload, self.prompts[workload])
        seconds = SHARES["tune"] * self.seconds / len(self.workloads)
        space = affordable_space(recipe, int(seconds / self._batch_seconds(replace(workload, batch=1))))
        if space is None:
            self._note(f"{candidate}: the budget pays for no tuning", workload)
            return []
        with self.ledger.stage(name):
            search = search_settings(recipe, space)
        self._note(f"{candidate}: {sum(search.tried.values())} settings were searched", workload)
        found = [each for settings in search.settings.values() for each in settings[:_TUNED] if each.lossless]
        return [
            replace(close[0], label="", speedup=each.speedup, method=each.method, options=each.options)
            for each in found
        ]

    def _certify(self, workload: Workload, winner: Measurement) -> None:
        """Write the winner's recipe, and its certificate if the budget pays for one."""
        rows, parts = combine_rows([winner], self.trained, self.recipe.drafters)
        name, tokens = self._name("winner", workload), self._certified_tokens()
        enough = min(self.questions.held_out, max(self.prompts[workload], 2 * tokens // self.recipe.new_tokens))
        recipe = evaluation_of(self.base, self.recipe, name, rows, workload, enough, **parts)
        write_recipe(recipe, file := self.out / f"{name}.yaml")
        self._note(f"to decode with it: draftsmith evaluate {file}", workload)
        if not tokens:
            self._note(f"to certify it: draftsmith certify {file}", workload)
            return
        with self.ledger.stage(f"certificate {name}"):
            verdicts = self.verdicts[workload] = certify_once(recipe, tokens)
        self._note("; ".join(f"{label}: {verdict}" for label, verdict in verdicts.items()), workload)
        if broken := [label for label, verdict in verdicts.items() if verdict == "not lossless"]:
            self._write()
            raise NotLosslessError(f"{broken[0]} is not lossless: {beside(Path(recipe.out), KIND)} has the evidence")

    def _serve(self, best: Sequence[Measurement]) -> None:
        """Tune the draft lengths of the winners and finalists in the engine that will run them."""
        self.section = f"Draft lengths in {self.recipe.engine}"
        for name, artifact in drafts_of(best, self.trained, self.recipe.drafters).items():
            self._write()  # in case the engine does not start
            with self.ledger.stage(f"{self.recipe.engine} {name}"):
                lines = tune_in_engine(self.recipe, name, artifact, max(self.prompts.values()))
            for line in lines:
                self._note(line)

    def _write(self, name: str = "forge") -> dict[str, Any]:
        results = {
            "schema": 3,
            "kind": "forge",
            "machine": machine(device_of(self.base.evaluate)),
            "recipe": self.recipe.recorded(),
            "decision_log": self.decision_log,
            "spent": self.ledger.seconds,
            "workloads": [
                {
                    **asdict(workload),
                    "untrained": [asdict(each) for each in self.untrained[workload]],
                    "history": {name: list(map(asdict, found)) for name, found in self.history[workload].items()},
                    "confirmed": [asdict(each) for each in self.confirmed.get(workload, [])],
                    "certificate": self.verdicts.get(workload),
                    "winner": None if (best := self.winners.get(workload)) is None else asdict(best),
                }
                for workload in self.workloads
            ],
        }
        atomic_text(self.out / f"{name}.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        write_forge_page(results, self.out / f"{name}.html")
        return results

    def _end(self, name: str) -> dict[str, Any]:
        log(f"forge: budget {duration(self.seconds)}, spent {duration(self.ledger.spent)}; see {self.out}/{name}.html")
        return self._write(name)
