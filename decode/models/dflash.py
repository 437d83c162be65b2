"""DFlash and DSpark drafters, which draft a block of tokens with one forward, given hidden states of the target.

Shape letters: B batch, M tokens, X = B · M, S slots of a block, K draft tokens, D hidden, G auxiliary hidden states of
the target, V vocabulary, R draft vocabulary, F rank of the Markov head, Y outputs of a slot: R logits and, with a
confidence head, its logit.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...checkpoints.heads.dflash import DFlashHeads
from ...checkpoints.heads.dspark import DSparkHeads
from .base import LanguageModel
from .kv_cache import KVCache
from .lean import LeanDecoder


class DFlashDrafter(LeanDecoder):
    """Drafter that runs `DFlashHeads` with attached target weights (see `AuxiliaryHeads.attach`).

    Its cache holds keys and values of committed tokens, which are projections of the target's hidden states. `extend`
    returns logits instead of hidden states, because one matrix product computes the logits of a whole block.

    The weights are prepared once, so create a new drafter after changing them.
    """

    required_aux_layers: tuple[int, ...]
    max_draft_tokens: int

    def __init__(self, heads: DFlashHeads) -> None:
        self.max_draft_tokens, self._first_slot, self._mask_token = heads.num_heads, heads.first_slot, heads.mask
        self._hold_heads(heads, heads.layer_stack, Qwen3RotaryEmbedding)
        norm_D = heads.hidden_norm.weight.detach()
        self._context_norm_D = self._scaled(norm_D) if self._complex else norm_D.to(self.dtype)

    def add_context(self, cache: KVCache, aux_BMG: Tensor) -> None:
        """Write the keys and values of M tokens per row to the cache, after its committed tokens.

        `aux_BMG` holds the target's hidden states at these tokens. The lengths of the cache do not change.
        """
        batch, count = aux_BMG.shape[:2]
        cache.check_capacity(count)
        states_XD = self._norm(self._fuse_aux(aux_BMG.reshape(batch * count, -1).to(self.dtype)), self._context_norm_D)
        offset_M = torch.arange(count, device=self.device)[None]
        positions_BM = offset_M + (cache.lengths[0] if cache.uniform else cache.lengths_B[:, None])
        turned = self._rotation.at(positions_BM, max(cache.lengths) + count, {by for _, by in self._sides})
        heads = self.heads + self.kv_heads
        for index, (layer, kind) in enumerate(zip(self._layers, self._side_of, strict=True)):
            qkv_BMHE = self._norm_heads(layer.qkv(states_XD), layer).view(batch, count, -1, self.key_width)
            qk_BMHE = self._rotation.turn(qkv_BMHE[:, :, :heads], turned[self._sides[kind][1]])
            key_BHME, value_BHME = qk_BMHE[:, :, self.heads :].transpose(1, 2), qkv_BMHE[:, :, heads:].transpose(1, 2)
            cache.write(index, key_BHME, value_BHME, 0)

    def draft_block(self, cache: KVCache, root_B1: Tensor, count: int) -> Tensor:
        """Return outputs [B, count, Y] for the `count` tokens after the root, which follows the cached tokens."""
        masks_BM = torch.full_like(root_B1, self._mask_token).expand(-1, count - 1 + self._first_slot)
        return self.extend(cache, torch.cat((root_B1, masks_BM), 1))[:, self._first_slot :]

    def after(self, outputs_BMY: Tensor, tokens_BM: Tensor) -> Tensor:
        """Return the outputs [B, M, Y] of slots, given the tokens before them. DFlash does not depend on them."""
        return outputs_BMY

    def _forward(self, *inputs: Any) -> Tensor:
        return super().draft_logits(super()._forward(*inputs))[0]

    def draft_logits(self, outputs_XY: Tensor) -> tuple[Tensor, Tensor | None]:
        return outputs_XY[..., : self.draft_vocab_size], self._kept_R

    def draft_forwards(self, widths: list[int]) -> list[tuple[LanguageModel, int]]:
        return [(self, self._first_slot + len(widths))]

    def _in_c(self, cache: KVCache, count: int) -> bool:  # C code must not process a block in parts
        return super()._in_c(cache, count) and len(cache.lengths) * count <= self._few.most_tokens  # type: ignore

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> Tensor | None:
        all_1Mn = torch.zeros(1, stop - start, stop, device=self.device)  # tokens attend to the whole block
        return LanguageModel._mask(self, cache, all_1Mn, start, stop, end)


class DSparkDrafter(DFlashDrafter):
    """Drafter that runs `DSparkHeads`: a DFlash drafter whose logits depend on the token before each slot."""

    def __init__(self, heads: DSparkHeads) -> None:
        super().__init__(heads)
        proj_E = heads.confidence_head.proj.weight.detach()[0].to(self.dtype)
        hidden_D, self._factors_VF = proj_E[: heads.hidden_size], heads.markov_head.markov_w1.weight.detach()
        self._confidence_D, self._bias = hidden_D, self._product(heads.markov_weight.detach())
        # the part of the confidence that depends on the token before the slot
        self._confidence_V = self._factors_VF.to(self.dtype) @ proj_E[heads.hidden_size :]
        self._confidence_V += heads.confidence_head.proj.bias.detach().to(self.dtype)

    def _forward(self, *inputs: Any) -> Tensor:
        hidden_BMD = LeanDecoder._forward(self, *inputs)
        logits_BMR, _ = LeanDecoder.draft_logits(self, hidden_BMD)
        return torch.cat((logits_BMR, (hidden_BMD @ self._confidence_D)[..., None]), -1)

    def after(self, outputs_BMY: Tensor, tokens_BM: Tensor) -> Tensor:
        factors_XF = self._factors_VF[tokens_BM.flatten()].to(self.dtype)
        bias_BMR = self._bias(factors_XF).view(*tokens_BM.shape, -1)
        return outputs_BMY + torch.cat((bias_BMR, self._confidence_V[tokens_BM][..., None]), -1)

    def confidence(self, outputs_XY: Tensor) -> Tensor:
        """Return the acceptance probabilities, float32 [X], that the confidence head predicts for draft tokens."""
        return outputs_XY[..., -1].float().sigmoid()


def block_drafter(heads: DFlashHeads) -> DFlashDrafter:
    """Return the drafter of DFlash or DSpark heads."""
    return DSparkDrafter(heads) if isinstance(heads, DSparkHeads) else DFlashDrafter(heads)
