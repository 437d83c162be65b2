"""How likely an emitted token was an accepted draft, for one candidate and for many, from whole distributions.

Lossless decoding emits the token y at a position with probability p(y). With replacement, after j refusals, what is
left of p is [p - cⱼq]+ for a scale c₀ = 0, cⱼ₊₁ = cⱼ + Fⱼ, Fⱼ = Σ [p - cⱼq]+. So all k candidates are refused and y is
drawn with probability [p(y) - cₖq(y)]+, and

    P(one of k accepted | y) = min(1, cₖ q(y) / p(y)).

Without replacement (Algorithm 2 of the multi-candidate paper) a refused x leaves q, cⱼ₊₁ = cⱼ + Fⱼ / (1 - Σ
q(refused)); drawing refused tokens in the proportions in which they are refused, the weights cancel, and the
probability is the mean of min(1, cₖ q(y) / p(y)) over such draws. Sorted once by p/q, every such sum is a look-up,
whatever k is.

In formulas p is the target's and q the drafter's warped distribution; `theory.py` has the plain recursions.

Shape letters: T positions, V vocabulary, K candidates, S draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-30


class Candidates:
    """What candidates drawn from q are worth at each of many positions whose emitted token is known; [T, V] warped
    distributions, any float type."""

    def __init__(self, target_TV: Tensor, draft_TV: Tensor, token_T: Tensor) -> None:
        target_TV, draft_TV = target_TV.double(), draft_TV.double()
        ratio_TV = torch.where(draft_TV > 0, target_TV / draft_TV.clamp(min=_TINY), torch.inf)
        self._ratio_TV, order_TV = ratio_TV.sort(1)
        self._draft_TV = draft_TV.gather(1, order_TV)
        sorted_TV = target_TV.gather(1, order_TV)
        # Sums over the tokens before a place and from it on: [T, V + 1].
        self._before = _before(sorted_TV), _before(self._draft_TV)
        self._from = _before(sorted_TV.flip(1)).flip(1), _before(self._draft_TV.flip(1)).flip(1)
        self._support_T1 = (draft_TV > 0).sum(1, keepdim=True)
        self.target_T = target_TV.gather(1, token_T[:, None])[:, 0]
        self.draft_T = draft_TV.gather(1, token_T[:, None])[:, 0]
        self._place_T1 = (order_TV == token_T[:, None]).int().argmax(1, keepdim=True)
        self._odds_T1 = (self.draft_T / self.target_T.clamp(min=_TINY))[:, None]

    def left(self, scale_TX: Tensor) -> Tensor:
        """F(c) = Σ [p - cq]+, [T, X]."""
        place_TX = self._place(scale_TX)
        target_TX, draft_TX = (sums.gather(1, place_TX) for sums in self._from)
        # c may be infinite, where nothing is left; 0 · ∞ is none.
        taken_TX = torch.where(draft_TX > 0, scale_TX * draft_TX, 0.0)
        return (target_TX - taken_TX).clamp(min=0)

    def _place(self, scale_TX: Tensor) -> Tensor:
        return torch.searchsorted(self._ratio_TV, scale_TX.contiguous(), right=True)

    def scales(self, count: int) -> tuple[Tensor, Tensor]:
        """With replacement: c₁ … cₖ and F(c₁) … F(cₖ), the probabilities that so many are refused, [T, K] each."""
        scales, masses = [torch.ones_like(self.target_T)[:, None]], []
        for _ in range(count):
            masses.append(self.left(scales[-1]))
            scales.append(scales[-1] + masses[-1])
        return torch.cat(scales[:-1], 1), torch.cat(masses, 1)

    def accepted(self, scale_TX: Tensor) -> Tensor:
        """min(1, c q(y) / p(y)), [T, X]."""
        return (scale_TX * self._odds_T1).nan_to_num(0.0).clamp(max=1)

    def without_replacement(self, count: int, draws: int, generator: torch.Generator) -> Tensor:
        """P(one of k candidates accepted | y) for k = 1 … `count`, drawn without replacement, [T, K].

        Exact for k ≤ 2; beyond, a mean over `draws` sequences of refused tokens, the first of which are spread evenly.
        """
        rows = len(self.target_T)
        before_TS = torch.zeros(rows, draws, dtype=torch.float64, device=self.target_T.device)
        scale_TS, rest_TS = torch.ones_like(before_TS), torch.ones_like(before_TS)
        drawn_TSK = torch.empty(rows, draws, 0, dtype=torch.int64, device=before_TS.device)
        accepted = [self.accepted(scale_TS[:, :1])]
        for index in range(1, count):
            uniform_TS = self._uniform(before_TS, generator, even=index == 1)
            refused_TS1 = self._refused(before_TS, scale_TS, drawn_TSK, uniform_TS)[..., None]
            drawn_TSK = torch.cat((drawn_TSK, refused_TS1), 2).sort(2).values
            rest_TS = rest_TS - self._draft_at(refused_TS1)[..., 0]
            mass_TS = self.left(scale_TS)
            step_TS = torch.where(mass_TS > 0, mass_TS / rest_TS.clamp(min=_TINY), torch.inf)
            # A drafter that has run out of tokens leaves the last ones' places empty.
            step_TS = torch.where(self._support_T1 > index, step_TS, 0.0)
            before_TS, scale_TS = scale_TS, scale_TS + step_TS
            each_T1 = self._second() if index == 1 else self.accepted(scale_TS).mean(1, keepdim=True)
            accepted.append(each_T1)
        return torch.cat(accepted, 1)

    def _second(self) -> Tensor:
        """For k = 2 the refused token is summed over, in proportion to [q - p]+; [T, 1]."""
        ratio_TV, draft_TV = self._ratio_TV, self._draft_TV
        weight_TV = draft_TV * (1 - ratio_TV).clamp(min=0).masked_fill(draft_TV == 0, 0.0)
        total_T1 = weight_TV.sum(1, keepdim=True)
        rest_TV = (1 - draft_TV).clamp(min=_TINY)
        scale_TV = 1 + torch.where(self._support_T1 > 1, self.left(torch.ones_like(total_T1)) / rest_TV, 0.0)
        mean_T1 = (weight_TV * self.accepted(scale_TV)).sum(1, keepdim=True) / total_T1.clamp(min=_TINY)
        return torch.where(total_T1 > _TINY, mean_T1, 1.0)

    def drawn_without_replacement(self, count: int, draws: int, generator: torch.Generator) -> Tensor:
        """P(y is among k candidates drawn without replacement) for k = 1 … `count`, [T, K].

        The mean of 1 - Π (1 - q(y) / (1 - Σ q(drawn))) over `draws` sequences without y; exact for k = 1.
        """
        rows = len(self.target_T)
        missed_TS = torch.ones(rows, draws, dtype=torch.float64, device=self.target_T.device)
        rest_TS = torch.ones_like(missed_TS)
        draft_T1, drawn_TSK = self.draft_T[:, None], self._place_T1[:, None].expand(-1, draws, 1)
        found = []
        for index in range(count):
            missed_TS = missed_TS * (1 - draft_T1 / rest_TS.clamp(min=_TINY)).clamp(min=0)
            found.append(1 - missed_TS.mean(1, keepdim=True))
            uniform_TS = self._uniform(rest_TS, generator, even=index == 0)
            others_TS = (rest_TS - draft_T1).clamp(min=0)
            other_TS1 = self._skip(uniform_TS * others_TS, drawn_TSK)[..., None]
            drawn_TSK = torch.cat((drawn_TSK, other_TS1), 2).sort(2).values
            rest_TS = rest_TS - torch.where(others_TS > _TINY, self._draft_at(other_TS1)[..., 0], 0.0)
        return torch.cat(found, 1)

    def _uniform(self, like_TS: Tensor, generator: torch.Generator, even: bool) -> Tensor:
        """Random numbers in [0, 1); `even`: one in each of S equal parts."""
        uniform_TS = torch.rand(like_TS.shape, generator=generator, dtype=torch.float64).to(like_TS.device)
        parts_S = torch.arange(like_TS.shape[1], device=like_TS.device)
        return (uniform_TS + parts_S) / like_TS.shape[1] if even else uniform_TS

    def _draft_at(self, place_TSX: Tensor) -> Tensor:
        return self._draft_TV.gather(1, place_TSX.flatten(1)).view_as(place_TSX)

    def _refused(self, before_TS: Tensor, scale_TS: Tensor, drawn_TSK: Tensor, uniform_TS: Tensor) -> Tensor:
        """Places of refused tokens, drawn in proportion to min([cq - p]+, (c - c')q), c' the scale before; [T, S].

        Sorted by p/q the weights are (c - c')q up to where the ratio reaches c', and cq - p from there up to c; those
        drawn before, which all lie in the first part, are left out.
        """
        gap_TS = torch.where(scale_TS.isfinite(), scale_TS - before_TS, 1.0)
        scale_TS = before_TS + gap_TS
        first_TS, end_TS = self._place(before_TS), self._place(scale_TS)
        sums_P, sums_Q = self._before
        taken_TS = self._draft_at(drawn_TSK).sum(2)
        low_TS = gap_TS * (sums_Q.gather(1, first_TS) - taken_TS).clamp(min=0)
        base_TS = scale_TS * sums_Q.gather(1, first_TS) - sums_P.gather(1, first_TS)
        top_TS = scale_TS * sums_Q.gather(1, end_TS) - sums_P.gather(1, end_TS)
        wanted_TS = uniform_TS * (low_TS + (top_TS - base_TS).clamp(min=0))
        early_TS = self._skip(wanted_TS / gap_TS.clamp(min=_TINY), drawn_TSK)
        # Bisection for the first place by which so much weight has gathered.
        low, high = first_TS, end_TS
        for _ in range(self._ratio_TV.shape[1].bit_length()):
            middle = (low + high) // 2
            enough = scale_TS * sums_Q.gather(1, middle) - sums_P.gather(1, middle) - base_TS > wanted_TS - low_TS
            low, high = torch.where(enough, low, (middle + 1).clamp(max=end_TS)), torch.where(enough, middle, high)
        late_TS = (high - 1).clamp(min=0)
        return torch.where(wanted_TS < low_TS, early_TS, late_TS)

    def _skip(self, mass_TS: Tensor, drawn_TSK: Tensor) -> Tensor:
        """The place where q's running sum passes `mass_TS` if the places drawn before (ascending) have no mass."""
        for taken_TS in drawn_TSK.unbind(2):
            start_TS = self._before[1].gather(1, taken_TS)
            mass_TS = torch.where(mass_TS >= start_TS, mass_TS + self._draft_TV.gather(1, taken_TS), mass_TS)
        place_TS = torch.searchsorted(self._before[1][:, 1:].contiguous(), mass_TS.contiguous(), right=True)
        return place_TS.clamp(max=self._draft_TV.shape[1] - 1)


def _before(values_TV: Tensor) -> Tensor:
    return torch.nn.functional.pad(values_TV.cumsum(1), (1, 0))
