"""Bigram drafter for vLLM's method `custom_class`, which drafts the most probable next token repeatedly.

vLLM imports a copy of this self-contained file from an exported table, which also contains `successors.npy`.

Shape letters: V vocabulary, R requests.
"""

from pathlib import Path
from typing import Any

import numpy as np

SUCCESSORS_FILE = "successors.npy"


class BigramProposer:
    """Bigram drafter that vLLM instantiates with its configuration and calls after each decoding step.

    Raises ValueError if `successors.npy` has an unexpected dtype, or more tokens than the served model.
    """

    def __init__(self, vllm_config: Any) -> None:
        path = Path(__file__).with_name(SUCCESSORS_FILE)
        mapped_V = np.load(path, mmap_mode="r", allow_pickle=False)
        if mapped_V.dtype != np.int32 or mapped_V.ndim != 1:
            raise ValueError(f"{path} is {mapped_V.dtype} {list(mapped_V.shape)}, expected one dimension of int32")
        vocab_size = vllm_config.model_config.get_vocab_size()
        if len(mapped_V) > vocab_size:
            raise ValueError(
                f"{path} has a vocabulary of {len(mapped_V)} tokens, but the served model has {vocab_size}"
            )
        self._next_V = np.asarray(mapped_V)  # stays memory-mapped; indexing np.memmap itself is slow
        self._gamma = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the drafter does not use the served model."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return at most `num_speculative_tokens` draft tokens for each request.

        Args:
            sampled_token_ids: Tokens of each request that the last step generated; empty during prefill.
            num_tokens_no_spec: Length of each request including these tokens, [R].
            token_ids_cpu: Not used, since a bigram depends on the last token only.
            slot_mappings: Not used.
        """
        del token_ids_cpu, slot_mappings
        return [
            self._chain(new_ids[-1], min(self._gamma, self._longest - int(length))) if new_ids else []
            for new_ids, length in zip(sampled_token_ids, num_tokens_no_spec, strict=False)
        ]

    def _chain(self, token: int, most: int) -> list[int]:
        """Draft up to `most` tokens after `token`, stopping at a token without a successor."""
        drafted: list[int] = []
        while len(drafted) < most and 0 <= token < len(self._next_V):
            token = self._next_V.item(token)
            if token < 0:
                break
            drafted.append(token)
        return drafted
