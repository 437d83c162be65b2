"""Setup of accelerate for one or several processes and DeepSpeed ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054)."""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ..config import FitConfig

_TIMEOUT = timedelta(hours=6)
"""Maximum time to wait for a process that prepares a corpus or evaluates."""
_SIZED_BY_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def make_accelerator(precision: str, **options: Any) -> Any:
    """Create an `accelerate.Accelerator` for the launched processes, with `options` as additional arguments.

    Raises ValueError for unsupported parallelism or precision, or if the processes do not form one group.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # an earlier run of this process had another precision
    with_deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    if with_deepspeed and _is_set("ACCELERATE_USE_CPU"):
        raise ValueError("ACCELERATE_USE_CPU is set, which would disable DeepSpeed: unset it")
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and precision == "fp16":
        raise ValueError("precision fp16 is not supported on CPUs: use auto or no")
    if on_cpu:
        # accelerate imports DeepSpeed if installed, which otherwise prints a warning about missing GPUs
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    backend: dict[str, Any] = {"backend": "gloo"} if with_deepspeed and on_cpu else {}
    if on_cpu and launched > 1 and not with_deepspeed:
        options["cpu"] = True  # otherwise accelerate looks for GPUs
    if with_deepspeed:
        _quiet_deepspeed(on_cpu)
    patience = InitProcessGroupKwargs(timeout=_TIMEOUT, **backend)
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[patience], **options)
    _check_launch(accelerator, launched, with_deepspeed)
    if with_deepspeed:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # otherwise transformers shards every loaded model under ZeRO-3
    return accelerator


def _quiet_deepspeed(on_cpu: bool) -> None:
    # torch 2.13 warns at each collective about names that DeepSpeed uses
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if on_cpu:
        from deepspeed import ops

        # skips compiling DeepSpeed's shared-memory kernel; gloo needs no compiler
        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _check_launch(accelerator: Any, launched: int, with_deepspeed: bool) -> None:
    kind, visible = accelerator.distributed_type.value, accelerator.num_processes
    if kind in ("FSDP", "MEGATRON_LM", "XLA"):
        raise ValueError(f"training under {kind} is not supported: use DeepSpeed ZeRO 1, 2 or 3 to shard a model")
    if visible != launched or (with_deepspeed and kind != "DEEPSPEED"):
        launch = f"{launched} processes{' under DeepSpeed' if with_deepspeed else ''}"
        raise ValueError(f"{launch} were launched, but this one sees {visible} ({kind}): check the accelerate config")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")


def zero_stage(accelerator: Any) -> int:
    """Return DeepSpeed's ZeRO stage (1 to 3), or 0 if DeepSpeed is not used."""
    return int(accelerator.deepspeed_plugin.zero_stage) if accelerator.distributed_type.value == "DEEPSPEED" else 0


def configure(accelerator: Any, config: FitConfig, micro_steps: int) -> None:
    """Write the settings of a run into DeepSpeed's configuration, if it is used. Raises ValueError on conflicts."""
    accelerator.gradient_accumulation_steps = micro_steps
    if accelerator.distributed_type.value != "DEEPSPEED":
        return
    settings: dict[str, Any] = accelerator.deepspeed_plugin.deepspeed_config
    zero: dict[str, Any] = settings["zero_optimization"]
    if zero.get("stage") not in (1, 2, 3):
        raise ValueError(f"the ZeRO stage must be 1, 2 or 3, got {zero.get('stage')} (or do not use DeepSpeed)")
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise ValueError(f"DeepSpeed's configuration sets {name!r}, which the recipe determines: remove it")
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part, {}).get("device") == "nvme":
            raise ValueError(f"DeepSpeed's {part}.device nvme is not supported: set it to cpu")
    settings |= {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": config.global_batch,
        "gradient_clipping": config.clip_norm,
        # torch's fused AdamW also supports offload, and needs no compiler
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": settings.get("bf16", {}) | {"enabled": config.precision == "bf16", "check_grad_overflow": True},
        "fp16": settings.get("fp16", {}) | {"enabled": config.precision == "fp16", "auto_cast": True},
    }
    for name in _SIZED_BY_MODEL:  # accelerate would derive these from a hidden size, which a task does not have
        if zero.get(name) == "auto":
            del zero[name]


class Stepper:
    """Helper for backward passes, gradient norms and optimizer steps, with or without DeepSpeed."""

    def __init__(self, accelerator: Any, module: nn.Module, optimizer: Any, clip_norm: float) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._clip_norm = clip_norm or math.inf
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        self._engine = None if wrapped is None else wrapped.engine
        if self._engine is not None and zero_stage(accelerator) == 3:
            from deepspeed import zero

            # parameters that the module's forward reads without calling their layer
            for parameter in getattr(self._engine.module, "read_directly", list)():
                zero.register_external_parameter(self._engine.module, parameter)

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled for float16 training, in which gradients overflow occasionally."""
        if self._engine is not None:
            return bool(self._engine.fp16_enabled())
        return self._accelerator.scaler is not None

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch. Gradients are averaged over all micro-batches and processes."""
        if self._engine is None:
            self._accelerator.backward(loss)
            return
        # accelerate's wrapper would update the weights here, before loss and norm are checked
        self._engine.set_gradient_accumulation_boundary(self._accelerator.sync_gradients)
        self._engine.backward(loss)

    def norm(self) -> float:
        """Clip the gradients unless DeepSpeed does. Return the norm before clipping, which may be infinite or NaN."""
        if self._engine is None:
            return float(torch.as_tensor(self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm)))
        zero = self._engine.optimizer
        if self._engine.zero_optimization_stage() < 3:
            scaled = float(zero.scaled_global_norm())
        else:
            norms = [float(norm) for norm in zero._get_norm_groups()]  # −1 where one is not finite
            scaled = math.hypot(*norms) if all(0 <= norm < math.inf for norm in norms) else -1.0
        return scaled / zero.loss_scale if scaled >= 0 else math.inf

    def apply(self) -> None:
        if self._engine is not None:
            self._engine.step()
            return
        self._optimizer.step()
        self._optimizer.zero_grad()

    def discard(self) -> None:
        """Clear the gradient without changing the weights or the optimizer state."""
        if self._engine is None:
            if self._accelerator.scaler is not None:
                self._accelerator.scaler.update()  # lowers the scale after gradients that are not finite
            self._optimizer.zero_grad()
            return
        # DeepSpeed only discards gradients that are not finite, so report an infinite norm
        zero, infinite = self._engine.optimizer, torch.tensor(math.inf)
        has_groups = self._engine.zero_optimization_stage() == 3
        name, norm = ("_get_norm_groups", [infinite]) if has_groups else ("scaled_global_norm", infinite)
        setattr(zero, name, lambda: norm)
        try:
            self._engine.step()
        finally:
            delattr(zero, name)
        assert not self._engine.was_step_applied()


@contextmanager
def gather_weights(accelerator: Any, module: nn.Module) -> Iterator[None]:
    """Gather all weights of a sharded `module` within a context, read-only. All processes must enter the context."""
    if zero_stage(accelerator) < 3:
        yield
        return
    from deepspeed import zero

    engine = accelerator.deepspeed_engine_wrapped.engine
    hooks = engine.optimizer.parameter_offload
    with zero.GatheredParameters(list(accelerator.unwrap_model(module).parameters())):
        # DeepSpeed's hooks would release a layer's weights after its forward pass
        for hook in [*hooks.forward_hooks, *hooks.backward_hooks]:
            hook.remove()
        hooks.forward_hooks, hooks.backward_hooks = [], []
        try:
            yield
        finally:
            hooks._register_deepspeed_module(hooks.module)
