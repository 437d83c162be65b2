"""What the `settings` of a paper's recipe may say, for each experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .data import Section

Count = Annotated[int, Field(ge=1)]


class RunsSettings(Section):
    """One or several evaluations."""

    runs: dict[str, dict[str, Any]] = Field({})
    """More than one evaluation: changes to `evaluate` by name, with rows called `name: label`. {}: `evaluate` as it
    stands."""
    pooled: bool = False
    """Also rows over the prompts of all runs together, under their labels alone."""
    categories: bool = False
    """Also rows of each category of the prompts, called `label [category]`."""


class AcceptanceSettings(Section):
    """Acceptance, from one reading of the target's own texts by target and drafters.

    Methods of `evaluate` beside `autoregressive` are decoded, and give rows of their own.
    """

    sources: list[Literal["drafters", "unigram", "bigram"]] = Field(["drafters"])
    """What drafts: the recipe's `drafter` and `more_drafters` (rows `drafter`, `drafter 2` …), its table's counts."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 1.0], min_length=1)
    """Of target and drafters; top_k and top_p are those of `evaluate`."""
    candidates: list[Count] = Field([1], min_length=1)
    """k: how many candidates stand at a position. With others than 1 the rows are called `drafter k=4 T=1`."""
    counted: str | None = None
    """A corpus whose table stands in for that of `evaluate`: it is counted first."""

    @model_validator(mode="after")
    def _recorded(self) -> AcceptanceSettings:
        if self.candidates != [1] and set(self.sources) - {"drafters"}:
            raise ValueError("several candidates are those of a drafter: `candidates` takes `sources: [drafters]`")
        return self


class CorrelationSettings(Section):
    """How often a head's best token is right, by itself and after correction by the table (`slim.txt`, table 6)."""

    candidates: int = Field(10, ge=2)
    """Tokens of a head that the correction may choose from."""
    unseen: float = Field(0.01, ge=0)
    """r of a pair that was never seen; eq. 5 has 0, which would rule it out."""
    add_k: float = Field(0.0, ge=0)
    """Number added to each count before r is computed."""
    categories: bool = False
    """Also rows of each category of the prompts, called `with correlation [category]`."""


class SaturationSettings(Section):
    """SLiM with tables of growing parts of a corpus (`slim.txt`, figure 7)."""

    source: str
    """The corpus that is counted: a file, a folder, a known name or a hub id."""
    sizes: list[Count] = Field(min_length=1)
    """Conversations of the parts, rising: rows `part 1`, `part 2` …; the whole corpus comes last, in the row `all`."""
    sequences: int = Field(20, ge=1)
    """Sequences that SLiM keeps."""
    candidates: int = Field(10, ge=1)
    """Candidates that it takes of each head."""


class EnergySettings(Section):
    """Time and energy of a forward against the batch size (`mjsd.txt`, table 1)."""

    batches: list[Count] = Field([1, 2, 4, 8, 16], min_length=1)
    """Inputs a run; each gives a row `batch 4`."""
    runs: int = Field(3000, ge=1)
    """Forwards of the model for each batch size."""
    context: int = Field(128, ge=1)
    """Tokens that each input has behind it."""


SETTINGS: dict[str, type[Section]] = {
    "evaluate": RunsSettings,
    "acceptance": AcceptanceSettings,
    "correlation": CorrelationSettings,
    "saturation": SaturationSettings,
    "energy": EnergySettings,
}
