"""What the tests of decoding share: Markov chains as models, and random numbers for thousands of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draftsmith.decode import method
from draftsmith.decode.custom_generate.method import CustomGenerate
from draftsmith.decode.theory.markov import MarkovModel, OneStream
from transformers import LlamaForCausalLM


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """A model of transformers that no token ends."""
    model = make_llama(64, seed=0)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def drafter(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """A smaller one."""
    return make_llama(64, seed=1, num_hidden_layers=1)


@pytest.fixture
def speculative(drafter: LlamaForCausalLM) -> CustomGenerate:
    """Speculative decoding with it, for `model.generate`."""
    return method("speculative", drafter=drafter, gamma=3)


@pytest.fixture
def make_markov() -> type[MarkovModel]:
    """`make_markov(tables_TVV)`: a model whose next token depends on the last token and its position."""
    return MarkovModel


@pytest.fixture
def make_stream() -> type[OneStream]:
    """`make_stream(seed, rows)`: an `Rng` for thousands of rows."""
    return OneStream
