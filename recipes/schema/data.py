"""The sections of a recipe that say where data comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from ...checkpoints.storage.redaction import without_secrets
from ...data.cleaning.cleaner import Cleaning
from ...data.sources.forms import check_renames
from .errors import describe


class Section(BaseModel):
    """Strict: an unknown key or a value of another type is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def recorded(self, **parts: Any) -> dict[str, Any]:
        """Its values as files may hold them: plain, without secrets. `parts`: pydantic's `include` and `exclude`."""
        return dict(without_secrets(self.model_dump(mode="json", **parts)))


def check_cleaning(options: dict[str, Any]) -> None:
    """Raises ValueError for an option or value that `Cleaning` does not have, with the nearest that it has."""
    try:
        Cleaning(**options)
    except ValidationError as error:
        raise ValueError("; ".join(describe(Cleaning, fault, "clean") for fault in error.errors())) from error


class PlaceSection(Section):
    """Where the rows of a corpus lie."""

    path: str | None = None
    """A local copy that stands in for the hub."""
    config: str | None = None
    """Configuration of a hub data set; by default what is known of the corpus, as for the next three."""
    split: str | None = None
    """Split of a hub data set; of a folder, the files with that name."""
    revision: str | None = None
    """Revision of a hub data set."""
    file: str | None = None
    """One data file inside a hub repository."""
    limit: int | None = Field(None, ge=1)
    """Read at most this many conversations."""
    columns: dict[str, str | None] = {}
    """What columns of the source, and of `heldout_source`, are called here, if not by our names (data/README.md):
    {question: instruction, reply: output}; null: not read."""

    @model_validator(mode="after")
    def _known_columns(self) -> Self:
        check_renames(self.columns)
        return self

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Without renamed columns a section is what it was before there were any: finished work is known by it."""
        return {name: value for name, value in dump(self).items() if name != "columns" or value}


class SourceSection(PlaceSection):
    """One corpus."""

    source: str
    """A local file or folder (.json, .jsonl, .parquet, .arrow, .txt, packed with gzip or Zstandard too), the name of a
    known corpus (`draftsmith prepare --list`), or a hub id."""
    weight: float = Field(1.0, gt=0)
    """How often each row is used in an epoch; 0.25: a quarter of the rows."""


class DataSection(PlaceSection):
    """Where conversations come from and how they become token blocks."""

    source: str | None = None
    """A corpus, as in `mixture`; `path`, `config`, `split`, `revision`, `file`, `limit` and `columns` are for it."""
    mixture: list[SourceSection] = []
    """Several corpora instead."""
    skip_broken: bool = False
    """Pass over rows that cannot be read, and count them."""
    clean: dict[str, Any] = {}
    """What is cut, dropped and rewritten: the options of `draftsmith.data.cleaning.cleaner.Cleaning`."""
    template: str = "vicuna-v1.1"
    """Chat template by name; `tokenizer`: its own."""
    last_turn_only: bool = False
    """Train on the last answer of a conversation alone."""
    block_tokens: int = Field(2048, ge=8)
    """Length of a training block; longer conversations are split between exchanges."""
    packing: Literal["best-fit", "pad"] = "best-fit"
    """Fill blocks with whole documents, or pad one document each to the longest of a batch."""
    streaming: bool = False
    """Render while training, and keep nothing on disk: for corpora larger than that."""
    window: int = Field(2048, ge=1)
    """Conversations that are packed together and shuffled, when streaming."""
    workers: int = Field(1, ge=0)
    """Processes that render ahead, when streaming; 0 renders in the training process."""
    heldout_source: str | None = None
    """Conversations to evaluate on; without it `heldout_share` of the source is held out."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Share of the conversations held out, chosen by a hash of their ids; 0 holds none out, for counting a table."""
    heldout_limit: int = Field(256, ge=1)
    """Use at most this many held-out conversations."""
    min_clean_share: float = Field(0.98, ge=0, le=1)
    """`draftsmith prepare --lint` fails where a smaller share of documents is without fault."""
    min_trained_share: float = Field(0.01, ge=0, le=1)
    """Refuse data of which a smaller share of tokens is trained on."""
    cache: str = "runs/prepared"
    """Folder that keeps prepared blocks; they are reused when nothing that matters has changed."""

    def parts(self) -> list[SourceSection]:
        """The corpora."""
        if self.source is None:
            return self.mixture
        return [SourceSection(source=self.source, **{name: getattr(self, name) for name in PlaceSection.model_fields})]

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if (self.source is None) == (not self.mixture):
            given = "both" if self.source else "neither"
            raise ValueError(f"give one of `source` (a corpus) and `mixture` (several), got {given}")
        if self.source is None and any(getattr(self, name) for name in PlaceSection.model_fields):
            raise ValueError(f"with `mixture`, {', '.join(PlaceSection.model_fields)} belong to its corpora")
        check_cleaning(self.clean)
        return self
