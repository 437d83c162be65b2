"""Bigram tables: which token follows which, counted exactly, and the correlation that SLiM prunes trees with.

Letters: V vocabulary, E entries (pairs held), X any shape, T tokens, D documents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..storage.atomic import read_consistent
from ..storage.names import TABLE_FILE
from .checks import check_range, read_tensors
from .counts import CHUNK, BigramCounts, row_ranges, row_sums
from .file import MAX_COUNT, check_counts, write_table
from .pruning import pruned
from .report import report
from .runs import Ints, Run, check_documents, count_pairs, key_dtype, merge_runs
from .smoothing import check_smoothing
from .views import Correlation, NextToken, SortedKeys

__all__ = ["MAX_COUNT", "TABLE_FILE", "BigramTable", "merged_runs"]


class BigramTable(BigramCounts):
    """Counts of neighbouring tokens, with what is asked of them: correlations, distributions, a smaller table."""

    device = torch.device("cpu")
    """Where `log_correlation` works. The counts themselves stay on the CPU."""

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[NDArray[Any]],
        vocab_size: int,
        budget_tokens: int = 1 << 23,
        progress: Callable[[int, int], None] | None = None,
    ) -> BigramTable:
        """Count the pairs of neighbours within each document; never one that reaches from a document into the next.

        For corpora that outgrow memory there is `train.counting`, which gives the same table.

        Args:
            documents: one-dimensional integer arrays of token ids; may be a stream.
            budget_tokens: tokens that are sorted at a time. Memory is about 16 bytes a token of it, and 64 bytes a
                pair of the table.
            progress: called with the documents and tokens counted so far.

        Raises:
            ValueError: a token outside the vocabulary; a pair seen more often than an int32 can hold.
        """
        key_dtype(vocab_size)
        if budget_tokens < 2:
            raise ValueError(f"budget_tokens is {budget_tokens}, expected at least 2: a pair is two tokens")
        counter = _MemoryCounter(vocab_size, budget_tokens)
        for number, document in enumerate(documents, 1):
            counter.add(np.asarray(document), number - 1)
            if progress is not None:
                progress(number, counter.tokens)
        row_ptr, col_E, count_E = _csr([counter.finish()], vocab_size)
        # Every token is the left of a pair, or the last of its document.
        unigram_V = row_sums(row_ptr, count_E) + counter.lasts_V
        return cls._of_arrays(row_ptr, col_E, count_E, unigram_V)

    @staticmethod
    def merge(*tables: BigramTable) -> BigramTable:
        """The table of all tables' documents together, in memory; `merged_runs` streams the same.

        Raises:
            ValueError: what `merged_runs` raises; a pair seen more often than an int32 can hold.
        """
        runs = merged_runs(tables)
        unigram_V = np.sum([table.unigram.numpy() for table in tables], axis=0)
        return BigramTable._of_arrays(*_csr(runs, tables[0].vocab_size), unigram_V)

    @classmethod
    def _of_arrays(cls, row_ptr: Ints, col: NDArray[np.int32], count: NDArray[np.int32], unigram: Ints) -> BigramTable:
        row_ptr_V1, col_E, count_E, unigram_V = (torch.from_numpy(array) for array in (row_ptr, col, count, unigram))
        return cls(row_ptr_V1, col_E, count_E, unigram_V)

    def run(self, first: int, end: int) -> Run:
        """The rows from `first` to `end` - 1 as a run, see `pair_runs`; counts int32."""
        start, stop = int(self.row_ptr[first]), int(self.row_ptr[end])
        keys_E = self.rows_of(first, end) * self.vocab_size + self.col[start:stop]
        return keys_E.numpy().astype(key_dtype(self.vocab_size)), self.count[start:stop].numpy()

    def to(self, device: torch.device | str) -> BigramTable:
        """This table with its look-up on `device`: itself if it is there, else another over the same counts."""
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if device == self.device:
            return self
        other = BigramTable.__new__(BigramTable)
        other.__dict__.update(self.__dict__, _views=self._views, device=device)
        return other

    def log_correlation(
        self, x_X: Tensor, y_X: Tensor, unseen: float, smoothing: str = "none", strength: float = 0.0
    ) -> Tensor:
        """log r(x, y) of token pairs, r = p(x, y) / (p(x, ·) p(·, y)) with p = n(x, y) / n over pairs.

        Source: SLiM, section 3.3, eq. (5); both marginals are those of the pair counts, so r has mean 1 under their
        product. A pruned table has the r of the whole counts for the pairs that it holds. With smoothing
        r = p(y | x) / p(·, y), see `table_smoothing.Smoothed`: a pair that was never seen has a value of its own.

        Args:
            x_X: int64, the left tokens, on this table's device.
            y_X: int64, the right tokens; broadcast against `x_X`.
            unseen: r of a pair that the table does not hold, at least 0; 0 gives −inf. Not used with smoothing.
            smoothing: "none", "add-k" or "kneser-ney".
            strength: k, or the discount; 0 is the smoothing's default.

        Returns:
            float32 of the broadcast shape, natural logarithms.

        Raises:
            ValueError: a negative `unseen`; a smoothing or strength that there is not; a token outside the vocabulary
                (on CPU only: looking would stop the host).
        """
        if not unseen >= 0:
            raise ValueError(f"unseen is a correlation: expected at least 0, got {unseen}")
        if self.device.type == "cpu":
            check_range(x_X, self.vocab_size)
            check_range(y_X, self.vocab_size)
        log_unseen = torch.tensor(math.log(unseen) if unseen else -math.inf, device=self.device)
        return self.look_up(x_X, y_X, log_unseen, smoothing, strength)

    def look_up(
        self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor, smoothing: str = "none", strength: float = 0.0
    ) -> Tensor:
        """`log_correlation` of tokens that are known to be in the vocabulary; `log_unseen` has no dimensions.

        What it searches in is made with the first call, on this table's device, and kept.
        """
        return self.correlation(smoothing, strength).look_up(x_X, y_X, log_unseen)

    def correlation(self, smoothing: str = "none", strength: float = 0.0) -> Correlation:
        """What `look_up` searches in, on this table's device.

        Raises:
            ValueError: a smoothing or strength that there is not.
        """
        check_smoothing(smoothing, strength)
        keys = self._kept_view((self.device, "keys"), lambda: SortedKeys(self, self.device))
        return self._kept_view(
            (self.device, "correlation", smoothing, strength),
            lambda: Correlation(self, keys, self.device, smoothing, strength),
        )

    def distributions(
        self, device: torch.device | str, prior: float, smoothing: str = "none", strength: float = 0.0
    ) -> NextToken:
        """What follows a token, as a drafter: smoothed distributions on a device, made once and kept.

        Raises:
            ValueError: a smoothing or strength that there is not.
        """
        check_smoothing(smoothing, strength)
        device = torch.device(device)
        return self._kept_view(
            (device, "next", prior, smoothing, strength), lambda: NextToken(self, device, prior, smoothing, strength)
        )

    @cached_property
    def _views(self) -> dict[tuple[Any, ...], Any]:
        """What was worked out once, by what it is and where; tables over the same counts share it."""
        return {}

    def _kept_view(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]

    def pruned(self, min_count: int = 1, top: int = 0, megabytes: float | None = None) -> BigramTable:
        """A smaller table derived from this one, see `table_pruning.pruned`; this one stays as it is."""
        return BigramTable(**pruned(self, min_count, top, megabytes))

    def report(self, tokenizer: Any = None) -> dict[str, Any]:
        """What is in this table, see `table_report.report`."""
        return report(self, tokenizer)

    def save(self, directory: Path) -> None:
        """Write `table.safetensors` into a folder."""
        parts = (self.run(first, end) for first, end in self.chunks())
        path, unigram_V = Path(directory) / TABLE_FILE, self.unigram.numpy()
        if self.pruning is None:
            return write_table(path, self.vocab_size, parts, unigram_V)
        sums = {"left_V": self.left_counts().numpy(), "right_V": self.right_counts().numpy()}
        metadata = {"pruning": json.dumps(self.pruning)}
        return write_table(path, self.vocab_size, parts, unigram_V, metadata=metadata, **sums)

    @classmethod
    def load(cls, directory: Path) -> BigramTable:
        """Read what `save` wrote. Entries stay in the file, mapped, and are read as they are asked for.

        Raises:
            ValueError: no such file, not a table, or one that contradicts itself: the file is named, and both sides.
        """
        return read_consistent(Path(directory), lambda: cls.read(Path(directory) / TABLE_FILE))

    @classmethod
    def read(cls, path: Path, prefix: str = "") -> BigramTable:
        """`load` of a file, in which the names of tensors and metadata may begin with a prefix."""
        metadata, tensors = read_tensors(path, prefix)
        text = metadata.get("pruning")
        try:
            table = cls(**tensors, pruning=None if text is None else json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        if metadata.get("vocab_size") != str(table.vocab_size):
            said = metadata.get("vocab_size")
            raise ValueError(f"{path}: its metadata says {said} tokens, its unigram counts are {table.vocab_size}")
        return table


def merged_runs(tables: Sequence[BigramTable], entries: int = CHUNK) -> Iterator[Run]:
    """The pairs of all tables together as consecutive parts of a run, in the memory of a part; for `write_table`.

    Args:
        entries: of all tables that are merged at a time.

    Raises:
        ValueError: no table; different vocabularies; a pruned table, whose lost pairs would be missing in the sum.
    """
    if not tables:
        raise ValueError("there are no tables to merge")
    vocab_size = tables[0].vocab_size
    for table in tables:
        if table.vocab_size != vocab_size:
            raise ValueError(
                f"tables of different vocabularies cannot be merged: {vocab_size} and {table.vocab_size} tokens"
            )
        if table.pruning is not None:
            raise ValueError(
                f"a pruned table cannot be merged: it holds {table.entries} of {table.pruning['entries']} entries; "
                "merge the whole counts, and prune the sum"
            )
    ranges = row_ranges(np.sum([table.row_ptr.numpy() for table in tables], axis=0), entries)
    return (
        part for first, end in ranges for part in merge_runs((table.run(first, end) for table in tables), vocab_size)
    )


class _MemoryCounter:
    """Collects documents up to a budget of tokens, counts them, and keeps runs that are merged as they grow."""

    def __init__(self, vocab_size: int, budget_tokens: int) -> None:
        self._vocab_size, self._budget = vocab_size, budget_tokens
        self.tokens, self._waiting = 0, 0
        self.lasts_V: Ints = np.zeros(vocab_size, dtype=np.int64)
        """How many documents end in each token."""
        self._pieces: list[NDArray[Any]] = []
        self._runs: list[Run] = []

    def add(self, ids_T: NDArray[Any], number: int) -> None:
        check_documents(ids_T, np.zeros(1, dtype=np.int64), self._vocab_size, number)
        if not len(ids_T):
            return
        self.tokens += len(ids_T)
        self.lasts_V[ids_T[-1]] += 1
        for start in range(0, max(len(ids_T) - 1, 1), self._budget):
            # Slices of a long document share a token, so that no pair is lost.
            self._pieces.append(ids_T[start : start + self._budget + 1].astype(np.uint32))
            self._waiting += len(self._pieces[-1])
            if self._waiting >= self._budget:
                self._flush()

    def _flush(self) -> None:
        tokens_T = np.concatenate(self._pieces)
        starts_D = np.cumsum([0, *map(len, self._pieces[:-1])])
        self._pieces, self._waiting = [], 0
        self._runs.append(count_pairs(tokens_T, starts_D, self._vocab_size))
        while len(self._runs) > 1 and 2 * len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            self._runs.append(self._merged([self._runs.pop(), self._runs.pop()]))

    def _merged(self, runs: list[Run]) -> Run:
        parts = list(merge_runs(runs, self._vocab_size))
        if not parts:
            return np.zeros(0, dtype=key_dtype(self._vocab_size)), np.zeros(0, dtype=np.int64)
        keys, counts = (np.concatenate(side) for side in zip(*parts, strict=True))
        return keys, counts

    def finish(self) -> Run:
        """The run of all pairs."""
        if self._pieces:
            self._flush()
        return self._merged(self._runs)


def _csr(parts: Iterable[Run], vocab_size: int) -> tuple[Ints, NDArray[np.int32], NDArray[np.int32]]:
    """row_ptr, col and count of consecutive parts of a run."""
    row_ptr = np.zeros(vocab_size + 1, dtype=np.int64)
    columns, counts = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int32)]
    for keys_E, counts_E in parts:
        if not len(keys_E):
            continue
        check_counts(keys_E, counts_E, vocab_size)
        rows_E, cols_E = np.divmod(keys_E, keys_E.dtype.type(vocab_size))
        first = int(rows_E[0])
        entries_R = np.bincount((rows_E - rows_E[0]).astype(np.int64))
        row_ptr[first + 1 : first + 1 + len(entries_R)] += entries_R
        columns.append(cols_E.astype(np.int32))
        counts.append(counts_E.astype(np.int32))
    return np.cumsum(row_ptr), np.concatenate(columns), np.concatenate(counts)
