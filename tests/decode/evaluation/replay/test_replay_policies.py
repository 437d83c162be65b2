"""Replay of chains that learn while they sample, against every way that decoding could go, and against decoding.

Shape letters: T positions, V vocabulary, C classes of confidence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.replay.policies import replay_expected_gain
from draftsmith.decode.evaluation.replay.recording import Recording, record, sample_texts
from draftsmith.decode.evaluation.replay.replay import chances, predict
from draftsmith.decode.evaluation.replay.tuning import Space, settings_of
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.adaptive import ExpectedGain
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling

VOCAB, TOKENS, GAMMA, COST = 3, 8, 3, 0.55
SAMPLING = Sampling(1.0)
SHARPNESS = 1.6  # of the drafter, so that it is surer than it is right


def every_way(classes: list[int], accept: list[float], learns: bool = True) -> dict[tuple[int, int], float]:
    """The chance of each (steps, draft tokens) that a text may take, every draft followed either way."""
    count = ExpectedGain.classes
    begin = tuple(2 * (np.float32(place) + np.float32(0.5)) / np.float32(count) for place in range(count))
    found: dict[tuple[int, int], float] = {}

    def go(place: int, steps: int, drafted: int, chance: float, good: tuple[Any, ...], seen: tuple[Any, ...]) -> None:
        if place >= len(accept):
            found[steps, drafted] = found.get((steps, drafted), 0.0) + chance
            return
        reach = expected = np.float32(1)
        length = 0
        for level in range(min(GAMMA, len(accept) - place)):
            own = classes[place + level]
            reach = reach * np.float32(good[own]) / np.float32(seen[own])
            if not reach / COST > expected / (1 + COST * level):
                break
            expected, length = expected + reach, level + 1
        for accepted in range(length + 1):
            odds = float(np.prod(accept[place : place + accepted]))
            if accepted < length:
                odds *= 1 - accept[place + accepted]
            now, all_ = list(good), list(seen)
            for level in range(min(accepted + 1, length)):
                all_[classes[place + level]] += 1
                now[classes[place + level]] += level < accepted
            if odds:
                kept = (tuple(now), tuple(all_)) if learns else (good, seen)
                go(place + accepted + 1, steps + 1, drafted + length, chance * odds, *kept)

    go(0, 0, 0, 1.0, begin, (2.0,) * count)
    return found


@pytest.fixture
def recorded(make_markov: Any) -> tuple[Recording, Parts]:
    """Thirty texts of a tiny vocabulary, and a drafter that is often wrong."""
    generator = torch.Generator().manual_seed(4)
    target_TVV, other_TVV = (
        (1.5 * torch.randn(TOKENS, VOCAB, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)
        for _ in range(2)
    )
    draft_TVV = torch.lerp(target_TVV, other_TVV, 0.5) ** SHARPNESS
    target, parts = make_markov(target_TVV), Parts(make_markov(draft_TVV / draft_TVV.sum(-1, keepdim=True)))
    prompts = [[2]] * 30
    texts = sample_texts(target, prompts, Limits(TOKENS), SAMPLING, seed=3)
    return record(target, parts, prompts, texts, SAMPLING), parts


def test_chains_that_learn_take_the_steps_that_enumeration_says(recorded: tuple[Recording, Parts]) -> None:
    """5 standard errors of the walks are allowed for each text. Without what is learned some text would be far off."""
    recording, parts = recorded
    drafts, walks = recording.drafts["drafter"], 3000
    accept_T = chances(recording, "drafter", 1, "with")
    found = replay_expected_gain(recording, drafts, accept_T, GAMMA, COST, walks)
    class_T = np.minimum((drafts.confidence_T * np.float32(10)).astype(int), 9)
    off, drafted, steps = [], 0.0, 0.0
    for number, told in enumerate(found.steps_by_text):
        place = slice(number * TOKENS, (number + 1) * TOKENS)
        given = class_T[place].tolist(), accept_T[place].tolist()
        ways = every_way(*given)
        assert sum(ways.values()) == pytest.approx(1)
        mean = sum(chance * each[0] for each, chance in ways.items())
        spread = sum(chance * (each[0] - mean) ** 2 for each, chance in ways.items()) / walks
        assert abs(told - mean) <= 5 * spread**0.5 + 1e-9
        forgetful = sum(chance * each[0] for each, chance in every_way(*given, learns=False).items())
        off.append(abs(forgetful - mean) / max(spread**0.5, 1e-9))
        steps, drafted = steps + mean, drafted + sum(chance * each[1] for each, chance in ways.items())
    assert max(off) > 20
    assert found.steps == pytest.approx(steps, rel=3e-3)
    assert found.nodes_per_step == pytest.approx(1 + drafted / steps, rel=3e-3)
    assert found.tokens_per_step == pytest.approx(recording.positions / steps, rel=3e-3)
    again = predict(recording, parts, "adaptive", {"gamma": GAMMA, "policy": "expected-gain", "cost": COST})
    assert again is not None
    assert again.steps == pytest.approx(steps, rel=5e-3)


def test_what_is_foretold_of_chains_that_learn_is_measured(make_llama: Any) -> None:
    """Tokens a step within 3 % of decoding that writes other texts of the same target; chains are of some length."""
    target = wrap_model(make_llama(12, seed=0, sharpness=2.0))
    parts = Parts(wrap_model(make_llama(12, seed=0, sharpness=2.2)))
    prompts, limits = [[1 + place % 11, 3] for place in range(200)], Limits(20)
    texts = sample_texts(target, prompts, limits, SAMPLING, seed=7, batch=100)
    recording = record(target, parts, prompts, texts, SAMPLING, candidates=1, chains=1)
    rates = set()
    for cost in (0.05, 0.3, 0.6):
        options = {"gamma": 5, "policy": "expected-gain", "cost": cost}
        counts = Tally()
        method = build_method("adaptive", parts, SAMPLING, **options)
        for step in generate(target, *method, prompts, limits, SAMPLING, Rng.for_rows(999, len(prompts))):
            for row in range(len(prompts)):
                counts.add_step(step, row)
        found = predict(recording, parts, "adaptive", options)
        assert found is not None
        assert found.tokens_per_step == pytest.approx(counts.tokens / counts.steps, rel=0.03)
        assert found.acceptance_by_depth[0] == pytest.approx(counts.metrics()["acceptance_by_depth"][0], abs=0.03)
        rates.add(round(found.tokens_per_step, 1))
    assert len(rates) == 3  # they differ, so that one number for all would not do


def test_chains_that_learn_are_tuned_at_every_temperature(recorded: tuple[Recording, Parts]) -> None:
    recording, parts = recorded
    tried = [each for each in settings_of("adaptive", recording, parts, Space()) if each["policy"] == "expected-gain"]
    assert len(tried) == 6 * len(Space().gain_costs)
    assert all(predict(recording, parts, "adaptive", each) is not None for each in tried)
