"""The methods by name: each is a proposer and a verifier, and the settings that a user may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from ..checkpoints.storage.messages import did_you_mean
from ..checkpoints.table.table import BigramTable
from .engine import Proposer, Verifier
from .models.base import LanguageModel
from .proposers.adaptive import AdaptiveChain, Confidence, ExpectedGain, LookupOrDrafter, Oracle, Policy
from .proposers.beams import DraftBeam, TargetBeam
from .proposers.by_text import TextChain
from .proposers.chains import DraftChains
from .proposers.draft_tree import DraftTree, NoDraft, ParallelChain
from .proposers.dynamic_tree import DynamicTree
from .proposers.head_trees import HeadModule, HeadTree, PrunedHeadTree
from .proposers.ngrams import PromptLookup, TableChain, TableSource
from .proposers.speculative_beam import SpeculativeBeam
from .proposers.suffix import SuffixTree
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


class Method(NamedTuple):
    """What `generate` takes after the target."""

    proposer: Proposer
    verifier: Verifier


@dataclass(frozen=True)
class Parts:
    """What a method may be built from, besides the target itself."""

    drafter: LanguageModel | None = None
    heads: HeadModule | None = None
    table: BigramTable | None = None
    more_drafters: tuple[LanguageModel, ...] = ()
    """Drafters beside the first: `drafter: 2` of a method's options names their first. `specinfer` takes all."""


Options = dict[str, Any]


@dataclass(frozen=True)
class _Spec:
    build: Callable[[Parts, Sampling, Options], Method]
    needs: tuple[str, ...] = ()
    defaults: Options = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _matching(proposer: Proposer, sampling: Sampling, verifier: Verifier) -> Method:
    """At temperature 0 the target's most likely tokens are matched, whatever the verifier elsewhere."""
    return Method(proposer, GreedyMatch() if sampling.greedy else verifier)


def _autoregressive(parts: Parts, sampling: Sampling, options: Options) -> Method:
    return _matching(NoDraft(), sampling, Sample())


def _beam(parts: Parts, sampling: Sampling, options: Options) -> Method:
    if options.get("width"):
        assert parts.drafter is not None
        if not sampling.greedy:
            raise ValueError(f"`width` is for temperature 0, where beams are no chance: it is {sampling.temperature:g}")
        sizes = (options["beams"], options["width"], options["draft_gamma"])
        return Method(SpeculativeBeam(parts.drafter, *sizes), AcceptAll())
    return Method(TargetBeam(options.get("gamma", 0), options["beams"]), AcceptAll())


_CHAINS: dict[str, Callable[[], Verifier]] = {"token": ExactChain, "block": ExactBlock}
"""How a sampled chain is verified."""
_TREES: dict[str, Callable[[bool], Verifier]] = {"token": MultiCandidate, "traversal": Traversal}
"""How a sampled tree is, with or without replacement."""


def _chain(parts: Parts, gamma: int) -> DraftTree:
    assert parts.drafter is not None
    return DraftTree(parts.drafter, (1,) * gamma)


def _speculative(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    at_once, gamma = options["parallel"], options["gamma"]
    if parts.drafter.translation is not None and not at_once:
        return _matching(TextChain(parts.drafter, gamma), sampling, ExactChain())
    proposer = ParallelChain(parts.drafter, gamma) if at_once else _chain(parts, gamma)
    return _matching(proposer, sampling, _CHAINS[options["verification"]]())


def _relaxed(parts: Parts, sampling: Sampling, options: Options, optimal: bool) -> Method:
    return Method(_chain(parts, options["gamma"]), OverAcceptance(options["epsilon"], optimal))


def _table_chain(parts: Parts, sampling: Sampling, options: Options, order: Literal[1, 2]) -> Method:
    assert parts.table is not None
    source = TableSource(order, **{name: value for name, value in options.items() if name != "gamma"})
    return _matching(TableChain(parts.table, options["gamma"], source), sampling, ExactChain())


def _prompt_lookup(parts: Parts, sampling: Sampling, options: Options) -> Method:
    return _matching(_lookup(options), sampling, ExactChain())


def _lookup(options: Options) -> PromptLookup:
    return PromptLookup(options["gamma"], options["ngram"], options["shortest"])


def _lookup_or_drafter(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    policy = Confidence(options["threshold"])
    proposer = LookupOrDrafter(parts.drafter, options["draft_gamma"], policy, _lookup(options))
    return _matching(proposer, sampling, ExactChain())


def _dynamic_tree(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    return _matching(DynamicTree(parts.drafter, **options), sampling, SampleAndMatch())


def _suffix(parts: Parts, sampling: Sampling, options: Options) -> Method:
    heads = parts.heads if "candidates" in options else None
    return _matching(_suffix_tree(parts, options, heads), sampling, SampleAndMatch())


def _suffix_tree(parts: Parts, options: Options, heads: HeadModule | None = None) -> SuffixTree:
    texts = None
    if options["store"] == "table":
        assert parts.table is not None
        if (texts := parts.table.texts) is None:
            raise ValueError("`store: table` looks into texts, and the table has none: count it with `count.texts`")
    sizes = (options["nodes"], options["depth"], options["least"])
    return SuffixTree(*sizes, texts, heads, options.get("candidates", 1))


def _suffix_drafter(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    sizes = (options["nodes"], options["draft_depth"], options["width"], options["least"])
    proposer = DynamicTree(parts.drafter, *sizes, _suffix_tree(parts, options), options["sure"])
    return _matching(proposer, sampling, SampleAndMatch())


def _draft_tree(parts: Parts, sampling: Sampling, branching: tuple[int, ...], options: Options) -> DraftTree:
    assert parts.drafter is not None
    if sampling.greedy and options["replacement"]:
        branching = (1,) * len(branching)  # independent draws from a one-hot distribution are all the same token
    return DraftTree(parts.drafter, branching, options["replacement"], options["attention"] == "batch")


def _multi_candidate(parts: Parts, sampling: Sampling, options: Options, naive: bool = False) -> Method:
    proposer = _draft_tree(parts, sampling, parse_branching(options["k_config"]), options)
    verifier = SampleAndMatch if naive else partial(_TREES[options["verification"]], options["replacement"])
    return _matching(proposer, sampling, verifier())


def _batch_speculative(parts: Parts, sampling: Sampling, options: Options) -> Method:
    branching = (options["drafts"],) + (1,) * (options["gamma"] - 1)
    proposer = _draft_tree(parts, sampling, branching, {"replacement": True, "attention": "tree"})
    return _matching(proposer, sampling, MultiCandidate(replacement=True))


def _chains(parts: Parts, sampling: Sampling, options: Options, several: bool) -> Method:
    assert parts.drafter is not None
    models = (parts.drafter, *parts.more_drafters) if several else (parts.drafter,)
    proposer = DraftChains(models, options["gamma"], options["drafts"], sampling.greedy)
    return _matching(proposer, sampling, SeveralDrafters() if several else KSequential())


def _bild(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    proposer = AdaptiveChain(parts.drafter, options["gamma"], Confidence(options["fallback"]))
    return Method(proposer, Rollback(options["rollback"], sampling.greedy))


def _mjsd(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    proposer = DraftBeam(parts.drafter, options["gamma"], options["beams"])
    return Method(proposer, JointLikelihood(options["threshold"], sampling.greedy))


def _adaptive(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.drafter is not None
    policies: dict[str, Callable[[], Policy]] = {
        "confidence": lambda: Confidence(options["threshold"]),
        "expected-gain": lambda: ExpectedGain(options["cost"], options["width"]),
        "oracle": lambda: Oracle(options["cost"], options["width"]),
    }
    proposer = AdaptiveChain(parts.drafter, options["gamma"], policies[options["policy"]]())
    return _matching(proposer, sampling, _CHAINS[options["verification"]]())


# Candidates of heads are not drawn by chance: matching the target's own choice is exact, and best.


def _bpd(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.heads is not None
    depth = options["depth"] or parts.heads.num_heads
    return _matching(HeadTree(parts.heads, "x".join("1" * depth)), sampling, SampleAndMatch())


def _medusa(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.heads is not None
    tree = options["tree"]
    if tree == METHODS["medusa"].defaults["tree"]:  # of the default no more levels than there are heads
        tree = "x".join(tree.split("x")[: parts.heads.num_heads])
    typical = options["acceptance"] == "typical" and not sampling.greedy
    verifier = TypicalAcceptance(options["epsilon"], options["delta"]) if typical else SampleAndMatch()
    return _matching(HeadTree(parts.heads, tree), sampling, verifier)


def _slim(parts: Parts, sampling: Sampling, options: Options) -> Method:
    assert parts.heads is not None
    depth = options["depth"] or parts.heads.num_heads
    settings = (options["sequences"], options["candidates"], options["unseen"], depth, options["lengths"])
    table = None if options["correlation"] == "none" else parts.table
    proposer = PrunedHeadTree(parts.heads, table, *settings, add_k=options["add_k"], least=options["least"])
    return _matching(proposer, sampling, SampleAndMatch())


def _slim_spec(sequences: int) -> _Spec:
    # `lengths` and `unseen` are not those of the paper's equations, see `PrunedHeadTree`.
    defaults = {"sequences": sequences, "candidates": 10, "unseen": 0.01, "depth": 0, "lengths": "all"}
    defaults |= {"least": 0.0, "correlation": "table", "add_k": 0.0}
    choices = {"lengths": ("all", "full"), "correlation": ("table", "none")}
    return _Spec(_slim, ("heads", "table"), defaults, choices)


_COUNTS = ("gamma", "drafts", "beams", "sequences", "candidates", "ngram", "shortest", "draft_gamma", "nodes")
_LOOKUP: Options = {"gamma": 4, "ngram": 3, "shortest": 1}
_SUFFIX: Options = {"nodes": 8, "depth": 8, "least": 0.1, "store": "none"}
_STORE = {"store": ("table", "none")}
_ATTENTION = {"attention": ("tree", "batch")}
_TREE = {"k_config": "4x2x2x1", "replacement": False, "attention": "tree"}

METHODS: dict[str, _Spec] = {
    "autoregressive": _Spec(_autoregressive),
    "beam": _Spec(_beam, (), {"beams": 4, "width": 0, "draft_gamma": 3}),
    "mjgd": _Spec(_beam, (), {"gamma": 2, "beams": 8}),
    "speculative": _Spec(
        _speculative,
        ("drafter",),
        {"gamma": 4, "verification": "token", "parallel": False},
        {"verification": tuple(_CHAINS)},
    ),
    "unigram": _Spec(partial(_table_chain, order=1), ("table",), {"gamma": 2}),
    "bigram": _Spec(partial(_table_chain, order=2), ("table",), {"gamma": 2, "prior": 1.0, "add_k": 0.0}),
    "prompt-lookup": _Spec(_prompt_lookup, (), _LOOKUP),
    "lookup-drafter": _Spec(
        _lookup_or_drafter, ("drafter",), _LOOKUP | {"shortest": 2, "draft_gamma": 4, "threshold": 0.4}
    ),
    "dynamic-tree": _Spec(_dynamic_tree, ("drafter",), {"nodes": 6, "depth": 4, "width": 2, "least": 0.1}),
    "suffix": _Spec(_suffix, (), _SUFFIX, _STORE),
    "suffix-drafter": _Spec(
        _suffix_drafter, ("drafter",), _SUFFIX | {"draft_depth": 3, "width": 2, "sure": 0.7}, _STORE
    ),
    "suffix-heads": _Spec(_suffix, ("heads",), _SUFFIX | {"candidates": 4}, _STORE),
    "multi-candidate": _Spec(
        _multi_candidate,
        ("drafter",),
        _TREE | {"verification": "token"},
        _ATTENTION | {"verification": tuple(_TREES)},
    ),
    "naive-multi-candidate": _Spec(partial(_multi_candidate, naive=True), ("drafter",), _TREE, _ATTENTION),
    "batch-speculative": _Spec(_batch_speculative, ("drafter",), {"gamma": 4, "drafts": 4}),
    "spectr": _Spec(partial(_chains, several=False), ("drafter",), {"gamma": 4, "drafts": 4}),
    "specinfer": _Spec(partial(_chains, several=True), ("drafter",), {"gamma": 4, "drafts": 1}),
    "bild": _Spec(_bild, ("drafter",), {"gamma": 10, "fallback": 0.9, "rollback": 2.0}),
    "mjsd": _Spec(_mjsd, ("drafter",), {"gamma": 4, "beams": 8, "threshold": 0.1}),
    "adaptive": _Spec(
        _adaptive,
        ("drafter",),
        {"gamma": 8, "policy": "confidence", "threshold": 0.4, "cost": 0.1, "width": 0.03, "verification": "token"},
        {"policy": ("confidence", "expected-gain", "oracle"), "verification": tuple(_CHAINS)},
    ),
    "relaxed-opt": _Spec(partial(_relaxed, optimal=True), ("drafter",), {"gamma": 4, "epsilon": 0.1}),
    "relaxed-uno": _Spec(partial(_relaxed, optimal=False), ("drafter",), {"gamma": 4, "epsilon": 0.1}),
    "bpd": _Spec(_bpd, ("heads",), {"depth": 0}),
    "medusa": _Spec(
        _medusa,
        ("heads",),
        {"tree": "4x2x1x1", "acceptance": "exact", "epsilon": 0.09, "delta": 0.3},
        {"acceptance": ("exact", "typical")},
    ),
    "slim-ss": _slim_spec(1),
    "slim-s": _slim_spec(20),
    "slim-l": _slim_spec(40),
}


def method_options(name: str, options: Options) -> Options:
    """The settings of a method, its defaults filled in. Raises ValueError: an unknown method, option or choice, with
    the nearest right name; a value of another type; a count below 1. Methods with a drafter know `drafter` too, which
    of several it is, by default the first."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}.{did_you_mean(name, list(METHODS))} Known: {', '.join(METHODS)}")
    defaults = METHODS[name].defaults
    if "drafter" in options and "drafter" in METHODS[name].needs:
        defaults = defaults | {"drafter": 1}
    for key, value in options.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            hint = did_you_mean(key, list(defaults))
            raise ValueError(f"method {name!r} has no option {key!r}.{hint} Known: {known}")
        wanted = type(defaults[key])
        if not (type(value) is wanted or (wanted is float and type(value) is int)):
            raise ValueError(f"option {key!r} of method {name!r} must be {wanted.__name__}, got {value!r}")
        choices = METHODS[name].choices.get(key)
        if choices and value not in choices:
            known, hint = ", ".join(choices), did_you_mean(value, list(choices))
            raise ValueError(f"option {key!r} of method {name!r} cannot be {value!r}.{hint} Known: {known}")
        if key in (*_COUNTS, "drafter") and value < 1:
            raise ValueError(f"option {key!r} of method {name!r} must be at least 1, got {value}")
    return defaults | options


def needs_of(name: str, options: Options) -> tuple[str, ...]:
    """The parts that a method works with: drafter, heads, table. SLiM without correlation (r ≡ 1) needs no table; what
    looks into a table's texts needs it, and a beam that is searched with a drafter that."""
    without = ("table",) if options.get("correlation") == "none" else ()
    more = ["table"] if options.get("store") == "table" else []
    more += ["drafter"] if name == "beam" and options.get("width") else []
    return *(part for part in METHODS[name].needs if part not in without), *more


def build_method(name: str, parts: Parts, sampling: Sampling, **options: Any) -> Method:
    """The proposer and verifier of a method; ValueError for wrong options, missing parts, settings that do not fit."""
    settings = method_options(name, options)
    for part in needs_of(name, settings):
        if getattr(parts, part) is None:
            raise ValueError(f"method {name!r} needs a {part}, and none was given")
    if (number := settings.pop("drafter", 1)) > 1:
        if number > len(parts.more_drafters) + 1:
            raise ValueError(f"`drafter` of method {name!r} is {number}: there are {len(parts.more_drafters) + 1}")
        parts = replace(parts, drafter=parts.more_drafters[number - 2])
    return METHODS[name].build(parts, sampling, settings)
