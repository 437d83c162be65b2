"""What a recipe's target says that may be kept on disk: a drafter's teacher, or the hidden states that heads read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...decode.models.loading import load_model
from ...train.teachers.hidden_cache import HiddenCache, HiddenRows, HiddenSource
from ...train.teachers.row_cache import RowCache
from ...train.teachers.row_plan import CachePlan, Source
from ...train.teachers.row_writer import MakeRows
from ...train.teachers.teacher import load_teacher
from ...train.teachers.top_k_cache import CacheSource, TeacherCache, TopRows
from ..schema.training import DrafterRecipe, HeadsRecipe
from ..session.terminal import gigabytes

_ENOUGH_MASS = 0.9  # with 0.54 of it a drafter was taught to be worse than it had been (tests/bench/objectives.py)


class Kept(ABC):
    """One kind of what a recipe keeps, with the recipe's settings."""

    word: str
    """What lines about it begin with."""
    setting: str
    """The recipe's key that names the folder."""
    instead: str
    """What to do without a cache."""
    cache_type: type[RowCache]
    target: str | None
    folder: str | None
    batch: int
    """Blocks per forward of the target."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What there is a cache of."""

    @abstractmethod
    def source(self, fingerprint: str, data: str) -> Source:
        """What the cache of this target and data is called."""

    @abstractmethod
    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        """The target, ready to make rows, and the size that their columns depend on."""

    @abstractmethod
    def contents(self, plans: Sequence[CachePlan]) -> str:
        """What will be written."""

    @abstractmethod
    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        """The nearest setting with which it fits into so many bytes."""

    @abstractmethod
    def facts(self, cache: Any) -> Iterator[str]:
        """What else there is to say about a finished cache."""


class KeptTeacher(Kept):
    """A drafter's teacher: its target's most likely tokens."""

    word = "teacher"
    setting = "teacher.cache"
    instead = "take the target in process"
    cache_type = TeacherCache

    def __init__(self, recipe: DrafterRecipe) -> None:
        self._section = recipe.teacher
        self.target, self.folder, self.batch = recipe.target, recipe.teacher.cache, recipe.teacher.batch

    @property
    def title(self) -> str:
        return f"the top {self._section.top_k} tokens of {self.target}"

    def source(self, fingerprint: str, data: str) -> CacheSource:
        section = self._section
        return CacheSource(str(self.target), fingerprint, data, section.top_k, section.dtype, section.load_in_8bit)

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        teacher = load_teacher(str(self.target), self._section.dtype, self._section.load_in_8bit, device)
        return TopRows(teacher, self._section.top_k), teacher.vocab_size

    def contents(self, plans: Sequence[CachePlan]) -> str:
        rows = sum(plan.rows for plan in plans)
        return f"the {self._section.top_k} most likely of {plans[0].size:,} tokens at {rows:,} positions"

    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        size = sum(plan.rows * plan.row_bytes for plan in plans)
        fixed = sum(plan.bytes_of(len(plan.shards), 0) for plan in plans)
        fits = max(0, (free - fixed) * self._section.top_k // max(1, size))
        return f"the largest `teacher.top_k` that fits is {fits}" if fits else "not even one token a position fits"

    def facts(self, cache: TeacherCache) -> Iterator[str]:
        mass = cache.mean_mass()
        yield f"the top {cache.source.top_k} hold {mass:.1%} of the probability"
        if mass < _ENOUGH_MASS:
            yield f"{1 - mass:.0%} of the probability is not taught: a larger `teacher.top_k` is better"


class KeptHidden(Kept):
    """The target's hidden states, which heads read."""

    word = "hidden states"
    setting = "hidden.cache"
    instead = "compute the states in every step (`hidden.cache=null`)"
    cache_type = HiddenCache

    def __init__(self, recipe: HeadsRecipe) -> None:
        self._recipe = recipe
        self.target, self.folder, self.batch = recipe.target, recipe.hidden.cache, recipe.hidden.batch

    @property
    def title(self) -> str:
        return f"the hidden states of {self.target} ({self._recipe.states}, {self._recipe.hidden.dtype})"

    def source(self, fingerprint: str, data: str) -> HiddenSource:
        recipe = self._recipe
        return HiddenSource(
            recipe.target, fingerprint, data, recipe.states, recipe.hidden.dtype, target_dtype=recipe.target_dtype
        )

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        model = load_model(self._recipe.target, dtype=self._recipe.target_dtype, device=str(device))
        rows = HiddenRows(model, self._recipe.states, self._recipe.hidden.dtype)
        return rows, rows.hidden_size

    def contents(self, plans: Sequence[CachePlan]) -> str:
        rows = sum(plan.rows for plan in plans)
        return f"{plans[0].size:,} numbers in {self._recipe.hidden.dtype} at {rows:,} positions"

    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        half = replace(self.source("", ""), dtype="bfloat16").columns(plans[0].size)
        size = sum(replace(plan, columns=half).bytes for plan in plans)
        if self._recipe.hidden.dtype == "float32" and size <= free:
            return f"the nearest setting that fits is `hidden.dtype=bfloat16` ({gigabytes(size)})"
        return f"no type of them fits; {self.instead}"

    def facts(self, cache: HiddenCache) -> Iterator[str]:
        yield f"{cache.hidden_size:,} numbers each, {cache.source.states}, in {cache.source.dtype}"


def kept_by(recipe: DrafterRecipe | HeadsRecipe) -> Kept:
    """What a recipe keeps."""
    return KeptTeacher(recipe) if isinstance(recipe, DrafterRecipe) else KeptHidden(recipe)
