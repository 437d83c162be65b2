"""On a (pretended) CUDA device every method decodes as on the CPU, waits once a step, and keeps to its launches.

A wait costs a GPU the time from the last kernel's end to the first one after it, tens of microseconds a step; a launch
about 4 µs of the host. More than one wait have: policies that stop drafting, which the host must know before it asks
for the next draft token; trees that the host builds from candidates of heads; beams, whose one step is a whole text.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import TextStore
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from pretend_device import PretendCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
VOCAB = 64
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [63, 0]]
LIMITS = Limits(24)
STOPS_DRAFTING = ("adaptive", "bild", "lookup-drafter")
SYNCS = {"suffix-heads": 2}
LAUNCHES = {
    "autoregressive": 18, "mjgd": 100, "speculative": 85, "unigram": 51, "bigram": 93, "prompt-lookup": 32,
    "lookup-drafter": 50, "suffix": 30, "suffix-heads": 30, "multi-candidate": 375, "naive-multi-candidate": 174,
    "batch-speculative": 305, "spectr": 1590, "specinfer": 377, "bild": 38, "mjsd": 184, "adaptive": 43,
    "relaxed-opt": 85, "relaxed-uno": 76, "bpd": 79, "medusa": 83, "slim-ss": 117, "slim-s": 128, "slim-l": 161,
}  # fmt: skip
"""A step at batch 1 and temperature 1, replayed forwards counted as one: what was measured."""


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as found:
        yield found


def built(make_llama: Any, device: str) -> tuple[Any, Parts]:
    """A target, and parts of every kind; the same on every device."""
    models = [make_llama(VOCAB, seed=seed, num_hidden_layers=layers) for seed, layers in ((0, 2), (1, 1), (2, 1))]
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, 3000).astype(np.int32)]
    table = BigramTable.from_documents(texts, VOCAB)
    table.texts = TextStore.from_documents(texts)
    torch.manual_seed(7)
    heads = PredictionHeads(3, 1, models[0].config.hidden_size, VOCAB).to(device).eval()
    target, drafter, other = (wrap_model(model.to(device)) for model in models)
    return target, Parts(drafter, heads, table, (other,))


def decode(target: Any, parts: Parts, name: str, batch: int, temperature: float, cuda: PretendCuda | None) -> Any:
    """Texts, and of the steps of a warm method what each waited for and launched."""
    sampling, seen = Sampling(temperature), []
    rng = Rng.for_rows(3, batch, target.device)
    texts: list[list[int]] = [[] for _ in range(batch)]
    if cuda is not None:
        cuda.reset()
    for step in generate(target, *build_method(name, parts, sampling), PROMPTS[:batch], LIMITS, sampling, rng):
        for text, ids in zip(texts, step.new_ids, strict=True):
            text += ids
        if cuda is not None:
            seen.append((list(map(str, cuda.syncs)), cuda.launches.total()))
            assert not cuda.unpinned
            cuda.reset()
    return texts, seen[len(seen) // 2 : -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "beam"])
def test_a_step_waits_once(cuda: PretendCuda, make_llama: Any, name: str, batch: int, temperature: float) -> None:
    _, steps = decode(*built(make_llama, "cuda"), name, batch, temperature, cuda)
    waits = [len(syncs) for syncs, _ in steps]
    if name in STOPS_DRAFTING:
        places = {place.partition(":")[0] for syncs, _ in steps for place in syncs}
        assert places <= {"decode/proposers/adaptive.py", "decode/models/kv_cache.py"}
    else:
        assert set(waits) == {SYNCS.get(name, 1)}, steps
    if batch == 1 and temperature:
        assert statistics.mean(launches for _, launches in steps) <= 1.05 * LAUNCHES[name]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "beam"])
def test_texts_are_those_of_the_cpu(cuda: PretendCuda, make_llama: Any, name: str) -> None:
    """Two rows at temperature 1: with a vocabulary of 64 and 24 tokens each a difference would not stay hidden."""
    on_device, _ = decode(*built(make_llama, "cuda"), name, 2, 1.0, cuda)
    assert decode(*built(make_llama, "cpu"), name, 2, 1.0, None)[0] == on_device
