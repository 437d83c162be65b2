"""Export of a bigram table as a drafter for vLLM (method `custom_class`).

There is no export to llama.cpp, whose n-gram cache drafts a token only if it has at least 75 % of a row's counts.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..table.table import BigramTable
from . import vllm_proposer
from .base import ExportOptions, Format, Source

_PRIOR = 1.0  # default of the method `bigram`
_GAMMA = 2
_MODULE = "vllm_proposer.py"


def successors(table: BigramTable) -> NDArray[np.int32]:
    """Return the most probable next token after each token, int32 [V]; −1 where the table has no successor."""
    best_V = table.distributions("cpu", _PRIOR).most_likely(torch.arange(table.vocab_size))
    return torch.where(table.row_ptr.diff() > 0, best_V, -1).numpy().astype(np.int32)


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    np.save(folder / vllm_proposer.SUCCESSORS_FILE, successors(BigramTable.load(source.folder)), allow_pickle=False)
    shutil.copyfile(vllm_proposer.__file__, folder / _MODULE)


def _compare(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    expected = successors(BigramTable.load(source.folder))
    if not np.array_equal(np.load(folder / vllm_proposer.SUCCESSORS_FILE, allow_pickle=False), expected):
        raise ValueError(f"the most probable next tokens in {folder} differ from those of {source.folder}")
    return [f"the draft token after each of {len(expected):,} tokens equals that of the method `bigram`"]


TABLE = Format(
    "vllm-bigrams",
    "table",
    "Most probable successor of each token, and a proposer that drafts from it",
    "vLLM ≥ 0.22 (method custom_class)",
    _write,
    _compare,
    lambda source, folder, options: {"tokens": options.speculative_tokens or _GAMMA},
    ("target", "speculative_tokens"),
)
