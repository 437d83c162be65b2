"""Conversion of the arguments of transformers' `generate` to the engine's. Unsupported arguments raise errors.

Shape letters: B batch, T tokens with padding.
"""

import inspect
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..engine import Limits
from ..models.base import LanguageModel
from ..warpers import Sampling

_WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_INPUTS = ("attention_mask", "position_ids", "past_key_values", "encoder_outputs", "use_cache", "logits_to_keep")
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def recover_arguments(frame: Any) -> dict[str, Any]:
    """Read, from the stack frame of `generate`, the arguments that it does not forward (transformers 5.17 to 5.23)."""
    caller = frame.f_back if frame else None
    if caller is None or caller.f_code is not _GENERATE:
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "synced_gpus", "assistant_model")}


def _refusal(what: str, instead: str) -> ValueError:
    return ValueError(f"draftsmith does not support {what} in `generate`: {instead}")


def check_request(model: PreTrainedModel, config: Any, inputs: dict[str, Any]) -> None:
    """Raise ValueError if the engine does not support a setting, an input or the requested outputs.

    This also removes `synced_gpus` and `assistant_model` from `inputs`.
    """
    sharded = any(hasattr(weight, "ds_id") or hasattr(weight, "device_mesh") for weight in model.parameters())
    if inputs.pop("synced_gpus", None) or sharded:
        raise _refusal("synced_gpus or sharded weights", "gather the weights first (ZeRO-3, FSDP, tensor parallelism)")
    if inputs.pop("assistant_model", None) is not None:
        raise _refusal("the argument assistant_model", "pass the model as `drafter` of the method")
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        raise _refusal("inputs that an adapter prepares (prompt tuning)", "only input_ids are used")
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        asks = "num_beams, penalty_alpha, prompt_lookup_num_tokens, use_mtp, dola_layers, constraints and similar ones"
        raise _refusal(f"generation mode {mode.value}", f"`custom_generate` selects the method; unset {asks}")
    if config.return_dict_in_generate and any(getattr(config, name) for name in _OUTPUTS):
        raise _refusal(next(name for name in _OUTPUTS if getattr(config, name)), "only token ids are returned")
    if config.cache_implementation == "quantized":
        raise _refusal("cache_implementation='quantized'", "the engine has its own cache; unset this option")
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise _refusal("past_key_values", "the engine has its own cache; pass all tokens as input_ids")
    for name, value in inputs.items():
        if value is not None and name not in _INPUTS:
            raise _refusal(f"the argument {name}", "only input_ids are used")


def read_sampling(processors: Sequence[Any], do_sample: bool) -> Sampling:
    """Convert temperature, top-k and top-p processors to a `Sampling`. Raise ValueError for other processors."""
    values: list[tuple[str, Any]] = []
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:
            continue  # probabilities always sum to 1 here
        if kind not in _WARPERS:
            instead = "only temperature, top_k and top_p are applied; unset the option in generation_config"
            raise _refusal(kind.__name__, instead)
        if getattr(processor, "filter_value", -math.inf) > -math.inf or getattr(processor, "min_tokens_to_keep", 1) > 1:
            raise _refusal(f"filter_value and min_tokens_to_keep of {kind.__name__}", "keep their defaults")
        values.append((_WARPERS[kind], getattr(processor, _WARPERS[kind])))
    names = [name for name, _ in values]
    if names != [name for name in _WARPERS.values() if name in names]:
        raise _refusal(f"the order {', then '.join(names)}", "use temperature, top_k and top_p once, in this order")
    # Greedy decoding can ignore these processors, since none of them changes the most likely token.
    return Sampling(**{"temperature": 1.0} | dict(values)) if do_sample else Sampling()


def unpad_prompts(
    target: LanguageModel, model: PreTrainedModel, ids_BT: Tensor, source_BT: Tensor | None, inputs: dict[str, Any]
) -> list[list[int]]:
    """Return prompts or encoder inputs without padding. Raise ValueError if an input is not supported."""
    mask_BT, positions_BT = inputs.get("attention_mask"), inputs.get("position_ids")
    has_source = model.config.is_encoder_decoder
    if has_source:
        start_id: Any = getattr(target, "start_id", None)
        if ids_BT.shape[1] != 1 or (ids_BT != start_id).any():
            raise _refusal("decoder_input_ids", "decoding starts with the model's decoder_start_token_id")
        if source_BT is None or source_BT.dim() != 2 or source_BT.is_floating_point() or (source_BT < 0).any():
            raise _refusal("encoder_outputs and inputs_embeds", "pass the source as input_ids")
        ids_BT = source_BT.repeat_interleave(len(ids_BT) // len(source_BT), 0)
    real_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
    if positions_BT is not None:
        usual_BT = real_BT.long().cumsum(-1) - 1
        if positions_BT.shape[1:] != usual_BT.shape[1:] or ((positions_BT != usual_BT) & real_BT).any():
            raise _refusal("position_ids", "positions are counted from the first token of a row")
    prompts = []
    for row, (ids, is_real) in enumerate(zip(ids_BT.tolist(), real_BT.tolist(), strict=True)):
        if is_real != sorted(is_real) and not (has_source and is_real == sorted(is_real, reverse=True)):
            raise _refusal(f"padding that is not on the left (row {row})", "set padding_side='left' in the tokenizer")
        prompts.append([token for token, real in zip(ids, is_real, strict=True) if real])
    return prompts


class OutputWriter:
    """Writer of generated tokens, which adds one token to every row at a time, as `generate` does.

    If a stopping criterion has an `eos_token_id`, rows that have ended are padded. Otherwise they continue until the
    last row ends. The first `length` columns of `ids_BT` (int64, CPU) contain prompts and output. Raises ValueError if
    a stopping criterion has an `eos_token_id` but there is no padding token.
    """

    def __init__(self, ids_BT: Tensor, criteria: Sequence[Any], config: Any, streamer: Any) -> None:
        batch, self.length = ids_BT.shape
        limit = min(rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria)
        stop_ids = [rule.eos_token_id.tolist() for rule in criteria if type(rule) is EosTokenCriteria]
        self.limits = Limits(max(1, limit - self.length), tuple(token for ids in stop_ids for token in ids))
        other_criteria = [rule for rule in criteria if type(rule) not in (MaxLengthCriteria, EosTokenCriteria)]
        self._criteria, self._streamer, self._device = StoppingCriteriaList(other_criteria), streamer, ids_BT.device
        self._pad: int | None = None
        if any(hasattr(rule, "eos_token_id") for rule in criteria):
            pad = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
            if pad is None:
                raise _refusal("eos_token_id without pad_token_id", "set pad_token_id too")
            self._pad = int(torch.as_tensor(pad).flatten()[0])
        self.ids_BT = torch.zeros(batch, self.length + self.limits.max_new_tokens, dtype=torch.int64)
        self.ids_BT[:, : self.length] = ids_BT
        self._waiting: list[deque[int]] = [deque() for _ in range(batch)]
        self._active = [True] * batch

    def add(self, new_ids: list[list[int]]) -> bool:
        """Append the new tokens of a decoding step, and return whether any row is unfinished."""
        for waiting, new in zip(self._waiting, new_ids, strict=True):
            waiting.extend(new)
        rows = range(len(new_ids))
        while any(self._active) and all(self._waiting[row] or self._ended(row) for row in rows):
            self._write([self._pad if self._ended(row) else self._waiting[row].popleft() for row in rows])
        return any(self._active)

    def _ended(self, row: int) -> bool:
        return self._pad is not None and not self._active[row]

    def _write(self, column: list[Any]) -> None:
        column_B = torch.tensor(column)
        self.ids_BT[:, self.length] = column_B
        self.length += 1
        full = self.length == self.ids_BT.shape[1]
        ends = [full or token in self.limits.stop_ids for token in column]
        if self._criteria:
            written_BT = self.ids_BT[:, : self.length].to(self._device, copy=True)
            stops = self._criteria(written_BT, None).tolist()
            ends = [end or stop for end, stop in zip(ends, stops, strict=True)]
        self._active = [is_active and not end for is_active, end in zip(self._active, ends, strict=True)]
        if self._streamer is not None:
            self._streamer.put(column_B)
