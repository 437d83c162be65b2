"""Prepared blocks contain every document once with correct labels, and are written atomically."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.prepared import PreparedData, prepare
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.render import Renderer
from draftsmith.data.rendering.templates import get_template

BLOCK = 64
CHATML = get_template("chatml")


@pytest.fixture(scope="module")
def many() -> list[Conversation]:
    """Return forty conversations of one to three exchanges; some are longer than a block."""

    def exchange(i: int, j: int) -> tuple[Turn, Turn]:
        return Turn("user", f"question number {i}-{j}"), Turn("assistant", f"answer {i} " * (1 + (i * 7 + j) % 11))

    return [Conversation(f"c{i}", tuple(turn for j in range(1 + i % 3) for turn in exchange(i, j))) for i in range(40)]


@pytest.fixture
def prepared(many: list[Conversation], bpe: Any, tmp_path: Path) -> PreparedData:
    return prepare(many, bpe, CHATML, BLOCK, tmp_path / "prepared", source={"name": "made up"})


def test_every_document_is_in_the_blocks_exactly_once(
    many: list[Conversation], bpe: Any, prepared: PreparedData
) -> None:
    expected = [document.ids.tolist() for document in Renderer(CHATML, bpe, BLOCK)(many)]
    assert len(expected) > len(many), "the test needs conversations that are split"
    written = [np.load(prepared.directory / f"{name}.npy") for name in ("tokens", "documents")]
    assert [document.tolist() for document in np.split(written[0], written[1][1:-1])] == expected
    batch = prepared.batch(range(prepared.blocks))
    lengths = Counter(batch.documents_BT[batch.documents_BT != -1].tolist())
    assert lengths == {number: len(ids) for number, ids in enumerate(expected)}
    # each document is contiguous: its positions are 0 … n − 1
    for number, ids in enumerate(expected):
        inside = batch.documents_BT == number
        assert batch.positions_BT[inside].tolist() == list(range(len(ids)))
        assert batch.tokens_BT[inside].tolist() == ids


def test_labels_are_the_trainable_tokens(many: list[Conversation], bpe: Any, prepared: PreparedData) -> None:
    documents = list(Renderer(CHATML, bpe, BLOCK)(many))
    batch = prepared.batch(range(prepared.blocks))
    for tensor in (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (prepared.blocks, BLOCK)
    for number, document in enumerate(documents):
        labels = batch.labels_BT[batch.documents_BT == number].tolist()
        assert labels == [i if flag else -100 for i, flag in zip(document.ids, document.trainable(), strict=True)]
    padding = batch.documents_BT == -1
    assert padding.any(), "the test needs blocks with padding"
    assert (batch.labels_BT[padding] == -100).all()
    assert (batch.tokens_BT[padding] == bpe.pad_token_id).all()


def test_the_first_token_of_a_document_has_no_label(bpe: Any, tmp_path: Path) -> None:
    plain, text = get_template("plain"), Conversation("text", (Turn("assistant", "question"),))
    (document,) = Renderer(plain, bpe, None)([text])
    assert document.spans == [(0, len(document.ids))], "this tokenizer adds no BOS token"
    data = prepare([text] * 2, bpe, plain, 2 * len(document.ids), tmp_path / "p", source={})
    labels = [-100, *document.ids[1:].tolist()]
    assert data.batch([0]).labels_BT.tolist() == [labels * 2]
    assert data.manifest["trainable_tokens"] == 2 * len(document.ids) - 2


def test_packed_documents_have_the_logits_of_separate_ones(prepared: PreparedData, make_llama: Any) -> None:
    model = make_llama(vocab_size=300)
    batch = prepared.batch([0, prepared.blocks - 1])
    mask_B1TT = batch.attention_mask_B1TT()
    additive = torch.zeros(mask_B1TT.shape).masked_fill(~mask_B1TT, torch.finfo(torch.float32).min)
    with torch.no_grad():
        packed_BTV = model(batch.tokens_BT, attention_mask=additive, position_ids=batch.positions_BT).logits
        for b in range(2):
            for number in batch.documents_BT[b].unique().tolist():
                if number != -1:
                    inside = batch.documents_BT[b] == number
                    alone_TV = model(batch.tokens_BT[b][inside][None]).logits[0]
                    torch.testing.assert_close(packed_BTV[b][inside], alone_TV, atol=2e-5, rtol=1e-4)


def test_an_interruption_leaves_the_former_data(
    many: list[Conversation], bpe: Any, prepared: PreparedData, tmp_path: Path
) -> None:
    before = prepared.manifest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.data.blocks.prepared.file_hash", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare(many[:3], bpe, CHATML, BLOCK, prepared.directory, source={})
    assert PreparedData.load(prepared.directory).manifest == before
    assert prepare(many[:3], bpe, CHATML, BLOCK, prepared.directory, source={}).manifest["rows"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def test_loading_and_verifying_find_damaged_files(prepared: PreparedData) -> None:
    folder = prepared.directory
    tokens = np.load(folder / "tokens.npy")
    assert tokens.dtype == np.uint16, "300 token ids fit into 16 bits"
    prepared.verify(300)
    with pytest.raises(ValueError, match=r"tokens\.npy has the token \d+, expected 0 to 9"):
        prepared.verify(10)
    np.save(folder / "tokens.npy", tokens[::-1])
    with pytest.raises(ValueError, match=r"tokens\.npy has SHA-256"):
        PreparedData.load(folder).verify(300)
    (folder / "tokens.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"tokens\.npy: missing or damaged"):
        PreparedData.load(folder)
    manifest = json.loads((folder / "data.json").read_text())
    for content, message in ((manifest | {"schema": 99}, "schema 99"), (None, r"data\.json")):
        (folder / "data.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            PreparedData.load(folder)
