"""Schema of the data sections of recipes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...checkpoints.storage.redaction import without_secrets
from ...data.cleaning.cleaner import Cleaning
from .errors import checked


class Section(BaseModel):
    """Base class of recipe sections. Unknown keys and values of the wrong type raise a validation error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def recorded(self, **parts: Any) -> dict[str, Any]:
        """Return the section as JSON values without secrets. `parts` are arguments of pydantic's `model_dump`."""
        return dict(without_secrets(self.model_dump(mode="json", **parts)))


class PlaceSection(Section):
    """Location of a corpus, and the number of conversations to use."""

    path: str | None = None
    """Local copy to use instead of the hub dataset."""
    config: str | None = None
    """Configuration of a hub dataset. The defaults of `config`, `split`, `revision` and `file` depend on the corpus."""
    split: str | None = None
    """Split of a hub dataset, or of the data files in a directory."""
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
    """Number of times that each row is used per epoch. With 0.25, a quarter of the rows is used."""


class DataSection(PlaceSection):
    """Training data: corpora, cleaning, chat template, packing and held-out data."""

    source: str | None = None
    """Corpus, as `source` in `mixture`. `path`, `config`, `split`, `revision`, `file` and `limit` apply to it."""
    mixture: list[SourceSection] = []
    """Several corpora to mix, instead of `source`."""
    clean: dict[str, Any] = {}
    """Cleaning options; see `draftsmith.data.cleaning.cleaner.Cleaning`."""
    template: str = "vicuna-v1.1"
    """Name of the chat template, or `tokenizer` for the tokenizer's own template."""
    template_options: dict[str, Any] = {}
    """Variables for the tokenizer's own chat template, such as `{enable_thinking: false}`. The variable `date` sets the
    current date in the template (default: 2024-07-26)."""
    last_turn_only: bool = False
    """Whether to train only on the last answer of a conversation."""
    block_tokens: int = Field(2048, ge=8)
    """Length of a training block in tokens. Longer conversations are split between exchanges."""
    packing: Literal["best-fit", "pad"] = "best-fit"
    """Packing method: best-fit fills blocks with whole documents; pad uses one document per block."""
    heldout_source: str | None = None
    """Corpus of held-out conversations (default: `heldout_share` of the training data)."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Fraction of the conversations to hold out, selected by a hash of their ids, or of ids and contents if there are
    few distinct ids. 0 is allowed only for counting a table."""
    heldout_limit: int = Field(256, ge=1)
    """Maximum number of held-out conversations."""
    min_clean_share: float = Field(0.98, ge=0, le=1)
    """Minimum fraction of documents without faults, which `draftsmith prepare --lint` checks."""
    min_trained_share: float = Field(0.01, ge=0, le=1)
    """Minimum fraction of supervised tokens in the training data."""
    cache: str = "runs/prepared"
    """Directory for prepared blocks, which are reused if source, options, template and tokenizer are unchanged."""

    def parts(self) -> list[SourceSection]:
        """Return the corpora in `mixture`, or the single corpus `source`."""
        if self.source is None:
            return self.mixture
        return [SourceSection(source=self.source, **{name: getattr(self, name) for name in PlaceSection.model_fields})]

    @model_validator(mode="after")
    def _consistent(self) -> "DataSection":
        if (self.source is None) == (not self.mixture):
            state = "both" if self.source else "neither"
            raise ValueError(f"set exactly one of `source` (a corpus) and `mixture` (several), got {state}")
        if self.source is None and any(getattr(self, name) for name in PlaceSection.model_fields):
            raise ValueError(f"`mixture`: set {', '.join(PlaceSection.model_fields)} in each corpus instead")
        checked(Cleaning, self.clean, "clean")
        return self
