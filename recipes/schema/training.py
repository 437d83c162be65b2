"""The sections of a training recipe, and the training recipes."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import Field, create_model, model_validator

from ...train.config import FitConfig, Medusa2, OnPolicy, Parallel
from .data import DataSection, Section


def _section(settings: type, *left_out: str) -> Any:
    """Return a section with the fields, defaults and limits of a dataclass of `train.config`."""
    hints = get_type_hints(settings)
    known: dict[str, Any] = {}
    for item in fields(settings):
        if item.name not in left_out:
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
    """Train low-rank changes to a model's matrices instead of it, with peft (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(16, ge=1)
    """Rank of each change."""
    alpha: float = Field(32.0, gt=0)
    """A change is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each change."""
    targets: list[str] = []
    """Ends of the names of the linear layers to change, such as q_proj; empty: all but the output projection."""
    export: Literal["merged", "adapter"] = "merged"
    """What the artifact holds: a whole model with the changes added, or the adapter alone, to be swapped."""


class VocabularySection(Section):
    """Draft vocabulary: fewer rows of the output layer, which is most of a small drafter's work. Every method stays
    exact."""

    tokens: int = Field(ge=1)
    """Propose so many tokens alone, the most frequent trained ones of the data. The rest of the vocabulary is read, and
    never drafted (FR-Spec: Zhao et al. 2025, arXiv 2502.14856)."""


class ParallelSection(_Parallel):
    """Draft several tokens in one forward pass; see `train.config.Parallel`. The drafter can also draft one by one."""

    token: int | None = Field(None, ge=0)  # type: ignore[assignment]
    """Id of the mask token; null: that of the model, or the token that occurs least often in the data."""


class ModelSection(Section):
    """The model to train: an existing one, a part of one, or a new one."""

    source: str | None = None
    """Folder or hub id of the model to start from."""
    layers: list[int] = []
    """Keep only these layers of `source`, counted from 0: a drafter cut from its target."""
    config: dict[str, Any] | None = None
    """A new model instead: `model_type` and other fields of its transformers configuration."""
    vocabulary: VocabularySection | None = None
    """A cheaper output layer; null: that of `source`, or a whole one."""
    freeze_embeddings: bool = False
    """Leave the token embeddings and the output projection as they are."""
    lora: LoraSection | None = None
    """Train an adapter, not the whole model."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel of transformers; auto: SDPA where the model has it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights while training."""

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            given = "both" if self.source else "neither"
            raise ValueError(f"give one of `source` (start from a model) and `config` (make a new one), got {given}")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs `model_type`, such as llama")
        if self.layers and (self.source is None or min(self.layers) < 0 or self.layers != sorted(set(self.layers))):
            raise ValueError(f"`layers` is {self.layers}: give layers of `source`, rising from 0, each once")
        if self.lora is not None and (self.config is not None or self.freeze_embeddings):
            raise ValueError("`lora` changes a model of `source`, whose embeddings it leaves alone by itself")
        return self


class TeacherSection(Section):
    """How the target teaches in the distillation objectives."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both sides."""
    top_k: int = Field(0, ge=0)
    """Learn from the target's k most likely tokens, and from all others as one event; 0: from each token."""
    cache: str | None = None
    """Folder of the target's `top_k` log-probabilities of all blocks, written by `draftsmith prepare --teacher`: the
    target is then run once, however many epochs and drafters learn from it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Type of the target's weights; auto takes that of the files. int8: those that `evaluate` decodes with as int8."""
    batch: int = Field(4, ge=1)
    """Blocks per forward while the cache is written."""

    @model_validator(mode="after")
    def _consistent(self) -> TeacherSection:
        if self.cache is not None and not self.top_k:
            raise ValueError("`cache` needs `top_k`: whole distributions are too large to keep")
        if self.top_k and self.temperature != 1:
            raise ValueError(f"`top_k` needs temperature 1, got {self.temperature}")
        return self


class OnPolicySection(_OnPolicy):
    """Learn from samples of the drafter itself; see `train.config.OnPolicy`."""


class TrainSection(_Loop):
    """The training loop: the settings of `train.config.FitConfig`, and what surrounds it."""

    epochs: float = Field(1.0, gt=0)
    """Passes over the data; `steps` overrides it."""
    steps: int | None = Field(None, ge=1)  # type: ignore[assignment]
    """Number of optimizer steps."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Additional trackers to log to, through accelerate."""

    def fit_config(self, steps: int, keep_best: str | None) -> FitConfig:
        """Return the loop's settings for this number of steps."""
        names = (item.name for item in fields(FitConfig) if item.name not in ("steps", "keep_best"))
        return FitConfig(steps=steps, keep_best=keep_best, **{name: getattr(self, name) for name in names})


class HeadsTrainSection(TrainSection):
    """The training loop, with what Medusa-1's heads were trained with (Cai et al. 2024, arXiv 2401.10774)."""

    learning_rate: float = Field(1e-3, gt=0)
    warmup: float = Field(0.1, ge=0, lt=1)


class MeasureSection(Section):
    """Acceptance measured while training, by decoding a fixed held-out sample."""

    prompts: int = Field(16, ge=0)
    """Held-out prompts to decode; 0 measures nothing. With fewer than 8, the last weights are kept."""
    new_tokens: int = Field(48, ge=1)
    """Tokens per prompt."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    gamma: int = Field(4, ge=1)
    """Draft tokens a step (drafters)."""
    tree: str = "2x1"
    """Candidates by depth (heads), or paths such as `0, 1, 0.0`; no deeper than there are heads."""
    sequences: int = Field(4, ge=0)
    """Sequences that SLiM keeps (heads): its decoding is measured beside Medusa's; 0: it is not."""
    table: str | None = None
    """Correlation table for it; without one r is 1, and only sequences as long as there are heads compete."""
    blocks: int = Field(64, ge=0)
    """Held-out blocks for losses and teacher-forced agreement; 0: none."""
    keep: Literal["best", "last"] = "best"
    """Which weights become the artifact: those with the most tokens per step of all evaluations, or the last."""


Weight = float | list[float]
"""Of an objective: a number, or [at the start, at the end of the run], or [from, to, share of the run at which `to` is
reached]; linear between."""


class _Recipe(Section):
    """What the recipes of drafters and heads share."""

    kind: Literal["drafter", "heads"]
    out: str
    """Folder of the artifact; logs and checkpoints lie beside it in `<out>.state`."""
    objective: dict[str, Weight] = {"cross-entropy": 1.0}
    """Objectives by name (`draftsmith.train.losses.objectives.OBJECTIVES`) with their weights; of heads, of each head.
    cross-entropy learns from the text, all others from the target's own distribution."""
    data: DataSection
    measure: MeasureSection = MeasureSection()

    @property
    def distils(self) -> bool:
        """Whether an objective looks at the target's distributions."""
        return set(self.objective) != {"cross-entropy"}


class DrafterRecipe(_Recipe):
    """Train a language model: a drafter, or a target from scratch."""

    kind: Literal["drafter"]
    model: ModelSection
    target: str | None = None
    """Folder or hub id of the model to draft for; the teacher of the distillation objectives."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; by default the target's, else the model's."""
    teacher: TeacherSection = TeacherSection()
    on_policy: OnPolicySection | None = None
    """Learn on the drafter's own samples too."""
    parallel: ParallelSection | None = None
    """Learn to draft several tokens by one forward."""
    train: TrainSection = TrainSection()

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
        if self.model.attention.startswith("flash") and self.model.dtype == "float32" and self.train.precision == "no":
            raise ValueError(f"`model.attention: {self.model.attention}` needs 16 bits: set `train.precision: bf16`")
        tokens = self.model.vocabulary.tokens if self.model.vocabulary else None
        if tokens is not None and self.teacher.top_k > tokens:
            raise ValueError(f"`teacher.top_k` is {self.teacher.top_k}, `model.vocabulary.tokens` {tokens}")
        if self.on_policy is not None and (not taught or self.teacher.cache is not None):
            reason = "a distillation objective" if not taught else "the target itself, not a cache of it"
            raise ValueError(f"`on_policy` needs {reason}: nobody knows beforehand what the drafter will write")
        return self


class HiddenSection(Section):
    """The target's hidden states, which heads learn from: recomputed in every step, or kept on disk."""

    cache: str | None = None
    """Folder that keeps them for all training blocks (`draftsmith prepare --teacher`): the target is then run once,
    however many epochs and kinds of heads learn from them."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type that they are kept in."""
    batch: int = Field(4, ge=1)
    """Blocks per forward while they are written."""


class BaseSection(_Medusa2):
    """Train the target together with its heads in two stages; see `train.config.Medusa2`.

    At first the heads alone, then both, with a loss of Σ heads' losses · `heads_weight` + `label_weight` · cross
    entropy + `kl_weight` · KL(original ‖ target), where the weight of the heads rises from 0.
    """

    lora: LoraSection = LoraSection()
    """How the target is changed; what the artifact's folder `base` then holds."""

    @model_validator(mode="after")
    def _anchored(self) -> BaseSection:
        if not self.label_weight + self.kl_weight:
            raise ValueError("`label_weight` and `kl_weight` are both 0: nothing would keep the target what it is")
        if self.alone + self.warmup > 1:
            raise ValueError(f"`alone` and `warmup` are {self.alone} and {self.warmup} of the run, together at most 1")
        return self


class HeadsRecipe(_Recipe):
    """Train Medusa / SLiM prediction heads on a target's last hidden state, or EAGLE-3's layer on its inner ones."""

    kind: Literal["heads"]
    architecture: Literal["medusa", "eagle3"] = "medusa"
    """`medusa`: heads side by side. `eagle3`: one layer that drafts token by token, as a drafter does; what
    `num_layers`, `projection`, `rank` and `states` say is Medusa's."""
    layers: list[int] | None = None
    """With `eagle3`: the layers of the target that it reads, what goes into them, from 0; null: those that engines
    read, 2, the middle one and the last but two."""
    target: str
    """Folder or hub id of the model that the heads sit on."""
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the target's weights; auto takes that of the files. Heads are trained in float32 and kept in this one."""
    num_heads: int = Field(4, ge=1)
    """Head k predicts the token k + 2 places ahead (k from 0). With `eagle3`, steps of drafting that it learns."""
    num_layers: int = Field(1, ge=0)
    """Residual blocks a head."""
    projection: Literal["own", "low-rank", "target"] = "own"
    """What makes logits: a matrix for each head that begins as the target's, one of rank `rank`, or the target's
    itself (Medusa's version 2)."""
    rank: int = Field(0, ge=0)
    """Of `projection: low-rank`."""
    vocabulary: VocabularySection | None = None
    """With `projection: target`: of its rows those of so many tokens alone; null: all."""
    states: Literal["after-norm", "before-norm"] = "after-norm"
    """The hidden states that heads read: after the target's final norm, as Medusa's, or before it."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both sides in the objectives that look at the target."""
    weight_decay_by_head: float = Field(0.8, gt=0)
    """Head k's loss counts this to the power of k, k from 0: the first head's counts 1. 1 is Medusa-1's plain sum."""
    hidden: HiddenSection = HiddenSection()
    base: BaseSection | None = None
    """Train the target too (Medusa-2); without it the target stays as it is (Medusa-1)."""
    train: HeadsTrainSection = HeadsTrainSection()

    @property
    def tokenizer_source(self) -> str:
        return self.target

    @model_validator(mode="after")
    def _consistent(self) -> HeadsRecipe:
        if self.architecture == "eagle3":
            of_medusa = ("base", "num_layers", "projection", "rank", "states")
            given = [name for name in of_medusa if getattr(self, name) != HeadsRecipe.model_fields[name].default]
            if given:
                raise ValueError(f"`{given[0]}` is of Medusa's heads: leave it out with `architecture: eagle3`")
        elif self.layers is not None:
            raise ValueError("`layers` says what `architecture: eagle3` reads: Medusa's heads read the last one")
        if (self.projection == "low-rank") != (self.rank > 0):
            raise ValueError(f"`rank` is {self.rank}, `projection` {self.projection}: low-rank takes 1 or more")
        if self.projection == "target" and self.num_layers == 0:
            raise ValueError("`projection: target` without residual blocks (`num_layers: 0`) leaves nothing to train")
        if self.projection == "target" and self.states == "before-norm":
            raise ValueError("`projection: target` reads states after the final norm: `states` cannot be before-norm")
        if self.vocabulary is not None:
            shares = self.projection == "target" or self.architecture == "eagle3"
            if not shares:
                raise ValueError("`vocabulary` has heads with `projection: target` keep `tokens` of its rows")
            if self.base is not None:
                raise ValueError("`vocabulary` copies rows of the target: leave out `base`")
        if self.hidden.cache is None:
            return self
        if self.num_heads > 15:
            raise ValueError(f"`hidden.cache` serves up to 15 heads, and `num_heads` is {self.num_heads}")
        if self.base is not None:
            raise ValueError("`hidden.cache` holds the states of the target as it is, and `base` changes it")
        return self


class CountSection(Section):
    """Which pairs of neighbouring tokens a table counts, and with how much memory."""

    pairs: Literal["documents", "answers"] = "documents"
    """`documents`: whole conversations with the tokens of the template, except its default system prompt. `answers`:
    pairs whose right token is supervised, that is, each answer with its end of turn and the token before it. Pairs
    never cross the border of a document or answer."""
    memory_mb: int = Field(512, ge=1)
    """Memory for the counts of each process; counts beyond it go to `<out>.state`."""
    save_minutes: float = Field(5.0, gt=0)
    """Longest time between saves of the counts, which is what a killed run may lose."""
    texts: int = Field(0, ge=0)
    """Number of counted tokens to keep as texts, from the first on, for the method `suffix` with `store: table`. A
    token takes eight bytes."""


class TableRecipe(Section):
    """Count the bigram correlation table of a corpus (SLiM, eq. 5).

    Whole conversations are counted, except those held out. The data options block_tokens and packing have no effect.
    """

    kind: Literal["table"]
    out: str
    """Directory of the artifact; unfinished counts are in `<out>.state`."""
    tokenizer: str
    """Directory or hub id of the tokenizer."""
    vocab_size: int | None = Field(None, ge=1)
    """Vocabulary size of the table; by default the tokenizer's. Where the target's embeddings are padded, set the size
    of the embeddings, such as 32064 for a tokenizer of 32000."""
    data: DataSection
    count: CountSection = CountSection()

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer


TrainingRecipe = DrafterRecipe | HeadsRecipe | TableRecipe


def role_of(recipe: TrainingRecipe) -> str:
    """What is trained, for people: a language model for no target is one itself."""
    return "target" if isinstance(recipe, DrafterRecipe) and recipe.target is None else recipe.kind
