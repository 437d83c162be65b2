"""The pretended device refuses, counts and replays operations as a CUDA device does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.pretend_device import CUDA, DeviceError, PretendCuda, PretendGraphs
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as device:
        yield device
    assert not torch.ones(1).is_cuda


def numbers() -> Tensor:
    return torch.arange(6, device="cuda").view(2, 3)


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
def test_synchronisations_are_recorded(cuda: PretendCuda, kind: str | None, act: Callable[[Tensor], Any]) -> None:
    x = numbers()
    cuda.reset()
    act(x)
    assert [sync.kind for sync in cuda.syncs] == ([] if kind is None else [kind])
    assert not cuda.unpinned


def test_a_replay_repeats_the_captured_operations(cuda: PretendCuda) -> None:
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
def test_forbidden_operations_in_a_capture(cuda: PretendCuda, act: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    x, rng = numbers(), torch.Generator(device="cuda").manual_seed(3)
    assert rng.device == CUDA
    assert torch.rand(2, generator=rng, device="cuda").is_cuda
    with pytest.raises(DeviceError):
        PretendGraphs(cuda).capture(lambda: act(x, rng))
