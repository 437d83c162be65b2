"""Tables in the forms of other programs, read back by scipy, by a slow reader, and as vLLM would load and ask."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.export.table import LLAMA_MOST
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Context, Limits
from draftsmith.decode.methods import METHODS
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.ngrams import TableChain, TableSource
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from scipy import sparse
from transformers import LlamaForCausalLM

VOCAB = 24
PRUNINGS: list[dict[str, int]] = [{}, {"min_count": 2}, {"top": 2}]
Record = tuple[list[int], list[tuple[int, int]]]
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


def random_table(seed: int = 0) -> BigramTable:
    """Unevenly filled rows, ties, and three tokens that were never seen."""
    rng = np.random.default_rng(seed)
    documents = [np.minimum(rng.geometric(0.2, 30) - 1, VOCAB - 4) for _ in range(12)]
    return BigramTable.from_documents(documents, VOCAB)


def counted(*rows: tuple[int, dict[int, int]]) -> BigramTable:
    """A table with these followers and counts."""
    row_ptr = torch.zeros(VOCAB + 1, dtype=torch.int64)
    for x, followers in rows:
        row_ptr[x + 1] = len(followers)
    pairs = [pair for _, followers in rows for pair in followers.items()]
    col_E, count_E = (torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True))
    unigram_V = torch.zeros(VOCAB, dtype=torch.int64)
    for x, followers in rows:
        unigram_V[x] = sum(followers.values())
    return BigramTable(row_ptr.cumsum(0), col_E, count_E, unigram_V)


@pytest.mark.parametrize("pruning", PRUNINGS, ids=str)
def test_scipy_reads_counts_and_works_out_the_correlation(
    export: Export, make_table: Make, pruning: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_table().pruned(**pruning) if pruning else random_table()
    folder, found = export(make_table(table), "npz")
    code = (folder / "SERVING.md").read_text().split("```python\n")[1].partition("```")[0]
    names: dict[str, Any] = {}
    x = int((table.row_ptr.diff() > 1).int().argmax())
    y = int(table.col[table.row_ptr[x]])
    monkeypatch.chdir(folder.parent)
    exec(compile(code, "SERVING.md", "exec"), {"x": x, "y": y}, names)
    counts = names["counts"]
    assert sparse.issparse(counts)
    for left in range(VOCAB):
        row = slice(int(table.row_ptr[left]), int(table.row_ptr[left + 1]))
        wanted = np.zeros(VOCAB, dtype=np.int64)
        wanted[table.col[row].numpy()] = table.count[row].numpy()
        np.testing.assert_array_equal(counts[[left]].toarray()[0], wanted)
    np.testing.assert_array_equal(names["unigram"], table.unigram.numpy())
    log_r = table.look_up(torch.tensor([x]), torch.tensor([y]), torch.tensor(-torch.inf))
    assert np.log(names["r"]) == pytest.approx(log_r.item(), abs=1e-5)
    assert f"all {table.entries:,} counts of pairs" in found
    if pruning:  # without the sums of the whole counts it would be another
        kept = counts[x, y] * counts.sum() / (counts[[x]].sum() * counts[:, [y]].sum())
        assert abs(np.log(kept) - log_r.item()) > 0.01


def read_slowly(path: Path) -> Iterator[Record]:
    """Records as llama.cpp's loader goes through them: number after number, which must end where a record ends."""
    with path.open("rb") as opened:
        while head := opened.read(16):
            (followers,) = struct.unpack("<i", opened.read(4))
            assert followers > 0
            yield list(struct.unpack("<4i", head)), [struct.unpack("<ii", opened.read(8)) for _ in range(followers)]


def drafts(records: list[Record]) -> dict[int, int]:
    """What llama.cpp drafts from a dynamic cache after each token: of at least 4 counts, one with 75 % of them."""
    found = {}
    for (x, *_), followers in records:
        total = sum(count for _, count in followers)
        token, most = max(followers, key=lambda pair: pair[1])
        assert 100 * total < 2**31, "llama.cpp multiplies in 32 bits"
        if total >= 4 and 100 * most >= 75 * total:
            found[x] = token
    return found


@pytest.mark.parametrize("pruning", PRUNINGS, ids=str)
def test_llama_cpp_reads_a_record_of_each_row(export: Export, make_table: Make, pruning: dict[str, int]) -> None:
    table = random_table(1).pruned(**pruning) if pruning else random_table(1)
    folder, found = export(make_table(table), "llama-ngrams")
    records = list(read_slowly(folder / "ngrams.bin"))
    wanted = []
    for x in range(VOCAB):
        row = slice(int(table.row_ptr[x]), int(table.row_ptr[x + 1]))
        followers = list(zip(table.col[row].tolist(), table.count[row].tolist(), strict=True))
        wanted += [([x, -1, -1, -1], followers)] if followers else []
    assert records == wanted
    assert f"{len(wanted)} records with {table.entries:,} counts" in found
    assert f"{len(drafts(records))} of the records make llama.cpp draft" in found
    assert (folder / "ngrams.bin").stat().st_size == 20 * len(wanted) + 8 * table.entries
    serving = (folder / "SERVING.md").read_text()
    assert "--spec-type ngram-cache --lookup-cache-dynamic exported-llama-ngrams/ngrams.bin" in serving


def test_counts_that_llama_cpp_cannot_multiply_are_scaled_down(export: Export, make_table: Make) -> None:
    most = 2**31 - 1
    table = counted((1, {2: 30_000_000, 3: 1, 5: 29_999_999}), (4, {0: most, 1: most // 8}), (6, {7: LLAMA_MOST}))
    folder, found = export(make_table(table), "llama-ngrams")
    records = list(read_slowly(folder / "ngrams.bin"))
    assert drafts(records) == {4: 0, 6: 7}
    by_token = {context[0]: dict(followers) for context, followers in records}
    assert by_token[6] == {7: LLAMA_MOST}
    assert by_token[1][3] == 1
    assert by_token[1][2] >= by_token[1][5]
    assert by_token[1][2] / sum(by_token[1].values()) == pytest.approx(0.5, abs=1e-3)
    assert by_token[4][1] / sum(by_token[4].values()) == pytest.approx(1 / 9, abs=1e-3)
    assert "of 2 records, counts that were scaled down" in found


def ask_vllm(folder: Path, contexts: list[list[int]], vocab_size: int = VOCAB, longest: int = 64) -> Any:
    """Drafts of the folder's own module, as vLLM makes and asks it, where there is no draftsmith."""
    code = (folder / "vllm_proposer.py").read_text()
    assert "draftsmith" not in code
    names: dict[str, Any] = {"__file__": str(folder / "vllm_proposer.py"), "__name__": "vllm_proposer"}
    exec(code, names)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: vocab_size),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
    )
    proposer = names["BigramProposer"](config)
    proposer.load_model(None)
    lengths = np.array([len(ids) for ids in contexts])
    return proposer.propose([ids[-1:] for ids in contexts], lengths, None, slot_mappings=None)


@pytest.mark.parametrize("pruning", PRUNINGS, ids=str)
def test_vllm_drafts_what_this_engine_drafts(
    export: Export, make_table: Make, make_llama: Callable[..., LlamaForCausalLM], pruning: dict[str, int]
) -> None:
    table = random_table(2).pruned(**pruning) if pruning else random_table(2)
    folder, found = export(make_table(table), "vllm-bigrams", speculative_tokens=4, target="some/target")
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 5, 2, 9, 30)]
    contexts[1][-1], contexts[2][-1] = VOCAB - 1, int(table.unigram.argmax())
    prior = METHODS["bigram"].defaults["prior"]
    chain, target = TableChain(table, 4, TableSource(2, prior)), wrap_model(make_llama(VOCAB))
    context = Context(target, contexts, Limits(8), Sampling(), Rng.for_rows(0, 5), chain.capacity(Limits(8)))
    chain.start(context)
    wanted = []
    for root, *drafted in chain.propose(context).tokens_BN.tolist():
        known = [bool(table.row_ptr[token + 1] > table.row_ptr[token]) for token in (root, *drafted)]
        wanted.append(drafted[: [*known, False].index(False)])
    assert any(wanted)
    assert wanted[1] == []  # a token that was never seen
    assert ask_vllm(folder, contexts) == wanted
    assert f"after each of {VOCAB} tokens" in found
    serving = (folder / "SERVING.md").read_text()
    assert "vllm serve some/target" in serving
    (command,) = [line.strip() for line in serving.splitlines() if line.strip().startswith("'{")]
    settings = json.loads(command.strip("'"))
    assert settings == {"method": "custom_class", "model": "vllm_proposer.BigramProposer", "num_speculative_tokens": 4}
    verify_artifact(folder)  # and nothing has been left there


def test_vllm_gets_no_drafts_where_there_is_no_room(export: Export, make_table: Make) -> None:
    table = counted((1, {2: 3, 5: 3}), (2, {1: 9}))
    folder, _ = export(make_table(table), "vllm-bigrams")
    asked = [[1], [], [0, 2, 1], [7, 1, 2, 1, 2], [1, 1, 1, 1, 1, 2], [9], [VOCAB + 3]]
    drafted = ask_vllm(folder, asked, VOCAB + 8, longest=6)
    assert drafted == [[2, 1, 2, 1], [], [2, 1, 2], [1], [], [], []]  # the lower of equals; no prompt yet; full
    with pytest.raises(ValueError, match=f"{VOCAB}.*{VOCAB - 1}"):
        ask_vllm(folder, asked[:1], VOCAB - 1)


def flip(name: str, at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return change


def drop_last_record(folder: Path) -> None:
    records = list(read_slowly(folder / "ngrams.bin"))
    size = 20 + 8 * len(records[-1][1])
    (folder / "ngrams.bin").write_bytes((folder / "ngrams.bin").read_bytes()[:-size])


ERRORS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("npz", flip("right.npy", 128), ("right",)),
    ("llama-ngrams", flip("ngrams.bin", 4), ("record 0",)),
    ("llama-ngrams", drop_last_record, ("record 20", "token 20")),
    ("llama-ngrams", lambda folder: (folder / "ngrams.bin").open("ab").write(b"more"), ("ngrams.bin",)),
    ("vllm-bigrams", flip("successors.npy", 128), ("token",)),
]


@pytest.mark.parametrize("error", ERRORS)
def test_what_was_written_wrong_does_not_stand(
    error: Any, make_table: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    form, change, parts = error
    good = FORMATS[form]

    def damaged(source: Any, folder: Path, options: Any) -> None:
        good.write(source, folder, options)
        change(folder)

    monkeypatch.setitem(FORMATS, form, replace(good, write=damaged))
    message = refused(make_table(random_table()), form)
    assert all(part in message for part in parts)
