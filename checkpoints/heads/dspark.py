"""DSpark drafter: a DFlash drafter with a Markov head and a confidence head.

Source: arXiv 2607.05147. Tensor names and config follow serving engines. The Markov head adds a low-rank bigram bias to
the logits of a slot, given the token before it. The confidence head predicts the probability that the token of a slot
is accepted. With `sample_from_anchor`, slot j predicts token j + 1 after the anchor. Otherwise slot 0 is unused, as in
DFlash.

Shape letters: X any, D hidden size, V vocabulary, R draft vocabulary, F rank of the Markov head, E pairs of a table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from torch import Tensor, nn
from transformers import Qwen3Config

from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from ..table.table import BigramTable
from .auxiliary import draft_tokens_in
from .dflash import BLOCK, SETTINGS, DFlashHeads, dflash_settings, fill_dflash, load_dflash, setting_faults
from .layouts import DSPARK, is_dspark

ANCHOR, RANK, KIND = "sample_from_anchor", "markov_rank", "markov_head_type"
"""Config keys: prediction by slot 0, rank and type of the Markov head."""
CONFIDENCE, WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"
"""Config keys: use of the confidence head, and whether it reads the Markov factors."""
_START_DEVIATION = 0.01
"""Standard deviation of a random `markov_w1`, as in speculators."""


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=_START_DEVIATION)


class _ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DSparkHeads(DFlashHeads):
    """Block drafter with a Markov head of rank `rank` and a confidence head; see `DFlashHeads`.

    `block_size` is the number of tokens of a block, of which the first one predicts if `from_anchor` is true.
    """

    architecture = DSPARK

    def __init__(
        self,
        config: Qwen3Config,
        layers: Sequence[int],
        mask: int,
        block_size: int,
        proposed: Tensor | None = None,
        rank: int = 256,
        from_anchor: bool = True,
    ) -> None:
        if rank < 1:
            raise ValueError(f"{RANK} must be at least 1, got {rank}")
        super().__init__(config, layers, mask, block_size, proposed)
        self.rank, self.first_slot = rank, 0 if from_anchor else 1
        self.num_heads = block_size - self.first_slot
        self.markov_head = _MarkovHead(self.vocab_size, self.vocab_size if proposed is None else len(proposed), rank)
        self.confidence_head = _ConfidenceHead(self.hidden_size + rank)

    def markov_factors(self, tokens_X: Tensor) -> Tensor:
        """Return the factors [X, F] of the bigram bias after the given tokens."""
        return self.markov_head.markov_w1(tokens_X)

    @property
    def markov_weight(self) -> Tensor:
        """Matrix [R, F] whose product with `markov_factors` is the bias of the logits."""
        return self.markov_head.markov_w2.weight

    def confidence(self, features_XE: Tensor) -> Tensor:
        """Return the logits [X] of the acceptance probability, given hidden states and Markov factors [X, D + F]."""
        return self.confidence_head.proj(features_XE)[..., 0]

    @torch.no_grad()
    def begin_from_table(self, table: BigramTable) -> Self:
        """Initialise the Markov head from a truncated SVD of a table's log-correlations (SLiM, eq. 5).

        Raises ValueError if the table has another vocabulary or too few tokens for the rank.
        """
        if table.vocab_size != self.vocab_size:
            raise ValueError(f"the table has {table.vocab_size} tokens, but the target has {self.vocab_size}")
        w1_VF, w2_VF = factorize(table, self.rank)
        self.markov_head.markov_w1.weight.copy_(w1_VF)
        self.markov_weight.copy_(w2_VF if self.proposed is None else w2_VF[self.proposed.to(w2_VF.device)])
        return self

    def stored_config(self) -> dict[str, Any]:
        # engines count draft tokens, with or without the anchor
        section = super().stored_config()[SETTINGS] | {BLOCK: self.num_heads}
        heads = {RANK: self.rank, KIND: "vanilla", CONFIDENCE: True, WITH_MARKOV: True}
        return {**section, **heads, ANCHOR: self.first_slot == 0, SETTINGS: section}


def factorize(table: BigramTable, rank: int) -> tuple[Tensor, Tensor]:
    """Return matrices [V, F] whose product approximates the log-correlations of a table, 0 for unseen pairs.

    Squared errors are weighted by the frequencies of both tokens of a pair, because log-correlations of rare tokens are
    large and inexact. Raises ValueError unless `rank` is less than the number of tokens.
    """
    vocab = table.vocab_size
    if not 1 <= rank < vocab:
        raise ValueError(f"{RANK} must be from 1 to {vocab - 1} for a table of {vocab} tokens, got {rank}")
    left_E, right_E = table.rows_of(0, vocab), table.col.long()
    log_r_E = table.look_up(left_E, right_E, torch.zeros(())).double().numpy()
    left_V, right_V = (np.sqrt(counts_V.double().numpy() + 1) for counts_V in (table.left_counts, table.right_counts))
    weighted_E = log_r_E * left_V[left_E] * right_V[right_E]
    weighted_VV = csr_matrix((weighted_E, right_E.numpy(), table.row_ptr.numpy()), (vocab, vocab))
    u_VF, scale_F, v_FV = svds(weighted_VV, rank, v0=np.random.default_rng(0).standard_normal(vocab))
    root_F = np.sqrt(scale_F)
    w1_VF, w2_VF = u_VF * root_F / left_V[:, None], v_FV.T * root_F / right_V[:, None]
    return torch.from_numpy(w1_VF).float(), torch.from_numpy(w2_VF).float()


def load_dspark(directory: Path, dtype: torch.dtype | None = None) -> DSparkHeads:
    """Load a DSpark drafter in evaluation mode. The target's weights are not attached.

    Raises ValueError if the config is invalid, or a tensor is missing, has the wrong shape or non-finite values.
    """
    directory = Path(directory)
    path, config = directory / CONFIG_FILE, read_json(directory / CONFIG_FILE)
    expected = {KIND: "vanilla", CONFIDENCE: True, WITH_MARKOV: True}
    for key, value in expected.items():
        if config.get(key) != value:
            raise ValueError(f"{path}: {key} must be {value!r}, got {config.get(key)!r}, which is not supported")
    for key, kind, name in ((RANK, int, "an integer"), (ANCHOR, bool, "true or false")):
        if type(config.get(key)) is not kind:
            raise ValueError(f"{path}: {key} must be {name}, got {config.get(key)!r}")
    if faults := setting_faults(config):
        raise ValueError(f"{path}: {next(iter(faults.values()))}, which is not supported")
    layers, mask, drafts = dflash_settings(directory)
    stored = load_file(directory / WHOLE_FILES[0])
    size, from_anchor = drafts if config[ANCHOR] else drafts + 1, config[ANCHOR]
    arguments = (layers, mask, size, draft_tokens_in(stored), config[RANK], from_anchor)
    heads = DSparkHeads(Qwen3Config.from_pretrained(directory), *arguments)
    return fill_dflash(heads, stored, directory).to(dtype=dtype).eval()


def load_block_drafter(directory: Path) -> DFlashHeads:
    """Load a DFlash or a DSpark drafter; see `load_dflash` and `load_dspark`."""
    return load_dspark(directory) if is_dspark(directory) else load_dflash(directory)


def draft_tokens_of(directory: Path) -> int:
    """Return the number of draft tokens per block of a stored DFlash or DSpark drafter."""
    return dflash_settings(directory)[2] - (not is_dspark(directory))
