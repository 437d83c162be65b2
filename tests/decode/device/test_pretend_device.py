"""The pretended device refuses, counts and repeats as a real one; what this cannot show only a GPU can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.pretend_device import CUDA, DeviceError, PretendCuda, PretendGraphs
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as found:
        yield found
    assert not torch.ones(1).is_cuda


def numbers() -> Tensor:
    return torch.arange(6, device="cuda").view(2, 3)


def test_tensors_know_where_they_are(cuda: PretendCuda) -> None:
    x = numbers()
    assert x.device == CUDA != torch.device("cuda"), "an index is added, as on a real device"
    assert x.is_cuda
    assert x.to("cuda") is x
    assert not torch.ones(2).is_cuda
    assert not x.cpu().is_cuda
    made = (x.new_zeros(2), torch.zeros_like(x, dtype=torch.float32), nn.functional.one_hot(x, 6), x[:, 1], x + 1)
    assert all(each.is_cuda for each in made)
    x[:, 0] = 9
    assert x.cpu()[1].tolist() == [9, 4, 5]
    out = torch.empty(2, 3, dtype=torch.int64, device="cuda")
    assert torch.add(x, 1, out=out) is out


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("read", lambda x: bool(x.sum())),
        ("copy-back", lambda x: x.tolist()),
        ("copy-back", lambda x: x.to("cpu")),
        ("send", lambda x: torch.tensor([1, 2], device="cuda")),
        ("send", lambda x: x[torch.tensor([0])]),
        ("shape", lambda x: x[x > 2]),
        ("shape", lambda x: x.unique()),
        ("wait", lambda x: torch.cuda.synchronize()),
        (None, lambda x: (x + torch.tensor(2)).sum()),
        (None, lambda x: torch.tensor([1.5], pin_memory=True).to("cuda", non_blocking=True)),
        (None, lambda x: torch.ones(3).pin_memory()[1:].to("cuda", non_blocking=True)),
    ],
)
def test_what_waits_is_noted(cuda: PretendCuda, kind: str | None, act: Callable[[Tensor], Any]) -> None:
    x = numbers()
    cuda.reset()
    act(x)
    assert [found.kind for found in cuda.syncs] == ([] if kind is None else [kind])
    assert not cuda.unpinned


def test_copies_from_other_memory_are_noted(cuda: PretendCuda) -> None:
    torch.ones(3).to("cuda", non_blocking=True)
    assert not cuda.syncs
    assert len(cuda.unpinned) == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.ones(3)[x[0] % 3],
        lambda x: x.numpy(),
        lambda x: x.gather(1, torch.zeros(2, 1).long()),
        lambda x: torch.cat((x, torch.zeros(1, 3))),
    ],
)
def test_devices_that_meet_are_refused(cuda: PretendCuda, act: Callable[[Tensor], Any]) -> None:
    with pytest.raises((DeviceError, TypeError)):
        act(numbers())


def test_a_layer_learns_without_waiting(cuda: PretendCuda) -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)).to("cuda")
    assert all(isinstance(each, nn.Parameter) and each.is_cuda for each in layer.parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    before = [each.detach().clone() for each in layer.parameters()]
    cuda.reset()
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        loss = layer(torch.ones(5, 3, device="cuda")).float().square().mean()
    loss.backward()
    optimizer.step()
    assert not cuda.syncs
    assert all(each.grad is not None and each.grad.is_cuda for each in layer.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))


def test_a_replay_repeats_what_was_captured(cuda: PretendCuda) -> None:
    graphs, source, of_host = PretendGraphs(cuda), torch.zeros(2, device="cuda"), [2]
    replay = graphs.capture(lambda: source * of_host[0] + 1)
    source.fill_(4)
    of_host[0] = 100
    cuda.reset()
    assert replay().cpu().tolist() == [9, 9], "of new content, with the old number of the host"
    assert cuda.launches == {"cudaGraphLaunch": 1}


@pytest.mark.parametrize(
    "act",
    [
        lambda x, rng: x.sum() * float(x[0, 0]),
        lambda x, rng: x + torch.tensor([1, 2, 3], device="cuda"),
        lambda x, rng: torch.rand(2, generator=rng, device="cuda"),
    ],
)
def test_what_a_capture_forbids(cuda: PretendCuda, act: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    x, rng = numbers(), torch.Generator(device="cuda").manual_seed(3)
    assert rng.device == CUDA
    assert torch.rand(2, generator=rng, device="cuda").is_cuda
    with pytest.raises(DeviceError):
        PretendGraphs(cuda).capture(lambda: act(x, rng))
