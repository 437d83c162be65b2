"""Fixtures of the decoding tests: Markov chains as models, and random numbers for thousands of rows.

As in the simulations of Yin et al. 2024 (arXiv 2411.00841), every position has its own transition table.

Shape letters: B batch, M new tokens, T positions, V states, X anything. In tables [T, V, V] the last two indices are
the previous and the next state.
"""

from collections.abc import Callable

import pytest
import torch
from draftsmith.decode import method
from draftsmith.decode.custom_generate.method import CustomGenerate
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.rng import Rng
from torch import Tensor
from transformers import LlamaForCausalLM


class MarkovModel(LanguageModel):
    """Model with known distributions: `tables_TVV[n, x]` is the distribution after state x at position n.

    Positions beyond the last table use the last table. There are no layers, so the cache only contains lengths. A
    hidden state is the index of a table's row, which float32 represents exactly.
    """

    def __init__(self, tables_TVV: Tensor) -> None:
        self.positions, self.vocab_size, _ = tables_TVV.shape
        self.max_positions = 1 << 30
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.layers = 0
        self.hidden_size = self.kv_heads = self.key_width = self.value_width = 1
        self._logits_XV = tables_TVV.log().float().flatten(0, 1)

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> None:
        return

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        row_BM = positions_BM.clamp(max=self.positions - 1) * self.vocab_size + tokens_BM
        return row_BM[..., None].float()

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return self._logits_XV[hidden_XD[..., 0].long()]


class OneStream(Rng):
    """Fast random numbers for many rows from a single generator. The numbers of one row cannot be reproduced alone."""

    def __init__(self, seed: int, rows: int) -> None:
        self.device = torch.device("cpu")
        self._rows, self._generator = rows, torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self._rows, *shape, generator=self._generator, dtype=torch.float64)


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    model = make_llama(64, seed=0)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def drafter(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(64, seed=1, num_hidden_layers=1)


@pytest.fixture
def speculative(drafter: LlamaForCausalLM) -> CustomGenerate:
    return method("speculative", drafter=drafter, gamma=3)


@pytest.fixture
def make_markov() -> type[MarkovModel]:
    """Return the class of models whose next token depends only on the last token and its position."""
    return MarkovModel


@pytest.fixture
def make_stream() -> type[OneStream]:
    """Return the class of a fast `Rng` for thousands of rows."""
    return OneStream
