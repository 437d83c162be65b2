"""Exported tables are loaded and queried as vLLM does it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Context, Limits
from draftsmith.decode.methods import METHODS
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.ngrams import TableChain, TableSource
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from transformers import LlamaForCausalLM

VOCAB = 24
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


def random_table(seed: int = 0) -> BigramTable:
    """Return a table with uneven rows, ties, and three unseen tokens."""
    rng = np.random.default_rng(seed)
    documents = [np.minimum(rng.geometric(0.2, 30) - 1, VOCAB - 4) for _ in range(12)]
    return BigramTable.from_documents(documents, VOCAB)


def counted(*rows: tuple[int, dict[int, int]]) -> BigramTable:
    """Return a table with these next tokens and counts; each row is a token and its counts by next token."""
    row_ptr = torch.zeros(VOCAB + 1, dtype=torch.int64)
    for x, followers in rows:
        row_ptr[x + 1] = len(followers)
    pairs = [pair for _, followers in rows for pair in followers.items()]
    col_E, count_E = (torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True))
    unigram_V = torch.zeros(VOCAB, dtype=torch.int64)
    for x, followers in rows:
        unigram_V[x] = sum(followers.values())
    return BigramTable(row_ptr.cumsum(0), col_E, count_E, unigram_V)


def ask_vllm(folder: Path, contexts: list[list[int]], vocab_size: int = VOCAB, longest: int = 64) -> Any:
    """Create and call the exported module as vLLM does, and return its draft tokens."""
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


def test_vllm_and_this_engine_draft_the_same_tokens(
    export: Export, make_table: Make, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    table = random_table(2)
    folder, report = export(make_table(table), "vllm-bigrams", speculative_tokens=4, target="some/target")
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 5, 2, 9, 30)]
    contexts[1][-1], contexts[2][-1] = VOCAB - 1, int(table.unigram.argmax())
    prior = METHODS["bigram"]().prior
    chain, target = TableChain(table, 4, TableSource(2, prior)), wrap_model(make_llama(VOCAB))
    context = Context(target, contexts, Limits(8), Sampling(), Rng.for_rows(0, 5), chain.capacity(Limits(8)))
    chain.start(context)
    expected = []
    for root, *drafted in chain.propose(context).tokens_BN.tolist():
        known = [bool(table.row_ptr[token + 1] > table.row_ptr[token]) for token in (root, *drafted)]
        expected.append(drafted[: [*known, False].index(False)])
    assert any(expected)
    assert expected[1] == []  # a token that was never seen
    assert ask_vllm(folder, contexts) == expected
    assert f"after each of {VOCAB} tokens" in report
    serving = (folder / "SERVING.md").read_text()
    assert "vllm serve some/target" in serving
    (command,) = [line.strip() for line in serving.splitlines() if line.strip().startswith("'{")]
    settings = json.loads(command.strip("'"))
    assert settings == {"method": "custom_class", "model": "vllm_proposer.BigramProposer", "num_speculative_tokens": 4}
    verify_artifact(folder)  # vLLM has written no files to the folder


def test_vllm_gets_no_drafts_beyond_its_limits(export: Export, make_table: Make) -> None:
    table = counted((1, {2: 3, 5: 3}), (2, {1: 9}))
    folder, _ = export(make_table(table), "vllm-bigrams")
    contexts = [[1], [], [0, 2, 1], [7, 1, 2, 1, 2], [1, 1, 1, 1, 1, 2], [9], [VOCAB + 3]]
    drafted = ask_vllm(folder, contexts, VOCAB + 8, longest=6)
    assert drafted == [[2, 1, 2, 1], [], [2, 1, 2], [1], [], [], []]  # ties: lower token id; empty prompt; full context
    with pytest.raises(ValueError, match=f"{VOCAB}.*{VOCAB - 1}"):
        ask_vllm(folder, contexts[:1], VOCAB - 1)


def test_an_export_that_differs_from_its_table_is_refused(
    make_table: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = FORMATS["vllm-bigrams"]

    def write_damaged(source: Any, folder: Path, options: Any) -> None:
        good.write(source, folder, options)
        content = bytearray((folder / "successors.npy").read_bytes())
        content[128] ^= 1
        (folder / "successors.npy").write_bytes(content)

    monkeypatch.setitem(FORMATS, "vllm-bigrams", replace(good, write=write_damaged))
    assert "most probable next tokens" in refused(make_table(random_table()), "vllm-bigrams")
