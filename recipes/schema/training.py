"""Schema of training recipes and their sections."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import Field, create_model, model_validator

from ...train.config import FitConfig, Medusa2, OnPolicy, Parallel
from .data import DataSection, Section


def _section(settings: type, *excluded: str) -> Any:
    """Create a section class with the fields, defaults and limits of a dataclass in `train.config`."""
    hints = get_type_hints(settings)
    known: dict[str, Any] = {}
    for item in fields(settings):
        if item.name not in excluded:
            strict = False if isinstance(item.default, tuple) else None  # YAML has lists only
            known[item.name] = (hints[item.name], Field(item.default, strict=strict, **item.metadata))
    return create_model(f"_{settings.__name__}", __base__=Section, **known)


if TYPE_CHECKING:

    class _Loop(Section, FitConfig): ...

    class _Medusa2(Section, Medusa2): ...

    class _OnPolicy(Section, OnPolicy): ...

    class _Parallel(Section, Parallel): ...

else:
    _Loop = _section(FitConfig, "steps", "keep_best")
    _Medusa2, _OnPolicy = _section(Medusa2), _section(OnPolicy, "stop_ids")
    _Parallel = _section(Parallel, "token")


class LoraSection(Section):
    """LoRA adapter that is trained with peft instead of the whole model (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(16, ge=1)
    """Rank of each adapter matrix."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the adapter's scale alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability before each adapter."""
    targets: list[str] = []
    """Suffixes of the names of linear layers to adapt, such as q_proj (default: all except the output projection)."""
    export: Literal["merged", "adapter"] = "merged"
    """Content of the artifact: the model with the adapter merged, or the adapter only."""


class VocabularySection(Section):
    """Draft vocabulary, which reduces the size of the drafter's output layer.

    In small drafters, this layer accounts for most of the cost. Lossless methods remain lossless.
    """

    tokens: int = Field(ge=1)
    """Number of tokens that can be drafted: the most frequent supervised tokens in the data. Other tokens are valid
    inputs, but they are never drafted (FR-Spec: Zhao et al. 2025, arXiv 2502.14856)."""


class ParallelSection(_Parallel):
    """Parallel drafting of several tokens in one forward pass (PARD). Autoregressive drafting remains possible.

    See `train.config.Parallel`.
    """

    token: int | None = Field(None, ge=0)  # type: ignore[assignment]
    """Id of the mask token (default: the model's mask token, or the rarest token in the data)."""


class ModelSection(Section):
    """Model to train: an existing model, some of its layers, or a new model."""

    source: str | None = None
    """Directory or hub id of the initial model."""
    layers: list[int] = []
    """Layers of `source` to keep, counted from 0, to make a drafter from a target (default: all layers)."""
    config: dict[str, Any] | None = None
    """Configuration of a new model: `model_type` and other fields of its transformers configuration."""
    vocabulary: VocabularySection | None = None
    """Draft vocabulary (default: the draft vocabulary of `source`, or the whole vocabulary)."""
    freeze_embeddings: bool = False
    """Whether to freeze the token embeddings and the output projection."""
    lora: LoraSection | None = None
    """LoRA adapter to train (default: train the whole model)."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation of transformers; auto uses SDPA if the model supports it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights during training."""

    @model_validator(mode="after")
    def _check_source(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            state = "both" if self.source else "neither"
            raise ValueError(f"set exactly one of `source` (an existing model) and `config` (a new model), got {state}")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` requires `model_type`, such as llama")
        if self.layers and (self.source is None or min(self.layers) < 0 or self.layers != sorted(set(self.layers))):
            raise ValueError(f"`layers` must be distinct, ascending layers of `source`, got {self.layers}")
        if self.lora is not None and (self.config is not None or self.freeze_embeddings):
            raise ValueError("`lora` requires `source` and freezes it: remove `config` and `freeze_embeddings`")
        return self


class TeacherSection(Section):
    """Settings for the target as the teacher of distillation objectives."""

    temperature: float = Field(1.0, gt=0)
    """Temperature that divides the logits of teacher and student."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to distil. All other tokens count as one event. 0 distils all tokens."""
    cache: str | None = None
    """Directory of a cache of the target's `top_k` log-probabilities, written by `draftsmith prepare --teacher`. With a
    cache, the target runs only once for all epochs and drafters."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Data type of the target's weights; auto uses the type of the files. int8 is as in `evaluate`."""
    batch: int = Field(4, ge=1)
    """Number of blocks per forward pass when the cache is written."""

    @model_validator(mode="after")
    def _consistent(self) -> TeacherSection:
        if self.cache is not None and not self.top_k:
            raise ValueError("`cache` requires `top_k`, since full distributions are too large to store")
        if self.top_k and self.temperature != 1:
            raise ValueError(f"`top_k` requires temperature 1, got {self.temperature}")
        return self


class OnPolicySection(_OnPolicy):
    """Settings for on-policy distillation on samples of the drafter; see `train.config.OnPolicy`."""


class TrainSection(_Loop):
    """Settings of the training loop; see also `train.config.FitConfig`."""

    epochs: float = Field(1.0, gt=0)
    """Number of passes over the data; `steps` overrides it."""
    steps: int | None = Field(None, ge=0)  # type: ignore[assignment]
    """Number of optimizer steps. With 0, the artifact contains the initial weights."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Experiment trackers to log to, in addition to the log file."""

    def fit_config(self, steps: int, keep_best: str | None) -> FitConfig:
        """Return the settings of the training loop. `keep_best` is the metric that selects the best weights."""
        names = (item.name for item in fields(FitConfig) if item.name not in ("steps", "keep_best"))
        return FitConfig(steps=steps, keep_best=keep_best, **{name: getattr(self, name) for name in names})


class HeadsTrainSection(TrainSection):
    """Settings of the training loop with the defaults of Medusa-1 (Cai et al. 2024, arXiv 2401.10774)."""

    learning_rate: float = Field(1e-3, gt=0)
    warmup: float = Field(0.1, ge=0, lt=1)


class MeasureSection(Section):
    """Measurement of acceptance on a fixed sample of held-out prompts during training."""

    prompts: int = Field(16, ge=0)
    """Number of held-out prompts to decode; 0 decodes none. With fewer than 8, the last weights are kept."""
    new_tokens: int = Field(48, ge=1)
    """Number of new tokens per prompt."""
    general: str | None = None
    """File, hub id or name of a second prompt set, such as mt-bench. It shows what a draft forgets that is adapted to
    other data: its metrics start with `general_`, and do not select weights."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 decodes greedily."""
    gamma: int = Field(4, ge=1)
    """For drafters: number of draft tokens per step."""
    tree: str = "2x1"
    """For heads: number of candidates at each depth, or tree paths such as `0, 1, 0.0`; at most `num_heads` deep."""
    sequences: int = Field(4, ge=0)
    """For heads: number of sequences of SLiM, which is measured in addition to Medusa; 0 disables SLiM."""
    table: str | None = None
    """Directory of the correlation table of SLiM. Without a table, r is 1 and all sequences have maximum length."""
    blocks: int = Field(64, ge=0)
    """Number of held-out blocks for computing losses and teacher-forced agreement; 0 disables them."""
    keep: Literal["best", "last"] = "best"
    """Weights to save: the weights with the most tokens per step in an evaluation, or the last weights."""


Weight = float | list[float]
"""Weight of an objective: a number, or [start, end] for a linear change. An optional third number is the fraction of
the run after which `end` is reached."""


class _Recipe(Section):
    """Fields shared by the recipes of drafters and heads."""

    kind: Literal["drafter", "heads"]
    out: str
    """Output directory of the artifact. Logs and checkpoints are written to `<out>.state`."""
    objective: dict[str, Weight] = {"cross-entropy": 1.0}
    """Mapping from objectives (`draftsmith.train.losses.objectives.OBJECTIVES`) to their weights. cross-entropy learns
    from the text, and all others learn from the target's distribution."""
    data: DataSection
    measure: MeasureSection = MeasureSection()

    @property
    def distils(self) -> bool:
        """True if an objective learns from the target's distributions."""
        return set(self.objective) != {"cross-entropy"}


class DrafterRecipe(_Recipe):
    """Recipe that trains a language model: a drafter, or a target from scratch."""

    kind: Literal["drafter"]
    model: ModelSection
    target: str | None = None
    """Directory or hub id of the target, which is the teacher of distillation objectives."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer (default: the target or, if there is none, the model)."""
    teacher: TeacherSection = TeacherSection()
    on_policy: OnPolicySection | None = None
    """On-policy distillation (default: none)."""
    parallel: ParallelSection | None = None
    """Parallel drafting (default: none)."""
    train: TrainSection = TrainSection()

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.target or str(self.model.source)

    @model_validator(mode="after")
    def _teacher(self) -> DrafterRecipe:
        if self.tokenizer is None and self.target is None and self.model.source is None:
            raise ValueError("a new model without a target requires `tokenizer`")
        taught = sorted(set(self.objective) - {"cross-entropy"})
        if taught and self.target is None:
            raise ValueError(f"objective {taught[0]!r} requires a `target`")
        if self.model.attention.startswith("flash") and self.model.dtype == "float32" and self.train.precision == "no":
            raise ValueError(f"`model.attention: {self.model.attention}` requires `train.precision: bf16`")
        tokens = self.model.vocabulary.tokens if self.model.vocabulary else None
        if tokens is not None and self.teacher.top_k > tokens:
            raise ValueError(f"`teacher.top_k` must be at most {tokens} (vocabulary.tokens), got {self.teacher.top_k}")
        if self.on_policy is not None and (not taught or self.teacher.cache is not None):
            needed = "no `teacher.cache`" if taught else "an objective that learns from the target"
            raise ValueError(f"`on_policy` requires {needed}, since only the target can score the drafter's samples")
        return self


class HiddenSection(Section):
    """Hidden states of the target that heads read. They are computed in every step or cached on disk."""

    cache: str | None = None
    """Directory of a cache of the target's hidden states, written by `draftsmith prepare --teacher`. With a cache, the
    target runs only once for all epochs and types of heads."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the cached states."""
    batch: int = Field(4, ge=1)
    """Number of blocks per forward pass when the cache is written."""


class BaseSection(_Medusa2):
    """Settings for training the target jointly with its heads (Medusa-2); see `train.config.Medusa2`.

    The first stage trains the heads only. The loss of the second stage is `heads_weight` · Σ losses of the heads +
    `label_weight` · cross entropy + `kl_weight` · KL(original ‖ target); the weight of the heads rises from 0.
    """

    lora: LoraSection = LoraSection()
    """LoRA adapter of the target, which is stored in the folder `base` of the artifact."""

    @model_validator(mode="after")
    def _anchored(self) -> BaseSection:
        if not self.label_weight + self.kl_weight:
            raise ValueError("`label_weight` and `kl_weight` must not both be 0: the target would diverge")
        if self.heads_only + self.warmup > 1:
            raise ValueError(f"`heads_only` + `warmup` must be at most 1, got {self.heads_only} + {self.warmup}")
        return self


class DSparkSection(Section):
    """Settings of `architecture: dspark`."""

    markov_rank: int = Field(256, ge=1)
    """Rank of the Markov head, which adds a bigram bias to the logits of a slot, given the token before it."""
    markov_start: str | None = None
    """Directory of a correlation table, from which the Markov head is initialised (default: random weights)."""
    confidence_weight: float = Field(1.0, gt=0)
    """Weight of the loss of the confidence head, which predicts the acceptance rate of each slot."""
    sample_from_anchor: bool = True
    """If true, the slot of the newest token also predicts a token. Otherwise it is unused, as with `dflash`."""


DSPARK_OBJECTIVE = {"cross-entropy": 0.1, "total-variation": 1.8}
"""Default objective of `architecture: dspark`, as in SpecForge: 0.1 · cross-entropy + 0.9 · Σ |p − q|."""
_MEDUSA = ("base", "num_layers", "projection", "rank", "states")
_EAGLE3 = ("layers", "norms", "start")
_DFLASH = ("layers", "num_layers", "anchors", "mask_token", "slot_weights", "start")
_DSPARK = ("layers", "num_layers", "anchors", "mask_token", "dspark", "start")


class HeadsRecipe(_Recipe):
    """Recipe that trains Medusa, SLiM or EAGLE-3 heads, or a DFlash or DSpark drafter on a target's hidden states."""

    kind: Literal["heads"]
    architecture: Literal["medusa", "eagle3", "dflash", "dspark"] = "medusa"
    """`medusa`: independent heads. `eagle3`: one decoder layer that drafts autoregressively. `dflash`: decoder layers
    that draft a block of tokens with one forward. `dspark`: `dflash` with a Markov head and a confidence head. Options
    of `dflash` also apply to `dspark`. `projection`, `rank` and `states` apply to `medusa` only."""
    dspark: DSparkSection = DSparkSection()
    start: str | None = None
    """Directory or hub id of trained `eagle3` heads, or of a `dflash` or `dspark` drafter, whose weights are trained
    further: an artifact, or a published draft in a layout that `import` reads. The recipe must state its sizes."""
    layers: list[int] | None = None
    """Layers of the target whose inputs `eagle3` and `dflash` use, counted from 0 (default for `eagle3`: layer 2, the
    middle layer and the third from the end; for `dflash`: up to five evenly spaced layers)."""
    norms: list[Literal["fc_norm", "norm_before_fc", "norm_output"]] = []
    """Additional norms of `eagle3`, named as in the config of serving engines. `fc_norm` normalises the states of each
    layer before they are combined, and `norm_before_fc` their concatenation. With `norm_output`, a drafting step reads
    the output of the previous step after the final norm. EAGLE-3.1 has `fc_norm` and `norm_output`."""
    anchors: int = Field(256, ge=1)
    """Maximum number of blocks on which `dflash` is trained in each row of `data.block_tokens` tokens."""
    slot_weights: Literal["decay", "d-pace"] = "decay"
    """Loss weights of the slots of `dflash`: `decay` by `weight_decay_by_head`, or `d-pace` for weights that follow the
    drafter's confidence in the preceding slots. `d-pace` replaces the decay, and requires `objective: {cross-entropy:
    1.0}`."""
    mask_token: int | None = Field(None, ge=0)
    """Id of the mask token of `dflash` (default: the rarest token of the data)."""
    target: str
    """Directory or hub id of the target."""
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the target and of the saved heads; auto uses the type of the files. Heads are trained in float32."""
    num_heads: int = Field(4, ge=1)
    """Number of heads; head k predicts the token k + 2 positions ahead (k from 0). With `eagle3`: TTT steps. With
    `dflash`: draft tokens per block, which is `block_size` − 1 in the config. With `dspark`: `block_size`."""
    num_layers: int = Field(1, ge=0)
    """Number of residual blocks per head. With `dflash`: number of decoder layers."""
    projection: Literal["own", "low-rank", "target"] = "own"
    """Output projection of a head: its own matrix, initialised from the target's projection, a matrix of rank `rank`,
    or the target's projection (version 2 of Medusa)."""
    rank: int = Field(0, ge=0)
    """Rank of `projection: low-rank`."""
    vocabulary: VocabularySection | None = None
    """Draft vocabulary of `projection: target`, `eagle3` or `dflash` (default: all tokens)."""
    states: Literal["after-norm", "before-norm"] = "after-norm"
    """Hidden states that heads read: after the target's final norm, as in Medusa, or before the final norm."""
    temperature: float = Field(1.0, gt=0)
    """Temperature that divides the logits of teacher and student in distillation objectives."""
    weight_decay_by_head: float = Field(0.8, gt=0)
    """Base of the loss weights: the loss of head k (from 0) is multiplied by this value to the power of k."""
    hidden: HiddenSection = HiddenSection()
    base: BaseSection | None = None
    """Joint training of the target (Medusa-2). Without it, the target is frozen (Medusa-1)."""
    train: HeadsTrainSection = HeadsTrainSection()

    @property
    def tokenizer_source(self) -> str:
        return self.target

    @property
    def drafts_blocks(self) -> bool:
        """True for architectures that draft a block of tokens with one forward."""
        return self.architecture in ("dflash", "dspark")

    @model_validator(mode="before")
    @classmethod
    def _default_objective(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("architecture") == "dspark":
            return {"objective": DSPARK_OBJECTIVE} | values
        return values

    @model_validator(mode="after")
    def _consistent(self) -> HeadsRecipe:
        accepted = {"medusa": _MEDUSA, "eagle3": _EAGLE3, "dflash": _DFLASH, "dspark": _DSPARK}[self.architecture]
        for name in dict.fromkeys((*_MEDUSA, *_EAGLE3, *_DFLASH, *_DSPARK)):
            if name not in accepted and getattr(self, name) != HeadsRecipe.model_fields[name].default:
                raise ValueError(f"`{name}` does not apply to `architecture: {self.architecture}`: remove it")
        if {"fc_norm", "norm_before_fc"} <= set(self.norms):
            raise ValueError("`norms` cannot contain both `fc_norm` and `norm_before_fc`: remove one of them")
        if self.start is not None and self.dspark.markov_start is not None:
            raise ValueError("`start` already has a Markov head: remove `dspark.markov_start`")
        if self.drafts_blocks and self.num_layers == 0:
            raise ValueError(f"`num_layers` must be at least 1 with `architecture: {self.architecture}`, got 0")
        if self.slot_weights == "d-pace" and set(self.objective) != {"cross-entropy"}:
            raise ValueError(f"`slot_weights: d-pace` requires cross-entropy as the objective, got {self.objective}")
        if (self.projection == "low-rank") != (self.rank > 0):
            raise ValueError(f"`rank` must be at least 1 with low-rank, else 0, got {self.rank} with {self.projection}")
        if self.projection == "target" and self.num_layers == 0:
            raise ValueError("`projection: target` with `num_layers: 0` has nothing to train")
        if self.projection == "target" and self.states == "before-norm":
            raise ValueError("`projection: target` reads states after the final norm: `states` cannot be before-norm")
        if self.vocabulary is not None and self.architecture == "medusa" and self.projection != "target":
            raise ValueError("`vocabulary` requires `projection: target`")
        if self.vocabulary is not None and self.base is not None:
            raise ValueError("`vocabulary` copies rows of a frozen target: remove `base`")
        if self.hidden.cache is not None and self.num_heads > 15:
            raise ValueError(f"`hidden.cache` supports at most 15 heads, got `num_heads` {self.num_heads}")
        if self.hidden.cache is not None and self.base is not None:
            raise ValueError("`hidden.cache` requires a frozen target: remove `base`")
        return self


class CountSection(Section):
    """Settings for counting pairs of adjacent tokens."""

    pairs: Literal["documents", "answers"] = "documents"
    """`documents`: whole conversations with the tokens of the template, except its default system prompt. `answers`:
    pairs whose right token is supervised, that is, each answer with its end of turn and the token before it. Pairs
    never cross the boundaries of a document or answer."""
    memory_mb: int = Field(512, ge=1)
    """Memory for the counts of each process in mebibytes. Further counts are written to `<out>.state`."""
    save_minutes: float = Field(5.0, gt=0)
    """Maximum time in minutes between two saves of the counts."""
    texts: int = Field(0, ge=0)
    """Number of tokens to store as texts, from the start of the corpus, for `suffix` with `datastore: table`. A token
    takes eight bytes."""


class TableRecipe(Section):
    """Recipe that counts the bigrams of a corpus for a correlation table (SLiM, eq. 5).

    Held-out conversations are not counted. The data options `block_tokens` and `packing` have no effect.
    """

    kind: Literal["table"]
    out: str
    """Output directory of the artifact. Unfinished counts are written to `<out>.state`."""
    tokenizer: str
    """Directory or hub id of the tokenizer."""
    vocab_size: int | None = Field(None, ge=1)
    """Vocabulary size of the table (default: the size of the model in the tokenizer's directory or, if there is none,
    of the tokenizer). If the target's embeddings are padded, set their number, such as 32064 instead of 32000."""
    data: DataSection
    count: CountSection = CountSection()

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer


TrainingRecipe = DrafterRecipe | HeadsRecipe | TableRecipe


def role_of(recipe: TrainingRecipe) -> str:
    """Return the name of the trained model for messages. A language model without a target is itself a target."""
    return "target" if isinstance(recipe, DrafterRecipe) and recipe.target is None else recipe.kind
