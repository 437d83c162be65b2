"""What a forge may be told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from .data import Section


class ForgeRecipe(Section):
    """A target in, the fastest lossless set-up out, within a budget."""

    kind: Literal["forge"]
    out: str = "runs/forge"
    """Folder of everything."""
    target: str
    """Folder or hub id of the target, or a `.gguf` file."""
    hours: float = Field(2.0, gt=0)
    """What it may take, about."""
    more_hours: float = Field(0.0, ge=0)
    """Beside these, for the training of what was chosen: a finished forge goes on with it."""
    template: str = "tokenizer"
    """Chat template by name; `tokenizer`: the target's own."""
    prompts: list[str] = []
    """Files of questions such as will be asked; none: they are made of the documentation of installed packages."""
    heldout_share: float = Field(0.05, gt=0, lt=1)
    """Share of the questions that is held out, to measure on."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer questions are not measured on."""
    drafters: list[str] = []
    """Drafters that there are already, tried beside what is trained."""
    temperature: list[Annotated[float, Field(ge=0)]] = Field([0.0], min_length=1)
    """At which it shall be fast, each by itself."""
    batch: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)
    """Texts at a time with which it shall be fast, each by itself; of an engine, requests."""
    new_tokens: int = Field(64, ge=8)
    """Tokens of an answer when it is measured."""
    engine: Literal["vllm", "sglang", "llama.cpp"] | None = None
    """What shall run it: what was trained is exported for it and measured there."""
    engine_options: str = ""
    """More for the engine, such as `--dtype float32`."""
    llama_cpp: str | None = None
    """A checkout of llama.cpp, whose converter writes drafts for it."""
    processes: int = Field(1, ge=1)
    """That train together, one a GPU, each on blocks of its own."""
    launch: str = ""
    """More options of the `accelerate launch` that starts these, such as `--config_file zero2.yaml`."""
    seed: int = 0
    """Of everything that is drawn."""

    @field_validator("temperature", "batch", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """One number as well as several."""
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _launched(self) -> ForgeRecipe:
        if self.launch and self.processes == 1:
            raise ValueError(f"`launch` is {self.launch!r}, and `processes` 1 is launched by nobody: say how many")
        return self
