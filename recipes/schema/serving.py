"""What a measurement of servers may say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .data import Section

_URL = "^https?://"


class ServedRecipe(Section):
    """Ask an OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`), and another beside it."""

    kind: Literal["served"]
    out: str = Field("served.json", pattern=r"\.json$")
    """The results file."""
    server: str = Field(pattern=_URL)
    """Where its API begins, such as http://127.0.0.1:8000/v1."""
    baseline: str | None = Field(None, pattern=_URL)
    """A server of the same model without drafts: the two are asked in turns, and compared by prompt."""
    expect: str | None = Field(None, pattern=r"\.json$")
    """Results of `draftsmith evaluate` with the same drafter: what should be accepted, and how prompts are read."""
    model: str | None = None
    """The model's name on the server; null: the first that it names."""
    baseline_model: str | None = None
    """That on the baseline, in the same way; `transformers serve MODEL` names none, and knows its path alone."""
    prompts: str = "spec-bench"
    """As in a recipe of kind evaluate."""
    prompts_path: str | None = None
    """A local copy of the set."""
    groups: list[str] = []
    """Only prompts of these categories."""
    limit: int = Field(80, ge=1)
    """Prompts to ask."""
    concurrency: list[int] = [1]
    """Requests at a time, one measurement each."""
    rate: list[float] = []
    """Instead: requests that begin a second, at random moments (Poisson), however many are under way."""
    max_new_tokens: int = Field(128, ge=1)
    """Tokens of an answer at most."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    seed: int = 0
    """Of sampling and of the moments of `rate`."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that an answer may take."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; where it is not set, the word none is sent instead of one."""

    @model_validator(mode="after")
    def _loads(self) -> ServedRecipe:
        if self.baseline_model is not None and self.baseline is None:
            raise ValueError(f"`baseline_model` is {self.baseline_model!r}, and there is no `baseline`")
        if not (self.rate or self.concurrency) or min([*self.concurrency, *self.rate], default=1) <= 0:
            raise ValueError(f"`concurrency` {self.concurrency} and `rate` {self.rate}: give numbers above 0")
        return self

    def sources(self) -> list[str]:
        """All files, folders and hub ids that it names."""
        return [source for source in (self.prompts, self.prompts_path, self.expect) if source is not None]
