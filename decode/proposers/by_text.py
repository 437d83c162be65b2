"""Drafting with a draft model that has a different tokenizer: its text is retokenised for the target.

String-level matching is exact at every temperature, because the draft is deterministic. `checkpoints/pairs/by_text.py`
builds the `Translation` of token ids from two tokenizers.

Shape letters: B batch, M new tokens, K depth, D hidden.
"""

from typing import Any

import numpy as np
import torch

from ..engine import Context, Proposal, Proposer, prefill
from ..models.base import LanguageModel, Translation
from ..models.kv_cache import to_device
from ..pool import common_prefix
from ..tree import Tree

_SLOTS = 4
"""Number of cache slots of the drafter per new token of the target, in addition to the prompt."""


class TextChain(Proposer):
    """Proposer of at most `gamma` target tokens, converted from `gamma` tokens that the drafter generates greedily.

    No tokens are drafted for a row whose text exceeds the positions or the cache of the drafter.
    """

    def __init__(self, drafter: LanguageModel, gamma: int) -> None:
        assert drafter.translation is not None
        self.drafter, self.gamma = drafter, gamma
        self._translation: Translation = drafter.translation

    def start(self, context: Context) -> None:
        if self.drafter.device != context.target.device:
            raise ValueError(
                f"the drafter is on {self.drafter.device}, but the target is on {context.target.device}: "
                "move both to the same device"
            )
        prompts = [self._translation.to_drafter(prompt) for prompt in context.prompts]
        ids, self._cache = self.drafter.begin(prompts, _SLOTS * context.limits.max_new_tokens + self.gamma)
        if ids is not prompts:
            raise ValueError("an encoder-decoder cannot draft for a target with a different tokenizer")
        self._room = min(self._cache.capacity, self.drafter.max_positions) - self.gamma
        if (longest := max(map(len, prompts))) > self._room:
            raise ValueError(
                f"the drafter has {self.drafter.max_positions} positions, but a prompt of {longest} drafter tokens and "
                f"{self.gamma} draft tokens need {longest + self.gamma}: shorten the prompt"
            )
        self._tree = Tree.chain(self.gamma).to(context.ids_BS.device)
        padded_BS = torch.tensor([[*row, *[0] * (longest - len(row))] for row in prompts])
        prefill(self.drafter, self._cache, padded_BS.to(self.drafter.device), [len(row) for row in prompts])
        self._read = [row[:-1] for row in prompts]

    def propose(self, context: Context) -> Proposal:
        ids = [row[:length].tolist() for row, length in zip(context.host_ids_BS, context.lengths, strict=True)]
        texts = [self._translation.to_drafter(text) for text in ids]
        can_draft = [not ended and len(row) <= self._room for ended, row in zip(context.ended, texts, strict=True)]
        drafts: list[list[int]] = [[] for _ in ids]
        if any(can_draft):
            # Rows that no longer draft run one token of their text again.
            rows = [row if drafts_on else row[: self._room] for row, drafts_on in zip(texts, can_draft, strict=True)]
            outputs = self._run_drafter(context, rows)
            for row, drafts_on in enumerate(can_draft):
                if drafts_on:
                    drafts[row] = self._translation.to_target(ids[row], texts[row], outputs[row])[: self.gamma]
        counts_B = np.array([len(draft) for draft in drafts])
        depth, device = int(counts_B.max()), context.ids_BS.device
        padded_BK = np.array([[*draft, *[0] * (depth - len(draft))] for draft in drafts], dtype=np.int64)
        tokens_BN = torch.cat((context.root_B1, to_device(torch.from_numpy(padded_BK), device)), 1)
        proposal = Proposal(Tree.chain(depth).to(device), tokens_BN, levels=self.gamma)
        if (counts_B < depth).any():
            valid_BN = np.arange(depth + 1) <= counts_B[:, None]
            proposal.valid_BN = to_device(torch.from_numpy(valid_BN), device)
        return proposal

    def _run_drafter(self, context: Context, rows: list[list[int]]) -> list[list[int]]:
        """Run the drafter on the new tokens of each row, and return the `gamma` tokens that it generates greedily."""
        # The last token is always run. Earlier tokens are skipped as long as they equal the cached tokens.
        pairs = zip(rows, self._read, strict=True)
        shared = [min(len(row) - 1, common_prefix(row, cached)) for row, cached in pairs]
        pending = max(len(row) - count for row, count in zip(rows, shared, strict=True))
        starts = [max(0, len(row) - pending) for row in rows]
        # Tokens after the end of shorter rows are ignored.
        tokens = [(row[start:] + [0] * pending)[:pending] for row, start in zip(rows, starts, strict=True)]
        device = self.drafter.device
        last = [len(row) - 1 - start for row, start in zip(rows, starts, strict=True)]
        sent_BX = to_device(torch.tensor([[*row, at] for row, at in zip(tokens, last, strict=True)]), device)
        self._cache.set_lengths(starts)
        hidden_BMD = self.drafter.extend(self._cache, sent_BX[:, :-1])
        hidden_B1D = hidden_BMD.gather(1, sent_BX[:, -1:, None].expand(-1, 1, hidden_BMD.shape[2]))
        self._cache.set_lengths([len(row) - 1 for row in rows])
        drafted = []
        for level in range(self.gamma):
            logit_B1, token_B1 = self.drafter.logits(hidden_B1D).max(-1)
            context.watch("the drafter's", logit_B1, level)
            drafted.append(token_B1)
            if level + 1 < self.gamma:
                hidden_B1D = self.drafter.extend(self._cache, token_B1, self._tree, level + 1)
        outputs: list[list[int]] = torch.cat(drafted, 1).tolist()  # translation needs the tokens on the host
        self._read = [row + draft[:-1] for row, draft in zip(rows, outputs, strict=True)]
        return outputs

    def stop(self) -> None:
        del self._cache, self._read

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.drafter, 1)] * self.gamma
