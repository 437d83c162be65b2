"""Models for the tests of evaluation."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM


@pytest.fixture
def models(make_llama: Callable[..., LlamaForCausalLM]) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a target, and a drafter with added noise that often agrees with it."""
    target, drafter = (make_llama(vocab_size=24, seed=3, sharpness=1.5) for _ in range(2))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter += 0.05 * torch.randn_like(parameter)
    return target, drafter
