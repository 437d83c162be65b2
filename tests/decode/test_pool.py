"""Continuous batching: the pool decodes the same text for each prompt as the engine."""

from collections.abc import Callable, Sequence

import pytest
import torch
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import TransformersModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.pool import Pool
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

VOCAB = 48
STOPS = (7, 11, 19)
MANY = Sampling(1.0, top_k=20, top_p=0.9)


def decode_alone(
    target: TransformersModel, prompt: Sequence[int], seed: int, limits: Limits, sampling: Sampling
) -> list[int]:
    method = build_method("autoregressive", Parts(), sampling)
    steps = generate(target, *method, [prompt], limits, sampling, Rng([seed]))
    return [token for step in steps for token in step.new_ids[0]]


def prompts_of(count: int, seed: int) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=draws).tolist()
    return [torch.randint(VOCAB, (length,), generator=draws).tolist() for length in lengths]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "samplings", [[Sampling()], [MANY], [Sampling(), MANY, Sampling(0.7)]], ids=["greedy", "sampled", "mixed"]
)
def test_every_text_equals_that_of_the_engine(
    make_llama: Callable[..., LlamaForCausalLM], samplings: list[Sampling], fast: bool
) -> None:
    target, limits = wrap_model(make_llama(VOCAB), fast=fast), Limits(12, STOPS)
    pool, prompts = Pool(target, 3, limits, samplings[0]), prompts_of(20, 3)
    chosen = [samplings[seed % len(samplings)] for seed in range(20)]
    tickets = {pool.add(prompt, seed, chosen[seed]): seed for seed, prompt in enumerate(prompts)}
    texts = {}
    while pool.busy:
        texts |= {tickets[ticket]: ids for ticket, ids in pool.step()}
    assert texts == {n: decode_alone(target, prompt, n, limits, chosen[n]) for n, prompt in enumerate(prompts)}
    ends = [ids[-1] in STOPS for ids in texts.values()]
    assert 0 < sum(ends) < 20, "some texts must end by a stop token, others by the limit"


def test_a_conversation_reuses_the_cache_of_its_row(
    make_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, limits, sampling = wrap_model(make_llama(VOCAB)), Limits(8), Sampling()
    pool, lengths, extend = Pool(target, 2, limits, sampling), [], type(target).extend

    def counting_extend(model: object, cache: object, tokens_BM: torch.Tensor, *options: object) -> torch.Tensor:
        lengths.append(tokens_BM.shape[1])
        return extend(model, cache, tokens_BM, *options)

    monkeypatch.setattr(type(target), "extend", counting_extend)
    turns = dict(enumerate(prompts_of(2, 5)))
    prompts, answers = [], []
    for turn in range(3):
        tickets = {pool.add(prompt, 0): n for n, prompt in turns.items()}
        while pool.busy:
            for ticket, ids in pool.step():
                prompts.append(turns[tickets[ticket]])
                answers.append(ids)
        for prompt, ids in zip(prompts[-2:], answers[-2:], strict=True):
            n = next(n for n, turn_prompt in turns.items() if turn_prompt == prompt)
            turns[n] = [*prompt, *ids, 5 + n, 9]
        if not turn:
            lengths.clear()
    assert max(lengths) == 2, "later turns read the end of the previous answer and the question without its last token"
    monkeypatch.undo()
    assert answers == [decode_alone(target, prompt, 0, limits, sampling) for prompt in prompts]


def test_the_cache_grows_with_the_longest_prompt(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    target, limits = wrap_model(make_llama(VOCAB, max_position_embeddings=2048)), Limits(4)
    pool = Pool(target, 2, limits, Sampling())
    prompts = [[1, 2, 3], list(range(40)) * 30, [4]]
    tickets = [pool.add(prompt, 0) for prompt in prompts]
    texts = {}
    while pool.busy:
        texts |= dict(pool.step())
    assert [texts[ticket] for ticket in tickets] == [
        decode_alone(target, prompt, 0, limits, Sampling()) for prompt in prompts
    ]


def test_nan_logits_raise_an_error(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama(VOCAB)
    target = wrap_model(model, check=False)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    pool = Pool(target, 2, Limits(4), Sampling())
    pool.add([3, 5, 8], 0)
    with pytest.raises(ValueError, match=r"position 3.* NaN"):
        pool.step()
