"""`draftsmith forge`: find the fastest lossless setup for a target within a time budget.

The command writes recipes and runs them. Its state is stored in the files of finished stages, so that an interrupted
run resumes with the same decisions.
"""

import gc
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ....decode.evaluation.tuning.costs import Curve
from ....decode.evaluation.tuning.plan import (
    BUDGET_SHARES,
    EVALUATION_OVERHEAD,
    EXPECTED_ACCEPTANCE,
    MIN_ANSWERS,
    MIN_BATCHES,
    MIN_STEPS,
    SELECTION_SHARE,
    Candidate,
    ModelShape,
    affordable_candidates,
    best_draft,
    count_batches,
    count_rows,
    is_worth_training,
    list_candidates,
)
from ....decode.evaluation.tuning.space import interleave
from ....decode.evaluation.tuning.tuner import MAX_FINALISTS, Measurement, Workload, choose_winner, tune
from ...assemble.evaluation import device_of
from ...report.certificate import KIND
from ...report.forge import write_forge_page
from ...schema.forge import ForgeRecipe
from ...schema.loading import write_recipe
from ...schema.results import derive_path
from ...schema.training import DrafterRecipe, HeadsRecipe
from ...session.launch import run_launched
from ...session.machine import machine
from ...session.terminal import duration, log
from ..diagnosis.pair import pair_verdict
from ..evaluation.evaluate import NotLosslessError, certify_once, evaluate_once
from .in_engine import check_engine, tune_in_engine
from .quickstart import Ledger, run_stage
from .stages import (
    DRAFT_VOCABULARY,
    REVERSED_HELDOUT,
    Row,
    Source,
    answers_of,
    base_of,
    evaluation_of,
    kind_of,
    measure_costs,
    prepare_prompts,
    training_of,
    with_heldout,
)

_TRIED = 16  # training steps for measuring the time of a step
_CERTIFIED = range(1000, 4001)  # number of tokens of a certificate
_CERTIFYING = 4  # forward passes per certified token, including the small pair
_MAX_LENGTH = 6  # maximum number of draft tokens when candidates are compared


def run_forge(recipe: ForgeRecipe, plan_only: bool = False) -> dict[str, Any]:
    """Find the fastest setup, write `forge.json` and `forge.html`, and return the content of the JSON file.

    With `plan_only`, costs are measured without training, and `plan.json` and `plan.html` are written instead.

    Raises ValueError if `out` contains a run of another recipe, if there are too few prompts, or if a stage fails.
    """
    out = Path(recipe.out)
    check_writable(out, folder=True)
    check_engine(recipe)
    for drafter in recipe.drafters:
        folder_of(drafter)
    with sole_writer(out):
        return _Forge(recipe, out).run(plan_only)


class _Forge:
    """State of a forge run. The methods are defined in the order in which they are called."""

    def __init__(self, recipe: ForgeRecipe, out: Path) -> None:
        self.recipe, self.out, self.base = recipe, out, base_of(recipe)
        self.seconds = 3600 * recipe.hours
        self.ledger = Ledger(out / "spent.json")
        self.decision_log: dict[str, list[str]] = {}
        """Mapping from section titles to lists of decisions with reasons."""
        batches, temperatures = dict.fromkeys(recipe.batch), dict.fromkeys(recipe.temperature)
        self.workloads = [Workload(*each) for each in itertools.product(batches, temperatures)]
        self.sources = {"prompt lookup": Source("prompt lookup")}
        """Mapping from names to the sources of draft tokens whose settings are tuned."""
        self.has_table = False
        self.compared: dict[Workload, dict[str, Measurement]] = {each: {} for each in self.workloads}
        """Mapping from workloads to measurements of given drafters, and of candidates after short training."""
        self.rows: dict[str, Row] = {}
        self.tuned: dict[Workload, list[Measurement]] = {each: [] for each in self.workloads}
        self.winners: dict[Workload, Measurement] = {}
        self.verdicts: dict[Workload, dict[str, str]] = {}

    def run(self, plan_only: bool) -> dict[str, Any]:
        """Run all stages, and return the results."""
        with self.ledger.stage("corpus"):
            self.questions = prepare_prompts(self.recipe, self.base, self.out)
        with self.ledger.stage("costs"):
            costs = measure_costs(self.base, self.out, self.questions.answered)
        self.shape, self.curve = ModelShape(**costs["shape"]), Curve(tuple(costs["nodes"]), tuple(costs["seconds"]))
        self.prefill = self.questions.tokens * costs["seconds"][-1] / costs["nodes"][-1]
        seconds = costs["seconds_per_answer"]
        answers = min(self.questions.answered, int(BUDGET_SHARES["answers"] * self.seconds / seconds))
        candidates = self._plan((costs["eagle"], costs["dflash"]), answers, seconds)
        if plan_only:
            return self._finish("plan")
        self.section = "Given drafters, and short training of all candidates"
        self._compare_given()
        if answers < MIN_ANSWERS:
            self._note(f"no training: the budget allows {answers} answers, but training requires {MIN_ANSWERS}")
        else:
            self.base = with_heldout(self.base, answers)
            table = self.base.table.model_copy(update={"out": f"{self.out}/table-{answers}"})
            self.base, self.has_table = self.base.model_copy(update={"table": table}), True
            with self.ledger.stage("answers"):
                run_stage(answers_of(self.base, answers, "answers"))
                run_stage(table)
            self._train_candidates(candidates)
        self._choose()
        return self._finish("forge")

    def _note(self, text: str, workload: Workload | None = None) -> None:
        text = text if workload is None or len(self.workloads) == 1 else f"{workload}: {text}"
        log(f"forge: {text}")
        self.decision_log.setdefault(self.section, []).append(text)

    def _name(self, stem: str, workload: Workload) -> str:
        return stem if len(self.workloads) == 1 else f"{stem}-{workload.slug}"

    def _plan(self, supports: tuple[bool, bool], answers: int, seconds_per_answer: float) -> list[Candidate]:
        """Return the candidates that could be faster than the baseline. Set the numbers of prompts for comparisons.

        `supports`: whether the target supports EAGLE-3 and DFlash.
        """
        self.section = "Plan: costs, candidates and budget"
        self._note(f"forward pass: {1e3 * self.curve(1):.1f} ms (1 token), {1e3 * self.curve(4):.1f} ms (4 tokens)")
        chosen, batches = [], dict.fromkeys(self.recipe.batch)
        for candidate in list_candidates(self.shape, DRAFT_VOCABULARY, *supports):
            decisions = {batch: is_worth_training(candidate, self.curve, batch) for batch in batches}
            for batch, (_, reason) in decisions.items():
                self._note(reason if len(batches) == 1 else f"batch {batch}: {reason}")
            chosen += [candidate] if any(able for able, _ in decisions.values()) else []
        rows = 2 * max(1, len(chosen) + len(self.recipe.drafters))  # each row is measured together with a baseline
        self.prompts = {each: self._count_prompts(each, BUDGET_SHARES["measure"], rows) for each in self.workloads}
        self._note(f"generating answers to {answers:,} of {self.questions.answered:,} prompts")
        certifying = len(self.workloads) * _CERTIFYING * self._certified_tokens() * self.curve(1)
        parts = {"answers": answers * seconds_per_answer, "certificates": certifying}
        parts["measuring and tuning"] = (BUDGET_SHARES["measure"] + BUDGET_SHARES["tune"]) * self.seconds
        costs = ", ".join(f"{duration(seconds)} for {name}" for name, seconds in parts.items() if seconds)
        extra = "; measurements in the engine are not included" if self.recipe.engine is not None else ""
        self._note(f"of the budget of {duration(self.seconds)}, about {costs}; the rest is for training{extra}")
        passes = 2 * EVALUATION_OVERHEAD * MIN_BATCHES * (1 + MAX_FINALISTS)
        least = passes * sum(map(self._batch_seconds, self.workloads))
        if least > self.seconds:
            self._note(f"the budget of {duration(self.seconds)} is too small: measuring takes about {duration(least)}")
        return chosen

    def _count_prompts(self, workload: Workload, share: float, rows: int) -> int:
        """Return the number of prompts for measuring `rows` settings within the fraction `share` of the time budget."""
        seconds, most = share * self.seconds / len(self.workloads), self.questions.held_out // workload.batch
        return workload.batch * count_batches(seconds, rows, self._batch_seconds(workload), most)

    def _batch_seconds(self, workload: Workload) -> float:
        """Estimate the time in seconds for decoding one batch autoregressively."""
        return workload.batch * self.prefill + self.recipe.new_tokens * self.curve(workload.batch)

    def _certified_tokens(self) -> int:
        """Return the number of tokens per certificate, or 0 if the budget is too small for a certificate."""
        share = BUDGET_SHARES["certify"] * self.seconds / len(self.workloads)
        tokens = min(int(share / (_CERTIFYING * self.curve(1))), _CERTIFIED[-1])
        return tokens if tokens in _CERTIFIED else 0

    def _compare_given(self) -> None:
        """Measure the drafters in the recipe, and skip drafters that do not fit the target."""
        reader = self.recipe.engine or "draftsmith"
        for number, drafter in enumerate(dict.fromkeys(self.recipe.drafters), 1):
            try:
                source = Source(drafter, kind_of(folder_of(drafter)), drafter)
                if source.kind not in ("eagle", "dflash"):
                    doubts = pair_verdict(str(self.out / "target"), drafter, reader)
                    if doubts is not None:
                        self._note(f"{drafter}: `draftsmith doctor` reports for {reader}: {doubts}")
                self._compare(source, f"given-{number}")
                self.sources[drafter] = source
            except NotLosslessError:
                raise
            except ValueError as error:
                self._note(f"{drafter}: skipped: {error}")

    def _compare(self, source: Source, stage: str, cost: float | None = None) -> None:
        """Measure a source of draft tokens on each workload. `cost` is its drafting time relative to the target."""
        layer = self.shape.layer_parameters / self.shape.parameters
        candidate = Candidate("", source.kind or "drafter", (), layer if cost is None else cost)
        for workload in self.workloads:

            def seconds(tokens: float, batch: int = workload.batch) -> float:
                return self.curve(batch * tokens)

            row = source.default(best_draft(candidate, seconds, [EXPECTED_ACCEPTANCE] * _MAX_LENGTH)[0])
            (measurement,) = self._measure(stage, workload, [row], self.prompts[workload])
            self._note(f"{measurement}, {measurement.tokens_per_step:.2f} tokens per step", workload)
            self.compared[workload][source.name] = measurement

    def _measure(
        self, stage: str, workload: Workload, rows: Sequence[Row], prompts: int, *prompts_file: str
    ) -> list[Measurement]:
        name = self._name(stage, workload)
        recipe = evaluation_of(self.base, self.recipe, name, rows, workload, prompts, *prompts_file)
        with self.ledger.stage(name):
            results = evaluate_once(recipe)
        sources = {row.label: row.source for row in rows}
        measurements = [Measurement.of_row(row) for row in results["methods"][1:]]
        return [replace(each, name=sources[each.label].name, steps=sources[each.label].steps) for each in measurements]

    def _train(self, candidate: Candidate, steps: int) -> Source:
        name = f"{candidate.slug}-{steps}"
        out = self.out / "trained" / name
        stage = training_of(self.base, candidate, self.shape.vocabulary, steps, out, self.recipe.processes)
        with self.ledger.stage(f"training {name}"):
            if self.recipe.processes == 1:
                run_stage(stage)
            elif not (out / MANIFEST_FILE).is_file():
                self._launch(stage, out.with_suffix(".yaml"))
        if (processes := load_manifest(out).training["processes"]) != self.recipe.processes:
            raise ValueError(f"`processes` is {self.recipe.processes}, but {processes} ran: set `launch=--multi_gpu`")
        return Source(candidate.name, candidate.kind, str(out), steps)

    def _launch(self, stage: DrafterRecipe | HeadsRecipe, file: Path) -> None:
        write_recipe(stage, file)
        gc.collect()
        torch.cuda.empty_cache()  # the first launched process uses the same device
        for command in (("prepare", str(file), "--teacher"), ("train", str(file))):
            run_launched(f"--num_processes {self.recipe.processes} {self.recipe.launch}", *command)

    def _train_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Train all candidates briefly, and then train the best one for each workload in the remaining time."""
        known = {each.name: each for each in candidates}
        if not known:
            self._note("no training: no candidate could be faster than autoregressive decoding")
            return
        seconds = self._training_seconds("race", "measure", "tune", "certify")
        rates, tried = self._try_steps(known, (1 - SELECTION_SHARE) * seconds)
        seconds -= tried
        names, reason = affordable_candidates(rates, seconds)
        if reason:
            self._note(reason)
        if not names:
            return
        trained = {}
        for name in names:
            steps = max(MIN_STEPS, int(SELECTION_SHARE * seconds / len(names) / rates[name]))
            trained[name] = self._train(known[name], steps)
            self._compare(trained[name], f"race-{known[name].slug}", known[name].cost)
        fastest = (max(names, key=lambda name: compared[name].speedup) for compared in self.compared.values())
        first = dict.fromkeys(fastest)
        self.section = "Full training, tuning and choice"
        self._note(f"training {', '.join(first)} for the rest of the time")
        seconds = (self._training_seconds("finish", "tune", "certify") + 3600 * self.recipe.more_hours) / len(first)
        for name in first:
            self.sources[name] = self._train(known[name], max(trained[name].steps, int(seconds / rates[name])))

    def _try_steps(self, known: dict[str, Candidate], most: float) -> tuple[dict[str, float], float]:
        """Train candidates for a few steps, in about `most` seconds. Return seconds per step by name, and the total."""
        rates, tried, last = dict[str, float](), 0.0, 0.0
        for name, candidate in known.items():
            if rates and tried + last > most:
                skipped = ", ".join(each for each in known if each not in rates)
                self._note(f"skipped {skipped}: other trials took {tried:.0f} s of at most {most:.0f} s")
                break
            folder = Path(str(self._train(candidate, _TRIED).artifact))
            # The recorded time is used, so that a resumed run makes the same decisions.
            last = float(load_manifest(folder).training["seconds"])
            rates[name] = last / _TRIED
            tried += last
        return rates, tried

    def _training_seconds(self, moment: str, *later: str) -> float:
        """Return the remaining seconds for training, after reserving the budget of the stages in `later`.

        The first call stores the time spent so far in `<moment>.json`, so that a resumed run makes the same decisions.
        """
        path, budget = self.out / f"{moment}.json", f"{self.recipe.hours:g} hours"
        spent: dict[str, float] = load_json(path, "spent")["spent"] if path.is_file() else {}
        if budget not in spent:
            spent[budget] = self.ledger.spent
            atomic_text(path, json.dumps({"spent": spent}, indent=1) + "\n")
        remaining = max(0.0, (1 - sum(BUDGET_SHARES[name] for name in later)) * self.seconds - spent[budget])
        self._note(
            f"spent {duration(spent[budget])} of {duration(self.seconds)}; left for training: {duration(remaining)}"
        )
        return remaining

    def _choose(self) -> None:
        """Tune the settings for each workload, certify the fastest one, and tune it in the serving engine."""
        self.section = "Full training, tuning and choice"
        for workload in self.workloads:
            self.tuned[workload] = self._tune(workload)
            winner, reason = choose_winner(self.tuned[workload])
            self._note(reason, workload)
            if winner is not None:
                self.winners[workload] = winner
        self._write()
        for workload in self.workloads:
            (self.out / f"{self._name('winner', workload)}.yaml").unlink(missing_ok=True)
            if workload in self.winners:
                self._certify(workload, self.rows[self.winners[workload].label])
        if self.recipe.engine is not None:
            self._serve()

    def _tune(self, workload: Workload) -> list[Measurement]:
        """Measure many settings on a few prompts, and the fastest settings again on other prompts."""
        share, batch_seconds = BUDGET_SHARES["tune"] / 2, self._batch_seconds(workload)
        few, many = workload.batch * MIN_BATCHES, self._count_prompts(workload, share, 1 + MAX_FINALISTS)
        seconds, compared = share * self.seconds / len(self.workloads), self.compared[workload]

        def measure(labels: Sequence[str], number: int, prompts: int) -> list[Measurement]:
            chosen, file = [self.rows[label] for label in labels], ("heldout.jsonl", REVERSED_HELDOUT)[number - 1]
            return self._measure(f"tune-{number}", workload, chosen, prompts, file)

        def tune_sources(names: Sequence[str]) -> list[Measurement]:
            # Settings of prompt lookup come first, followed by settings of the fastest drafter.
            ranked = sorted(names, key=lambda name: -compared[name].speedup if name in compared else -math.inf)
            listed = [self.sources[name].settings(self.has_table, workload.temperature) for name in ranked]
            rows = {row.label: row for row in interleave(listed)}
            self.rows |= rows
            labels = list(rows)[: count_rows(seconds, batch_seconds, max(MAX_FINALISTS, len(names)))]
            self._note(f"measuring {len(labels)} of {len(rows)} settings", workload)
            return tune(labels, measure, [few, many])

        try:
            return tune_sources(list(self.sources))
        except NotLosslessError:
            raise
        except ValueError as error:  # given drafters may be incompatible with trained drafters
            own = [name for name in self.sources if name not in self.recipe.drafters]
            if len(own) in (0, len(self.sources)):
                raise
            self._note(f"skipping the given drafters: {error}", workload)
            return tune_sources(own)

    def _certify(self, workload: Workload, row: Row) -> None:
        """Write a recipe with the fastest setting, and certify the setting if the budget allows it."""
        name, tokens = self._name("winner", workload), self._certified_tokens()
        enough = min(self.questions.held_out, max(self.prompts[workload], 2 * tokens // self.recipe.new_tokens))
        recipe = evaluation_of(self.base, self.recipe, name, [row], workload, enough)
        write_recipe(recipe, file := self.out / f"{name}.yaml")
        self._note(f"evaluate it with `draftsmith evaluate {file}`", workload)
        if not tokens:
            self._note(f"certify it with `draftsmith certify {file}`", workload)
            return
        with self.ledger.stage(f"certificate {name}"):
            verdicts = self.verdicts[workload] = certify_once(recipe, tokens)
        self._note("; ".join(f"{label}: {verdict}" for label, verdict in verdicts.items()), workload)
        if broken := [label for label, verdict in verdicts.items() if verdict == "not lossless"]:
            self._write()
            raise NotLosslessError(f"{broken[0]} is not lossless: see {derive_path(Path(recipe.out), KIND)}")

    def _serve(self) -> None:
        """Tune the number of draft tokens of the fastest and of all fully trained drafters in the serving engine."""
        self.section = f"Draft lengths in {self.recipe.engine}"
        trained = [name for name, source in self.sources.items() if source.steps]
        for name in dict.fromkeys([*(winner.name for winner in self.winners.values()), *trained]):
            self._write()  # keeps the results if the engine fails to start
            source = self.sources[name]
            artifact = None if source.artifact is None else folder_of(source.artifact)
            default_stem = f"given-{1 + self.recipe.drafters.index(name)}" if name in self.recipe.drafters else "lookup"
            stem = artifact.name if artifact is not None and source.steps else default_stem
            with self.ledger.stage(f"{self.recipe.engine} {stem}"):
                lines = tune_in_engine(self.recipe, stem, artifact, max(self.prompts.values()))
            for line in lines:
                self._note(line)

    def _write(self, name: str = "forge") -> dict[str, Any]:
        results = {
            "kind": "forge",
            "machine": machine(device_of(self.base.evaluate)),
            "recipe": self.recipe.recorded(),
            "decision_log": self.decision_log,
            "spent": self.ledger.seconds,
            "workloads": [
                {
                    **asdict(workload),
                    "compared": [asdict(each) for each in self.compared[workload].values()],
                    "tuned": [asdict(each) for each in self.tuned[workload]],
                    "certificate": self.verdicts.get(workload),
                    "winner": asdict(self.winners[workload]) if workload in self.winners else None,
                }
                for workload in self.workloads
            ],
        }
        atomic_text(self.out / f"{name}.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        write_forge_page(results, self.out / f"{name}.html")
        return results

    def _finish(self, name: str) -> dict[str, Any]:
        log(f"forge: budget {duration(self.seconds)}, spent {duration(self.ledger.spent)}; see {self.out}/{name}.html")
        return self._write(name)
