"""Decoding methods for transformers: `model.generate(**inputs, custom_generate=method("speculative", drafter=...))`.

`generate` prepares the inputs, logits processors and stopping criteria as usual, and `request.py` converts them.

Shape letters: B batch, T tokens with padding, V vocabulary, D hidden.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ...checkpoints.artifact.artifact import verify_artifact
from ...checkpoints.artifact.locate import model_source, resolve
from ...checkpoints.heads.files import PredictionHeads, load_heads
from ...checkpoints.storage.names import MANIFEST_FILE
from ...checkpoints.table.table import BigramTable
from ..engine import generate
from ..methods import Parts, build_method, method_config
from ..models.base import LanguageModel, check_same_vocabulary
from ..models.graphs import GraphedModel
from ..models.lean import LeanDecoder
from ..models.loading import load_model, wrap_model
from ..proposers.head_trees import HeadModule, attach_projection, states_of
from ..rng import Rng
from .request import OutputWriter, check_request, read_sampling, recover_arguments, unpad_prompts

Part = TypeVar("Part")


def method(
    name: str,
    *,
    drafter: PreTrainedModel | str | Path | None = None,
    more_drafters: Sequence[PreTrainedModel | str | Path] = (),
    heads: HeadModule | str | Path | None = None,
    table: BigramTable | str | Path | None = None,
    **options: Any,
) -> "CustomGenerate":
    """Return a decoding method for transformers: `model.generate(**inputs, custom_generate=method(...))`.

    Artifacts that the method does not need are ignored.

    Args:
        name: Name of a method in `methods.METHODS`.
        drafter: Draft model on the target's device, or its directory or hub id, which is loaded to this device.
        more_drafters: Additional drafters, for methods that use several.
        heads: Prediction heads on the target's device and in its dtype, or their directory or hub id.
        table: Bigram counts, or their directory or hub id.
        options: Options of the method, such as `gamma=4`.

    Raises:
        ValueError: A method or option is unknown (the message suggests the closest one), or an artifact is missing or
            cannot be read.
    """
    config = method_config(name, options)
    settings, needs = asdict(config), config.needs
    settings.pop("drafter", None)  # the first drafter is used
    artifacts = {"drafter": drafter, "heads": heads, "table": table}
    for part in needs:
        if artifacts[part] is None:
            raise ValueError(f"method {name!r} requires `{part}`, but none was given")
    models = [_Drafter(source) for source in (drafter, *more_drafters) if "drafter" in needs]
    heads = heads if "heads" in needs else None
    table = table if "table" in needs else None
    loaded = isinstance(heads, (str, Path))
    if isinstance(heads, (str, Path)):
        heads = _read(resolve(heads, "heads"), load_heads, "heads")
    if isinstance(table, (str, Path)):
        table = _read(resolve(table, "table"), BigramTable.load, "table")
    return CustomGenerate(name, settings, models, heads, table, loaded)


@dataclass(frozen=True)
class CustomGenerate:
    """Callable to pass to `generate` as `custom_generate`. Create it with `method`.

    If sampling is enabled, each call draws its seed from torch's default generator for the target's device.
    """

    name: str
    options: dict[str, Any]
    drafters: "Sequence[_Drafter]"
    heads: HeadModule | None
    table: BigramTable | None
    loaded_heads: bool
    """True if the heads were loaded from files. They are then moved to the target's device and dtype."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return prompts and generated tokens, [B, T + new], in a `ModelOutput` if `return_dict_in_generate` is set.

        `input_ids` contains left-padded prompts [B, T]. For an encoder-decoder, it contains the start tokens, and
        `inputs_tensor` contains the source.

        Raises:
            ValueError: A setting or input is not supported, or the artifacts belong to a different target.
        """
        model_kwargs = recover_arguments(inspect.currentframe()) | model_kwargs
        streamer = model_kwargs.pop("streamer", None)
        check_request(model, generation_config, model_kwargs)
        sampling = read_sampling(logits_processor, bool(generation_config.do_sample))
        target = _scorer(model, "target", None if self.heads is None else states_of(self.heads))
        prompts = unpad_prompts(target, model, input_ids, inputs_tensor, model_kwargs)
        replay = OutputWriter(input_ids, stopping_criteria, generation_config, streamer)
        attach_projection(self.heads, model, target.device)
        built = build_method(self.name, self._parts(target), sampling, **self.options)
        seed = 0 if sampling.greedy else int(torch.randint(1 << 62, (), device=target.device))
        rng = Rng.for_rows(seed, len(prompts), target.device)
        for step in generate(target, *built, prompts, replay.limits, sampling, rng):
            if not replay.add(step.new_ids):
                break
        if streamer is not None:
            streamer.end()
        sequences = replay.ids_BT[:, : replay.length].to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        output = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return output(sequences=sequences)

    def _parts(self, target: LanguageModel) -> Parts:
        drafters = [drafter.scorer(target) for drafter in self.drafters]
        if self.table is not None:
            check_same_vocabulary(target, self.table, "table")
        if isinstance(self.heads, PredictionHeads):
            weight = next(self.heads.parameters())
            if (weight.device, weight.dtype) != (target.device, target.dtype):
                if not self.loaded_heads:
                    heads_on, target_on = (f"{weights.dtype} on {weights.device}" for weights in (weight, target))
                    raise ValueError(f"the heads are {heads_on}, the target is {target_on}: call `heads.to`")
                self.heads.to(target.device, target.dtype)
            # Drop copies of weights, since they do not follow writes to `.data`.
            self.heads.train(self.heads.training)
        return Parts(drafters[0] if drafters else None, self.heads, self.table, tuple(drafters[1:]))


class _Drafter:
    """Draft model passed by the user: a model, or a directory or hub id that is loaded to the target's device."""

    def __init__(self, source: Any) -> None:
        source = getattr(source, "_orig_mod", source)  # unwrap torch.compile, since the engine has its own forwards
        self._loaded = isinstance(source, (str, Path))
        if not self._loaded and not isinstance(source, PreTrainedModel):
            kind = type(source).__name__
            raise ValueError(f"a drafter must be a transformers model, a directory or a hub id, got {kind}")
        self.model = source
        if self._loaded:
            path = model_source(str(source))
            self.model = _read(Path(path), lambda _: load_model(path))

    def scorer(self, target: LanguageModel) -> LanguageModel:
        if self._loaded:
            self.model.to(target.device)
        return _scorer(self.model, "drafter", None)


def _read(folder: Path, load: Callable[[Path], Part], kind: str | None = None) -> Part:
    """Load a drafter, heads or a table from a directory. Check the file hashes if there is a manifest."""
    if (folder / MANIFEST_FILE).is_file():
        verify_artifact(folder, kind)
    return load(folder)


class _CachedTarget(NamedTuple):
    state: list[Any]
    states: str
    scorer: LanguageModel | None
    """Wrapped model, or None if caching it would keep the model alive. It is then rewrapped without checks."""


_TARGETS: WeakKeyDictionary[PreTrainedModel, _CachedTarget] = WeakKeyDictionary()


def _scorer(model: PreTrainedModel, what: str, states: str | None) -> LanguageModel:
    """Wrap a model for decoding. A cached wrapper is reused if weights and `states` have not changed."""
    if model.training:
        raise ValueError(f"the {what} is in training mode, where dropout changes its output: call its eval() first")
    state = _state(model)
    cached = _TARGETS.get(model)
    if cached is not None and cached.state == state and states in (None, cached.states):
        return cached.scorer or wrap_model(model, fast=False, check=False, states=cached.states)
    states = states or "after-norm"
    try:
        scorer = wrap_model(model, states=states)
    except ValueError as error:
        raise ValueError(f"the {what}: {error}") from error
    _TARGETS[model] = _CachedTarget(state, states, scorer if isinstance(scorer, (LeanDecoder, GraphedModel)) else None)
    return scorer


def _state(model: PreTrainedModel) -> list[Any]:
    """Return the version, address and dtype of each weight, which reveal whether weights have changed."""
    versions = [0 if weight.is_inference() else weight._version for weight in model.parameters()]
    return [*versions, *((weight.data_ptr(), weight.dtype) for weight in model.parameters())]
