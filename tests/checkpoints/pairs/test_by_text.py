"""Drafters with a different tokenizer draft by text; the output is unchanged and draft tokens are accepted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.pairs.by_text import TextTranslation
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

TEXTS = ["the draft target keeps, drops or reads a tree of tokens", "na\u00efve \u4e2d\u6587 text", "    x = 12"]
OTHERS = ["a table of texts that a target keeps", "the slow, fast and naive readers", "\u4e2d \u6587"]
LETTERS = " abcdefghijklmnopqrstuvwxyz"


def letters(text: str) -> Any:
    """Return a tokenizer with one token per letter of `text`, in that order."""
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(text)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def permuted(model: LlamaForCausalLM, order_V: torch.Tensor, new: LlamaForCausalLM) -> LlamaForCausalLM:
    """Load the weights of a model into `new` with permuted tokens: row i is the old row `order_V[i]`."""
    new.load_state_dict(model.state_dict())
    for layer in new.get_input_embeddings(), new.get_output_embeddings():
        layer.weight.data = layer.weight.data[order_V]
    return new


def decoded(target: Any, parts: Parts, prompts: Sequence[Sequence[int]], sampling: Sampling, **options: Any) -> Any:
    """Decode all prompts; return the tokens of each row and the number of steps."""
    texts, steps = [list[int]() for _ in prompts], 0
    method = build_method("speculative", parts, sampling, **options)
    rng = Rng.for_rows(0, len(prompts))
    for step in generate(target, *method, prompts, Limits(40), sampling, rng):
        steps += 1
        for text, new in zip(texts, step.new_ids, strict=True):
            text += new
    return texts, steps


@pytest.fixture
def pair(make_llama: Callable[..., LlamaForCausalLM]) -> tuple[Any, Any, Any]:
    """Return a target whose tokens are letters, a noisy drafter, and this drafter with permuted letters."""
    size = len(LETTERS)
    target = make_llama(size, sharpness=3.0)
    drafter = make_llama(size)
    noise = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in target.state_dict().items()}
    drafter.load_state_dict(noise)
    order_V = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    other = wrap_model(permuted(drafter, order_V, make_llama(size)))
    own_letters, other_letters = letters(LETTERS), letters("".join(LETTERS[number] for number in order_V.tolist()))
    other.translation = TextTranslation(own_letters, other_letters)
    return target, wrap_model(drafter), other


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_by_text_accepts_the_same_number_of_tokens(pair: tuple[Any, Any, Any], rows: int, gamma: int) -> None:
    """Permuting the tokens of a drafter changes neither the text nor the number of steps."""
    model, drafter, other = pair
    target = wrap_model(model)
    tokenizer = letters(LETTERS)
    prompts = [tokenizer(text).input_ids for text in ("the quick brown", "a", "speculative")[:rows]]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
        for prompt in prompts
    ]
    usual, steps = decoded(target, Parts(drafter), prompts, Sampling(), gamma=gamma)
    texts, own = decoded(target, Parts(other), prompts, Sampling(), gamma=gamma)
    assert texts == usual
    assert [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)] == alone
    assert own == steps < 35, "no draft tokens were accepted"


def test_sampling_by_text_follows_the_target(pair: tuple[Any, Any, Any]) -> None:
    """The first two letters of 4,000 rows follow the target's distribution within five standard deviations."""
    model, _, other = pair
    target = wrap_model(model)
    rows, prompt = 4000, letters(LETTERS)("the").input_ids
    texts = [list[int]() for _ in range(rows)]
    sampling = Sampling(1.0)
    method = build_method("speculative", Parts(other), sampling, gamma=2)
    for step in generate(target, *method, [prompt] * rows, Limits(2), sampling, Rng.for_rows(0, rows)):
        for text, new in zip(texts, step.new_ids, strict=True):
            text += new
    size = len(LETTERS)
    with torch.inference_mode():
        first_V = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        follow_VV = (
            model(torch.cat((torch.tensor([prompt] * size), torch.arange(size)[:, None]), 1))
            .logits[:, -1]
            .double()
            .softmax(-1)
        )
    expected_X = (first_V[:, None] * follow_VV).flatten() * rows
    observed_X = torch.bincount(torch.tensor([a * size + b for a, b in texts]), minlength=size**2).double()
    common_X = expected_X > 5
    chi = float(((observed_X - expected_X)[common_X] ** 2 / expected_X[common_X]).sum())
    cells = int(common_X.sum())
    assert cells > 20
    assert chi < cells + 5 * (2 * cells) ** 0.5


@pytest.mark.parametrize("text", [*TEXTS, *OTHERS])
def test_drafts_are_retokenised_as_by_the_target(text: str) -> None:
    """Draft tokens become the target's tokens of the same text, or no tokens if the prefix ends inside a character."""
    target, drafter = train_bpe(TEXTS, 300, ["<unk>"]), train_bpe(OTHERS, 290, ["<unk>", "<s>"])
    translation = TextTranslation(target, drafter)
    whole = target(text, add_special_tokens=False).input_ids
    for position in range(1, len(whole)):
        before = whole[:position]
        start = target.decode(before)
        own = translation.to_drafter(before)
        assert drafter.decode(own, skip_special_tokens=True) == start.rstrip("\ufffd")
        draft = drafter(text[len(start) :], add_special_tokens=False).input_ids
        tokens = translation.to_target(before, own, draft)
        if start.endswith("\ufffd"):
            assert not tokens
        else:
            assert target.decode([*before, *tokens]) == text
            assert tokens == whole[position:], "the tokens differ from those of the whole text"


def test_texts_longer_than_the_drafters_limit_continue(pair: tuple[Any, Any, Any]) -> None:
    model, _, other = pair
    target = wrap_model(model)
    prompts = [letters(LETTERS)(text).input_ids for text in ("the quick brown fox", "a")]
    usual, _ = decoded(target, Parts(other), prompts, Sampling(), gamma=2)
    other.max_positions = 30
    texts, _ = decoded(target, Parts(other), prompts, Sampling(), gamma=2)
    assert texts == usual
    other.max_positions = 20
    with pytest.raises(ValueError, match=r"20 positions.*19.*21"):
        decoded(target, Parts(other), prompts, Sampling(), gamma=2)


def test_other_methods_name_the_supported_one(pair: tuple[Any, Any, Any]) -> None:
    model, _, other = pair
    target = wrap_model(model)
    for name, options in (("multi-candidate", {}), ("adaptive", {}), ("mjsd", {})):
        method = build_method(name, Parts(other), Sampling(), **options)
        with pytest.raises(ValueError, match=r"different tokenizer.*`speculative`"):
            next(generate(target, *method, [[1, 2]], Limits(4), Sampling(), Rng.for_rows(0, 1)))


def test_encoder_decoders_need_the_targets_tokens(pair: tuple[Any, Any, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    models = [T5ForConditionalGeneration(T5Config(vocab_size=len(LETTERS), **sizes)).eval() for _ in range(2)]
    target, drafter = map(wrap_model, models)
    drafter.translation = pair[2].translation
    method = build_method("speculative", Parts(drafter), Sampling())
    with pytest.raises(ValueError, match="encoder-decoder"):
        next(generate(target, *method, [[1, 2]], Limits(4), Sampling(), Rng.for_rows(0, 1)))
