"""Schema of the recipes that decode: evaluations, regenerated responses and quickstarts."""

from collections.abc import Container
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...data.cleaning.cleaner import Cleaning
from ...data.sources.registry import find_corpus
from .data import PlaceSection, Section
from .errors import checked
from .training import DrafterRecipe, HeadsRecipe, TableRecipe


class MethodSection(Section):
    """Row of an evaluation: a decoding method with its options."""

    method: str
    """Name of the method."""
    label: str | None = None
    """Label of the row (default: the method, followed by the temperature if the row sets one)."""
    options: dict[str, Any] = {}
    """Options of the method, such as gamma (see `docs/methods`). The defaults of SLiM follow appendix C of its paper;
    set `lengths: full` for equation 2, and `unseen_correlation: 0` for equation 5."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature (default: the recipe's). At 0, `mjsd` uses a deterministic beam search. Its paper (arXiv
    2407.09722, appendix D) samples beams at temperature 1 with `top_k: 20` and `top_p: 0.9`."""


def every_row(parts: Container[str], at: float, temperature: float | None) -> list[MethodSection]:
    """Return a row for each method variant that `parts` support at temperature `at`. All rows set `temperature`."""
    from ...decode.methods import all_rows

    suffix = "" if temperature is None else f" T={temperature:g}"
    rows = []
    for method, options in all_rows(parts, at):
        label = " ".join([method, *map(str, options.values())]) + suffix if options else None
        rows.append(MethodSection(method=method, label=label, options=options, temperature=temperature))
    return rows


class _Decoding(Section):
    """Fields shared by all recipes that decode."""

    template: str = "vicuna-v1.1"
    """Name of the chat template, or `tokenizer` for the tokenizer's own template. A server applies its own template;
    this field then only determines whether a leading space is removed from answers."""
    template_options: dict[str, Any] = {}
    """Variables for the tokenizer's own chat template, such as `{enable_thinking: false}`. The variable `date` sets the
    current date in the template (default: 2024-07-26)."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 decodes greedily. `transformers serve` samples only if the generation config does so."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 uses all tokens, and is not sent to servers."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Total probability of the most likely tokens to sample from (nucleus sampling)."""
    device: str = "auto"
    """Device for decoding, such as auto, cpu, cuda or cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Data type of the weights; auto uses the type of the files. int8 quantises matrices to eight bits per weight, with
    one scale per row; CPUs compute with these integers, GPUs with bfloat16."""
    stop: list[str] = []
    """Additional tokens that end generation, besides the tokenizer's EOS token, the EOS tokens in
    `generation_config.json` and the end-of-turn token of the template."""
    seed: int = 0
    """Random seed. The random numbers of a prompt do not depend on the other prompts in its batch."""


class EvaluateRecipe(_Decoding):
    """Recipe that decodes held-out prompts with several methods and compares them."""

    kind: Literal["evaluate"]
    out: str
    """Results file (.json)."""
    target: str
    """Directory or hub id of the target."""
    drafter: str | None = None
    """Directory or hub id of the drafter."""
    drafter_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] | None = None
    """Data type of the drafters' weights (default: `dtype`). Lossless methods remain lossless with any type."""
    more_drafters: list[str] = []
    """Additional drafters. A row with the option `drafter: 2` uses the first of these; specinfer uses all drafters."""
    heads: str | None = None
    """Directory or hub id of the prediction heads."""
    table: str | None = None
    """Directory or hub id of the correlation table."""
    prompts: str
    """Name of an evaluation set (`draftsmith prepare --list`), or file, directory or hub id of conversations, whose
    first questions are the prompts."""
    prompts_path: str | None = None
    """Local copy of the evaluation set, used instead of the hub."""
    groups: list[str] = []
    """Categories of prompts to use (default: all)."""
    limit: int = Field(80, ge=1)
    """Maximum number of prompts, or of conversations if all questions are asked."""
    turns: Literal["auto", "first", "all"] = "auto"
    """Questions of a conversation to ask: first, all or auto (all for chatalpaca, mt-bench and spec-bench, else first).
    Later questions follow the recorded answers or, if there are none, the target's greedy answers."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Maximum length of a prompt in tokens. Longer prompts are skipped, and their number is reported."""
    max_new_tokens: int = Field(128, ge=1)
    """Maximum number of new tokens per prompt."""
    batch: int = Field(1, ge=1)
    """Batch size; prompts of similar lengths share a batch. Confidence intervals are over batches, and the time of a
    batch is divided among its prompts. `ideal`, `cost_ratio`, FLOPs and joules are measured at batch size 1."""
    repeats: int = Field(1, ge=1)
    """Number of timed runs of each prompt with each method. The medians are reported."""
    compare_with_transformers: bool = True
    """Whether to also run `transformers.generate` at temperature 0, and compare its tokens and speed."""
    energy: Literal["auto", "off"] = "auto"
    """Measurement of joules per token; off disables it. auto measures four windows of a few seconds for each method if
    an energy counter is available (NVML for GPUs, RAPL for processors), and logs a message otherwise."""
    energy_batches: list[Annotated[int, Field(ge=1)]] = []
    """Batch sizes at which the time and energy of the target's forward passes are measured (`--energy`)."""
    energy_runs: int = Field(300, ge=1)
    """Number of timed forward passes for each batch size in `energy_batches`."""
    energy_context: int = Field(128, ge=1)
    """Number of cached tokens per sequence in the forward passes of `energy_batches`."""
    device_map: str | None = None
    """Placement of the target on several devices (accelerate), such as auto or balanced (default: `device` only)."""
    methods: list[MethodSection] = Field(min_length=1)
    """Rows of the results table, including the baseline `autoregressive`. `all` selects every method that the given
    artifacts support, at `temperature` and, if this is 0, also at temperature 1."""

    @model_validator(mode="before")
    @classmethod
    def _all_methods(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("methods") != "all":
            return values
        parts = [part for part in ("drafter", "heads", "table") if values.get(part) is not None]
        temperature = values.get("temperature", 0.0)
        rows = every_row(parts, temperature, None) + ([] if temperature else every_row(parts, 1.0, 1.0))
        return values | {"methods": rows}

    def sources(self) -> list[str]:
        """Return the prompts and models of the recipe: files, directories and hub ids."""
        named = [self.target, self.drafter, *self.more_drafters, self.heads, self.table]
        return [source for source in (*named, self.prompts, self.prompts_path) if source is not None]

    def asks_every_turn(self) -> bool:
        """Return whether all questions of a conversation are asked, instead of only the first question."""
        corpus = find_corpus(self.prompts)
        return self.turns == "all" or (self.turns == "auto" and corpus is not None and corpus.every_turn)

    def labels(self) -> list[str]:
        """Return the labels of the rows."""
        own = ["" if row.temperature is None else f" T={row.temperature:g}" for row in self.methods]
        return [row.label or row.method + suffix for row, suffix in zip(self.methods, own, strict=True)]

    def temperature_of(self, row: MethodSection) -> float:
        """Return the sampling temperature of a row."""
        return self.temperature if row.temperature is None else row.temperature

    @model_validator(mode="after")
    def _rows(self) -> "EvaluateRecipe":
        labels = self.labels()
        for label in labels:
            if label == "transformers" or labels.count(label) > 1:
                raise ValueError(f"each of `methods` requires a unique `label`, not 'transformers', got {label!r}")
        at = [(row.method, self.temperature_of(row)) for row in self.methods]
        compared = {temperature for method, temperature in at if method == "autoregressive"}
        missing = {temperature for _, temperature in at} - compared
        if missing:
            setting = f"temperature {min(missing):g}"
            raise ValueError(f"`methods` must contain the baseline `autoregressive` at {setting} to compute speedups")
        if self.batch > 1 and self.compare_with_transformers:
            raise ValueError(f"`compare_with_transformers` requires `batch: 1`, got {self.batch}: set it to false")
        return self


class CorpusSection(Section):
    """Corpus of a quickstart: the documentation of installed Python packages, and additional files."""

    packages: list[str] = Field(min_length=1)
    """Packages to read in addition to the standard library; missing ones are skipped and logged."""
    megabytes: float = Field(ge=0)
    """Size of the documentation to read in megabytes, spread over the packages; 0 reads only `files`."""
    questions: int = Field(0, ge=0)
    """Number of questions on programming, mathematics and general topics to make from templates, and to mix in."""
    files: list[str] = []
    """Files, directories, names of corpora or hub ids with further questions, which are mixed in at random."""
    heldout_share: float = Field(0.02, gt=0, lt=1)
    """Fraction of the documented objects, of the questions and of the rows in `files` to hold out, which a hash of
    their names selects."""
    vocab_size: int | None = Field(4096, ge=300)
    """Vocabulary size of the byte-level BPE tokenizer to train on the corpus; null uses the target's tokenizer."""


class ServerSection(Section):
    """OpenAI-compatible server, such as `transformers serve`, vLLM, SGLang, TGI or llama.cpp."""

    url: str = Field(pattern="^https?://")
    """Base URL of the server's API, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model on the server."""
    concurrency: int = Field(16, ge=1)
    """Number of concurrent requests."""
    timeout: float = Field(600.0, gt=0)
    """Timeout of a request in seconds. A request that times out is repeated a few times."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that contains the API key. If it is not set, the key is `none`."""


class RegenerateRecipe(PlaceSection, _Decoding):
    """Recipe that regenerates the answers of a corpus with the target."""

    kind: Literal["regenerate"]
    out: str = Field(pattern=r"\.jsonl$")
    """Output file for the new conversations (.jsonl). Settings, errors and the recipe are written next to it."""
    source: str
    """Corpus whose questions are answered, as `source` in a data section."""
    clean: dict[str, Any] = {}
    """Cleaning options; see `draftsmith.data.cleaning.cleaner.Cleaning`."""
    target: str | None = None
    """Directory or hub id of the target, if it is decoded in this process."""
    server: ServerSection | None = None
    """Server that generates the answers, instead of a local target."""
    system: str | None = None
    """System prompt to add to conversations that have none (default: the system prompt of the template)."""
    max_new_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens per answer."""
    on_length: Literal["drop", "keep"] = "drop"
    """Treatment of answers that reach the token limit. `drop` removes them and all later turns, because a drafter would
    learn to end answers there."""
    sampled: float = Field(0.0, ge=0, le=1)
    """Fraction of the questions, selected by their seeds, that are answered at temperature 1 instead of `temperature`,
    for drafters that are used at both temperatures."""
    batch: int = Field(16, ge=1)
    """Batch size of local decoding. A finished conversation is replaced by the next one."""

    @model_validator(mode="after")
    def _check_source(self) -> "RegenerateRecipe":
        if (self.target is None) == (self.server is None):
            state = "both" if self.target else "neither"
            raise ValueError(f"set exactly one of `target` (decode locally) and `server`, got {state}")
        checked(Cleaning, self.clean, "clean")
        return self


class QuickstartRecipe(Section):
    """Recipe that runs all stages: corpus, tokenizer, target, responses, drafters, heads, table and evaluation."""

    kind: Literal["quickstart"]
    out: str = "runs/quickstart"
    """Output directory, which replaces `{out}` in the stages below."""
    minutes: float = Field(8.0, gt=0)
    """Approximate time budget in minutes on two CPU cores. The training steps of all stages and `answers.limit` are
    multiplied by `minutes` / `reference_minutes`. Below 1, this factor also reduces `evaluate.limit`."""
    reference_minutes: float = Field(8.0, gt=0)
    """Time in minutes for which the settings of the stages are designed."""
    seed: int = 0
    """Random seed for the corpus, the initial weights and the order of the data."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Data type for regenerating responses and for training drafters and heads, but not for the evaluation. auto uses
    bfloat16 if the hardware supports it, otherwise float32."""
    corpus: CorpusSection
    target: DrafterRecipe | str
    """Recipe that trains the target, or an existing model: a directory or hub id, to which `{out}/target` links, or a
    `.gguf` file, which is converted. `package:NAME/FILE.gguf` is a file in an installed package."""
    small_model: str | None = None
    """Existing model that can draft for the target, such as a smaller one of its family (default: none), named as
    `target`. `{out}/small_model` links to it, or contains the converted GGUF file."""
    gguf_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Data type of a target or small model that is converted from a GGUF file."""
    answers: RegenerateRecipe
    """Recipe that regenerates the responses with the target."""
    trimmed: DrafterRecipe | None = None
    """Recipe that reduces the vocabulary of the small model."""
    drafter: DrafterRecipe
    distilled: DrafterRecipe | None = None
    """Second stage of drafter training, which starts from the weights of the first stage."""
    eagle: HeadsRecipe | None = None
    """EAGLE-3 heads, which the evaluation uses as a drafter."""
    block: HeadsRecipe | None = None
    """DFlash or DSpark drafter."""
    heads: HeadsRecipe
    table: TableRecipe
    evaluate: EvaluateRecipe

    @model_validator(mode="after")
    def _trims_small_model(self) -> "QuickstartRecipe":
        if (self.small_model is None) != (self.trimmed is None):
            raise ValueError(f"set both `small_model` and `trimmed`, or none, got small_model {self.small_model!r}")
        return self
