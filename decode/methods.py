"""Decoding methods. Each combines a proposer and a verifier, and declares its options and the artifacts it needs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .engine import Proposer, Verifier
from .models.base import LanguageModel
from .proposers.adaptive import AdaptiveChain, ConfidenceChain, OracleChain
from .proposers.beams import DraftBeam, TargetBeam
from .proposers.by_text import TextChain
from .proposers.chains import DraftChains
from .proposers.draft_tree import DraftTree, NoDraft, ParallelChain
from .proposers.dynamic_tree import DynamicTree
from .proposers.head_trees import HeadModule, HeadTree, PrunedHeadTree
from .proposers.ngrams import PromptLookup, TableChain, TableSource
from .proposers.speculative_beam import SpeculativeBeam
from .proposers.suffix import SuffixTree
from .registry import (
    METHODS,
    Method,
    MethodConfig,
    Options,
    Part,
    Parts,
    all_rows,
    build_method,
    method_config,
    method_variants,
    register,
)
from .tree import parse_branching
from .verifiers.lossless import (
    ExactBlock,
    ExactChain,
    GreedyMatch,
    KSequential,
    MultiCandidate,
    Sample,
    SampleAndMatch,
    SeveralDrafters,
    Traversal,
)
from .verifiers.lossy import AcceptAll, JointLikelihood, OverAcceptance, Rollback, TypicalAcceptance
from .warpers import Sampling

__all__ = ["METHODS", "Method", "Options", "Parts", "all_rows", "build_method", "method_config", "method_variants"]

_GAMMA = "draft tokens per step"
_MAX_GAMMA = "maximum number of draft tokens per step"
_CONFIDENCE = "drafting stops when the probability of the drafter's most likely token is below this value"
_EXPAND_PROB = "minimum joint probability of the path to a node that the drafter expands"
_MAX_NODES, _MIN_PROB = "maximum number of draft tokens", "minimum joint probability of the path to a node"
_ALL_HEADS = "number of heads to use (none: all)"
_VERIFICATION = "`block`: verify the draft as a whole, which never accepts fewer tokens"
_ADD_K = "number added to each count of the table"

Chain = Literal["token", "block"]


def _exact(proposer: Proposer, sampling: Sampling, verifier: Verifier) -> Method:
    """Return a method that verifies with `GreedyMatch` at temperature 0, and with `verifier` otherwise."""
    return Method(proposer, GreedyMatch() if sampling.greedy else verifier)


def _drafter(parts: Parts) -> LanguageModel:
    assert parts.drafter is not None
    return parts.drafter


def _longest(parts: Parts, gamma: int) -> int:
    """Return the maximum number of draft tokens: `gamma`, or less if the drafter has shorter blocks (DFlash)."""
    return min(gamma, _drafter(parts).max_draft_tokens or gamma)


def _heads(parts: Parts) -> HeadModule:
    assert parts.heads is not None
    return parts.heads


def _chain_verifier(verification: Chain) -> Verifier:
    return ExactBlock() if verification == "block" else ExactChain()


@register("autoregressive")
class Autoregressive(MethodConfig):
    """Autoregressive decoding, without draft tokens."""

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return _exact(NoDraft(), sampling, Sample())


@dataclass(frozen=True)
class _WithDrafter(MethodConfig):
    drafter: Annotated[int, "number of the drafter to use, from 1"] = 1


@register("speculative", ("drafter",))
class Speculative(_WithDrafter):
    """Chain of tokens from a draft model. If the tokenizers differ, tokens are converted via text."""

    gamma: Annotated[int, _GAMMA] = 4
    verification: Annotated[Chain, _VERIFICATION] = "token"
    parallel: Annotated[bool, "draft all tokens in one forward pass, with a drafter trained for this (PARD)"] = False

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        if _drafter(parts).translation is not None and not self.parallel:
            return _exact(TextChain(_drafter(parts), self.gamma), sampling, ExactChain())
        chain = ParallelChain(_drafter(parts), self.gamma) if self.parallel else _chain(parts, self.gamma)
        return _exact(chain, sampling, _chain_verifier(self.verification))


def _chain(parts: Parts, gamma: int) -> DraftTree:
    return DraftTree(_drafter(parts), (1,) * gamma)


@register("adaptive", ("drafter",))
class Adaptive(_WithDrafter):
    """Chain of tokens from a draft model. A policy determines the length of the chain."""

    gamma: Annotated[int, _MAX_GAMMA] = 8
    policy: Annotated[
        Literal["confidence", "confidence-head", "oracle"],
        "rule that ends a chain; `confidence-head` uses the predicted acceptance rates of a DSpark drafter, `oracle` "
        "the true ones",
    ] = "confidence"
    confidence_threshold: Annotated[
        float, "drafting stops after a token for which the drafter's highest probability is below this value"
    ] = 0.4
    draft_cost: Annotated[float, "cost of a drafter forward relative to a target forward (not `confidence`)"] = 0.1
    token_cost: Annotated[float, "cost of an added token relative to a one-token target forward"] = 0.03
    verification: Annotated[Chain, _VERIFICATION] = "token"

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        gamma = _longest(parts, self.gamma)
        proposer = AdaptiveChain(_drafter(parts), gamma, self.confidence_threshold, keep_last=True)
        if self.policy != "confidence":
            chain = OracleChain if self.policy == "oracle" else ConfidenceChain
            proposer = chain(_drafter(parts), gamma, self.draft_cost, self.token_cost)
        return _exact(proposer, sampling, _chain_verifier(self.verification))


@register("dynamic-tree", ("drafter",))
class DynamicTreeConfig(_WithDrafter):
    """Tree of tokens from a draft model, deep where the model is confident and wide elsewhere (EAGLE-2)."""

    max_nodes: Annotated[int, _MAX_NODES] = 6
    max_depth: Annotated[int, "maximum depth"] = 4
    width: Annotated[int, "number of nodes expanded per level, and of candidates per node"] = 2
    min_prob: Annotated[float, _MIN_PROB] = 0.1
    expand_prob: Annotated[float, _EXPAND_PROB] = 0.0

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        sizes = (self.max_nodes, self.max_depth, self.width, self.min_prob, self.expand_prob)
        return _exact(DynamicTree(_drafter(parts), *sizes), sampling, SampleAndMatch())


@register("naive-multi-candidate", ("drafter",))
class NaiveMultiCandidate(_WithDrafter):
    """Tree of candidates sampled from a drafter, accepted if they match samples from the target."""

    k_config: Annotated[str, "number of candidates per node at each depth"] = "4x2x2x1"
    replacement: Annotated[bool, "sample candidates with replacement"] = False
    attention: Annotated[Literal["tree", "batch"], "`batch`: score each path of the tree as a separate row"] = "tree"

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return _exact(self._proposer(parts, sampling), sampling, SampleAndMatch())

    def _proposer(self, parts: Parts, sampling: Sampling) -> DraftTree:
        branching = parse_branching(self.k_config)
        if sampling.greedy and self.replacement:
            branching = (1,) * len(branching)  # draws from a one-hot distribution are all equal
        return DraftTree(_drafter(parts), branching, self.replacement, self.attention == "batch")


@register("multi-candidate", ("drafter",))
class MultiCandidateConfig(NaiveMultiCandidate):
    """Tree of candidates sampled from a drafter, verified by rejection sampling."""

    verification: Annotated[Literal["token", "traversal"], "`traversal`: verify from the leaves to the root"] = "token"

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        verifier = Traversal if self.verification == "traversal" else MultiCandidate
        return _exact(self._proposer(parts, sampling), sampling, verifier(self.replacement))


@register("batch-speculative", ("drafter",))
class BatchSpeculative(_WithDrafter):
    """Chains sampled independently from a drafter, verified by rejection sampling."""

    gamma: Annotated[int, _GAMMA] = 4
    num_drafts: Annotated[int, "number of chains"] = 4

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        branching = (1 if sampling.greedy else self.num_drafts, *(1,) * (self.gamma - 1))
        return _exact(DraftTree(_drafter(parts), branching), sampling, MultiCandidate(replacement=True))


@register("spectr", ("drafter",))
class SpecTr(BatchSpeculative):
    """Chains sampled independently from a drafter, merged into a tree and verified by k-SEQ."""

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        proposer = DraftChains((_drafter(parts),), self.gamma, self.num_drafts, sampling.greedy)
        return _exact(proposer, sampling, KSequential())


@register("specinfer", ("drafter",))
class SpecInfer(_WithDrafter):
    """Chains from several drafters, merged into a tree."""

    gamma: Annotated[int, _GAMMA] = 4
    num_drafts: Annotated[int, "number of chains per drafter"] = 1

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        drafters = (_drafter(parts), *parts.more_drafters)
        return _exact(DraftChains(drafters, self.gamma, self.num_drafts, sampling.greedy), sampling, SeveralDrafters())


@register("unigram", ("table",))
class Unigram(MethodConfig):
    """Chain of the most frequent tokens in a table of token counts."""

    gamma: Annotated[int, _GAMMA] = 2

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return self._table_chain(parts, sampling, TableSource(1))

    def _table_chain(self, parts: Parts, sampling: Sampling, source: TableSource) -> Method:
        assert parts.table is not None
        return _exact(TableChain(parts.table, self.gamma, source), sampling, ExactChain())


@register("bigram", ("table",))
class Bigram(Unigram):
    """Chain of the most frequent next tokens according to a bigram table."""

    prior: Annotated[float, "weight of the unigram distribution if `add_k` is 0"] = 1.0
    add_k: Annotated[float, _ADD_K] = 0.0

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return self._table_chain(parts, sampling, TableSource(2, self.prior, self.add_k))


@register("prompt-lookup")
class PromptLookupConfig(MethodConfig):
    """Tokens that followed the most recent earlier match of the last n-gram (prompt lookup)."""

    gamma: Annotated[int, _GAMMA] = 4
    max_ngram: Annotated[int, "longest n-gram to match"] = 3
    min_ngram: Annotated[int, "shortest n-gram to match"] = 1

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return _exact(PromptLookup(self.gamma, self.max_ngram, self.min_ngram), sampling, ExactChain())


@register("suffix")
class Suffix(_WithDrafter):
    """Tree of tokens that followed earlier matches in the text or a datastore, with an optional second source."""

    max_nodes: Annotated[int, _MAX_NODES] = 8
    max_depth: Annotated[int, "maximum depth"] = 8
    min_prob: Annotated[float, _MIN_PROB] = 0.1
    datastore: Annotated[Literal["none", "table"], "`table`: also match the texts stored in the table"] = "none"
    fallback: Annotated[Literal["none", "drafter", "heads"], "second source of draft tokens"] = "none"
    num_candidates: Annotated[int, "number of candidates per head"] = 4
    draft_depth: Annotated[int, "number of levels to draft with the drafter"] = 3
    width: Annotated[int, "number of nodes that the drafter expands per level, and of candidates per node"] = 2
    expand_prob: Annotated[float, _EXPAND_PROB] = 0.0
    confidence_threshold: Annotated[float, "the drafter skips nodes with a match of at least this probability"] = 0.7

    @property
    def needs(self) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = () if self.fallback == "none" else (self.fallback,)
        return parts if self.datastore == "none" else (*parts, "table")

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        texts = None
        if self.datastore == "table":
            assert parts.table is not None
            if (texts := parts.table.texts) is None:
                raise ValueError("`datastore: table` requires a table with texts: create it with `count.texts`")
        heads = parts.heads if self.fallback == "heads" else None
        tree = SuffixTree(self.max_nodes, self.max_depth, self.min_prob, texts, heads, self.num_candidates)
        if self.fallback != "drafter":
            return _exact(tree, sampling, SampleAndMatch())
        sizes = (self.max_nodes, self.draft_depth, self.width, self.min_prob, self.expand_prob)
        proposer = DynamicTree(_drafter(parts), *sizes, tree, self.confidence_threshold)
        return _exact(proposer, sampling, SampleAndMatch())


# Candidates of heads are not sampled, so `SampleAndMatch` is exact and accepts the most tokens.


@register("bpd", ("heads",))
class BlockwiseParallel(MethodConfig):
    """Chain of the most likely token of each prediction head."""

    max_depth: Annotated[int | None, _ALL_HEADS] = None

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        depth = self.max_depth or _heads(parts).num_heads
        return _exact(HeadTree(_heads(parts), "x".join("1" * depth)), sampling, SampleAndMatch())


_MEDUSA_TREE = "4x2x1x1"


@register("medusa", ("heads",))
class Medusa(MethodConfig):
    """Fixed tree of candidate tokens from the prediction heads."""

    tree: Annotated[str, "candidates per node by depth, paths such as `0, 1, 0.0, 0.2`, or `medusa-63`"] = _MEDUSA_TREE
    acceptance: Annotated[Literal["exact", "typical"], "acceptance rule above temperature 0"] = "exact"
    epsilon: Annotated[float, "threshold ε of typical acceptance"] = 0.09
    delta: Annotated[float, "factor δ of exp(−entropy) in typical acceptance"] = 0.3

    @property
    def is_lossless(self) -> bool:
        return self.acceptance == "exact"

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        tree = self.tree
        if tree == _MEDUSA_TREE:  # the default is shortened to the number of heads
            tree = "x".join(tree.split("x")[: _heads(parts).num_heads])
        typical = self.acceptance == "typical" and not sampling.greedy
        verifier = TypicalAcceptance(self.epsilon, self.delta) if typical else SampleAndMatch()
        return _exact(HeadTree(_heads(parts), tree), sampling, verifier)


@register("slim-ss", ("heads", "table"))
class SlimSS(MethodConfig):
    """Most likely sequences of candidate tokens from the prediction heads, scored with a bigram table (SLiM)."""

    num_sequences: Annotated[int, "number of sequences"] = 1
    num_candidates: Annotated[int | str, "candidates per head, or one number for each head such as 10x5x3"] = 10
    unseen_correlation: Annotated[float, "correlation r of token pairs that are not in the table"] = 0.01
    max_depth: Annotated[int | None, _ALL_HEADS] = None
    lengths: Annotated[Literal["all", "full"], "`all`: also rank prefixes of sequences"] = "all"
    min_prob: Annotated[float, "sequences with at most this posterior are dropped"] = 0.0
    correlation: Annotated[Literal["table", "none"], "source of the correlation r (none: r = 1)"] = "table"
    add_k: Annotated[float, _ADD_K] = 0.0

    @property
    def needs(self) -> tuple[Part, ...]:
        return ("heads",) if self.correlation == "none" else ("heads", "table")

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        depth = self.max_depth or _heads(parts).num_heads
        table = None if self.correlation == "none" else parts.table
        width = self.num_candidates
        counts = (width,) * depth if isinstance(width, int) else parse_branching(width)
        sizes = (self.num_sequences, counts, self.unseen_correlation, depth, self.lengths)
        proposer = PrunedHeadTree(_heads(parts), table, *sizes, self.add_k, self.min_prob)
        return _exact(proposer, sampling, SampleAndMatch())


@register("slim-s", ("heads", "table"))
class SlimS(SlimSS):
    """Tree of the most likely sequences of candidate tokens from the prediction heads (SLiM)."""

    num_sequences: Annotated[int, "number of sequences"] = 20


@register("slim-l", ("heads", "table"))
class SlimL(SlimSS):
    """Larger tree than `slim-s`, with more sequences."""

    num_sequences: Annotated[int, "number of sequences"] = 40


@register("mjsd", ("drafter",), lossless=False)
class JointSpeculative(_WithDrafter):
    """Most likely sequence from beam search with a drafter, accepted by joint likelihood."""

    gamma: Annotated[int, _GAMMA] = 4
    num_beams: Annotated[int, "number of beams"] = 8
    likelihood_threshold: Annotated[float, "minimum ratio of the target's joint likelihood to the drafter's"] = 0.1

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        proposer = DraftBeam(_drafter(parts), self.gamma, self.num_beams)
        return Method(proposer, JointLikelihood(self.likelihood_threshold, sampling.greedy))


@register("bild", ("drafter",), lossless=False)
class BigLittleDecoder(_WithDrafter):
    """Chain drafted while the drafter is confident, accepted up to the first unlikely token."""

    gamma: Annotated[int, _MAX_GAMMA] = 10
    fallback_threshold: Annotated[float, _CONFIDENCE] = 0.9
    rollback_threshold: Annotated[float, "maximum negative log-probability of an accepted token under the target"] = 2.0

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        proposer = AdaptiveChain(_drafter(parts), _longest(parts, self.gamma), self.fallback_threshold)
        return Method(proposer, Rollback(self.rollback_threshold, sampling.greedy))


@register("relaxed-opt", ("drafter",), lossless=False)
class RelaxedOptimal(_WithDrafter):
    """Chain from a drafter. Lossy verification accepts more tokens, with minimal bias."""

    gamma: Annotated[int, _GAMMA] = 4
    epsilon: Annotated[float, "number added to the target probability of a draft token"] = 0.1

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return Method(_chain(parts, self.gamma), OverAcceptance(self.epsilon, optimal=True))


@register("relaxed-uno", ("drafter",), lossless=False)
class RelaxedUnoptimized(RelaxedOptimal):
    """Chain from a drafter as in `relaxed-opt`. Samples from the target replace rejected tokens."""

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return Method(_chain(parts, self.gamma), OverAcceptance(self.epsilon, optimal=False))


@register("beam", lossless=False, greedy_only=True)
class Beam(_WithDrafter):
    """Beam search with the target over all new tokens."""

    num_beams: Annotated[int, "number of beams"] = 4
    draft_beams: Annotated[int | None, "number of beams of the drafter (none: no drafter)"] = None
    draft_gamma: Annotated[int, "number of levels to draft with the drafter"] = 3

    @property
    def needs(self) -> tuple[Part, ...]:
        return () if self.draft_beams is None else ("drafter",)

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        if self.draft_beams is None:
            return Method(TargetBeam(0, self.num_beams), AcceptAll())
        if not sampling.greedy:
            raise ValueError(f"`draft_beams` requires temperature 0, got {sampling.temperature:g}")
        if _drafter(parts).max_draft_tokens is not None:
            raise ValueError("`draft_beams` requires a drafter that drafts token by token, not blocks (DFlash)")
        beam = SpeculativeBeam(_drafter(parts), self.num_beams, self.draft_beams, self.draft_gamma)
        return Method(beam, AcceptAll())


@register("mjgd", lossless=False, greedy_only=True)
class JointGreedy(MethodConfig):
    """Beam search with the target over a few tokens per step (multi-token joint greedy decoding)."""

    gamma: Annotated[int, "tokens per step"] = 2
    num_beams: Annotated[int, "number of beams"] = 8

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        return Method(TargetBeam(self.gamma, self.num_beams), AcceptAll())
