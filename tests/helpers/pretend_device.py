"""Simulated CUDA device: arithmetic on the CPU with the device rules of CUDA. It needs no GPU and no CUDA build.

    from helpers.pretend_device import PretendCuda
    with PretendCuda() as cuda:                # mixed devices raise, as with CUDA
        model = build_model().to("cuda")
        x = torch.arange(4, device="cuda") + 1 # x.device is cuda:0, x.is_cuda, x.numpy() raises
        cuda.reset(); work(model, x)
        print(cuda.syncs, cuda.launches)

Every tensor is an ordinary CPU tensor. Memory "on cuda" is identified by its storage (`PretendCuda.tag`). A
`TorchFunctionMode` intercepts Python calls: it answers `.device` and `.is_cuda`, moves tensors, and interprets `device`
arguments. A `TorchDispatchMode` below autograd sees every executed operation, including backward passes: it checks
devices, records synchronisations, and tags outputs. Streams, events, pinned memory, counters and generators of
`torch.cuda` are replaced; `decode.models.graphs.CudaGraphs` is replaced by `PretendGraphs`.

It finds:
 - operations on a CPU tensor and a CUDA tensor (0-dimensional CPU tensors are allowed where CUDA allows them: in
   pointwise operations);
 - host synchronisations (`syncs`), each with the line of the package that caused it:
     read       .item(), bool(), int(), float(), `if tensor`
     copy-back  .cpu(), .tolist(), .to("cpu"), copy_ to the CPU
     send       a blocking copy to the device: torch.tensor(list, device="cuda"), .to("cuda") without non_blocking, a
                CPU index into a tensor on the device (CUDA copies it, then waits for the stream)
     shape      a size that depends on data: nonzero, boolean-mask indexing, masked_select, unique,
                repeat_interleave by a tensor, equal
     wait       synchronize() of the device, a stream or an event
 - non_blocking copies from memory that is not pinned (`unpinned`), which the driver stages without a wait;
 - kernel launches by operation (`launches`), without views and allocations; attention and RMSNorm count as one. The
   count is a lower bound for operations with several kernels (sort, topk, cumsum, index_put_);
 - operations that a capture forbids: synchronisations, sends, and random numbers of a generator that is not registered
   with the graph. Other errors of a replay (changed host values, moved memory) appear as wrong results, since a replay
   repeats the recorded operations on the same memory.

It cannot find: speed, races between streams, numerical differences of CUDA kernels, the choice of attention kernels,
lack of memory, and C++ code that bypasses the dispatcher.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import draftsmith
import torch
from draftsmith.decode.models import graphs
from draftsmith.decode.tree import Tree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = str(Path(draftsmith.__file__).parent)

SHAPE_OF_DATA = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal",
    "repeat_interleave", "_linalg_eigh", "linalg_eig", "_linalg_svd",
}  # fmt: skip
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift", "lift_fresh",
    "_local_scalar_dense", "is_pinned", "set_", "resize_", "_unsafe_view", "record_stream", "_reshape_alias",
}  # fmt: skip
TAKES_A_SCALAR = {  # these accept a scalar on the CPU, like pointwise operations
    "where", "masked_fill", "masked_fill_", "fill_", "fill", "lerp", "_fused_adamw_", "_fused_adam_", "_foreach_add_",
    "_foreach_mul_", "_foreach_div_", "index_put_", "index_put",
}  # fmt: skip
ONE_KERNEL = (nn.functional.scaled_dot_product_attention, nn.functional.rms_norm)
WHOLE = {"linear", "matmul", "softmax", "log_softmax", "rms_norm", "scaled_dot_product_attention", "layer_norm"}
"""Composite operations that take one or two kernels on a GPU."""
LIKE = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided"}


class DeviceError(RuntimeError):
    """Error that CUDA would have raised."""


@dataclass(frozen=True)
class Event:
    """Recorded event with the source line that caused it."""

    kind: str
    operation: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind} ({self.operation})"


class PretendCuda:
    """Context manager that simulates a CUDA device, as described in the module docstring."""

    def __init__(self) -> None:
        self.recording: list[tuple[Any, Any, Any, Any]] | None = None
        self.caller_is_on_device = False
        """Whether the current call has tensors on the device but no `device`: new tensors belong on the device."""
        self.inside_one_kernel = False
        self._tags: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.reset()

    def reset(self) -> None:
        """Clear all records."""
        self.syncs: list[Event] = []
        self.unpinned: list[Event] = []
        self.launches: Counter[str] = Counter()

    # location of tensors

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the simulated device."""
        with torch._C.DisableTorchFunction():
            reference = self._tags.get(_storage(tensor))
        return reference is not None and not reference.expired()

    def tag(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as being on the device."""
        with torch._C.DisableTorchFunction():
            if tensor.layout == torch.strided:
                self._tags[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        if len(self._tags) > 20_000:
            for key in [key for key, reference in self._tags.items() if reference.expired()]:
                del self._tags[key]
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark the memory of a tensor as pinned."""
        self._pinned[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            reference = self._pinned.get(_storage(tensor))
        return reference is not None and not reference.expired()

    # context

    def __enter__(self) -> PretendCuda:
        self._stack = contextlib.ExitStack()
        for name, value in self._stands_in().items():
            self._stack.enter_context(mock.patch(name, value, create=True))
        self._stack.enter_context(mock.patch.object(graphs, "is_in_torch_dispatch_mode", return_value=False))
        graph_patch = mock.patch.object(graphs, "CudaGraphs", side_effect=lambda _: PretendGraphs(self))
        self._stack.enter_context(graph_patch)
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
        for cached in (Tree.chain, Tree.k_ary):  # these modules cache copies on the device
            cached.cache_clear()

    def _stands_in(self) -> dict[str, Any]:
        def waits(what: str) -> Callable[..., None]:
            return lambda *_, **__: self.wait("wait", what)

        nothing = staticmethod(lambda *_, **__: None)
        event = type("Event", (), {
            "__init__": lambda *_, **__: None, "record": nothing, "wait": nothing, "query": lambda _: True,
            "elapsed_time": lambda *_: 1.0, "synchronize": waits("Event.synchronize"),
        })  # fmt: skip
        stream = type("Stream", (event,), {
            "wait_stream": nothing, "wait_event": nothing, "record_event": lambda *_: event(), "device": CUDA,
            "synchronize": waits("Stream.synchronize"),
        })  # fmt: skip
        properties = type("Properties", (), {"major": 9, "minor": 0, "name": "pretended", "total_memory": 80 << 30})
        enabled, kind = torch.is_autocast_enabled, torch.get_autocast_dtype
        autocast = type("autocast", (_Autocast,), {
            "__init__": lambda its, kind, *a, **k: _Autocast.__init__(its, "cpu" if kind == "cuda" else kind, *a, **k),
        })  # fmt: skip
        return {
            "torch.cuda._lazy_init": lambda: None,
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.is_initialized": lambda: True,
            "torch.cuda.is_bf16_supported": lambda *_, **__: True,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.set_device": lambda _: None,
            "torch.cuda.synchronize": waits("torch.cuda.synchronize"),
            "torch.cuda.current_stream": lambda *_: stream(),
            "torch.cuda.Stream": stream,
            "torch.cuda.Event": event,
            "torch.cuda.empty_cache": lambda: None,
            "torch.cuda.memory_allocated": lambda *_: 0,
            "torch.cuda.max_memory_allocated": lambda *_: 0,
            "torch.cuda.reset_peak_memory_stats": lambda *_: None,
            "torch.cuda.mem_get_info": lambda *_: (80 << 30, 80 << 30),
            "torch.cuda.get_device_name": lambda *_: "pretended",
            "torch.cuda.get_device_properties": lambda *_: properties,
            "torch.cuda.get_device_capability": lambda *_: (9, 0),
            "torch.cuda.manual_seed_all": lambda _: None,
            "torch.Generator": _Generator,
            "torch.autocast": autocast,
            "torch.is_autocast_enabled": lambda device="cpu": enabled("cpu" if device == "cuda" else device),
            "torch.get_autocast_dtype": lambda device="cpu": kind("cpu" if device == "cuda" else device),
        }

    # records

    def where(self) -> str:
        """Return the innermost line of the package on the stack, or else the innermost line outside torch."""
        frame: FrameType | None = sys._getframe(1)
        other = "?"
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE) and not re.search(r"/(\.venv|tests)/", file):
                return f"{file[len(PACKAGE) :].lstrip('/')}:{frame.f_lineno}"
            if other == "?" and file != __file__ and "/torch/" not in file:
                other = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}"
            frame = frame.f_back
        return other

    def wait(self, kind: str, operation: str) -> None:
        """Record that the host waits for the device; raise DeviceError during a capture."""
        event = Event(kind, operation, self.where())
        self.syncs.append(event)
        if self.recording is not None:
            raise DeviceError(f"operation not permitted when stream is capturing: {event}")

    def mix(self, what: str) -> None:
        """Raise the error that CUDA raises for tensors on different devices; `what` describes the operation."""
        raise DeviceError(f"expected all tensors to be on the same device: {self.where()}: {what}")

    def launch(self, name: str) -> None:
        """Count a kernel launch."""
        if not self.inside_one_kernel:
            self.launches[name] += 1

    # operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check and execute an operation, and tag its outputs."""
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        are_held = [self.holds(tensor) for tensor in tensors]
        requested = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if requested is not None and requested.type == "cuda":
            kwargs["device"], on_device = CPU, True
        elif not tensors:
            on_device = requested is not None and (self.caller_is_on_device or torch._C._current_graph_task_id() != -1)
        else:
            on_device = are_held[0] if name == "copy_" else any(are_held)
        if not on_device and not any(are_held):
            return func(*args, **kwargs)
        if name not in WHOLE and _is_made_of_others(func):  # inference mode does not decompose these operations
            with _Operations(self):
                return func.decompose(*args, **kwargs)
        self._check(func, name, args, kwargs, tensors, are_held, on_device)
        if kwargs.get("generator") is not None and self.recording is not None:
            raise DeviceError(f"{self.where()}: a capture must be told of the generator of {name}")
        output = func(*args, **kwargs)
        if on_device and self._is_kernel(func, name):
            self.launch(name)
        if self.recording is not None:
            self.recording.append((func, args, kwargs, output))
        if on_device and name != "_local_scalar_dense":
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self.tag(leaf)
        return output

    def _is_kernel(self, func: Any, name: str) -> bool:
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return not view and name not in NO_KERNEL

    def _check(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], are_held: list[bool],
        on_device: bool,
    ) -> None:  # fmt: skip
        if name == "copy_":
            if are_held[0] != are_held[1]:
                self._note_copy(to_device=are_held[0], source=args[1], waits=not (len(args) > 2 and args[2]))
            return
        if name == "_to_copy" or name.endswith("_like") or name.startswith("new_"):
            return  # `_Calls` handles copies between devices
        if name == "_local_scalar_dense":
            self.wait("read", "item, bool, int or float")
            return
        if name in SHAPE_OF_DATA and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self.wait("shape", name)
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            self._check_indices(name, args)
            return
        allowed = torch.Tag.pointwise in func.tags or name in TAKES_A_SCALAR
        for tensor, is_held in zip(tensors, are_held, strict=True):
            if not is_held and not (allowed and tensor.dim() == 0):
                self.mix(f"{name} with {list(tensor.shape)} {tensor.dtype} on the CPU")

    def _note_copy(self, to_device: bool, source: Tensor, waits: bool) -> None:
        if not to_device:
            self.wait("copy-back", "copy to the CPU")
        elif waits:
            self.wait("send", "copy to the device")
        elif not self.is_pinned(source):
            self.unpinned.append(Event("unpinned", "non_blocking copy", self.where()))

    def _check_indices(self, name: str, args: Any) -> None:
        base, indices = args[0], [index for index in args[1] if index is not None]
        are_held = [self.holds(index) for index in indices]
        if not self.holds(base):
            if any(are_held):
                self.mix(f"{name}: a tensor on the CPU, indexed by one on the device")
            return
        values = args[2] if "index_put" in name else None
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        is_fill = values is not None and values.numel() == 1 and not self.holds(values)
        if masks and not (is_fill and len(masks) == len(indices)):
            self.wait("shape", f"{name} by a boolean mask")
        if not all(are_held):
            self.wait("send", f"{name} by an index on the CPU")
        if values is not None and not self.holds(values) and values.dim():
            self.mix(f"{name} with values {list(values.shape)} on the CPU")


@cache
def _is_made_of_others(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


class _Operations(TorchDispatchMode):
    def __init__(self, owner: PretendCuda) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.run(func, args, dict(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Mode that intercepts calls of torch functions before their C++ code checks the devices of tensors."""

    def __init__(self, owner: PretendCuda) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, owner = dict(kwargs or {}), self._owner
        if func is torch.device:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_device = first is not None and owner.holds(first)
        if func == Tensor.device.__get__:
            return CUDA if on_device else func(*args)
        if func == Tensor.is_cuda.__get__:
            return on_device or func(*args)
        if func == Tensor.is_cpu.__get__:
            return not on_device and func(*args)
        if func is Tensor.get_device:
            return 0 if on_device else -1
        if on_device and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"{owner.where()}: can't convert cuda:0 device type tensor to numpy")
        if on_device and func is Tensor.tolist:
            owner.wait("copy-back", "tolist")
            return func(*args)
        if func is Tensor.pin_memory:
            if on_device:
                raise DeviceError(f"{owner.where()}: only dense CPU tensors can be pinned")
            return owner.pin(first.clone())
        if func is Tensor.is_pinned:
            return owner.is_pinned(args[0])
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._to(func, *args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return owner.pin(self._call(func, args, kwargs))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor) and self._goes(kwargs, on_device):
            result = func(*args, **(kwargs | {"device": CPU}))
            return result if isinstance(args[0], Tensor) and func is not Tensor.new_tensor else self._sent(result)
        return self._call(func, args, kwargs)

    @staticmethod
    def _goes(kwargs: dict[str, Any], on_device: bool) -> bool:
        requested = kwargs.get("device")
        return on_device if requested is None else torch.device(requested).type == "cuda"

    def _sent(self, tensor: Tensor) -> Tensor:
        owner = self._owner
        copy = tensor.detach().clone()
        owner.wait("send", "torch.tensor on the device")
        owner.launch("memcpy to device")
        return owner.tag(copy).requires_grad_(tensor.requires_grad)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        owner = self._owner
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CUDA
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = kwargs.get("device") is None and any(owner.holds(tensor) for tensor in tensors)
        if on_device and getattr(func, "__name__", "") in LIKE:
            kwargs["device"] = CUDA
        before, one = owner.caller_is_on_device, owner.inside_one_kernel
        owner.caller_is_on_device = on_device
        if on_device and func in ONE_KERNEL and not one:
            owner.launch(func.__name__)
            owner.inside_one_kernel = True
        try:
            return func(*args, **kwargs)
        finally:
            owner.caller_is_on_device, owner.inside_one_kernel = before, one

    def _to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Implement all forms of `Tensor.to`."""
        owner, non_blocking, copy = self._owner, kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        on_device = owner.holds(tensor)
        device: Any = {Tensor.cuda: CUDA, Tensor.cpu: CPU}.get(func)
        dtype = kwargs.pop("dtype", None)
        device = kwargs.pop("device", device)
        other = kwargs.pop("other", None)
        flags = []
        for value in args if func is Tensor.to else ():
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                other = value
            elif isinstance(value, bool):
                flags.append(value)
            elif value is not None:
                device = value
        if flags:
            non_blocking, copy = flags[0], copy or (flags[1] if len(flags) > 1 else False)
        if other is not None:
            device, dtype = CUDA if owner.holds(other) else CPU, other.dtype
        goes = on_device if device is None else torch.device(device).type == "cuda"
        if goes == on_device:
            same = dtype is None or dtype == tensor.dtype
            return (
                tensor if same and not copy else self._call(Tensor.to, (tensor, dtype or tensor.dtype), {"copy": copy})
            )
        if dtype is not None and dtype != tensor.dtype and on_device:
            tensor = self._call(Tensor.to, (tensor, dtype), {})
        owner._note_copy(goes, tensor, not non_blocking)
        if goes:
            owner.launch("memcpy to device")
        with _Untracked(owner):
            moved = tensor.clone()
        if goes:
            owner.tag(moved)
        return moved if dtype is None or dtype == moved.dtype else self._call(Tensor.to, (moved, dtype), {})


class _Untracked:
    """Context in which operations are neither counted nor tagged."""

    def __init__(self, owner: PretendCuda) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._run = self._owner.run
        self._owner.run = lambda func, args, kwargs: func(*args, **kwargs)  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        del self._owner.run


_TorchGenerator, _Autocast = torch.Generator, torch.autocast


class _Generator(_TorchGenerator):
    """CPU generator that reports the device for which it was requested."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu") if torch.device(device).type == "cuda" else _TorchGenerator(device)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


@dataclass
class PretendGraphs:
    """Replacement for `decode.models.graphs.Capture`: a recording of operations, replayed on the same memory.

    Like a CUDA graph, a replay repeats all host values and addresses. It counts as one launch.
    """

    owner: PretendCuda

    def warm_up(self, run: Callable[[], Any]) -> Any:
        return run()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        owner = self.owner
        launches = owner.launches.copy()
        owner.recording = []
        try:
            output = run()
        finally:
            recorded, owner.recording = owner.recording, None
        owner.launches = launches  # a capture launches no kernels
        with _Untracked(owner):
            for each in tree_leaves(output):
                each.fill_(torch.nan if each.is_floating_point() else 0)

        def replay() -> Any:
            owner.launch("cudaGraphLaunch")
            with _Untracked(owner):
                for func, args, kwargs, old in recorded:
                    again = func(*args, **kwargs)
                    for before, now in zip(tree_leaves(old), tree_leaves(again), strict=True):
                        if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
                            before.copy_(now)
            return output

        return replay
