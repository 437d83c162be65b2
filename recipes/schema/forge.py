"""Recipe of `draftsmith forge`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from .data import Section


class ForgeRecipe(Section):
    """Recipe that finds the fastest lossless setup for a target within a time budget."""

    kind: Literal["forge"]
    out: str = "runs/forge"
    """Output directory."""
    target: str
    """Directory or hub id of the target, or a `.gguf` file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Data type of the target's weights in measurements and in the result."""
    hours: float = Field(2.0, gt=0)
    """Approximate time budget in hours."""
    more_hours: float = Field(0.0, ge=0)
    """Additional hours for training the selected candidates. They can be added after a forge has finished."""
    template: str = "tokenizer"
    """Name of the chat template, or `tokenizer` for the target's own template."""
    template_options: dict[str, Any] = {}
    """Variables for the tokenizer's own chat template, such as `{enable_thinking: false}`. The variable `date` sets the
    current date in the template (default: 2024-07-26)."""
    prompts: list[str] = []
    """Files with prompts that represent the workload (default: from the documentation of installed packages)."""
    heldout_share: float = Field(0.05, gt=0, lt=1)
    """Fraction of the prompts that is held out for measurements."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Maximum length of the prompts in measurements, in tokens."""
    drafters: list[str] = []
    """Directories or hub ids of existing drafters, which are compared with the trained drafters."""
    temperature: list[Annotated[float, Field(ge=0)]] = Field([0.0], min_length=1)
    """Sampling temperatures to optimise for. Each has its own result."""
    batch: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)
    """Batch sizes (with an engine: numbers of concurrent requests) to optimise for. Each has its own result."""
    new_tokens: int = Field(64, ge=8)
    """Number of new tokens per prompt in measurements."""
    engine: Literal["vllm", "sglang", "llama.cpp"] | None = None
    """Serving engine for which the drafters are exported and tuned."""
    engine_options: str = ""
    """Additional arguments for the engine, such as `--dtype float32`."""
    llama_cpp: str | None = None
    """Directory of a llama.cpp checkout, whose converter is used to export drafters."""
    processes: int = Field(1, ge=1)
    """Number of training processes, one per GPU."""
    launch: str = ""
    """Additional options for `accelerate launch`, such as `--config_file zero2.yaml`."""
    seed: int = 0
    """Random seed."""

    @field_validator("temperature", "batch", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _check_launch(self) -> "ForgeRecipe":
        if self.launch and self.processes == 1:
            raise ValueError(f"`launch` is {self.launch!r}, but `processes` is 1: set the number of processes")
        return self
