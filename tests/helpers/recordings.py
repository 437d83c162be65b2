"""Recorded forward passes that stand in for CUDA graphs on machines without a device."""

from collections.abc import Callable
from typing import Any

import torch
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.graphs import GraphedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Mode that records operations and their tensors, and can repeat the operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recordings:
    """Replacement for `CudaGraphs` that needs no device and counts calls."""

    def __init__(self) -> None:
        self.warmed = self.captured = self.replayed = 0

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.warmed += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        with Recorder() as recorder:
            output = run()
        for each in tree_leaves(output):  # capturing a CUDA graph computes no values
            each.fill_(torch.nan if each.is_floating_point() else 0)

        def replay() -> Any:
            self.replayed += 1
            recorder.replay()
            return output

        return replay


def graphed(model: LanguageModel, **options: int) -> tuple[GraphedModel, Recordings]:
    """Wrap a model so that its forward passes are recorded; return it with the recordings."""
    recordings = Recordings()
    return GraphedModel(model, recordings, **({"stride": 16} | options)), recordings
