"""Gathering and scattering of weights and AdamW states that DeepSpeed shards, for checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .accelerate import zero_stage

_MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_state(accelerator: Any, module: nn.Module) -> dict[str, Tensor] | None:
    """Gather the weights and buffers of a sharded `module` on the CPU of the main process.

    Names have no wrapper prefix, trained weights are float32, and tied weights share a tensor. All processes must call
    this function; the other processes receive None.
    """
    bare = accelerator.unwrap_model(module)
    copies: dict[int, Tensor | None] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in bare.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = _gather_tensor(accelerator, name, tensor)
        if (copy := copies[id(tensor)]) is not None:
            state[name] = copy
    return state if accelerator.is_main_process else None


def _gather_tensor(accelerator: Any, name: str, tensor: Tensor) -> Tensor | None:
    from deepspeed import utils, zero

    shape = getattr(tensor, "ds_shape", tensor.shape)
    if tensor.requires_grad:
        gathered = utils.safe_get_full_fp32_param(tensor)
        copy = gathered.detach().cpu() if accelerator.is_main_process else None
    else:
        with zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            copy = tensor.detach().cpu().clone() if accelerator.is_main_process else None
    assert copy is None or copy.shape == shape, f"{name} was not gathered: {copy.shape}, expected {shape}"
    return copy


def unshard(accelerator: Any, module: nn.Module) -> None:
    """Undo ZeRO-3 sharding after training, so that every process has all weights. All processes must call this."""
    if zero_stage(accelerator) < 3:
        return
    from deepspeed import zero

    bare = accelerator.unwrap_model(module)
    parameters = list(bare.parameters())
    with zero.GatheredParameters(parameters):
        fresh = {id(p): nn.Parameter(p.data.clone(), requires_grad=p.requires_grad) for p in parameters}
    for part in bare.modules():
        # replaces DeepSpeed's own dictionary type
        part._parameters = {name: None if p is None else fresh[id(p)] for name, p in part._parameters.items()}


def gather_optimizer(accelerator: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Gather AdamW's state in the main process, as a `state_dict` of the unsharded optimizer.

    `groups` are the parameter groups before `accelerator.prepare`. All processes must call this function; the other
    processes receive None.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = accelerator.deepspeed_engine_wrapped.engine
    steps = [engine.optimizer.optimizer.state[flat].get("step") for flat in _partitions(engine)]
    state: dict[int, dict[str, Tensor]] = {}
    _link_moments(engine)
    for index, parameter in _numbered(groups):
        if steps[0] is None:  # no step was taken
            break
        moments = {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
        if accelerator.is_main_process:
            state[index] = {"step": steps[0].detach().cpu().clone()}
            state[index] |= {key: moment.detach().cpu() for key, moment in moments.items()}
    if not accelerator.is_main_process:
        return None
    numbers = {id(parameter): index for index, parameter in _numbered(groups)}
    described = [dict(group) | {"params": [numbers[id(p)] for p in group["params"]]} for group in groups]
    return {"state": state, "param_groups": described}


def scatter_weights(accelerator: Any, module: nn.Module, file: Path) -> None:
    """Load a safetensors file into a DeepSpeed module and its float32 master weights. All processes must call this."""
    from safetensors import safe_open

    bare = accelerator.unwrap_model(module)
    with safe_open(file, framework="pt") as weights:
        tensors = bare.state_dict(keep_vars=True)
        for name in weights.keys():  # noqa: SIM118 (tied weights are stored once)
            _set_tensor(accelerator, tensors[name], weights.get_tensor(name))


@torch.no_grad()
def _set_tensor(accelerator: Any, tensor: Tensor, value: Tensor) -> None:
    from deepspeed import zero

    with zero.GatheredParameters([tensor], modifier_rank=0, enabled=hasattr(tensor, "ds_id")):
        if accelerator.is_main_process or not hasattr(tensor, "ds_id"):
            tensor.copy_(value)
    if tensor.requires_grad:
        _set_master(tensor, value.to(tensor.device, torch.float32), None)


def _set_master(parameter: Any, value: Tensor, key: str | None) -> None:
    """Write this process's shard of a float32 master weight or, if `key` is given, of its AdamW moment `key`."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return
    # ZeRO-3's own "set full" fails for sizes that are not divisible by the number of processes
    size = parameter.ds_tensor.numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    padded = value.new_zeros(size * torch.distributed.get_world_size(parameter.ds_process_group))
    padded[: value.numel()] = value.flatten()
    part = padded[rank * size : (rank + 1) * size]
    if key is None:
        utils.safe_set_local_fp32_param(parameter, part)
    else:
        utils.safe_set_local_optimizer_state(parameter, part, key)


def scatter_optimizer(accelerator: Any, groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
    """Load AdamW's state, saved by `gather_optimizer` or by an unsharded torch AdamW, into DeepSpeed's shards."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    states = saved["state"]
    if not states:
        return
    step = next(iter(states.values()))["step"]
    for flat in _partitions(engine):
        moments = {key: torch.zeros_like(flat.data) for key in _MOMENTS}
        engine.optimizer.optimizer.state[flat] = {"step": step.clone().to(flat.device), **moments}
    _link_moments(engine)
    for index, parameter in _numbered(groups):
        for key in _MOMENTS:
            _set_master(parameter, states[index][key].to(parameter.device, torch.float32), key)


def _link_moments(engine: Any) -> None:
    """Link parameters to their AdamW moments, because ZeRO 1 and 2 do this only in the first step."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _partitions(engine: Any) -> list[Tensor]:
    """Return this process's shards of the float32 master weights, one flat tensor for each parameter group."""
    zero = engine.optimizer
    stage3 = engine.zero_optimization_stage() == 3
    return list(zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups)


def _numbered(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield all parameters with their indices in the optimizer's `state_dict`."""
    yield from enumerate(parameter for group in groups for parameter in group["params"])
