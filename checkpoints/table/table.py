"""Bigram tables: which token follows which, counted exactly, and the correlation that SLiM prunes trees with.

Letters: V vocabulary, E entries (pairs held), X any shape, T tokens, D documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..storage.names import TABLE_FILE
from .counts import CHUNK, BigramCounts, row_ranges
from .file import check_counts, write_table
from .pruning import pruned
from .report import report
from .runs import Run, check_documents, key_dtype, merge_runs
from .smoothing import check_smoothing
from .texts import TextStore
from .views import Correlation, NextToken, SortedKeys

__all__ = ["TABLE_FILE", "BigramTable", "merged_runs"]


class BigramTable(BigramCounts):
    """Counts of neighbouring tokens, with what is asked of them: correlations, distributions, a smaller table."""

    device = torch.device("cpu")
    """Where `look_up` works. The counts themselves stay on the CPU."""
    texts: TextStore | None = None
    """Some of the texts themselves, where they were kept."""

    @staticmethod
    def _made(array: Any) -> Tensor:
        return torch.from_numpy(array)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The table in a folder, with the texts that lie beside it. Raises what both raise."""
        table = super().load(directory)
        table.texts = TextStore.load(directory, table.vocab_size)
        return table

    @classmethod
    def from_documents(cls, documents: Iterable[NDArray[Any]], vocab_size: int) -> BigramTable:
        """Count the pairs of neighbours within each document (integers [T]), in memory; `train.table.counting` gives
        the same table for corpora that outgrow it. Raises ValueError: a token outside the vocabulary; a pair seen more
        often than an int32 can hold."""
        key_dtype(vocab_size)
        arrays = [np.zeros(0, dtype=np.int64)]
        for number, document in enumerate(documents):
            check_documents(np.asarray(document), np.zeros(1, dtype=np.int64), vocab_size, number)
            arrays.append(np.asarray(document).astype(np.int64))
        keys_T = np.concatenate([ids_T[:-1] * vocab_size + ids_T[1:] for ids_T in arrays])
        keys_E, count_E = np.unique(keys_T, return_counts=True)
        if len(keys_E):
            check_counts(keys_E, count_E, vocab_size)
        row_ptr = np.searchsorted(keys_E, np.arange(vocab_size + 1) * vocab_size)
        unigram_V = np.bincount(np.concatenate(arrays), minlength=vocab_size)
        parts = row_ptr, (keys_E % vocab_size).astype(np.int32), count_E.astype(np.int32), unigram_V
        rows, columns, counts, unigrams = map(torch.from_numpy, parts)
        return cls(rows, columns, counts, unigrams)

    def run(self, first: int, end: int) -> Run:
        """The rows from `first` to `end` - 1 as a run, see `runs`; counts int32."""
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

    def look_up(
        self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor, smoothing: str = "none", strength: float = 0.0
    ) -> Tensor:
        """log r(x, y) of token pairs, r = p(x, y) / (p(x, ·) p(·, y)) with p = n(x, y) / n over pairs; float32 of the
        broadcast shape, natural logarithms. Source: SLiM, section 3.3, eq. (5), with the pair counts' marginals.

        With smoothing r = p(y | x) / p(·, y), see `smoothing.Smoothed`; `strength` is k of "add-k" or the discount of
        "kneser-ney", 0 the default. Tokens are int64, on this table's device and in the vocabulary, which is not looked
        at. `log_unseen`, without dimensions, is log r of a pair that the table does not hold; not used with smoothing.

        Raises ValueError: a smoothing or strength that there is not.
        """
        return self.correlation(smoothing, strength).look_up(x_X, y_X, log_unseen)

    def correlation(self, smoothing: str = "none", strength: float = 0.0) -> Correlation:
        """What `look_up` searches in, on this table's device; made with the first call."""
        check_smoothing(smoothing, strength)
        keys = self._kept_view((self.device, "keys"), lambda: SortedKeys(self, self.device))
        return self._kept_view(
            (self.device, "correlation", smoothing, strength),
            lambda: Correlation(self, keys, self.device, smoothing, strength),
        )

    def distributions(
        self, device: torch.device | str, prior: float, smoothing: str = "none", strength: float = 0.0
    ) -> NextToken:
        """What follows a token, as a drafter: smoothed distributions on a device, made once and kept."""
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
        """A smaller table derived from this one, see `pruning.pruned`; this one stays as it is."""
        table = BigramTable(**pruned(self, min_count, top, megabytes))
        table.texts = self.texts
        return table

    def report(self, tokenizer: Any = None) -> dict[str, Any]:
        """What is in this table, see `report.report`."""
        return report(self, tokenizer)

    def save(self, directory: Path) -> None:
        """Write `table.safetensors` into a folder, and the texts."""
        if self.texts is not None:
            self.texts.save(directory)
        parts = (self.run(first, end) for first, end in self.chunks())
        path, unigram_V = Path(directory) / TABLE_FILE, self.unigram.numpy()
        if self.pruning is None:
            return write_table(path, self.vocab_size, parts, unigram_V)
        sums = {"left_V": self.left_counts().numpy(), "right_V": self.right_counts().numpy()}
        metadata = {"pruning": json.dumps(self.pruning)}
        return write_table(path, self.vocab_size, parts, unigram_V, metadata=metadata, **sums)


def merged_runs(tables: Sequence[BigramTable], entries: int = CHUNK) -> Iterator[Run]:
    """The pairs of all tables together as consecutive parts of a run, of about so many entries; for `write_table`.
    Raises ValueError: no table, different vocabularies, a pruned table."""
    if not tables:
        raise ValueError("there are no tables to merge")
    for table in tables:
        if table.vocab_size != tables[0].vocab_size:
            both = f"{tables[0].vocab_size} and {table.vocab_size} tokens"
            raise ValueError(f"tables of different vocabularies cannot be merged: {both}")
        if table.pruning is not None:  # the sum would lack the pairs that are lost
            kept = f"{table.entries} of {table.pruning['entries']} entries"
            raise ValueError(f"a pruned table cannot be merged: it holds {kept}; merge the whole counts, prune the sum")
    ranges = row_ranges(np.sum([table.row_ptr.numpy() for table in tables], axis=0), entries)
    return (
        part
        for first, end in ranges
        for part in merge_runs((table.run(first, end) for table in tables), tables[0].vocab_size)
    )
