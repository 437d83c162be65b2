"""Selection of the data type for training on this machine."""

import timeit
from functools import cache, partial
from typing import Any, TypeVar

import torch

from ..schema.training import DrafterRecipe, HeadsRecipe, TableRecipe
from .launch import is_first
from .machine import has_bfloat16
from .terminal import log

_Recipe = TypeVar("_Recipe", DrafterRecipe | HeadsRecipe, DrafterRecipe | HeadsRecipe | TableRecipe)


@cache
def bfloat16_slowdown() -> float:
    """Measure how many times slower matrix products are in bfloat16 than in float32 on this CPU."""
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        tokens, weight = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        seconds.append(min(timeit.repeat(partial(torch.matmul, tokens, weight), number=1, repeat=4)))
    return seconds[0] / seconds[1]


def settle_precision(recipe: _Recipe) -> _Recipe:
    """Return the recipe with `train.precision: auto` resolved for this machine.

    If bfloat16 is only emulated, `auto` selects float32 for the drafter and the target. A recipe that explicitly sets
    bfloat16 is not changed, but a warning is logged.
    """
    if isinstance(recipe, TableRecipe):
        return recipe
    dtype = recipe.target_dtype if isinstance(recipe, HeadsRecipe) else recipe.teacher.dtype
    is_auto, precision = recipe.train.precision == "auto", recipe.train.precision
    if has_bfloat16():
        precision = "bf16" if is_auto else precision
    else:
        _report_emulation(recipe, dtype)
        if is_auto:
            precision, dtype = "no", "float32" if dtype == "bfloat16" else dtype
    changes: dict[str, Any] = {"train": recipe.train.model_copy(update={"precision": precision})}
    if isinstance(recipe, HeadsRecipe):
        changes["target_dtype"] = dtype
    else:
        changes["teacher"] = recipe.teacher.model_copy(update={"dtype": dtype})
    return recipe.model_copy(update=changes)


def _report_emulation(recipe: DrafterRecipe | HeadsRecipe, dtype: str) -> None:
    """Log the slowdown if a recipe uses bfloat16 on a machine that only emulates bfloat16."""
    precision = recipe.train.precision
    if not is_first() or (precision in ("no", "fp16") and dtype != "bfloat16"):
        return
    slow = f"bfloat16 is emulated on this machine and {bfloat16_slowdown():.0f} times slower than float32"
    if precision == "auto":
        log(f"using float32, because {slow}")
    else:
        name = "target_dtype" if isinstance(recipe, HeadsRecipe) else "teacher.dtype"
        log(f"warning: {slow}: set train.precision=no {name}=float32")
