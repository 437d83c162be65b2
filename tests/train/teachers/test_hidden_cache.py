"""Cached hidden states equal those computed by the target."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.forward.packed import PackedForward
from draftsmith.train.losses.drafter import IGNORED, head_labels, shifted_labels
from draftsmith.train.teachers.cache import CacheWriter, RowCache
from draftsmith.train.teachers.teacher import REACH, CachedHidden, HiddenRows, HiddenSource

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_source(dtype: str = "float32", **changed: str) -> HiddenSource:
    return HiddenSource(**({"target": "nowhere", "sha256": "a model", "data": "data", "dtype": dtype} | changed))


def write_cache(
    folder: Path, data: Any, model: Any, source: HiddenSource, shard_bytes: int | None = None, batch: int = 1
) -> RowCache:
    rows = HiddenRows(model, source.states, source.dtype)
    writer = CacheWriter(folder, source, data, rows.hidden_size, shard_bytes)
    for shard in writer.missing_shards():
        assert writer.write(shard, rows, CPU, batch)
    writer.finish()
    return RowCache(folder, HiddenSource)


def near_trained(batch: Batch) -> torch.Tensor:
    ahead = [shifted_labels(batch.labels_BT, batch.documents_BT, offset) != IGNORED for offset in range(1, REACH + 1)]
    return torch.stack(ahead).any(0)


def sparse_data(worker: ModuleType, blocks: int = 7, length: int = 40) -> Any:
    """Return long documents with few supervised tokens, and padding."""
    rng = np.random.default_rng(3)
    documents = np.zeros((blocks, length), dtype=np.int32)
    documents[:, length // 2 + 3 :] = 1
    documents[:, -2:] = -1
    trained = (rng.random((blocks, length)) < 0.04) & (documents >= 0)
    trained[0] = False
    return worker.data_of(rng.integers(0, worker.VOCAB, (blocks, length)), trained, documents, "sparse")


@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard_bytes", [1, 3000, None])
def test_cached_rows_of_any_batch_equal_those_of_the_target(
    worker: ModuleType, tmp_path: Path, dtype: str, states: str, shard_bytes: int | None
):
    data, model = sparse_data(worker), worker.make_model()
    cache = write_cache(tmp_path / "cache", data, model, make_source(dtype, states=states), shard_bytes)
    forward = PackedForward(model, states)
    total = 0
    for blocks in ([3], [0], [6, 2], [5, 5, 1], list(range(7))):
        batch = data.batch(blocks)
        actual_BTD = CachedHidden(cache).hidden(batch)
        with torch.no_grad():
            expected_BTD = forward.hidden(batch)
        assert actual_BTD.dtype == DTYPES[dtype]
        assert actual_BTD.shape == expected_BTD.shape
        used_BT = near_trained(batch)
        total = int(used_BT.sum())
        if len(blocks) == 1:  # same batch as in the cache: identical
            assert torch.equal(actual_BTD[used_BT], expected_BTD[used_BT].to(DTYPES[dtype]))
        tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
        torch.testing.assert_close(actual_BTD[used_BT].float(), expected_BTD[used_BT], rtol=1.01 * tolerance, atol=1e-6)
        assert (actual_BTD[~used_BT] == 0).all()
        labels_BTK = head_labels(batch.labels_BT, batch.documents_BT, REACH - 1)
        assert used_BT[(labels_BTK != IGNORED).any(-1)].all()  # states for all supported heads
    assert cache.rows == total
    assert 0 < total < 7 * 38 / 2


def test_states_that_are_not_finite_are_refused_with_their_document(worker: ModuleType, tmp_path: Path):
    data, model = worker.make_data(4), worker.make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(1e5)
    with pytest.raises(ValueError, match=r"document \d+ .*float16.*hidden\.dtype"):
        write_cache(tmp_path / "cache", data, model, make_source("float16"))
    assert not list((tmp_path / "cache").glob("*.json"))
    assert write_cache(tmp_path / "wide", data, model, make_source("bfloat16")).rows > 0
    batch = data.batch([0, 1, 2, 3])
    spoilt = int(batch.tokens_BT[2, 5])
    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight[spoilt] = float("inf")
    first = int((batch.tokens_BT == spoilt).flatten().nonzero()[0])
    with pytest.raises(ValueError, match=rf"document {int(batch.documents_BT.flatten()[first])} .*target_dtype"):
        write_cache(tmp_path / "spoilt", data, model, make_source("float32"), batch=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_copied_to_a_gpu_asynchronously(worker: ModuleType, tmp_path: Path, dtype: str):
    data, model = worker.make_data(12), worker.make_model()
    cache = write_cache(tmp_path / "cache", data, model, make_source(dtype), shard_bytes=600)
    for blocks in ([0, 5], [11], list(range(12))):
        batch = data.batch(blocks)
        actual_BTD = CachedHidden(cache).hidden(batch.to("cuda"))
        assert actual_BTD.device.type == "cuda"
        assert torch.equal(actual_BTD.cpu(), CachedHidden(cache).hidden(batch))
