"""Bigram drafts for vLLM, as a proposer of its method `custom_class`: each token the likeliest after the one before.

This file stands by itself. An export of a table holds a copy of it beside `successors.npy`, and vLLM imports the copy;
of this package nothing need be installed there.

Letters: V vocabulary, R requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SUCCESSORS_FILE = "successors.npy"


class BigramProposer:
    """What vLLM makes with its configuration and asks for drafts after each step. Raises ValueError: `successors.npy`
    is of another form, or knows more tokens than the served model."""

    def __init__(self, vllm_config: Any) -> None:
        path = Path(__file__).with_name(SUCCESSORS_FILE)
        mapped_V = np.load(path, mmap_mode="r", allow_pickle=False)
        if mapped_V.dtype != np.int32 or mapped_V.ndim != 1:
            raise ValueError(f"{path} is {mapped_V.dtype} {list(mapped_V.shape)}, expected one dimension of int32")
        vocab_size = vllm_config.model_config.get_vocab_size()
        if len(mapped_V) > vocab_size:
            raise ValueError(
                f"{path} was counted with {len(mapped_V)} tokens, the served model has {vocab_size}: "
                "a table serves the model whose tokenizer it was counted with"
            )
        self._next_V = np.asarray(mapped_V)  # still mapped; numpy's class for it is slow to read single values from
        self._gamma = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this when the served model is there; counts have nothing to load from it."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts of at most `num_speculative_tokens` tokens for each request, of which `sampled_token_ids` has what the
        last step committed (nothing while its prompt is being read) and `num_tokens_no_spec` [R] the length with
        these. A bigram looks at the last token alone."""
        del token_ids_cpu, slot_mappings
        return [
            self._chain(new_ids[-1], min(self._gamma, self._longest - int(length))) if new_ids else []
            for new_ids, length in zip(sampled_token_ids, num_tokens_no_spec, strict=False)
        ]

    def _chain(self, token: int, most: int) -> list[int]:
        """What follows a token, up to the first that the table holds nothing for."""
        drafted: list[int] = []
        while len(drafted) < most and 0 <= token < len(self._next_V):
            token = self._next_V.item(token)
            if token < 0:
                break
            drafted.append(token)
        return drafted
