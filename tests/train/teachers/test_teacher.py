"""Teachers in this process, and from a cache of the most likely tokens."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.losses.chunks import DenseTeacher, SparseTeacher
from draftsmith.train.losses.drafter import IGNORED, mixture, shifted_labels
from draftsmith.train.teachers.cache import CacheWriter, RowCache
from draftsmith.train.teachers.teacher import CachedTeacher, CacheSource, ModelTeacher, top_log_probs, top_rows

CPU = torch.device("cpu")


def write_cache(
    folder: Path, blocks: Any, teacher: Any, top_k: int, shard_bytes: int | None = None, batch: int = 3, **source: Any
) -> RowCache:
    settings = {"target": "nowhere", "sha256": "a model", "data": "some data"} | source
    made_from = CacheSource(top_k=top_k, **settings)
    writer = CacheWriter(folder, made_from, blocks, teacher.vocab_size, shard_bytes)
    for shard in writer.missing_shards():
        assert writer.write(shard, partial(top_rows, teacher, top_k), CPU, batch)
    writer.finish()
    return RowCache(folder, CacheSource)


def kept_of(batch: Batch) -> torch.Tensor:
    return (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).flatten().nonzero()[:, 0]


def dense_log_probs(teacher: ModelTeacher, batch: Batch) -> torch.Tensor:
    dense = teacher(batch)
    return (dense.hidden_XE @ dense.weight_VE.T).float().log_softmax(1)


@pytest.mark.parametrize(
    ("positions", "hidden", "vocab", "top_k"), [(1, 3, 7, 7), (37, 5, 300_007, 3), (101, 4, 33, 1)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("logits_only", [False, True])
def test_the_most_likely_tokens_equal_those_of_the_softmax(
    positions: int, hidden: int, vocab: int, top_k: int, dtype: torch.dtype, tolerance: float, logits_only: bool
):
    torch.manual_seed(vocab)
    hidden_XE, weight_VE = torch.randn(positions, hidden), torch.randn(vocab, hidden)
    dense = DenseTeacher(hidden_XE.to(dtype), weight_VE.to(dtype))
    if logits_only:
        dense = DenseTeacher(dense.hidden_XE @ weight_VE.to(dtype).T)
    rows = torch.arange(0, positions, 2)
    ids_RK, actual_RK = (torch.cat(part) for part in zip(*top_log_probs(dense, rows, top_k), strict=True))
    expected_RV = (hidden_XE @ weight_VE.T).log_softmax(1)[rows]
    torch.testing.assert_close(actual_RK, expected_RV.topk(top_k).values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual_RK, expected_RV.gather(1, ids_RK), rtol=tolerance, atol=tolerance)
    assert (actual_RK.diff(dim=1) <= 0).all()


def test_logits_that_are_not_finite_are_refused():
    logits_XV = torch.zeros(3, 8)
    logits_XV[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"not finite.*teacher\.dtype"):
        list(top_log_probs(DenseTeacher(logits_XV), torch.arange(3), 2))
    logits_XV[1, 2] = -math.inf  # targets may exclude tokens
    ((_, log_probs_CK),) = top_log_probs(DenseTeacher(logits_XV), torch.arange(3), 8)
    assert log_probs_CK[1, -1] == -math.inf


@pytest.mark.parametrize("shard_bytes", [1, 700, None])
@pytest.mark.parametrize("top_k", [1, 6, 32])
def test_cached_rows_of_any_batch_equal_those_of_the_teacher(
    worker: ModuleType, tmp_path: Path, shard_bytes: int | None, top_k: int
):
    data, teacher = worker.make_data(13, 17, seed=5), ModelTeacher(worker.make_model())
    cache = write_cache(tmp_path / "cache", data, teacher, top_k, shard_bytes)
    cached = CachedTeacher(cache)
    assert cached.vocab_size == teacher.vocab_size == worker.VOCAB
    assert cache.rows == len(kept_of(data.batch(range(13))))
    # any order, repeated blocks, a single block
    for blocks in ([3, 12, 0, 7], [5, 5], [12], list(range(13))):
        batch = data.batch(blocks)
        sparse = cached(batch)
        assert isinstance(sparse, SparseTeacher)
        assert sparse.ids_XK.dtype == torch.int64
        assert sparse.log_probs_XK.dtype == torch.float32
        supervised = kept_of(batch)
        expected_RV = dense_log_probs(teacher, batch)[supervised]
        actual_RK, ids_RK = sparse.log_probs_XK[supervised], sparse.ids_XK[supervised]
        torch.testing.assert_close(actual_RK, expected_RV.topk(top_k).values, rtol=2**-10, atol=1e-5)
        torch.testing.assert_close(actual_RK, expected_RV.gather(1, ids_RK), rtol=2**-10, atol=1e-5)
        # ids of unsupervised rows are valid and distinct
        assert (sparse.ids_XK.sort(dim=1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize(("vocab", "bytes_an_id"), [(65_536, 2), (65_537, 4)])
def test_the_dtype_of_ids_and_the_size_of_a_cache(
    worker: ModuleType, tmp_path: Path, make_llama: Callable[..., Any], vocab: int, bytes_an_id: int
):
    data = worker.make_data(6)
    teacher = ModelTeacher(make_llama(vocab, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    writer = CacheWriter(tmp_path / "new", CacheSource("nowhere", "a model", "some data", 3), data, vocab)
    cached = CachedTeacher(write_cache(tmp_path / "cache", data, teacher, 3))
    assert writer.row_bytes == 3 * (bytes_an_id + 2) + 2
    written = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors"))
    assert writer.rows * writer.row_bytes < written <= writer.missing_bytes()
    batch = data.batch([0, 1])
    supervised = kept_of(batch)
    assert torch.equal(cached(batch).ids_XK[supervised, 0], dense_log_probs(teacher, batch)[supervised].argmax(1))


def test_float16_changes_probabilities_within_the_stated_bound():
    exact = -np.concatenate([np.geomspace(1e-9, 1e-3, 20_001), np.linspace(1e-3, 30, 300_001)])
    stored = exact.astype(np.float16).astype(np.float64)
    moved = np.abs(np.exp(stored) - np.exp(exact))
    assert moved.max() <= 2**-11 / math.e
    assert moved.max() > 0.9 * 2**-11 / math.e  # the bound is tight
    normal = exact <= -(2.0**-14)
    assert (np.abs(stored - exact)[normal] <= 2**-11 * np.abs(exact[normal])).all()
    logits_RV = torch.randn(2000, 500, dtype=torch.float64) * 3
    log_probs_RV = logits_RV.log_softmax(1)
    sums_R = log_probs_RV.half().double().exp().sum(1)
    entropy_R = -(log_probs_RV.exp() * log_probs_RV).sum(1)
    assert ((sums_R - 1).abs() <= 2**-11 * entropy_R + 1e-9).all()


@pytest.mark.parametrize("name", ["forward-kl", "reverse-kl", "jensen-shannon", "total-variation"])
@pytest.mark.parametrize("top_k", [32, 4])
def test_training_from_the_cache_equals_training_in_process(worker: ModuleType, tmp_path: Path, name: str, top_k: int):
    data, teacher = worker.make_data(8), ModelTeacher(worker.make_model())
    with torch.no_grad():  # make the teacher confident
        teacher.model.lm_head.weight.mul_(50)
    cached = CachedTeacher(write_cache(tmp_path / "cache", data, teacher, top_k))
    batch = data.batch([6, 1, 3])
    labels_X = shifted_labels(batch.labels_BT, batch.documents_BT, 1).flatten()
    torch.manual_seed(1)
    hidden_XD, weight_VD = torch.randn(labels_X.numel(), 8), torch.randn(worker.VOCAB, 8)
    results = []
    for source in (cached(batch), teacher(batch)):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden_XD, weight_VD))
        loss, count = mixture({name: 1.0}, hidden, weight, labels_X, source, top_k=top_k)
        (loss / count).backward()
        results.append((loss / count, hidden.grad, weight.grad))
    assert int(count) == len(kept_of(batch)) > 10
    for actual, expected in zip(*results, strict=True):
        # rounding to float16 changes log-probabilities by 2⁻¹¹ times a few nats
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)
    assert results[0][0] > 0.01


def test_batches_of_other_documents_are_refused(worker: ModuleType, tmp_path: Path):
    teacher = ModelTeacher(worker.make_model())
    data, heldout = worker.make_data(10), worker.make_data(4, seed=9)
    training = write_cache(tmp_path / "training", data, teacher, 4)
    cached = CachedTeacher(training)
    changed, untrained = data.batch([2, 3]), data.batch([2, 3])
    first = kept_of(changed)[0]
    changed.tokens_BT.view(-1)[first] += 1  # for example, an on-policy token
    untrained.labels_BT.view(-1)[first + 1] = IGNORED
    for batch in (heldout.batch([0, 1]), changed, untrained):
        with pytest.raises(ValueError, match=str(training.folder)):
            cached(batch)

    # with a second cache for held-out data, both can be used
    both = CachedTeacher(training, write_cache(tmp_path / "heldout", heldout, teacher, 4, data="held out"))
    for source in (heldout, data):
        batch = source.batch([3, 0])
        supervised = kept_of(batch)
        expected = dense_log_probs(teacher, batch)[supervised].topk(4)
        assert torch.equal(both(batch).ids_XK[supervised], expected.indices)


def test_a_teacher_is_frozen_and_in_evaluation_mode(worker: ModuleType):
    teacher = ModelTeacher(worker.make_model())  # with dropout
    batch = worker.make_data(4).batch([0, 1])
    first, second = teacher(batch), teacher(batch)
    assert torch.equal(first.hidden_XE, second.hidden_XE)
    assert not first.hidden_XE.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    teacher.move_to("cpu")
    settings = ModelTeacher(worker.make_model(), "ab").settings
    assert json.loads(json.dumps(settings)) == settings == {"target": "ab", "dtype": "torch.float32"}
