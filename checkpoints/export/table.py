"""Forms of a bigram table for other programs: npz for scipy, llama.cpp's n-gram cache, a proposer for vLLM.

Letters: V vocabulary, E entries (distinct pairs), R rows that have entries.
"""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from ..artifact.markdown import shell
from ..table.file import write_array
from ..table.table import BigramTable
from . import vllm_proposer
from .base import FOLDER, FOLDER_IN_PYTHON, ExportOptions, Format, Source
from .target import target_name

NPZ_FILE = "bigrams.npz"
LLAMA_FILE = "ngrams.bin"
LLAMA_MOST = (2**31 - 1) // 100
"""Most counts in a record: llama.cpp works out percentages of their sum in 32 bits."""

_SUMS = ("unigram", "left", "right")
_PRIOR = 1.0  # of the method `bigram`, by default
_SAMPLE = 10_000
_RECORD = 5  # numbers at the head of a record: four tokens of context, and how many followers there are
_LLAMA_LEAST, _LLAMA_SHARE = 4, 75


def _sums(table: BigramTable) -> dict[str, NDArray[np.int64]]:
    """int64 [V] by name: how often each token was seen, and how often on either side of a pair in the whole counts."""
    sums = (table.unigram, table.left_counts(), table.right_counts())
    return {name: sums_V.numpy() for name, sums_V in zip(_SUMS, sums, strict=True)}


def _write_npz(source: Source, folder: Path, options: ExportOptions) -> None:
    del options
    table = BigramTable.load(source.folder)
    shape = (table.vocab_size, table.vocab_size)
    counts = sparse.csr_array((table.count.numpy(), table.col.numpy(), table.row_ptr.numpy()), shape=shape)
    sparse.save_npz(folder / NPZ_FILE, counts, compressed=False)
    for name, sums_V in _sums(table).items():
        np.save(folder / f"{name}.npy", sums_V, allow_pickle=False)


def _compare_npz(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    del options
    table = BigramTable.load(source.folder)
    counts = sparse.load_npz(folder / NPZ_FILE)
    sums = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in _SUMS}
    mine = {"row_ptr": table.row_ptr.numpy(), "col": table.col.numpy(), "count": table.count.numpy()} | _sums(table)
    theirs = {"row_ptr": counts.indptr, "col": counts.indices, "count": counts.data} | sums
    for name, array in mine.items():
        if not np.array_equal(array, theirs[name]):
            raise ValueError(f"{name} read back from {folder} differs from that of {source.folder}")
    found = [f"all {counts.nnz:,} counts of pairs, and {', '.join(_SUMS)} of {table.vocab_size:,} tokens"]
    chosen = np.linspace(0, table.entries - 1, min(table.entries, _SAMPLE)).astype(np.int64)
    x_X = np.searchsorted(counts.indptr, chosen, side="right") - 1
    y_X = counts.indices[chosen]
    r_X = counts.data[chosen] * (sums["left"].sum() / (sums["left"][x_X] * sums["right"][y_X].astype(np.float64)))
    log_r_X = table.log_correlation(torch.from_numpy(x_X), torch.from_numpy(y_X).long(), unseen=0.0).numpy()
    if not np.allclose(np.log(r_X), log_r_X, rtol=1e-5, atol=1e-5):
        raise ValueError(f"correlations worked out from {folder} differ from those of {source.folder}")
    return [*found, f"r(x, y) of {len(chosen):,} pairs, worked out from these files, within 0.001 %"]


def _serve_npz(source: Source, options: ExportOptions) -> str:
    del source, options
    return f"""
```python
import numpy as np
from scipy import sparse

counts = sparse.load_npz("{FOLDER_IN_PYTHON}/{NPZ_FILE}")  # counts[x, y]: how often token y came after token x
unigram = np.load("{FOLDER_IN_PYTHON}/unigram.npy")  # how often each token was seen
left = np.load("{FOLDER_IN_PYTHON}/left.npy")  # ... on the left of a pair
right = np.load("{FOLDER_IN_PYTHON}/right.npy")  # ... on the right of one
r = counts[x, y] * left.sum() / (left[x] * right[y])  # the correlation p(x, y) / (p(x) p(y))
```

`left` and `right` are sums of the whole counts. Of a pruned table they are more than the sums of `counts`, and the
correlation is right with them alone.
"""


def _llama_counts(table: BigramTable, first: int, end: int) -> NDArray[np.int32]:
    """Counts of the rows from `first` to `end` - 1; of rows that add up to more than `LLAMA_MOST`, scaled to that."""
    start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
    count_E = table.count[start:stop].numpy()
    sums_V = table.kept_left()[first:end].numpy()
    if not len(sums_V) or int(sums_V.max()) <= LLAMA_MOST:
        return count_E
    sizes_V = table.row_ptr[first : end + 1].diff().numpy()
    sums_E, room_E = np.repeat(sums_V, sizes_V), np.repeat(LLAMA_MOST - sizes_V, sizes_V)
    scaled_E = np.maximum(count_E.astype(np.int64) * room_E // np.maximum(sums_E, 1), 1)
    return np.where(sums_E > LLAMA_MOST, scaled_E, count_E).astype(np.int32)


def _llama_records(table: BigramTable, first: int, end: int) -> NDArray[np.int32]:
    """The rows from `first` to `end` - 1 as they stand in the file: token, -1, -1, -1, n, and n of (token, count)."""
    start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
    sizes_V = table.row_ptr[first : end + 1].diff().numpy()
    rows_R = np.flatnonzero(sizes_V)
    sizes_R = sizes_V[rows_R]
    heads_R = _RECORD * np.arange(len(rows_R)) + 2 * (np.cumsum(sizes_R) - sizes_R)
    places_E = 2 * np.arange(stop - start) + _RECORD * np.repeat(np.arange(1, len(rows_R) + 1), sizes_R)
    numbers = np.full(_RECORD * len(rows_R) + 2 * (stop - start), -1, dtype="<i4")
    numbers[heads_R] = first + rows_R
    numbers[heads_R + 4] = sizes_R
    numbers[places_E] = table.col[start:stop].numpy()
    numbers[places_E + 1] = _llama_counts(table, first, end)
    return numbers


def _write_llama(source: Source, folder: Path, options: ExportOptions) -> None:
    del options
    table = BigramTable.load(source.folder)
    with (folder / LLAMA_FILE).open("wb") as out:
        for first, end in table.chunks():
            write_array(out, _llama_records(table, first, end))


def _read_llama(path: Path) -> Iterator[tuple[list[int], NDArray[np.int32]]]:
    """Context and followers [n, 2] of each record, one after the other as llama.cpp reads them."""
    numbers = np.fromfile(path, dtype="<i4")
    at = 0
    while at < len(numbers):
        end = at + _RECORD + 2 * int(numbers[at + 4])
        yield numbers[at : at + 4].tolist(), numbers[at + _RECORD : end].reshape(-1, 2)
        at = end


def _compare_llama(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    del options
    table = BigramTable.load(source.folder)
    wanted = iter(np.flatnonzero(table.row_ptr.diff().numpy()).tolist())
    rows = drafting = scaled = 0
    for context, pairs in _read_llama(folder / LLAMA_FILE):
        x = next(wanted, None)
        if x is None or context != [x, -1, -1, -1] or not _same_followers(table, x, pairs):
            raise ValueError(f"record {rows} read back from {folder / LLAMA_FILE} differs from {source.folder}")
        total, most = int(pairs[:, 1].sum(dtype=np.int64)), int(pairs[:, 1].max())
        drafting += total >= _LLAMA_LEAST and 100 * most >= _LLAMA_SHARE * total
        rows, scaled = rows + 1, scaled + (int(table.kept_left()[x]) > LLAMA_MOST)
    if (left := next(wanted, None)) is not None:
        raise ValueError(f"{folder / LLAMA_FILE} ends before the followers of token {left}")
    found = [f"{rows:,} records with {table.entries:,} counts"]
    if scaled:
        found.append(f"of {scaled:,} records, the order of counts that were scaled down")
    found.append(
        f"{drafting:,} of the records make llama.cpp draft: they have {_LLAMA_LEAST} counts or more, and one token "
        f"{_LLAMA_SHARE} % of them"
    )
    return found


def _same_followers(table: BigramTable, x: int, pairs: NDArray[np.int32]) -> bool:
    """Whether they are those of a row: equal counts, or scaled ones in the same order that add up to little enough."""
    entries = slice(int(table.row_ptr[x]), int(table.row_ptr[x + 1]))
    count_E = table.count[entries].numpy()
    if not np.array_equal(pairs[:, 0], table.col[entries].numpy()):
        return False
    if int(table.kept_left()[x]) <= LLAMA_MOST:
        return np.array_equal(pairs[:, 1], count_E)
    ascending_E = pairs[np.argsort(count_E, kind="stable"), 1]
    return int(ascending_E[0]) > 0 and bool((np.diff(ascending_E) >= 0).all()) and int(pairs[:, 1].sum()) <= LLAMA_MOST


def _serve_llama(source: Source, options: ExportOptions) -> str:
    del source, options
    return f"""
```sh
llama-server -m TARGET.gguf --spec-type ngram-cache --lookup-cache-dynamic {FOLDER}/{LLAMA_FILE}
cp {FOLDER}/{LLAMA_FILE} lookup.bin && llama-lookup -m TARGET.gguf --lookup-cache-dynamic lookup.bin -p "..."
```

`llama-lookup` writes what it has seen back into the file that it is given: hand it a copy. `llama-server` only reads
it, and drafts up to 8 tokens, whatever `--spec-draft-n-max` says. TARGET.gguf must have the vocabulary that the table
was counted with, token for token: convert it from the target that the table was made for.

Records have one token of context, so this is a *dynamic* cache; a static one (`--lookup-cache-static`) is looked up by
two tokens and would find nothing here. llama.cpp looks first in the text so far. From this file it drafts where the
likeliest follower has {_LLAMA_SHARE} % of its record's counts, and the record at least {_LLAMA_LEAST}; how many
records that are stands below. A table that is pruned first (`draftsmith table prune TABLE --out OUT --top 4`) makes a
smaller file; shares are then of the counts that are left, so that more records draft, and are wrong more often.

The file has 8 bytes a pair and {4 * _RECORD} a record; llama.cpp keeps it in hash tables of several times that.
Records that add up to more than {LLAMA_MOST:,} are scaled down to that: llama.cpp's percentages would overflow.
"""


def successors(table: BigramTable) -> NDArray[np.int32]:
    """int32 [V]: what the method `bigram` drafts after each token at temperature 0; −1 where a row has no entries."""
    best_V = table.distributions("cpu", _PRIOR).most_likely(torch.arange(table.vocab_size))
    return torch.where(table.row_ptr.diff() > 0, best_V, -1).numpy().astype(np.int32)


def _write_vllm(source: Source, folder: Path, options: ExportOptions) -> None:
    del options
    np.save(folder / vllm_proposer.SUCCESSORS_FILE, successors(BigramTable.load(source.folder)), allow_pickle=False)
    shutil.copyfile(vllm_proposer.__file__, folder / f"{_module()}.py")


def _module() -> str:
    return vllm_proposer.__name__.rpartition(".")[2]


def _compare_vllm(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    table = BigramTable.load(source.folder)
    copied = runpy.run_path(str(folder / f"{_module()}.py"))  # which leaves no bytecode in the folder
    vocab, gamma = table.vocab_size, _gamma(options)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: vocab, max_model_len=gamma + 1),
        speculative_config=SimpleNamespace(num_speculative_tokens=gamma),
    )
    tokens_VK = torch.arange(vocab)[:, None]
    distributions = table.distributions("cpu", _PRIOR)
    for _ in range(gamma):
        tokens_VK = torch.cat((tokens_VK, distributions.most_likely(tokens_VK[:, -1:])), 1)
    known_VK = (table.row_ptr.diff() > 0)[tokens_VK[:, :-1]].int().cumprod(1)
    lengths_V = known_VK.sum(1).tolist()
    wanted = [row[1 : 1 + length] for row, length in zip(tokens_VK.tolist(), lengths_V, strict=True)]
    drafted = copied["BigramProposer"](config).propose([[x] for x in range(vocab)], np.ones(vocab), None)
    if drafted != wanted:
        x = next(x for x in range(vocab) if drafted[x] != wanted[x])
        raise ValueError(f"{folder} drafts {drafted[x]} after token {x}, and {source.folder} {wanted[x]}")
    return [f"drafts of up to {gamma} tokens after each of {vocab:,} tokens, with those of this package's `bigram`"]


def _gamma(options: ExportOptions) -> int:
    return options.speculative_tokens or 2


def _serve_vllm(source: Source, options: ExportOptions) -> str:
    target = shell(target_name(source, options) or "TARGET")
    gamma = _gamma(options)
    settings = f'"method": "custom_class", "model": "{_module()}.BigramProposer", "num_speculative_tokens": {gamma}'
    return f"""
```bash
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD"/{FOLDER} vllm serve {target} --speculative-config \\
  '{{{settings}}}'
```

`{_module()}.py` needs nothing of draftsmith. It drafts the likeliest token after the last one, then the likeliest after
that, and stops where nothing was ever counted. vLLM verifies every draft, so that outputs are the target's own. A
bigram is right about one token more often than about two: more than 2 or 3 `num_speculative_tokens` seldom pay.

`custom_class` is experimental in vLLM. It runs without asynchronous scheduling, and in the first model runner alone.
Without PYTHONDONTWRITEBYTECODE Python would leave a cache in the folder, which is then no longer what was hashed.
"""


TABLE_FORMATS = (
    Format(
        name="npz",
        kind="table",
        summary="Counts of pairs as a sparse matrix, and sums of tokens as arrays",
        readers="scipy ≥ 1.8 and numpy",
        write=_write_npz,
        compare=_compare_npz,
        serving=_serve_npz,
    ),
    Format(
        name="llama-ngrams",
        kind="table",
        summary="Counts of pairs as a dynamic n-gram cache",
        readers="llama.cpp (llama-server with --spec-type ngram-cache, llama-lookup; run with commit 0c1e57098)",
        write=_write_llama,
        compare=_compare_llama,
        serving=_serve_llama,
    ),
    Format(
        name="vllm-bigrams",
        kind="table",
        summary="The likeliest token after each token, and a proposer that drafts from it",
        readers="vLLM ≥ 0.22 (method custom_class)",
        write=_write_vllm,
        compare=_compare_vllm,
        serving=_serve_vllm,
        options=("target", "speculative_tokens"),
    ),
)
"""Formats of tables."""
