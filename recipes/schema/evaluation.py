"""What a recipe may say: every field once, its meaning under it, its default beside it."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...data.sources.registry import find_corpus
from .data import PlaceSection, Section, check_cleaning
from .training import DrafterRecipe, HeadsRecipe, TableRecipe


class MethodSection(Section):
    """One row of an evaluation."""

    method: str
    """A method by name."""
    label: str | None = None
    """Name of the row; by default the method's, with the temperature where it has one of its own."""
    options: dict[str, Any] = {}
    """Options of the method, such as gamma; `decode/README.md` lists them. Two defaults of SLiM are not
    its paper's: `lengths: full` is its eq. 2 (`all` is its appendix C), `unseen_correlation: 0` its eq. 5."""
    temperature: float | None = Field(None, ge=0)
    """By default the recipe's. At 0 `mjsd` searches its beams where Algorithm 1 of arXiv 2407.09722 samples them: the
    paper has temperature 1 with `top_k: 20` and `top_p: 0.9` (appendix D)."""


def every_row(parts: Container[str], at: float, temperature: float | None) -> list[MethodSection]:
    """Return a row for each method, and variant of one, that these artifacts allow at a temperature."""
    from ...decode.methods import all_rows

    suffix = "" if temperature is None else f" T={temperature:g}"
    rows = []
    for method, options in all_rows(parts, at):
        label = " ".join([method, *map(str, options.values())]) + suffix if options else None
        rows.append(MethodSection(method=method, label=label, options=options, temperature=temperature))
    return rows


class _Decoding(Section):
    """What the recipes that decode share."""

    template: str = "vicuna-v1.1"
    """Chat template by name. A server has its own: then this only says whether an answer stands after a space, so that
    one space at its beginning is taken off."""
    template_options: dict[str, Any] = {}
    """Variables of the tokenizer's own chat template, such as `{enable_thinking: false}`; `date` is its day today,
    2024-07-26 by default."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily. `transformers serve` draws by chance only where the model's own settings say so."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all. Sent to a server only if it is not 0: not every server knows it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this mass."""
    device: str = "auto"
    """Where to decode: auto, cpu, cuda …"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Type of the weights; auto takes that of the files. int8: matrices are rounded to eight bits a weight, each
    row with a scale; CPUs read them as such, GPUs hold them in bfloat16."""
    stop: list[str] = []
    """Further tokens that end a text, beside those of the tokenizer, of the model's generation settings and of the
    template's end of turn."""
    seed: int = 0
    """Random numbers of sampling; each prompt's are its own, whatever is decoded before or beside it."""


class EvaluateRecipe(_Decoding):
    """Decode held-out prompts with several methods and compare them."""

    kind: Literal["evaluate"]
    out: str
    """The results file (.json)."""
    target: str
    """Folder or hub id of the target."""
    drafter: str | None = None
    """Folder or hub id of the drafter."""
    drafter_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] | None = None
    """Type of the drafters' weights; null: `dtype`. A narrower one drafts faster, and methods stay exact."""
    more_drafters: list[str] = []
    """Drafters beside the first: with the option `drafter: 2` a row drafts with their first; specinfer takes all."""
    heads: str | None = None
    """Folder or hub id of the prediction heads."""
    table: str | None = None
    """Folder or hub id of the correlation table."""
    prompts: str
    """Questions to answer: an evaluation set by name (`draftsmith prepare --list`), or conversations (a file, a folder
    or a hub id) whose first question is the prompt."""
    prompts_path: str | None = None
    """A local copy of the set that stands in for the hub."""
    groups: list[str] = []
    """Only prompts of these categories."""
    limit: int = Field(80, ge=1)
    """Prompts to decode, or conversations if every turn is asked."""
    turns: Literal["auto", "first", "all"] = "auto"
    """first: ask the first question of each conversation. all: ask every question, after the recorded answers or, where
    there are none, the target's own greedy ones. auto: all for chatalpaca, mt-bench and spec-bench."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are skipped."""
    max_new_tokens: int = Field(128, ge=1)
    """Tokens to generate for each prompt."""
    batch: int = Field(1, ge=1)
    """Prompts that are decoded together, those of like lengths. Then intervals are over batches, and a prompt's time is
    its share of its batch's; `ideal`, `cost_ratio`, FLOPs and joules are of one prompt at a time."""
    repeats: int = Field(1, ge=1)
    """Timed runs of each prompt with each method; medians are reported."""
    compare_with_transformers: bool = True
    """At temperature 0, run `transformers.generate` too, for its tokens and its speed."""
    energy: Literal["auto", "off"] = "auto"
    """auto: where something counts energy (NVML for GPUs, RAPL for processors), decode a few prompts again and again
    with each method, four windows of seconds each, and give joules a token; else say why there are none. off: no
    joules."""
    energy_batches: list[Annotated[int, Field(ge=1)]] = []
    """Batch sizes at which time and energy of the target's forwards are measured too (`--energy`); empty: none."""
    energy_runs: int = Field(300, ge=1)
    """Forwards to time at each of these batch sizes."""
    energy_context: int = Field(128, ge=1)
    """Tokens of context behind each input of these forwards."""
    device_map: str | None = None
    """Spread the target over several devices, as accelerate does: auto, balanced …; by default it lies on `device`."""
    methods: list[MethodSection] = Field(min_length=1)
    """Rows of the table; `autoregressive`, the baseline, must be one of them. `all`: every method that the artifacts
    allow at `temperature`, and, where that is 0, at temperature 1."""

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
        """All files, folders and hub ids that it names."""
        named = [self.target, self.drafter, *self.more_drafters, self.heads, self.table]
        return [source for source in (*named, self.prompts, self.prompts_path) if source is not None]

    def asks_every_turn(self) -> bool:
        """Whether later questions of a conversation are asked too."""
        corpus = find_corpus(self.prompts)
        return self.turns == "all" or (self.turns == "auto" and corpus is not None and corpus.every_turn)

    def labels(self) -> list[str]:
        """Names of the rows."""
        own = ["" if row.temperature is None else f" T={row.temperature:g}" for row in self.methods]
        return [row.label or row.method + suffix for row, suffix in zip(self.methods, own, strict=True)]

    def temperature_of(self, row: MethodSection) -> float:
        """At which a row is decoded."""
        return self.temperature if row.temperature is None else row.temperature

    @model_validator(mode="after")
    def _rows(self) -> EvaluateRecipe:
        labels = self.labels()
        for label in labels:
            if label == "transformers" or labels.count(label) > 1:
                raise ValueError(
                    f"a row of `methods` needs a `label`: another, or the reference run, is called {label!r}"
                )
        at = [(row.method, self.temperature_of(row)) for row in self.methods]
        compared = {temperature for method, temperature in at if method == "autoregressive"}
        missing = {temperature for _, temperature in at} - compared
        if missing:
            place = f"temperature {min(missing):g}"
            raise ValueError(f"`methods` must hold `autoregressive` at {place}: speedups are measured against it")
        if self.batch > 1 and self.compare_with_transformers:
            raise ValueError(
                f"`batch` is {self.batch}: set `compare_with_transformers: false`, which decodes one prompt"
            )
        return self


class CorpusSection(Section):
    """The corpus of a pair: documentation of the Python packages already installed, and files."""

    packages: list[str] = Field(min_length=1)
    """Packages to read besides the standard library; those that are not installed are skipped and named."""
    megabytes: float = Field(ge=0)
    """Text to take, spread over the packages; 0: none, but `files` alone."""
    files: list[str] = []
    """More questions, mixed in at random: files, folders, known corpora (`draftsmith prepare --list`) or hub ids."""
    heldout_share: float = Field(0.02, gt=0, lt=1)
    """Share of the documented objects, and of the rows of `files`, held out, chosen by a hash of their names."""
    vocab_size: int | None = Field(4096, ge=300)
    """Tokens of the byte-level BPE that is trained on it; null: none is trained, the target brings its own."""


class ServerSection(Section):
    """An OpenAI-compatible server: `transformers serve`, vLLM, SGLang, TGI, llama.cpp …"""

    url: str = Field(pattern="^https?://")
    """Where its API begins, such as http://127.0.0.1:8000/v1."""
    model: str
    """The model's name there."""
    concurrency: int = Field(16, ge=1)
    """Requests at a time."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that an answer may take; then it is asked for again, a few times."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; where it is not set, the word none is sent instead of one."""


class RegenerateRecipe(PlaceSection, _Decoding):
    """Replace the answers of a corpus by a target's own."""

    kind: Literal["regenerate"]
    out: str = Field(pattern=r"\.jsonl$")
    """The file of conversations (.jsonl); settings, errors and the recipe lie beside it."""
    source: str
    """The corpus whose questions are asked, as in a data section."""
    clean: dict[str, Any] = {}
    """What is cut and dropped before: the options of `draftsmith.data.cleaning.cleaner.Cleaning`."""
    target: str | None = None
    """Folder or hub id of the target, to decode in this process."""
    server: ServerSection | None = None
    """A server to ask instead."""
    system: str | None = None
    """System text for conversations that bring none, kept with them; null: what the template says by itself."""
    max_new_tokens: int = Field(1024, ge=1)
    """Tokens of an answer at most."""
    on_length: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that this limit cut: `drop` leaves it out with the turns that follow it, for a
    conversation written with it would teach to stop there."""
    sampled: float = Field(0.0, ge=0, le=1)
    """Share of the questions, chosen by their seeds, that are answered at temperature 1, whatever `temperature` says: a
    drafter for both learns from both."""
    batch: int = Field(16, ge=1)
    """Conversations decoded together (in this process); one that has ended makes room for the next."""

    @model_validator(mode="after")
    def _one_of_them(self) -> RegenerateRecipe:
        if (self.target is None) == (self.server is None):
            given = "both" if self.target else "neither"
            raise ValueError(f"give one of `target` (decode here) and `server` (ask one), got {given}")
        check_cleaning(self.clean)
        return self


class QuickstartRecipe(Section):
    """The whole main job on text that is already here: corpus, tokenizer, target, answers, drafter, heads, table,
    evaluation."""

    kind: Literal["quickstart"]
    out: str = "runs/quickstart"
    """Folder of everything; `{out}` in the parts below stands for it."""
    minutes: float = Field(8.0, gt=0)
    """What the run may take on two cores, about: training steps and `answers.limit` are those given below times minutes
    / `reference_minutes`."""
    reference_minutes: float = Field(8.0, gt=0)
    """What it takes with those as they stand there."""
    seed: int = 0
    """Fixes the corpus, the initial weights and the order of the data."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """In which the target answers and drafter, heads and EAGLE-3's layer are trained; auto: bfloat16 where the GPU or
    the processor has it, float32 elsewhere. The evaluation is not touched."""
    corpus: CorpusSection
    target: DrafterRecipe | str
    """How it is trained; or a model that is there: a folder or hub id, to which `{out}/target` then is a link, or a
    `.gguf` file, which is converted to it. `package:NAME/FILE.gguf`: a file inside an installed package."""
    answers: RegenerateRecipe
    """The target's own answers, to learn from."""
    drafter: DrafterRecipe
    distilled: DrafterRecipe | None = None
    """A second stage from the first, which is then no more than that: the artifact of this one is the drafter."""
    eagle: HeadsRecipe | None = None
    """EAGLE-3's layer, which the evaluation names as a drafter of its own."""
    heads: HeadsRecipe
    table: TableRecipe
    evaluate: EvaluateRecipe
