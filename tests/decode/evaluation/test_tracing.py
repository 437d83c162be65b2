"""Traces of decoding, compared with decoding without a trace."""

from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.trace import trace
from draftsmith.decode.methods import Method, Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

PROMPT = [3, 1, 4, 1, 5]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("speculative", {"gamma": 3}),
    ("multi-candidate", {"k_config": "3x2x1"}),
    ("multi-candidate", {"k_config": "2x2", "replacement": True}),
    ("naive-multi-candidate", {"k_config": "3x2"}),
    ("spectr", {"gamma": 3, "num_drafts": 3}),
    ("specinfer", {"gamma": 3, "num_drafts": 2}),
    ("adaptive", {"confidence_threshold": 0.3}),
    ("prompt-lookup", {"gamma": 3, "max_ngram": 1}),
    ("medusa", {"tree": "3x2"}),
    ("mjsd", {"gamma": 3, "num_beams": 3, "likelihood_threshold": 0.05}),
    ("bild", {"gamma": 4, "fallback_threshold": 0.2, "rollback_threshold": 2.0}),
    ("mjgd", {"gamma": 2, "num_beams": 2}),
]


def built(models: Any, make_heads: Any, name: str, options: dict[str, Any], sampling: Sampling) -> tuple[Any, Method]:
    target, drafter = map(wrap_model, models)
    parts = Parts(drafter, make_heads(2, 32, 24))
    return target, build_method(name, parts, sampling, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "options"), METHODS)
def test_a_trace_equals_decoding_without_it(
    models: Any, make_heads: Any, name: str, options: dict[str, Any], temperature: float
) -> None:
    sampling, limits = Sampling(temperature), Limits(23)
    target, method = built(models, make_heads, name, options, sampling)
    steps = list(generate(target, *method, [PROMPT], limits, sampling, Rng.for_rows(5, 1)))
    target, method = built(models, make_heads, name, options, sampling)
    traced = trace(target, method, PROMPT, limits, sampling, seed=5)
    assert len(traced) == len(steps)
    for number, (item, step) in enumerate(zip(traced, steps, strict=True)):
        assert [*item.accepted, *([] if item.next_id is None else [item.next_id])] == step.new_ids[0]
        if item.next_id is None:
            assert item.rejected == ()
            assert number == len(steps) - 1
            continue
        assert bool(item.rejected) == bool(step.rejected[0])
        assert len(item.accepted) + len(item.rejected) <= step.examined[0]


def test_the_rejected_token_of_a_greedy_chain_is_the_drafters(models: Any, make_heads: Any) -> None:
    target, method = built(models, make_heads, "speculative", {"gamma": 4}, Sampling())

    def best_token(model: LlamaForCausalLM, ids: list[int]) -> int:
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())

    ids, rejections = list(PROMPT), 0
    with torch.inference_mode():
        for step in trace(target, method, PROMPT, Limits(40), Sampling()):
            for token in step.accepted:
                assert token == best_token(models[1], ids) == best_token(models[0], ids)
                ids.append(token)
            if step.rejected:
                rejections += 1
                assert step.rejected == (best_token(models[1], ids),)
                assert step.rejected[0] != step.next_id
            if step.next_id is not None:
                assert step.next_id == best_token(models[0], ids)
                ids.append(step.next_id)
    assert rejections > 0
    assert len(ids) == len(PROMPT) + 40


@pytest.mark.parametrize("limit", range(6, 11))
def test_the_limit_cuts_the_last_step(models: Any, make_heads: Any, limit: int) -> None:
    target = wrap_model(models[0])
    method = build_method("speculative", Parts(target), Sampling(), gamma=4)
    first, last = trace(target, method, PROMPT, Limits(limit), Sampling())
    assert (first.rejected, last.rejected) == ((), ())
    assert len(first.accepted) == 4
    assert len(last.accepted) + (last.next_id is not None) == limit - 5
