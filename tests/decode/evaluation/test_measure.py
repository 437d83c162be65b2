"""Interleaved runs, resumption, and the rows of the results."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import (
    REFERENCE,
    Decoded,
    Entry,
    Run,
    RunKey,
    job_order,
    measure,
    warm_up_prompts,
)
from draftsmith.decode.evaluation.metrics import total
from draftsmith.decode.evaluation.quality import perplexity_of, surprisal
from draftsmith.decode.evaluation.summary import EvalPrompt, Summariser, Summary
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

ENTRIES = [
    Entry("plain", "autoregressive"),
    Entry("chain", "speculative", {"gamma": 3}),
    Entry("beam", "beam", {"num_beams": 2}),
    Entry("drawn", "autoregressive", sampling=Sampling(1.0)),
    Entry("drawn chain", "speculative", {"gamma": 2}, Sampling(1.0)),
]
LIMITS = Limits(14, (9,))
ASKED = [
    EvalPrompt([3, 5, 7], "first", "math", ("10 11 12",)),
    EvalPrompt([8, 2], "second", "text"),
    EvalPrompt([1], "third", "math", ("40", "13 1 2 3")),
    EvalPrompt([4, 4, 4, 4, 30], "fourth", "math"),
]


@dataclasses.dataclass
class Evaluation:
    target: Any
    model: LlamaForCausalLM
    parts: Parts
    runs: dict[str, Run]
    order: list[RunKey]

    def perplexity(self, prompts: Any, texts: list[list[int]]) -> float | None:
        nats = [surprisal(self.target, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return perplexity_of(nats, map(len, texts))

    def summary(self, runs: dict[str, Run] | None = None) -> Summary:
        def text_of(ids: Any) -> str:
            return " ".join(map(str, ids))

        maker = Summariser(self.target, self.parts, ASKED, runs or self.runs, LIMITS, text_of=text_of)
        return maker.summarise(ENTRIES)


@pytest.fixture
def evaluation(make_llama: Callable[..., LlamaForCausalLM]) -> Evaluation:
    model = make_llama(48, seed=0)
    target, parts = wrap_model(model), Parts(wrap_model(make_llama(48, seed=1, num_hidden_layers=1)))
    order: list[RunKey] = []
    prompts = [prompt.ids for prompt in ASKED]
    runs = measure(
        target, parts, ENTRIES, prompts, LIMITS, reference=model, repeats=2, on_run=lambda key, _: order.append(key)
    )
    return Evaluation(target, model, parts, runs, order)


@pytest.mark.parametrize("count", range(1, 9))
def test_each_method_follows_every_other_equally_often(count: int) -> None:
    turns = count * (1 + count % 2)
    orders = [job_order(count, number) for number in range(turns)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1
    positions = Counter((position, job) for order in orders for position, job in enumerate(order))
    assert set(positions.values()) == {turns // count}


def test_runs_are_interleaved_and_complete(evaluation: Evaluation) -> None:
    labels = [entry.label for entry in ENTRIES] + [REFERENCE]
    assert len(evaluation.order) == len(set(evaluation.order)) == 2 * len(ASKED) * len(labels)
    rounds = [evaluation.order[first : first + len(labels)] for first in range(0, len(evaluation.order), len(labels))]
    for number, keys in enumerate(rounds):
        assert {(key.repeat, key.prompt) for key in keys} == {divmod(number, len(ASKED))}
        assert [key.label for key in keys] == [labels[job] for job in job_order(len(labels), number)]
    assert len({tuple(key.label for key in keys) for keys in rounds}) > 4
    assert all(len(twice) == 2 for run in evaluation.runs.values() for twice in run.by_prompt)


def test_finished_runs_are_not_repeated(evaluation: Evaluation) -> None:
    prompts = [prompt.ids for prompt in ASKED]
    finished = {
        RunKey("plain", 0, 0): Decoded(evaluation.runs["plain"].ids[0], evaluation.runs["plain"].tallies[0], 77.0, 7.0),
        RunKey("chain", 3, 0): Decoded(evaluation.runs["chain"].ids[3], evaluation.runs["chain"].tallies[3], 88.0, 8.0),
    }
    decoded: list[RunKey] = []
    states: list[tuple[int, int, str]] = []
    runs = measure(
        evaluation.target,
        evaluation.parts,
        ENTRIES,
        prompts,
        LIMITS,
        finished=finished,
        on_run=lambda key, _: decoded.append(key),
        progress=lambda *state: states.append(state),
    )
    work = len(ENTRIES) * len(ASKED)
    assert not set(decoded) & set(finished)
    assert len(decoded) == work - 2
    assert states[0][:2] == (2, work)
    assert [state[2] for state in states[:-1]] == [key.label for key in decoded]
    assert states[-1] == (work, work, "")
    assert (runs["plain"].median_seconds()[0], runs["chain"].median_seconds()[3]) == (77.0, 88.0)
    for label, run in runs.items():
        assert run.ids == evaluation.runs[label].ids, "samples depend only on the seed and the prompt's index"


def test_batches_give_the_texts_of_single_prompts(evaluation: Evaluation) -> None:
    """Finished batches are not decoded again, but incomplete batches are."""
    prompts = [prompt.ids for prompt in ASKED]
    arguments: tuple[Any, ...] = (evaluation.target, evaluation.parts, ENTRIES, prompts, LIMITS)
    decoded: list[RunKey] = []
    runs = measure(*arguments, batch=3, on_run=lambda key, _: decoded.append(key))
    assert len(decoded) == len(set(decoded)) == len(ENTRIES) * len(ASKED)
    for label, run in runs.items():
        assert run.ids == evaluation.runs[label].ids
        assert run.tallies == evaluation.runs[label].tallies
        assert run.groups == [0, 0, 0, 1]
        first, second = map(sum, run.by_batch(run.median_seconds()))
        assert first == pytest.approx(3 * run.median_seconds()[1])
        assert second == run.median_seconds()[3]
    finished = {RunKey("plain", prompt, 0): runs["plain"].by_prompt[prompt][0] for prompt in (0, 1, 2)}
    finished[RunKey("chain", 0, 0)] = runs["chain"].by_prompt[0][0]
    decoded.clear()
    measure(*arguments, batch=3, finished=finished, on_run=lambda key, _: decoded.append(key))
    assert not {key for key in decoded if key.label == "plain" and key.prompt < 3}
    assert {key.prompt for key in decoded if key.label == "chain"} == {0, 1, 2, 3}
    summary = Summariser(evaluation.target, evaluation.parts, ASKED, runs, LIMITS, batch=3).summarise(ENTRIES)
    assert not summary.errors
    for row in summary.rows:
        assert row["speedup_interval"] is None, "two batches are too few for an interval"
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / sum(runs[row["label"]].median_seconds()))


def test_prompts_have_their_own_random_numbers(evaluation: Evaluation) -> None:
    prompts = [[5, 6], [5, 6], [5, 6]]
    run = measure(evaluation.target, Parts(), ENTRIES[3:4], prompts, LIMITS)["drawn"]
    assert len({tuple(ids) for ids in run.ids}) == 3


def test_rows_agree_with_the_runs(evaluation: Evaluation) -> None:
    summary = evaluation.summary()
    assert summary.errors == summary.lossless_violations == []
    rows = {row["label"]: row for row in summary.rows}
    assert list(rows) == [entry.label for entry in ENTRIES]
    prompts = [prompt.ids for prompt in ASKED]
    for label, row in rows.items():
        run = evaluation.runs[label]
        assert row["tokens"] == sum(map(len, run.ids)) == sum(part["tokens"] for part in row["by_prompt"])
        assert row["seconds"] == pytest.approx(sum(part["seconds"] for part in row["by_prompt"]))
        assert all(0 < part["decoding_seconds"] < part["seconds"] for part in row["by_prompt"])
        assert row["perplexity"] == pytest.approx(evaluation.perplexity(prompts, run.ids))
        assert row["rouge_l"] == pytest.approx((row["by_prompt"][0]["rouge_l"] + row["by_prompt"][2]["rouge_l"]) / 2)
        assert [part["rouge_l"] is None for part in row["by_prompt"]] == [False, True, False, True]
        assert {"draft", "score", "verify", "commit", "host", "step"} == set(row["phases_us"])
        phases = row["phases_us"]
        assert max(phases["draft"], phases["score"]) <= phases["step"]
        assert row["joules_per_token"] is row["energy_source"] is None
    assert rows["chain"]["identical_to_greedy"] == [4, 4]
    assert (rows["chain"]["near_ties"], rows["beam"]["near_ties"], rows["drawn"]["near_ties"]) == (0, None, None)


def test_a_category_equals_an_evaluation_of_its_prompts(evaluation: Evaluation) -> None:
    row = next(row for row in evaluation.summary().rows if row["label"] == "chain")
    run, base = evaluation.runs["chain"], evaluation.runs["plain"]
    assert list(row["by_category"]) == ["math", "text"]
    for name, numbers in (("math", [0, 2, 3]), ("text", [1])):
        part, selected, base_selected = row["by_category"][name], run.select(numbers), base.select(numbers)
        tokens = sum(map(len, selected.ids))
        speed, base_speed = (tokens / sum(picked.median_seconds()) for picked in (selected, base_selected))
        assert part["prompts"] == len(numbers)
        assert part["tokens"] == tokens
        assert part["tokens_per_step"] == total(selected.tallies).metrics()["tokens_per_step"]
        assert part["tokens_per_second"] == pytest.approx(speed)
        assert part["speedup"] == pytest.approx(speed / base_speed)
        assert (part["speedup_interval"] is None) == (len(numbers) < 3)
        assert (part["tokens_per_step_interval"] is None) == (len(numbers) < 3)
        prompts = [ASKED[number].ids for number in numbers]
        assert part["perplexity"] == pytest.approx(evaluation.perplexity(prompts, selected.ids))
        assert part["efficiency"] == pytest.approx(part["speedup"] / part["bound"])
    assert row["by_category"]["text"]["rouge_l"] is None


def change_text(runs: dict[str, Run], label: str, prompt: int, ids: list[int], **counts: int) -> dict[str, Run]:
    """Return the runs with one text and its counts replaced."""
    by_prompt = list(runs[label].by_prompt)
    first, *repeats = by_prompt[prompt]
    by_prompt[prompt] = [first._replace(ids=ids, tally=dataclasses.replace(first.tally, **counts)), *repeats]
    return runs | {label: Run(by_prompt)}


def test_a_lossless_method_with_another_text_is_reported(evaluation: Evaluation) -> None:
    ids = evaluation.runs["chain"].ids[1]
    changed = [*ids[:-1], (ids[-1] + 1) % 48]
    summary = evaluation.summary(change_text(evaluation.runs, "chain", 1, changed))
    (broken,) = summary.lossless_violations
    assert "'chain' claims to be lossless, but differs from greedy decoding on 1 of 4 prompts" in broken
    assert "first on prompt 1 (second)" in broken
    assert summary.errors == []
    row = next(row for row in summary.rows if row["label"] == "chain")
    assert (row["identical_to_greedy"], row["near_ties"]) == ([3, 4], 0)

    shorter = change_text(evaluation.runs, "chain", 1, ids[:-1], tokens=len(ids) - 1)
    summary = evaluation.summary(shorter)
    (error,) = summary.errors
    assert f"prompt 1 (second) has {len(ids) - 1} output tokens, but {len(ids)} in greedy decoding" in error
    assert "chain" not in [row["label"] for row in summary.rows]
    assert len(summary.lossless_violations) == 1


def test_the_reference_may_differ_by_a_near_tie(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    def measured(model: LlamaForCausalLM) -> tuple[Any, dict[str, Run]]:
        target = wrap_model(model)
        return target, measure(target, Parts(), ENTRIES[:1], [prompt.ids for prompt in ASKED], LIMITS, reference=model)

    model = make_llama(48)
    last = measured(model)[1]["plain"].ids[3][-1]
    with torch.no_grad():
        model.lm_head.weight[47] = model.lm_head.weight[last]
    target, runs = measured(model)
    ids = runs["plain"].ids[3]
    position = next(index for index, token in enumerate(ids) if token in (last, 47))
    for changed, equal in ((last + 47 - ids[position], 4), ((last + 1) % 47, 3)):
        other = change_text(runs, REFERENCE, 3, [*ids[:position], changed, *ids[position + 1 :]])
        summary = Summariser(target, Parts(), ASKED, other, LIMITS).summarise(ENTRIES[:1])
        assert summary.identical_to_transformers == [equal, 4]


def test_counts_that_disagree_with_texts_are_reported(evaluation: Evaluation) -> None:
    tokens = len(evaluation.runs["beam"].ids[2])
    changed = change_text(evaluation.runs, "beam", 2, evaluation.runs["beam"].ids[2], tokens=tokens + 1)
    (error,) = evaluation.summary(changed).errors
    assert f"prompt 2 (third) has {tokens} output tokens, but its steps counted {tokens + 1}" in error


def test_a_baseline_is_required(evaluation: Evaluation) -> None:
    maker = Summariser(evaluation.target, evaluation.parts, ASKED, evaluation.runs, LIMITS)
    with pytest.raises(ValueError, match=r"'chain'.*'autoregressive'"):
        maker.summarise(ENTRIES[1:2])


def test_a_gpu_is_warmed_up_with_every_graph_length() -> None:
    prompts = [[1] * length for length in (3, 900, 250, 300, 10, 1000)]
    limits = Limits(40, (2,))
    chosen = warm_up_prompts(prompts, limits, "cuda")
    assert [len(prompt) for prompt, _ in chosen] == [1000, 300, 250]
    assert all(until == Limits(40) for _, until in chosen)
    assert warm_up_prompts(prompts, limits, "cuda", supports_any_length=True) == [(prompts[-1], Limits(40))]
    assert warm_up_prompts(prompts, limits, "cpu") == [(prompts[0], Limits(8, (2,)))]
