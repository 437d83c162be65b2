"""Base class for language models that score token trees, and a wrapper for any transformers decoder.

Shape letters: B batch, M new tokens, n tree nodes up to the last new node, S cache slots, V vocabulary, D hidden, G
auxiliary hidden states, H heads, E head width, N tree nodes, L leaves, P nodes of a path, X = B · L.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoints.heads.auxiliary import decoder_layers
from ...checkpoints.heads.logits import LogitShape
from ...checkpoints.storage.draft_vocabulary import widen
from ...checkpoints.verify.families import tree_fault
from ...checkpoints.verify.windows import position_limit, windows
from ..tree import Tree
from .draft_vocabulary import kept_tokens
from .final_norm import final_norm, module_inputs
from .kv_cache import KVCache, RowCache, SlotCache
from .products.shared import stored_weights

NO_LIMIT = 1 << 30
"""Value of `max_positions` for models that support any number of positions."""


class Translation(Protocol):
    """Interface for converting token ids between a target and a drafter with different tokenizers."""

    def to_drafter(self, ids: Sequence[int]) -> list[int]:
        """Convert target token ids to drafter token ids. The result contains at least one id."""

    def to_target(self, ids: Sequence[int], own: Sequence[int], draft: Sequence[int]) -> list[int]:
        """Convert draft tokens to target ids. `ids` and `own` are the preceding text in target ids and drafter ids."""


class LanguageModel(ABC):
    """Base class for language models that score the nodes of a token tree with a key-value cache."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    device: torch.device
    dtype: torch.dtype
    layers: int
    kv_heads: int
    key_width: int
    value_width: int
    layer_devices: Sequence[torch.device] | None = None
    """Device of each layer, or None if all layers are on `device`."""
    states: str = "after-norm"
    """Kind of hidden states that `extend` returns, after or before the final norm: "after-norm" or "before-norm"."""
    config: Any = None
    """Configuration of the wrapped transformers model, if any."""
    translation: Translation | None = None
    """Token translation for a drafter whose tokenizer differs from the target's. None for all other models."""
    windows: tuple[int | None, ...] = ()
    """Attention window of each layer in tokens, including the current token. None for full attention."""
    tree_fault: str | None = None
    """Reason why this model does not support tree attention, or None if it does."""
    supports_any_length: bool = False
    """True if one CUDA graph works for all sequence lengths, because attention stops at each row's last token."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose inputs `extend` also returns. They are concatenated before the hidden states, as [B, M, G + D]."""
    required_aux_layers: tuple[int, ...] | None = None
    """Target layers whose inputs this drafter requires (see `EagleDrafter`). None if it requires only tokens."""
    max_draft_tokens: int | None = None
    """Number of tokens that this drafter drafts with one forward (see `DFlashDrafter`). None for one token."""

    @property
    def weights_dtype(self) -> torch.dtype:
        """Return the dtype of the weights, which may be narrower than `dtype`, the dtype of the hidden states."""
        return self.dtype

    @property
    def precision(self) -> float:
        """Return the relative precision of matrix products, which is that of the weights' dtype."""
        return torch.finfo(self.weights_dtype).eps

    @property
    def is_async(self) -> bool:
        """Return whether reading a tensor's value on the host synchronises with the device."""
        return self.device.type != "cpu"

    @property
    def draft_vocab_size(self) -> int:
        """Return the size of the draft vocabulary, which contains the tokens that a drafter can propose."""
        return self.vocab_size

    def draft_logits(self, hidden_XD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits [..., R] over the draft vocabulary, and its token ids [R] (None if it contains all tokens)."""
        return self.logits(hidden_XD), None

    @abstractmethod
    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Project hidden states [..., D] returned by `extend` to logits [..., V]."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty key-value cache for `batch` sequences with at least `capacity` slots per sequence."""
        widths = (self.key_width, self.value_width)
        return KVCache(
            self.layers, batch, self.kv_heads, capacity, *widths, self.dtype, self.device, self.layer_devices
        )

    def begin(self, prompts: Sequence[Sequence[int]], extra_slots: int) -> tuple[Sequence[Sequence[int]], KVCache]:
        """Return the initial decoder ids (prompts or start tokens) and an empty cache with `extra_slots` more slots."""
        return prompts, self.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + extra_slots)

    def extend(
        self, cache: KVCache, tokens_BM: Tensor, tree: Tree | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Run a forward pass on new tokens, and write their keys and values to the cache.

        Args:
            cache: Key-value cache. The new tokens are stored after the committed tokens, and its lengths do not change.
            tokens_BM: Token ids of the tree nodes start to stop - 1.
            tree: Topology of the nodes 0 to stop - 1. None for a chain.
            start: Number of tree nodes that earlier calls have processed.
            stop: Index after the last new node (default: start + M).

        Returns:
            Hidden states [B, M, D] (kind: `self.states`), or [B, M, G + D] with the inputs of `aux_layers` first.

        Raises:
            ValueError: The cache is too small, or the model does not support tree attention.
        """
        count = tokens_BM.shape[1]
        stop = start + count if stop is None else stop
        assert stop - start == count
        cache.check_capacity(stop)
        if tree is None or tree.is_chain:
            depth_BM = torch.arange(start, stop, device=self.device)[None]
            bias_BMn = None
        else:
            self.check_trees("this method")
            depth_BM = tree.depth_BN[:, start:stop]
            bias_BMn = tree.bias(start, stop)
        positions_BM = depth_BM + (cache.lengths[0] if cache.uniform else cache.lengths_B[:, None])
        end = max(cache.lengths) + stop
        mask_B1MS = self._mask(cache, bias_BMn, start, stop, end)
        return self._forward(cache, tokens_BM, positions_BM, mask_B1MS, start, end)

    def draft_forwards(self, widths: list[int]) -> list[tuple["LanguageModel", int]]:
        """Return the model and token count of each drafting forward. Forward i runs on `widths[i]` nodes."""
        return [(self, width) for width in widths]

    def check_trees(self, method: str) -> None:
        """Raise ValueError if this model does not support tree attention. The message names `method`."""
        if self.tree_fault is not None:
            works = "autoregressive, speculative, adaptive, prompt-lookup, unigram, bigram, bpd"
            raise ValueError(
                f"{method} requires tree attention, but {self.tree_fault}; use a method that drafts chains: {works} "
                "(`speculative` and `adaptive` with a draft model, EAGLE-3 heads or a DFlash drafter)"
            )

    def fuse_aux(self, aux_BMG: Tensor) -> Tensor:
        """Project the target's auxiliary hidden states [B, M, G] to the drafter's input [B, M, D]."""
        raise AssertionError("this model takes only tokens as input")

    def set_aux_input(self, above_BMD: Tensor) -> None:
        """Set the hidden states that the next call of `extend` combines with its tokens.

        For each token, pass the state of the preceding position, which `fuse_aux` or the drafter has computed.
        """
        raise AssertionError("this model takes only tokens as input")

    def extend_with_aux(
        self, above_BMD: Tensor, cache: KVCache, tokens_BM: Tensor, tree: Tree | None = None, start: int = 0
    ) -> Tensor:
        """Call `set_aux_input(above_BMD)` and then `extend`, for drafters with `required_aux_layers`."""
        self.set_aux_input(above_BMD)
        return self.extend(cache, tokens_BM, tree, start)

    def run_captured(
        self, cache: KVCache, tree: Tree, key: Hashable, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Call `run(*inputs)`, which drafts a fixed tree, and return its outputs.

        A subclass may replay the whole draft as one CUDA graph. `key` identifies the function.
        """
        return run(*inputs)

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> Tensor | None:
        """Return the additive attention mask [B or 1, 1, M, end], or None if every new token attends to all slots."""
        count = stop - start
        if bias_BMn is None:
            if count == 1 and cache.uniform:
                return None
            ones_Mn = torch.ones(count, stop, dtype=torch.bool, device=self.device)
            bias_BMn = torch.zeros(1, count, stop, device=self.device).masked_fill_(~ones_Mn.tril(start), -torch.inf)
        bias_BMn = bias_BMn.to(self.dtype)
        if cache.uniform:
            prefix_BML = bias_BMn.new_zeros(1, count, cache.lengths[0]).expand(len(bias_BMn), -1, -1)
            return torch.cat((prefix_BML, bias_BMn), -1)[:, None]
        batch = len(cache.lengths)
        committed_BS = torch.arange(end, device=self.device) < cache.lengths_B[:, None]
        mask_BS = torch.zeros(batch, end, dtype=self.dtype, device=self.device).masked_fill_(~committed_BS, -torch.inf)
        mask_BMS = mask_BS[:, None].repeat(1, count, 1)
        slots_Bn = cache.lengths_B[:, None] + torch.arange(stop, device=self.device)
        mask_BMS.scatter_(2, slots_Bn[:, None].expand(-1, count, -1), bias_BMn.expand(batch, -1, -1))
        return mask_BMS[:, None]

    def _windowed(self, mask_B1MS: Tensor | None, positions_BM: Tensor, end: int, window: int | None) -> Tensor | None:
        """Add a layer's attention window to a mask, so that tokens `window` or more positions earlier are masked.

        Without a mask, the tokens are a chain, and later tokens are masked too.
        """
        if window is None or end <= window:
            return mask_B1MS
        slots_S = torch.arange(end, device=self.device)
        hidden_BMS = slots_S <= positions_BM[..., None] - window
        if mask_B1MS is None:
            mask_B1MS = torch.zeros((), dtype=self.dtype, device=self.device)
            hidden_BMS |= slots_S > positions_BM[..., None]
        return torch.where(hidden_BMS[:, None], -torch.inf, mask_B1MS)

    @abstractmethod
    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        """Return hidden states [B, M, D], and write keys and values to the cache from slot `length + start` on."""


_KINDS = "sliding_attention", "full_attention"


class TransformersModel(LanguageModel):
    """Wrapper for any transformers decoder, including models that are loaded with a `device_map`.

    Raises:
        ValueError: `states` is "before-norm", but the model has no final norm.
    """

    kv_heads = key_width = value_width = 0

    def __init__(self, model: PreTrainedModel, states: str = "after-norm", aux_layers: Sequence[int] = ()) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model, self.config = model, config
        self.vocab_size = model.get_output_embeddings().out_features
        self.hidden_size = config.hidden_size
        self.max_positions, self.windows = position_limit(config) or NO_LIMIT, windows(config)
        weights = stored_weights(model.get_input_embeddings())
        self.device, self.dtype = weights.device, weights.dtype
        self.layers = config.num_hidden_layers
        self.tree_fault = tree_fault(model.config)
        if self.tree_fault is None:
            heads = config.num_attention_heads
            self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
            self.key_width = self.value_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._shape = LogitShape.of(config)
        # In Llama 4 `base_model` is the whole model, because the decoder has an unusual name.
        self._decoder: nn.Module = getattr(model, "model", model) if model.base_model is model else model.base_model
        self._kept_R = kept_tokens(model)
        if self._kept_R is not None:
            self._kept_weight_RD = model.get_output_embeddings().weight.detach()[self._kept_R]
        self.states, self.aux_layers = states, tuple(aux_layers)
        self._norm = final_norm(self._decoder) if states == "before-norm" else None
        layers: Any = decoder_layers(self._decoder, self.layers) if aux_layers else ()
        self._watched: list[nn.Module] = [layers[layer] for layer in aux_layers if layer < self.layers]
        """Modules whose inputs `extend` returns."""
        self._watched += [] if self._norm is None else [self._norm]
        if len({parameter.device for parameter in model.parameters()}) > 1:
            self.layer_devices = self._find_devices()
            if self.device.type == "meta":
                self.device = self.layer_devices[0]

    def _find_devices(self) -> list[torch.device]:
        """Return the device of each layer. Offloaded layers run on the first device with weights."""
        first = next(weight.device for weight in self.model.parameters() if weight.device.type != "meta")
        devices = [next(layer.parameters()).device for layer in decoder_layers(self._decoder, self.layers)]
        return [first if device.type == "meta" else device for device in devices]

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        if mask_B1MS is None:  # otherwise transformers would create its own mask
            mask_B1MS = torch.zeros(1, 1, tokens_BM.shape[1], end, dtype=self.dtype, device=self.device)
        batch = tokens_BM.shape[0]
        masks = {}
        for window in set(self.windows):
            windowed_B1MS = self._windowed(mask_B1MS, positions_BM, end, window)
            assert windowed_B1MS is not None
            masks[_KINDS[window is None]] = windowed_B1MS.expand(batch, -1, -1, -1)
        inputs = {
            "input_ids": tokens_BM,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            # Rows that have ended may run beyond the last learned position. Their output is ignored.
            "position_ids": positions_BM.clamp(max=self.max_positions - 1).expand(batch, -1),
            "past_key_values": SlotCache(cache, start, end),
            "use_cache": True,
        }
        return self._run(inputs)

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """Run the decoder, and return the hidden states [B, M, D] or [B, M, G + D] that `extend` returns."""
        with masked_attention(self.model), module_inputs(self._watched) as read:
            outputs = self._decoder(**inputs)
        states = read if self._norm is not None else [*read, outputs.last_hidden_state]
        shape = inputs["input_ids"].shape
        return torch.cat([each.to(self.device).reshape(*shape, -1) for each in states], -1)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        if self.aux_layers:
            hidden_XD = hidden_XD[..., -self.hidden_size :]
        if self._norm is not None:
            hidden_XD = self._norm(hidden_XD)
        head = self.model.get_output_embeddings()
        if self._kept_R is None:
            return self._shape(head(hidden_XD).to(self.device))
        bias_R = None if head.bias is None else head.bias[self._kept_R]
        logits_XR = self._shape(F.linear(hidden_XD, self._kept_weight_RD, bias_R))
        return widen(logits_XR, self._kept_R, self.vocab_size)


class RowwiseModel(TransformersModel):
    """Wrapper that runs rows one after the other, each with its own cache of transformers.

    It supports any causal decoder, including recurrent layers, but only chains of draft tokens.
    """

    one_by_one: bool = False
    """Run only one token in each forward, except for the first tokens of a row."""

    def __init__(self, model: PreTrainedModel, states: str = "after-norm", aux_layers: Sequence[int] = ()) -> None:
        super().__init__(model, states, aux_layers)
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return RowCache(batch, capacity, self.device, self.config)

    def extend(
        self, cache: KVCache, tokens_BM: Tensor, tree: Tree | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        assert isinstance(cache, RowCache)
        cache.check_capacity(start + tokens_BM.shape[1])
        if tree is not None and not tree.is_chain:
            self.check_trees("this method")
        rows = zip(cache.states, tokens_BM.tolist(), cache.lengths, strict=True)
        return torch.stack([state.run(ids, length + start, length, self._run_row) for state, ids, length in rows])

    def _run_row(self, ids: list[int], cache: Any, cached: int) -> Tensor:
        """Return the hidden states [M, D] of tokens that follow the `cached` tokens of a cache."""
        ids_1M = torch.tensor([ids], device=self.device)
        parts = ids_1M.split(1, 1) if self.one_by_one and cached else [ids_1M]
        inputs = {self._cache_name: cache, "use_cache": True}
        return torch.cat([self._run({"input_ids": part_1M} | inputs)[0] for part_1M in parts])


def extend_by_path(model: LanguageModel, cache: KVCache, tokens_BN: Tensor, tree: Tree) -> Tensor:
    """Run `extend` on a tree without tree attention, with each path as a row that has its own copy of the cache.

    All leaves must have the same depth (arXiv 2401.06706, section 3.3 and table 4).
    """
    if tree.is_chain or isinstance(cache, RowCache):
        return model.extend(cache, tokens_BN, tree)
    assert len(tree.parents_BN) == 1, "all rows must have the same tree"
    path_LP, leaf_N = tree.leaf_paths
    leaves, rows = len(path_LP), len(tokens_BN)
    by_leaf = model.new_cache(rows * leaves, cache.capacity)
    end = max(cache.lengths)
    pairs = list(zip(cache.keys + cache.values, by_leaf.keys + by_leaf.values, strict=True))
    for original_BHSE, copied_XHSE in pairs:
        copied_XHSE[:, :, :end] = original_BHSE[:, :, :end].repeat_interleave(leaves, 0)
    by_leaf.set_lengths([length for length in cache.lengths for _ in range(leaves)])
    tokens_XP = tokens_BN[:, path_LP].flatten(0, 1)
    hidden_BLPD = model.extend(by_leaf, tokens_XP).unflatten(0, (rows, leaves))
    depth_N = tree.depth_BN[0]
    # Copy the keys and values of each node from the path of the first leaf below it.
    row_BN = torch.arange(rows, device=leaf_N.device)[:, None] * leaves + leaf_N
    source_BN = by_leaf.lengths_B[row_BN] + depth_N
    target_BN = cache.lengths_B[:, None] + torch.arange(tree.nodes, device=leaf_N.device)
    rows_B1 = torch.arange(rows, device=leaf_N.device)[:, None]
    for original_BHSE, copied_XHSE in pairs:
        original_BHSE[rows_B1, :, target_BN] = copied_XHSE[row_BN, :, source_BN]
    return hidden_BLPD[:, leaf_N, depth_N]


def bare_model(model: Any) -> Any:
    """Return the transformers model without the wrappers of peft and `torch.compile`."""
    model = getattr(model, "_orig_mod", model)
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Return a context manager that replaces flash and flex attention with a kernel that supports additive masks."""
    config = model.config.get_text_config(decoder=True)
    chosen = getattr(config, "_attn_implementation", None) or ""
    if "flash" not in chosen and "flex" not in chosen:
        yield
        return
    config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    try:
        yield
    finally:
        config._attn_implementation = chosen


def check_same_vocabulary(target: LanguageModel, other: Any, what: str) -> None:
    """Raise ValueError if a drafter, table or prediction heads have a different vocabulary from the target."""
    if getattr(other, "translation", None) is not None:
        raise ValueError(f"the {what} has a different tokenizer from the target: only `speculative` supports this")
    if target.vocab_size != other.vocab_size:
        raise ValueError(
            f"the vocabulary of the {what} has {other.vocab_size} tokens, but the target's has {target.vocab_size}: "
            "both must be equal"
        )
