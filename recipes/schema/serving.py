"""Recipe of `draftsmith bench`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .data import Section

_URL = "^https?://"


class BenchRecipe(Section):
    """Recipe that benchmarks an OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`)."""

    kind: Literal["bench"]
    out: str = Field("bench.json", pattern=r"\.json$")
    """Results file."""
    server: str = Field(pattern=_URL)
    """Base URL of the server's API, such as http://127.0.0.1:8000/v1."""
    baseline: str | None = Field(None, pattern=_URL)
    """Base URL of a server that runs the same model without drafting. Requests alternate between the two servers."""
    model: str | None = None
    """Name of the model on the server (default: the first model that the server lists)."""
    baseline_model: str | None = None
    """Name of the model on the baseline server. `transformers serve MODEL` lists no models: set the path MODEL."""
    prompts: str = "spec-bench"
    """Evaluation set, file, directory or hub id of the prompts, as in a recipe of kind `evaluate`."""
    prompts_path: str | None = None
    """Local copy of the evaluation set, used instead of the hub."""
    groups: list[str] = []
    """Categories of prompts to use (default: all)."""
    limit: int = Field(80, ge=1)
    """Maximum number of prompts."""
    concurrency: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)
    """Numbers of concurrent requests. Each number is measured separately."""
    context: list[Annotated[int, Field(ge=1)]] = []
    """Approximate prompt lengths in tokens, each measured separately. Shorter prompts are extended with texts of other
    prompts (default: prompts are unchanged)."""
    max_new_tokens: int = Field(128, ge=1)
    """Maximum number of tokens per answer."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 decodes greedily."""
    seed: int = 0
    """Random seed for sampling."""
    timeout: float = Field(600.0, gt=0)
    """Timeout of a request in seconds."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that contains the API key. If it is not set, the key is `none`."""

    @model_validator(mode="after")
    def _loads(self) -> "BenchRecipe":
        if self.baseline_model is not None and self.baseline is None:
            raise ValueError(f"`baseline_model` requires `baseline`, got {self.baseline_model!r} without it")
        return self
