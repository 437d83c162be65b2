"""AdamW optimizer and learning rate schedules."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import FitConfig


def make_optimizer(module: nn.Module, config: FitConfig) -> torch.optim.Optimizer:
    """Create an AdamW optimizer for the trained parameters, with weight decay for matrices only.

    The module may define `rate_group(parameter)`, which names the group of a parameter (default: ""), and
    `rate(group)`, which returns the learning rate multiplier of a group at the current step.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    assert trained, "the task has no trained parameters"
    group_of: Callable[[nn.Parameter], str] = getattr(module, "rate_group", lambda _: "")
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for parameter in trained:
        name, vector = group_of(parameter), parameter.dim() < 2
        decay = 0.0 if vector else config.weight_decay
        group = groups.setdefault((name, vector), {"params": [], "weight_decay": decay, "rate_group": name})
        group["params"].append(parameter)
    ordered = [groups[key] for key in sorted(groups)]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    return torch.optim.AdamW(ordered, lr=config.learning_rate, betas=config.betas, fused=fused)


def learning_rates(config: FitConfig) -> Callable[[int], float]:
    """Return a function from the step to the learning rate relative to its peak, as in transformers."""
    from transformers import get_scheduler

    names = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = math.ceil(config.warmup * config.steps)
    scheduler = get_scheduler(names[config.schedule], optimizer, warmup, config.steps)
    return scheduler.lr_lambdas[0]
