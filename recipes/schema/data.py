"""Sections of a recipe that describe data."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...checkpoints.storage.redaction import without_secrets
from ...data.cleaning.cleaner import Cleaning
from .errors import describe


class Section(BaseModel):
    """Base class of sections, which reject unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def recorded(self, **parts: Any) -> dict[str, Any]:
        """Return JSON values without secrets; `parts` are `include` and `exclude` of pydantic."""
        return dict(without_secrets(self.model_dump(mode="json", **parts)))


def check_cleaning(options: dict[str, Any]) -> None:
    """Raise ValueError for an unknown option or value of `Cleaning`, with the nearest known one."""
    try:
        Cleaning(**options)
    except ValidationError as error:
        raise ValueError("; ".join(describe(Cleaning, fault, "clean") for fault in error.errors())) from error


class PlaceSection(Section):
    """Location of the rows of a corpus."""

    path: str | None = None
    """Local copy that replaces the hub."""
    config: str | None = None
    """Configuration of a hub dataset (default: that of the registry, as for the next three)."""
    split: str | None = None
    """Split of a hub dataset, or part of the files of a folder."""
    revision: str | None = None
    """Revision of a hub dataset."""
    file: str | None = None
    """Data file of a hub repository."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of conversations."""


class SourceSection(PlaceSection):
    """Corpus with its weight in a mixture."""

    source: str
    """Local file or folder (.json, .jsonl, .parquet; JSON also with .gz), name of a known corpus
    (`draftsmith prepare --list`), or hub id."""
    weight: float = Field(1.0, gt=0)
    """Number of uses of each row per epoch; 0.25 uses a quarter of the rows."""


class DataSection(PlaceSection):
    """Source of conversations, and the settings of their token blocks."""

    source: str | None = None
    """Corpus, as in `mixture`; `path`, `config`, `split`, `revision`, `file` and `limit` apply to it."""
    mixture: list[SourceSection] = []
    """Several corpora in place of `source`."""
    clean: dict[str, Any] = {}
    """Options of cleaning, see `draftsmith.data.cleaning.cleaner.Cleaning`."""
    template: str = "vicuna-v1.1"
    """Name of the chat template; `tokenizer`: the tokenizer's own."""
    template_options: dict[str, Any] = {}
    """Variables of the tokenizer's own chat template, such as `{enable_thinking: false}`; `date` sets its current date
    (default: 2024-07-26)."""
    last_turn_only: bool = False
    """Train on the last answer of a conversation only."""
    block_tokens: int = Field(2048, ge=8)
    """Length of a training block; longer conversations are split between exchanges."""
    packing: Literal["best-fit", "pad"] = "best-fit"
    """Packing method: fill blocks with whole documents, or pad one document each to the longest of a batch."""
    heldout_source: str | None = None
    """Conversations to evaluate on (default: `heldout_share` of the source)."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Share of the conversations held out, by a hash of their ids, or of ids and contents where there are few ids; 0
    is allowed for counting a table."""
    heldout_limit: int = Field(256, ge=1)
    """Maximum number of held-out conversations."""
    min_clean_share: float = Field(0.98, ge=0, le=1)
    """Minimum share of documents without faults for `draftsmith prepare --lint`."""
    min_trained_share: float = Field(0.01, ge=0, le=1)
    """Minimum share of trained tokens."""
    cache: str = "runs/prepared"
    """Folder of prepared blocks, which are reused while source, options, template and tokenizer are unchanged."""

    def parts(self) -> list[SourceSection]:
        """Return the corpora."""
        if self.source is None:
            return self.mixture
        return [SourceSection(source=self.source, **{name: getattr(self, name) for name in PlaceSection.model_fields})]

    @model_validator(mode="after")
    def _consistent(self) -> "DataSection":
        if (self.source is None) == (not self.mixture):
            state = "both" if self.source else "neither"
            raise ValueError(f"set exactly one of `source` (a corpus) and `mixture` (several), got {state}")
        if self.source is None and any(getattr(self, name) for name in PlaceSection.model_fields):
            raise ValueError(f"with `mixture`, set {', '.join(PlaceSection.model_fields)} in its corpora")
        check_cleaning(self.clean)
        return self
