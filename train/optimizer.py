"""AdamW and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from .config import FitConfig


def make_optimizer(module: nn.Module, config: FitConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained; matrices decay, biases and norms do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    assert trained, "the task has no trained parameters"
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def learning_rates(config: FitConfig) -> Callable[[int], float]:
    """Share of the peak learning rate at step 0, 1, …: transformers' schedule as a pure function, nothing to store."""
    from transformers import get_scheduler

    names = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = math.ceil(config.warmup * config.steps)
    scheduler = get_scheduler(names[config.schedule], optimizer, warmup, config.steps)
    return scheduler.lr_lambdas[0]
