"""Perplexity compared with the loss of transformers, ROUGE-L compared with known values, and near-ties."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from draftsmith.decode.evaluation.quality import common_subsequence, nearly_tied, perplexity_of, rouge_l, surprisal
from draftsmith.decode.models.loading import wrap_model
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM, T5Config, T5ForConditionalGeneration

LENGTHS = [(1, 1), (7, 1), (1, 9), (12, 40), (5, 300)]
"""Of prompt and output; the last does not fit into one piece of logits."""


def family(name: str, make_llama: Callable[..., LlamaForCausalLM]) -> Any:
    if name == "llama":
        return make_llama(40, max_position_embeddings=512)
    torch.manual_seed(3)
    if name == "opt":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "max_position_embeddings": 512}
        return OPTForCausalLM(OPTConfig(vocab_size=40, hidden_size=16, word_embed_proj_dim=16, **sizes)).eval()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **sizes)).eval()


def loss_of_transformers(model: Any, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Return the summed loss of the output's tokens, computed by one forward of the model."""
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            mean = model(input_ids=torch.tensor([prompt]), labels=torch.tensor([output])).loss
        else:
            labels = torch.tensor([[-100] * len(prompt) + list(output)])
            mean = model(input_ids=torch.tensor([[*prompt, *output]]), labels=labels).loss
    return float(mean) * len(output)


@pytest.mark.parametrize("name", ["llama", "opt", "t5"])
def test_perplexity_equals_a_direct_computation(name: str, make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, rng = family(name, make_llama), random.Random(0)
    prompts = [[rng.randrange(1, 40) for _ in range(length)] for length, _ in LENGTHS]
    outputs = [[rng.randrange(1, 40) for _ in range(length)] for _, length in LENGTHS]
    target = wrap_model(model)
    direct = [loss_of_transformers(model, *pair) for pair in zip(prompts, outputs, strict=True)]
    nats = [surprisal(target, *pair) for pair in zip(prompts, outputs, strict=True)]
    assert nats == pytest.approx(direct, rel=1e-5)
    expected = math.exp(sum(direct) / sum(map(len, outputs)))
    assert surprisal(target, [3], []) == 0
    assert perplexity_of(nats, map(len, outputs)) == pytest.approx(expected, rel=1e-5)


def test_perplexity_of_empty_impossible_and_nan_texts() -> None:
    assert perplexity_of([0.0], [0]) is None
    assert perplexity_of([math.inf, 1.0], [2, 2]) is None
    assert math.isnan(perplexity_of([math.nan, math.inf], [2, 2]) or 0.0)
    assert perplexity_of([0.0], [3]) == 1.0


@pytest.mark.parametrize(
    ("text", "references", "expected"),
    [
        ("the cat sat on the mat", ["the cat is on the mat"], 5 / 6),  # 5 of 6 words in both texts
        ("a b c d", ["d c b a"], 1 / 4),
        ("The CAT, sat!", ["the cat sat"], 1.0),
        ("a b", ["a b c d e f"], 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ("a x b", ["a b"], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("walks", ["walk"], 0.0),  # no stemming
        ("f_1: 2.5", ["f 1 2 5"], 1.0),
        ("Müller", ["m ller"], 1.0),  # as in Google's implementation: letters beyond a–z separate words
        ("a b c", ["x y", "a b z", "c"], 2 / 3),  # the best reference counts
        ("", ["a"], 0.0),
        ("a", [""], 0.0),
        ("a", [], None),
    ],
)
def test_rouge_l_by_hand(text: str, references: list[str], expected: float | None) -> None:
    assert rouge_l(text, references) == (None if expected is None else pytest.approx(expected))


def plain_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_the_common_subsequence_equals_dynamic_programming() -> None:
    rng = random.Random(1)
    for _ in range(300):
        first, second = (rng.choices("abcde"[: rng.randint(1, 5)], k=rng.randint(0, 80)) for _ in range(2))
        assert common_subsequence(first, second) == plain_common_subsequence(first, second)


def test_near_ties_are_distinguished_from_faults(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama(24)
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[7]
    target, prompt, begun = wrap_model(model), [3, 9, 1], [4, 11]
    assert nearly_tied(target, prompt, [*begun, 5, 2], [*begun, 7, 8, 1])
    with torch.inference_mode():
        logits_V = model(torch.tensor([[*prompt, *begun]])).logits[0, -1]
    low, high = int(logits_V.argmin()), int(logits_V.argmax())
    assert not nearly_tied(target, prompt, [*begun, low], [*begun, high])
    assert not nearly_tied(target, prompt, begun, [*begun, 7])
    logits = target.logits
    target.logits = lambda hidden_XD: logits(hidden_XD).index_fill(-1, torch.tensor([20]), -math.inf)  # type: ignore[method-assign]
    assert not nearly_tied(target, prompt, [*begun, low], [*begun, high])  # a masked token does not change that
    assert nearly_tied(target, prompt, [*begun, 5, 2], [*begun, 7, 8, 1])
