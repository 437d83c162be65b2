"""What a recipe may say: every field once, its meaning under it, its default beside it. Only this folder sees YAML."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..data.cleaning_options import Cleaning, nearest_name


class Section(BaseModel):
    """Strict: an unknown key or a value of another type is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def check_cleaning(options: dict[str, Any]) -> None:
    """Raises ValueError for an option or value that `Cleaning` does not have, with the nearest that it has."""
    known = [field.name for field in dataclasses.fields(Cleaning)]
    for name in options:
        if name not in known:
            raise ValueError(f"`clean` has no option {name!r}{nearest_name(name, known)}")
    Cleaning(**options)


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


class SourceSection(PlaceSection):
    """One corpus."""

    source: str
    """A local file or folder (.json, .jsonl, .parquet, .arrow, .txt, packed with gzip or Zstandard too), the name of a
    known corpus (`draftsmith corpora`), or a hub id."""
    weight: float = Field(1.0, gt=0)
    """How often each row is used in an epoch; 0.25: a quarter of the rows."""


class DataSection(PlaceSection):
    """Where conversations come from and how they become token blocks."""

    source: str | None = None
    """A corpus, as in `mixture`; `path`, `config`, `split`, `revision`, `file` and `limit` are for it."""
    mixture: list[SourceSection] = []
    """Several corpora instead."""
    skip_broken: bool = False
    """Pass over rows that cannot be read, and count them."""
    clean: dict[str, Any] = {}
    """What is cut, dropped and rewritten: the options of `draftsmith.data.cleaning_options.Cleaning`."""
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
    heldout_share: float = Field(0.01, gt=0, lt=1)
    """Share of the conversations held out, chosen by a hash of their ids."""
    heldout_limit: int = Field(256, ge=1)
    """Use at most this many held-out conversations."""
    min_clean_share: float = Field(0.98, ge=0, le=1)
    """Refuse data of which a smaller share of documents is without fault (see `draftsmith prepare --lint`)."""
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
            raise ValueError("with `mixture`, path, config, split, revision, file and limit belong to its corpora")
        check_cleaning(self.clean)
        return self


class ModelSection(Section):
    """The model to train: an existing one, or a new one."""

    source: str | None = None
    """Folder or hub id of the model to start from."""
    config: dict[str, Any] | None = None
    """A new model instead: `model_type` and other fields of its transformers configuration."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights while training."""

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            given = "both" if self.source else "neither"
            raise ValueError(f"give one of `source` (start from a model) and `config` (make a new one), got {given}")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs `model_type`, such as llama")
        return self


class TrainSection(Section):
    """The training loop."""

    epochs: float = Field(1.0, gt=0)
    """Passes over the data; `steps` overrides it."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; needed when the data is streamed, whose length nobody knows."""
    global_batch: int = Field(128, ge=1)
    """Blocks per optimizer step, over all processes and micro batches."""
    micro_batch: int = Field(4, ge=1)
    """Blocks per forward of one process."""
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its warm-up."""
    warmup: float = Field(0.03, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    betas: list[float] = Field([0.9, 0.999], min_length=2, max_length=2)
    """AdamW's moment decays."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 never clips."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    evaluate_every: int = Field(200, ge=0)
    """Steps between evaluations on held-out data, the first before training; 0: only at the end."""
    save_every: int = Field(200, ge=0)
    """Steps between checkpoints, which is what a killed run may lose; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints stay on disk."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of the log."""
    seed: int = 0
    """Order of the data and initial weights."""


class MeasureSection(Section):
    """Acceptance measured while training, by decoding a fixed held-out sample at temperature 0."""

    prompts: int = Field(8, ge=0)
    """Held-out prompts to decode; 0 measures nothing."""
    new_tokens: int = Field(48, ge=1)
    """Tokens per prompt."""
    gamma: int = Field(4, ge=1)
    """Draft tokens a step (drafters)."""
    tree: str = "2x1"
    """Candidates by depth (heads)."""


class DrafterRecipe(Section):
    """Train a causal language model: a drafter, or a target from scratch."""

    kind: Literal["drafter"]
    out: str
    """Folder of the artifact; logs and checkpoints lie beside it in `<out>.state`."""
    model: ModelSection
    target: str | None = None
    """Folder or hub id of the model to draft for; the teacher of the distillation objectives."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; by default the target's, else the model's."""
    objective: dict[str, float] = {"cross-entropy": 1.0}
    """Objectives by name with their weights: cross-entropy, forward-kl, total-variation."""
    data: DataSection
    train: TrainSection = TrainSection()
    measure: MeasureSection = MeasureSection()

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.target or str(self.model.source)

    @model_validator(mode="after")
    def _teacher(self) -> DrafterRecipe:
        if self.tokenizer is None and self.target is None and self.model.source is None:
            raise ValueError("a new model without a target needs `tokenizer`")
        taught = sorted(set(self.objective) - {"cross-entropy"})
        if taught and self.target is None:
            raise ValueError(f"objective {taught[0]!r} needs a `target` to learn from")
        return self


class HeadsRecipe(Section):
    """Train Medusa-1 / SLiM prediction heads on a frozen target."""

    kind: Literal["heads"]
    out: str
    """Folder of the artifact; logs and checkpoints lie beside it in `<out>.state`."""
    target: str
    """Folder or hub id of the model that the heads sit on."""
    num_heads: int = Field(4, ge=1)
    """Head k predicts the token k + 2 places ahead (k from 0)."""
    num_layers: int = Field(1, ge=0)
    """Residual blocks a head."""
    weight_decay_by_head: float = Field(0.8, gt=0)
    """Head k's loss counts this to the power of k (so the first head counts 1)."""
    data: DataSection
    train: TrainSection = TrainSection(learning_rate=1e-3, warmup=0.1)
    measure: MeasureSection = MeasureSection()

    @property
    def tokenizer_source(self) -> str:
        return self.target

    @model_validator(mode="after")
    def _tree(self) -> HeadsRecipe:
        depth = self.measure.tree.count("x") + 1
        if self.measure.prompts and depth > self.num_heads:
            raise ValueError(f"`measure.tree` is {depth} levels deep, and there are {self.num_heads} heads")
        return self


class TableRecipe(Section):
    """Count the bigram correlation table of a corpus (SLiM, eq. 5)."""

    kind: Literal["table"]
    out: str
    """Folder of the artifact."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    data: DataSection

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer


class MethodSection(Section):
    """One row of an evaluation."""

    method: str
    """A method by name."""
    label: str | None = None
    """Name of the row; by default the method's, with the temperature where it has one of its own."""
    options: dict[str, Any] = {}
    """Settings of the method, such as gamma."""
    temperature: float | None = Field(None, ge=0)
    """By default the recipe's."""


class EvaluateRecipe(Section):
    """Decode held-out prompts with several methods and compare them."""

    kind: Literal["evaluate"]
    out: str
    """The results file (.json)."""
    target: str
    """Folder or hub id of the target."""
    drafter: str | None = None
    """Folder or hub id of the drafter."""
    more_drafters: list[str] = []
    """Drafters beside the first, for methods that take several (specinfer)."""
    heads: str | None = None
    """Folder of the prediction heads."""
    table: str | None = None
    """Folder of the correlation table."""
    prompts: str
    """Questions to answer: a known evaluation set by name (`draftsmith corpora`), or conversations whose first question
    is the prompt: a file, a folder or a hub id."""
    prompts_path: str | None = None
    """A local copy of the set that stands in for the hub."""
    groups: list[str] = []
    """Only prompts of these categories."""
    template: str = "vicuna-v1.1"
    """Chat template by name."""
    limit: int = Field(80, ge=1)
    """Prompts to decode."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are passed over."""
    max_new_tokens: int = Field(128, ge=1)
    """Tokens to generate for each prompt."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this mass."""
    repeats: int = Field(1, ge=1)
    """Timed runs of each prompt with each method; medians are reported."""
    compare_with_transformers: bool = True
    """At temperature 0, run `transformers.generate` too, for its tokens and its speed."""
    device: str = "auto"
    """Where to decode: auto, cpu, cuda …"""
    device_map: str | None = None
    """Spread the target over several devices, as accelerate does: auto, balanced …; by default it lies on `device`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto takes that of the files."""
    seed: int = 0
    """Random numbers of sampling."""
    methods: list[MethodSection] = Field(min_length=1)
    """Rows of the table; `autoregressive`, the baseline, must be one of them."""

    def labels(self) -> list[str]:
        """Names of the rows."""
        own = ["" if row.temperature is None else f" T={row.temperature:g}" for row in self.methods]
        return [row.label or row.method + suffix for row, suffix in zip(self.methods, own, strict=True)]

    @model_validator(mode="after")
    def _rows(self) -> EvaluateRecipe:
        labels = self.labels()
        double = sorted({label for label in labels if labels.count(label) > 1})
        if "transformers" in labels:
            raise ValueError("no row of `methods` may be called 'transformers': that is the name of the reference run")
        if double:
            raise ValueError(f"two rows of `methods` are both called {double[0]!r}: give one of them a `label`")
        temperatures = [self.temperature if row.temperature is None else row.temperature for row in self.methods]
        compared = {
            place for row, place in zip(self.methods, temperatures, strict=True) if row.method == "autoregressive"
        }
        missing = sorted(set(temperatures) - compared)
        if missing:
            raise ValueError(
                f"`methods` must hold `autoregressive` at temperature {missing[0]:g}: speedups are measured against it"
            )
        return self


class CorpusSection(Section):
    """The corpus of the embedded pair: documentation of the Python packages already installed."""

    packages: list[str] = Field(min_length=1)
    """Packages to read besides the standard library; those that are not installed are passed over and named."""
    megabytes: float = Field(gt=0)
    """Text to take, spread over the packages."""
    heldout_share: float = Field(0.02, gt=0, lt=1)
    """Share of the documented objects held out, chosen by a hash of their names."""
    vocab_size: int = Field(4096, ge=300)
    """Tokens of the byte-level BPE that is trained on it."""


class QuickstartRecipe(Section):
    """The whole main job on text that is already here: corpus, tokenizer, target, drafter, heads, table, evaluation."""

    kind: Literal["quickstart"]
    out: str = "runs/quickstart"
    """Folder of everything; `{out}` in the parts below stands for it."""
    minutes: float = Field(8.0, gt=0)
    """Training steps are those given below times minutes / 8: the whole run then takes about so long on two cores."""
    seed: int = 0
    """Fixes the corpus, the initial weights and the order of the data."""
    corpus: CorpusSection
    target: DrafterRecipe
    drafter: DrafterRecipe
    """First stage: cross entropy."""
    distilled: DrafterRecipe
    """Second stage, from the first: distillation from the target. Its artifact is the drafter."""
    heads: HeadsRecipe
    table: TableRecipe
    evaluate: EvaluateRecipe


class ServerSection(Section):
    """An OpenAI-compatible server: `transformers serve`, vLLM, SGLang, TGI, llama.cpp …"""

    url: str = Field(pattern="^https?://")
    """Where its API begins, such as http://127.0.0.1:8000/v1."""
    model: str
    """The model's name there."""
    concurrency: int = Field(16, ge=1)
    """Requests at a time."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Requests begun a minute at most, those that are tried again included; null: as many as there are."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that an answer may take; then it is asked for again, a few times."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; where it is not set, the word none is sent instead of one."""


class RegenerateRecipe(PlaceSection):
    """Replace the answers of a corpus by a target's own."""

    kind: Literal["regenerate"]
    out: str = Field(pattern=r"\.jsonl$")
    """The file of conversations (.jsonl); settings, errors and the recipe lie beside it."""
    source: str
    """The corpus whose questions are asked, as in a data section."""
    clean: dict[str, Any] = {}
    """What is cut and dropped before: the options of `draftsmith.data.cleaning_options.Cleaning`."""
    target: str | None = None
    """Folder or hub id of the target, to decode in this process."""
    server: ServerSection | None = None
    """A server to ask instead."""
    template: str = "vicuna-v1.1"
    """Chat template by name. A server has its own: then this only says whether an answer stands after a space, so that
    one space at its beginning is taken off."""
    system: str | None = None
    """System text for conversations that bring none, kept with them; null: what the template says by itself."""
    max_new_tokens: int = Field(1024, ge=1)
    """Tokens of an answer at most."""
    on_length: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that this limit cut: `drop` leaves it out with the turns that follow it, for a
    conversation written with it would teach to stop there."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily. `transformers serve` draws by chance only where the model's own settings say so."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all. Sent to a server only if it is not 0: not every server knows it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this mass."""
    seed: int = 0
    """Random numbers of sampling; each answer's are its own, whatever is decoded beside it."""
    batch: int = Field(8, ge=1)
    """Conversations decoded together (in this process)."""
    method: str = "autoregressive"
    """How to decode in this process, by name; speculative methods need the drafter."""
    options: dict[str, Any] = {}
    """Settings of the method, such as gamma."""
    drafter: str | None = None
    """Folder or hub id of the drafter."""
    device: str = "auto"
    """Where to decode: auto, cpu, cuda …"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto takes that of the files."""

    @model_validator(mode="after")
    def _one_of_them(self) -> RegenerateRecipe:
        if (self.target is None) == (self.server is None):
            given = "both" if self.target else "neither"
            raise ValueError(f"give one of `target` (decode here) and `server` (ask one), got {given}")
        check_cleaning(self.clean)
        only_here = ("batch", "method", "options", "drafter", "device", "dtype")
        fields = type(self).model_fields
        useless = [name for name in only_here if getattr(self, name) != fields[name].default]
        if self.server is not None and useless:
            raise ValueError(f"`{useless[0]}` is for decoding in this process, and a `server` was given")
        return self


Recipe = DrafterRecipe | HeadsRecipe | TableRecipe | EvaluateRecipe | RegenerateRecipe | QuickstartRecipe
RECIPES: dict[str, type[Section]] = {
    "drafter": DrafterRecipe,
    "heads": HeadsRecipe,
    "table": TableRecipe,
    "evaluate": EvaluateRecipe,
    "regenerate": RegenerateRecipe,
    "quickstart": QuickstartRecipe,
}
