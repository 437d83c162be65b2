"""What the `settings` of a paper's recipe may say, for each experiment but `evaluate` (see `papers`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from .claims import nearest
from .data import Section
from .errors import describe

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


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
    epsilons: list[Share] = Field([])
    """ε of over-acceptance: rows `OPT e=0.1 T=1` and `UNO e=0.1 T=1` of the first drafter, at temperatures above 0."""
    counted: str | None = None
    """A corpus whose table stands in for that of `evaluate`: it is counted first."""

    @model_validator(mode="after")
    def _recorded(self) -> AcceptanceSettings:
        if self.candidates != [1] and set(self.sources) - {"drafters"}:
            raise ValueError("several candidates are those of a drafter: `candidates` takes `sources: [drafters]`")
        if self.epsilons and not any(self.temperatures):
            raise ValueError("`epsilons` needs a temperature above 0: one-hot distributions trade nothing")
        return self


class CorrelationSettings(Section):
    """How often a head's best token is right, by itself and after correction by the table (`slim.txt`, table 6)."""

    candidates: int = Field(10, ge=2)
    """Tokens of a head that the correction may choose from."""
    unseen: float = Field(0.01, ge=0)
    """r of a pair that was never seen."""
    smoothing: Literal["none", "add-k", "kneser-ney"] = "none"
    """Of the counts, before r is derived."""
    strength: float = Field(0.0, ge=0)
    """k or the discount of the smoothing; 0: its default."""
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


class _Study(Section):
    texts: int = Field(2000, ge=100)
    """Texts that are decoded for each row."""
    seed: int = 0
    """Fixes the chains and the texts."""


class _OneChain(_Study):
    states: int = Field(8, ge=4)
    """Size of the chains' state space."""


class RejectionsStudy(_Study):
    """Rejections of speculative decoding against their sum (`theory.md`, points 1, 2 and 6a)."""

    study: Literal["rejections"]
    states: list[Annotated[int, Field(ge=4)]] = Field([8], min_length=1)
    """Sizes of the chains' state space."""
    tokens: list[Count] = Field([50], min_length=1)
    """Lengths of the texts."""
    shares: list[Share] = Field([0.5], min_length=1)
    """How much of another chain the drafter's has in it: 0 is the target's own."""


class DraftsStudy(_OneChain):
    """Rejections of batch speculative decoding, which makes several drafts (`theory.md`, points 3 and 6a)."""

    study: Literal["drafts"]
    tokens: int = Field(30, ge=1)
    """Length of the texts."""
    share: float = Field(0.5, ge=0, le=1)
    """How much of another chain the drafter's has in it."""
    drafts: list[Count] = Field([1, 2, 4, 8], min_length=1)
    """M; the limit of ever more is always added."""


class OverAcceptanceStudy(_OneChain):
    """Rejections and bias of over-acceptance, one token after every state (`theory.md`, points 4, 5 and 6b)."""

    study: Literal["over-acceptance"]
    share: float = Field(0.5, ge=0, le=1)
    """How much of another chain the drafter's has in it."""
    epsilons: list[Share] = Field([0.0, 0.05, 0.1, 0.2, 0.4, 1.0], min_length=1)
    """ε of b = min(1, (p + ε)/q)."""


class WalltimeStudy(_OneChain):
    """Tokens a step and walltime against the closed forms (slides, "Theoretical analysis" to "Choosing γ")."""

    study: Literal["walltime"]
    alphas: list[Share] = Field([0.6, 0.8, 0.9], min_length=1)
    """Acceptance rates."""
    gammas: list[Count] = Field([3, 5, 7], min_length=1)
    """Draft tokens a step."""
    costs: list[Annotated[float, Field(gt=0)]] = Field([0.01, 0.05, 0.1], min_length=1)
    """A drafter's forward in those of the target."""


STUDIES: dict[str, type[Section]] = {
    "rejections": RejectionsStudy,
    "drafts": DraftsStudy,
    "over-acceptance": OverAcceptanceStudy,
    "walltime": WalltimeStudy,
}
SETTINGS: dict[str, type[Section]] = {
    "acceptance": AcceptanceSettings,
    "correlation": CorrelationSettings,
    "saturation": SaturationSettings,
    "energy": EnergySettings,
}


def checked_settings(experiment: str, settings: dict[str, Any]) -> Section:
    """The settings of an experiment. Raises ValueError: all that is wrong with them, with the nearest right name of an
    unknown key or study."""
    model = SETTINGS.get(experiment)
    if experiment == "simulation":
        study = settings.get("study")
        if study not in STUDIES:
            raise ValueError(f"`settings.study` is {study!r}.{nearest(str(study), list(STUDIES))}")
        model = STUDIES[study]
    if model is None:
        raise ValueError(f"there is no experiment {experiment!r}.{nearest(experiment, [*SETTINGS, 'simulation'])}")
    try:
        found = model.model_validate(settings)
    except ValidationError as error:
        raise ValueError("; ".join(describe(model, fault, "settings") for fault in error.errors())) from error
    for name, values in found:
        if isinstance(values, list) and len(set(values)) < len(values):
            raise ValueError(f"'settings.{name}' names a value twice: {', '.join(map(str, values))}")
    return found
