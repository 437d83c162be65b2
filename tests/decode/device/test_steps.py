"""Every method on a (pretended) CUDA device decodes as on the CPU and synchronises once per step.

A synchronisation leaves the GPU idle until the next kernel starts, and a launch takes time on the host. Beam search,
whose single step decodes a whole text, and drafters that match text synchronise more than once.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.graphs import GraphedModel
from draftsmith.decode.models.loading import wrap_model
from helpers.pretend_device import PretendCuda
from helpers.steps import ROWS, VOCAB, built, decode, with_eagle
from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
LAUNCHES = {
    "autoregressive": 18, "mjgd": 100, "speculative": 58, "unigram": 51, "bigram": 93, "prompt-lookup": 32,
    "dynamic-tree": 121, "suffix": 30, "suffix table": 43, "medusa typical": 92,
    "suffix heads": 33, "multi-candidate": 346,
    "naive-multi-candidate": 132, "suffix drafter": 193,
    "batch-speculative": 269, "spectr": 592, "specinfer": 377, "bild": 38, "mjsd": 184, "adaptive": 57,
    "relaxed-opt": 58, "relaxed-uno": 49, "bpd": 79, "medusa": 83, "slim-ss": 117, "slim-s": 128, "slim-l": 127,
}  # fmt: skip
"""Measured launches per step at batch size 1 and temperature 1; a replayed forward counts as one."""


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as device:
        yield device


@pytest.mark.parametrize(
    ("batch", "temperature"),
    [(1, 1.0), *(pytest.param(*values, marks=pytest.mark.slow) for values in ((4, 0.0), (1, 0.0), (4, 1.0)))],
)
@pytest.mark.parametrize("label", ROWS)
def test_each_step_synchronises_once(
    cuda: PretendCuda, make_llama: Any, label: str, batch: int, temperature: float
) -> None:
    name, options = ROWS[label]
    _, steps = decode(*built(make_llama, "cuda"), name, batch, temperature, cuda, **options)
    waits = [len(syncs) for syncs, _ in steps]
    assert set(waits) == {1}, steps
    if batch == 1 and temperature:
        assert statistics.mean(launches for _, launches in steps) <= 1.05 * LAUNCHES[label]


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=[pytest.mark.slow] if i % 2 else []) for i, label in enumerate(ROWS)]
)
def test_texts_equal_those_of_the_cpu(cuda: PretendCuda, make_llama: Any, label: str) -> None:
    name, options = ROWS[label]
    on_device, _ = decode(*built(make_llama, "cuda"), name, 2, 1.0, cuda, **options)
    assert decode(*built(make_llama, "cpu"), name, 2, 1.0, None, **options)[0] == on_device


@pytest.mark.parametrize("name", ["dynamic-tree", "suffix"])
def test_eagle_in_trees_with_fewer_nodes_than_levels(
    cuda: PretendCuda, make_llama: Any, make_eagle: Any, name: str
) -> None:
    options = {"max_nodes": 2, "min_prob": 0.001} | ({"fallback": "drafter"} if name == "suffix" else {})
    texts = decode(*with_eagle(make_llama, make_eagle, "cuda"), name, 1, 0.0, cuda, **options)[0]
    assert texts == decode(*with_eagle(make_llama, make_eagle, "cpu"), name, 1, 0.0, None, **options)[0]


def test_a_drafter_on_another_device_is_refused(cuda: PretendCuda, make_llama: Any) -> None:
    target, _ = built(make_llama, "cuda")
    _, parts = built(make_llama, "cpu")
    with pytest.raises(ValueError, match=r"cpu.*cuda:0"):
        decode(target, parts, "speculative", 1, 0.0, cuda)


def ask(_module: Any, _arguments: Any, output: Any) -> None:
    """Read a number from the device in a forward hook, which is forbidden during a capture."""
    assert bool(output.last_hidden_state.isfinite().all())


@pytest.mark.parametrize(("asks", "fast"), [(False, False), (True, False), (False, True)])
def test_other_decoders_use_graphs_if_possible(cuda: PretendCuda, asks: bool, fast: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    model, parts = GPT2LMHeadModel(config).eval(), Parts()
    if asks:
        model.transformer.register_forward_hook(ask)
    texts, _ = decode(wrap_model(model, fast=fast), parts, "autoregressive", 2, 0.0, None)
    target = wrap_model(model.to("cuda"), fast=fast)
    assert isinstance(target, GraphedModel) != asks
    assert decode(target, parts, "autoregressive", 2, 0.0, cuda)[0] == texts
