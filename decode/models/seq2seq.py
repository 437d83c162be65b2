"""Encoder-decoders of the T5 family, with support for tree attention.

In transformers, all rows have the same relative positions. Rows of different lengths and branches of a tree need
different positions, so the decoder runs module by module here and looks up the position bias of each distance.

Shape letters: B batch, M new tokens, N tree nodes, S cache slots, T source tokens, R distances, V vocabulary, D hidden,
H heads, E head width, X heads x head width.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoints.verify.families import check_family
from ..tree import Tree
from .base import NO_LIMIT, LanguageModel
from .finite import check_close, tolerances_of
from .kv_cache import KVCache

# Supported families, with the config setting that enables scaling of the decoder's output.
SCALED_IF = {"t5": "scale_decoder_outputs", "mt5": None, "umt5": "tie_word_embeddings"}


class SourceCache(KVCache):
    """Decoder cache that also contains the cross-attention keys and values of the encoded prompts."""

    source: list[tuple[Tensor, Tensor]]
    """Cross-attention keys and values of each layer, [B, H, T, E]."""
    source_mask_B11T: Tensor | None = None
    """Additive cross-attention mask with minus infinity at padding. None if there is no padding."""
    tree: Tree | None = None
    """Tree of the current forward. None for a chain."""

    def positions(self, end: int) -> Tensor:
        """Return the position of the token in each slot, [B or 1, end]. Position and slot differ only in trees."""
        slots_1S = torch.arange(end, device=self.device)[None]
        if self.tree is None:
            return slots_1S
        node_BS = slots_1S - self.lengths_B[:, None]
        depth_BN = self.tree.depth_BN.expand(len(node_BS), -1)
        depth_BS = depth_BN.gather(1, node_BS.clamp(0, depth_BN.shape[1] - 1))
        return torch.where(node_BS < 0, slots_1S, self.lengths_B[:, None] + depth_BS)


class Seq2SeqModel(LanguageModel):
    """Wrapper for T5 (1.0, 1.1, FLAN), mT5 and UMT5 models with a language-modelling head.

    Prompts are the exact encoder input, including an end token if the tokenizer adds one. Committed ids are decoder
    ids that begin with the start token. The position bias is copied, so wrap the model again after further training.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model. Raise ValueError for an unsupported type, several devices or a missing start token."""
        config: Any = model.config
        check_family(config)
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1:
            raise ValueError(f"an encoder-decoder must be on one device, but this model is on {' and '.join(devices)}")
        start_id = model.generation_config.decoder_start_token_id
        if start_id is None:
            start_id = getattr(config, "decoder_start_token_id", None)
        if not isinstance(start_id, int):
            raise ValueError(f"{config.model_type!r} models need an integer decoder_start_token_id, got {start_id}")
        decoder: Any = model.decoder
        self.model, self.config, self._decoder, self.start_id = model, config, decoder, start_id
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.hidden_size = config.d_model
        self.max_positions = NO_LIMIT  # all larger distances share one bias
        self.device, self.dtype = decoder.embed_tokens.weight.device, decoder.embed_tokens.weight.dtype
        self.layers = config.num_decoder_layers
        self.kv_heads = config.num_heads
        self.key_width = self.value_width = config.d_kv
        scaled_if = SCALED_IF[config.model_type]
        self._scale = config.d_model**-0.5 if scaled_if and getattr(config, scaled_if) else None
        self._farthest = config.relative_attention_max_distance
        self._bias_tables = [self._bias_table(block.layer[0].SelfAttention) for block in decoder.block]

    @torch.no_grad()
    def _bias_table(self, attention: Any) -> Tensor | None:
        """Return the position bias of all R distances, [H, R], or None if the layer reuses an earlier layer's bias."""
        if not attention.has_relative_attention_bias:
            return None
        bias_1H1R = attention.compute_bias(1, self._farthest + 1, past_seen_tokens=self._farthest)
        return bias_1H1R[0, :, 0].flip(-1).to(self.dtype).contiguous()

    def new_cache(self, batch: int, capacity: int) -> NoReturn:
        """Raise ValueError, since a cache requires an encoded prompt (see `begin`)."""
        raise ValueError("`attention: batch` supports decoders only, use `attention: tree`")

    def begin(self, prompts: Sequence[Sequence[int]], extra_slots: int) -> tuple[list[list[int]], SourceCache]:
        """Encode the prompts. Return the start token of each row, and a cache with the encoded prompts."""
        batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
        source_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        # Padding is identified by position, because its token may also occur in the source.
        padding_BT = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        source_BT, padding_BT = source_BT.to(self.device), padding_BT.to(self.device)
        output = self.model.encoder(input_ids=source_BT, attention_mask=(~padding_BT).long())
        encoded_BTD = output.last_hidden_state

        widths = (self.key_width, self.value_width)
        cache = SourceCache(self.layers, batch, self.kv_heads, 1 + extra_slots, *widths, self.dtype, self.device)
        across = [block.layer[1].EncDecAttention for block in self._decoder.block]
        cache.source = [(self._split(layer.k(encoded_BTD)), self._split(layer.v(encoded_BTD))) for layer in across]
        if len(set(lengths)) > 1:
            zeros_BT = torch.zeros(padding_BT.shape, dtype=self.dtype, device=self.device)
            cache.source_mask_B11T = zeros_BT.masked_fill_(padding_BT, -torch.inf)[:, None, None]
        return [[self.start_id] for _ in prompts], cache

    def extend(
        self, cache: KVCache, tokens_BM: Tensor, tree: Tree | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Store the tree in the cache, which computes positions from it, and run `LanguageModel.extend`."""
        assert isinstance(cache, SourceCache)
        cache.tree = None if tree is None or tree.is_chain else tree
        return super().extend(cache, tokens_BM, tree, start, stop)

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        assert isinstance(cache, SourceCache)
        distance_BMS = (positions_BM[..., None] - cache.positions(end)[:, None]).clamp(0, self._farthest)
        hidden_BMD = self._decoder.embed_tokens(tokens_BM)
        for index, (block, table_HR) in enumerate(zip(self._decoder.block, self._bias_tables, strict=True)):
            own, across, feed_forward = block.layer
            if table_HR is not None:
                bias_BHMS = table_HR[:, distance_BMS].transpose(0, 1)
                bias_BHMS = bias_BHMS if mask_B1MS is None else bias_BHMS + mask_B1MS
            attention, normed_BMD = own.SelfAttention, own.layer_norm(hidden_BMD)
            cache.write(index, self._split(attention.k(normed_BMD)), self._split(attention.v(normed_BMD)), start)
            hidden_BMD = hidden_BMD + self._attend(attention, normed_BMD, *cache.view(index, end), bias_BHMS)
            hidden_BMD = _bounded(hidden_BMD)
            attention, normed_BMD = across.EncDecAttention, across.layer_norm(hidden_BMD)
            mask_B11T = cache.source_mask_B11T
            hidden_BMD = hidden_BMD + self._attend(attention, normed_BMD, *cache.source[index], mask_B11T)
            hidden_BMD = _bounded(feed_forward(_bounded(hidden_BMD)))
        return self._decoder.final_layer_norm(hidden_BMD)

    def _split(self, x_BMX: Tensor) -> Tensor:
        """Reshape [B, M, X] to [B, H, M, E]."""
        return x_BMX.unflatten(-1, (self.kv_heads, self.key_width)).transpose(1, 2)

    def _attend(
        self, attention: Any, normed_BMD: Tensor, key_BHSE: Tensor, value_BHSE: Tensor, bias_BHMS: Tensor | None
    ) -> Tensor:
        query_BHME = self._split(attention.q(normed_BMD))
        # T5 does not scale the products of queries and keys.
        attended_BHME = F.scaled_dot_product_attention(query_BHME, key_BHSE, value_BHSE, bias_BHMS, scale=1.0)
        return attention.o(attended_BHME.transpose(1, 2).flatten(2))

    def logits(self, hidden_XD: Tensor) -> Tensor:
        if self._scale is not None:
            hidden_XD = hidden_XD * self._scale
        return self.model.get_output_embeddings()(hidden_XD)


def _bounded(hidden_BMD: Tensor) -> Tensor:
    """Clamp values that overflowed in half precision, as transformers does between its layers."""
    if hidden_BMD.dtype != torch.float16:
        return hidden_BMD
    largest = torch.finfo(torch.float16).max
    return hidden_BMD.clamp(-largest, largest)


@torch.inference_mode()
def check_source_forward(wrapped: Seq2SeqModel, model: PreTrainedModel) -> None:
    """Raise ValueError if a chain's logits differ from the model's own forward, or a tree's from a chain's."""
    start, device, vocab = wrapped.start_id, wrapped.device, wrapped.vocab_size
    source_BT = torch.tensor([[5, 1, 7, 2, 9], [3, 6, 0, 0, 0]], device=device) % vocab
    nodes_BN = torch.tensor([[6, 2, 8, 3], [start, 2, 8, 3]], device=device) % vocab  # root, left, right, left's child
    path_BM = torch.tensor([[start, 4, 6, 2, 3], [start, 8, 0, 0, 0]], device=device) % vocab
    mask_BM = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)  # used for both sources and paths
    tree = Tree.from_parents(torch.tensor([[-1, 0, 0, 1]], device=device), 2)

    def score(tokens_BN: Tensor, tree: Tree | None) -> Tensor:
        _, cache = wrapped.begin([source_BT[0].tolist(), source_BT[1, :2].tolist()], 8)
        wrapped.extend(cache, path_BM[:, :2])
        cache.set_lengths([2, 0])
        return wrapped.logits(wrapped.extend(cache, tokens_BN, tree)).float()

    tree_BV = score(nodes_BN, tree)[[0, 1], [3, 2]]
    chains_BN = torch.stack((path_BM[0, [2, 3, 4, 4]], path_BM[1, :4]))
    chain_BV = score(chains_BN, None)[[0, 1], [2, 1]]
    # Masks are passed because UMT5's decoder is not causal without them in transformers 5.17.
    inputs = {"input_ids": source_BT, "attention_mask": mask_BM}
    plain_BMV = model(**inputs, decoder_input_ids=path_BM, decoder_attention_mask=mask_BM).logits.float()
    differs = f"this {model.config.model_type!r} model differs from its family: logits"
    of_chains, of_trees = tolerances_of(model)
    check_close(chain_BV, plain_BMV[[0, 1], [4, 1]], model, f"{differs} differ from its own forward", of_chains)
    check_close(tree_BV, chain_BV, model, f"{differs} of a tree differ from those of a chain", of_trees)
