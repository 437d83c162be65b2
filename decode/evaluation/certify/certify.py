"""Certificates of losslessness: does a method, as it decodes, write what the target would have written?

Every token that it wrote is judged by one wide forward of the target over the method's own text (`rescoring.py`), so
that a difference is found wherever it stands and one near-tie does not end the comparison.

- At temperature 0 each token must be the target's most likely one after the text before it, up to near-ties: logits
  that rounding in forwards of different shapes can exchange.
- Otherwise the tokens must follow the target's warped distribution (`uniformity.py`), the vocabulary ordered by what
  the method's drafter, heads or table prefer over the target, and by the target's own probabilities. A token outside
  the warped distribution's support is a fault by itself.

Shape letters: X tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...engine import Limits, decode_texts
from ...methods import Method, Parts, build_method
from ...models.base import LanguageModel
from ...rng import Rng
from ...warpers import Sampling, warp
from ..measure import Entry
from .joint import LENGTH, MOST, joint_law, joint_test, outcome
from .rescoring import Rounding, chunks, judged, measure_rounding, proposers_view, read_back
from .uniformity import Evidence, Result, detectable_bias, favour, transform, uniformity_tests

Verdict = Literal["lossless", "too little text", "undecided", "not lossless", "not claimed"]
"""lossless: no test doubts it, and a bias of `VISIBLE` would have been found. too little text: it would not have been.
undecided: even `MORE` text left a p-value that a correct method has with probability `DOUBT` at most."""
LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the planned tokens after which the tests are made; the level is divided among these and `MORE`."""
MORE = (2.0, 4.0, 8.0)
"""Shares to which a text grows, from fresh seeds, while it is neither clear nor a fault for certain."""
DOUBT = 0.01
"""Probability that all tests of a correct method at one look together leave a doubt."""
VISIBLE = 0.1
"""The largest smallest bias (see `power`, found_99) with which a method may be called lossless."""
EXCUSED = ("near-tie", "edge")
"""Kinds of findings that rounding explains."""
_LISTED = 20  # of those, and of faults


@dataclass(frozen=True)
class Plan:
    """How much is looked at, and how sure a fault must be. Raises ValueError: less than one token or row."""

    tokens: int = 4_000
    """Tokens to judge for each method. At temperature 0 every prompt is decoded once, and no more."""
    level: float = 1e-6
    """Probability of a false alarm, of all tests of one method together."""
    batch: int = 1
    """Rows decoded together."""
    seed: int = 0
    """Row r draws from seed + r."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch) < 1:
            raise ValueError(f"tokens and batch must be at least 1, got {self.tokens} and {self.batch}")


@dataclass(frozen=True)
class Finding:
    """A token that is not what it should be, or that only rounding explains."""

    kind: Literal["token", "near-tie", "outside", "edge", "length"]
    """token: not the most likely one. near-tie: the same, within rounding. outside: of probability 0 after warping.
    edge: the same, within rounding of what warping keeps. length: the text ends where it should not, or goes on."""
    prompt: int
    position: int
    """Of the new tokens, from 0."""
    token: int
    expected: int | None
    """The target's most likely token there."""
    margin: float | None
    """By how much the expected token's logit is larger."""


class DecodedBatch(NamedTuple):
    """What a method wrote after the next of its prompts."""

    outputs: list[list[int]]
    seconds: float


@dataclass
class Certificate:
    """What was found about one method with its settings."""

    label: str
    method: str
    options: dict[str, Any]
    sampling: dict[str, Any]
    claimed: bool
    """Whether the method calls itself lossless."""
    verdict: Verdict
    prompts: int
    rows: int
    batch: int
    tokens: int
    planned: int
    level: float
    faults: int
    """How many tokens are wrong beyond doubt; `findings` lists the first."""
    near_ties: int
    undecided: int | None
    """At temperature 0: places where another token would have passed as well, for rounding's sake."""
    findings: list[Finding]
    tests: list[dict[str, Any]]
    """At the last look: order, test, statistic, p_value, level."""
    bias: dict[str, Any]
    """estimate, interval (95 %), towards: the share of probability that moved there; not more than the mean total
    variation between the text's distribution and the target's. At temperature 0 the share of wrong tokens."""
    power: dict[str, Any]
    """tokens, level, found_80, found_99: the smallest bias that so many tokens find with this probability."""
    rounding: Rounding
    seconds: float
    early: bool
    """Ended before all planned tokens, because a fault was certain."""

    @property
    def failed(self) -> bool:
        """Whether there is reason to doubt a method that calls itself lossless."""
        return self.verdict in ("not lossless", "undecided")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"rounding": self.rounding._asdict()}


@torch.inference_mode()
def certify_method(
    target: LanguageModel,
    parts: Parts,
    entry: Entry,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    plan: Plan,
    *,
    method: Method | None = None,
    reference: LanguageModel | None = None,
    rounding: Rounding | None = None,
    keep: Callable[[int, Callable[[], DecodedBatch]], DecodedBatch] = lambda _, work: work(),
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Run a method and judge what it writes. One that does not claim to be lossless runs to the end, whatever is found.

    Args:
        method: a proposer and a verifier; by default those of the entry.
        reference: judges; by default the target. Another scorer of its weights tests the target's forward too.
        rounding: of the target and the reference under this sampling; measured here by default.
        keep: has texts written, from the row of a number on, or knows what was written before.
    """
    method = method or build_method(entry.method, parts, entry.sampling, **entry.options)
    rounding = rounding or measure_rounding(target, prompts, entry.sampling, reference=reference)
    hooks = (keep, progress or (lambda *_: None))
    run = _Run(target, entry, prompts, limits, plan, method, reference or target, rounding, *hooks)
    return run.greedy() if entry.sampling.greedy else run.sampled()


@dataclass
class _Run:
    """One method's certificate in the making."""

    target: LanguageModel
    entry: Entry
    prompts: Sequence[Sequence[int]]
    limits: Limits
    plan: Plan
    method: Method
    reference: LanguageModel
    rounding: Rounding
    keep: Callable[[int, Callable[[], DecodedBatch]], DecodedBatch]
    progress: Callable[[int, int], None]
    findings: list[Finding] = field(default_factory=list)
    faults: int = 0
    near_ties: int = 0
    rows: int = 0
    tokens: int = 0
    tests: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    laws: list[np.ndarray] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.claimed = self.method.verifier.lossless
        # Whatever the text is drawn from, it is not drawn from these.
        self.uniform = np.random.default_rng([self.plan.seed, 1])
        self.spare = np.random.default_rng([self.plan.seed, 2])

    def greedy(self) -> Certificate:
        planned = min(self.plan.tokens, len(self.prompts) * self.limits.max_new_tokens)
        undecided = 0
        while self.rows < len(self.prompts) and self.tokens < planned and not (self.claimed and self.faults):
            numbers = range(self.rows, min(self.rows + self.plan.batch, len(self.prompts)))
            outputs = self.write([self.prompts[number] for number in numbers])
            undecided += self.judge_greedy(numbers, outputs)
            self.progress(min(self.tokens, planned), planned)
        bias = {"estimate": self.faults / max(1, self.tokens), "interval": None, "towards": "other tokens"}
        decided = max(1, self.tokens - undecided)
        found = {f"found_{power}": 1 - (1 - power / 100) ** (1 / decided) for power in (80, 99)}
        sure = {"tokens": decided, "level": 0.0} | found
        return self.certificate(planned, bias, sure, self.claimed and self.faults > 0, undecided)

    def write(self, prompts: list[Sequence[int]]) -> list[list[int]]:
        """What the method writes after each prompt, or wrote before."""

        def work() -> DecodedBatch:
            rng = Rng.for_rows(self.plan.seed + self.rows, len(prompts), self.target.device)
            outputs = decode_texts(self.target, *self.method, prompts, self.limits, self.entry.sampling, rng)
            return DecodedBatch(outputs, time.monotonic() - start)

        start = time.monotonic()
        written = self.keep(self.rows, work)
        self.start += time.monotonic() - start - written.seconds  # of texts that were kept, what they took then
        self.rows += len(prompts)
        self.tokens += sum(map(len, written.outputs))
        return written.outputs

    def judge_greedy(self, numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> int:
        """Each token against the most likely one. Returns at how many places another would have passed too."""
        self.judge_lengths(numbers, outputs)
        where = _positions(numbers, outputs)
        if not where:
            return 0
        hidden_XD = read_back(self.reference, [self.prompts[number] for number in numbers], outputs).hidden_XD
        token_X = torch.tensor([token for output in outputs for token in output], device=hidden_XD.device)
        undecided = 0
        for chunk in chunks(len(token_X), self.reference.vocab_size):
            logits_CV, token_C1 = self.reference.logits(hidden_XD[chunk]).float(), token_X[chunk, None]
            best_C, expected_C = logits_CV.max(-1)
            margin_C = best_C - logits_CV.gather(1, token_C1)[:, 0]
            undecided += int(((logits_CV >= best_C[:, None] - self.rounding.near_tie).sum(1) > 1).sum())
            for index in torch.nonzero(token_C1[:, 0] != expected_C)[:, 0].tolist():
                margin, (number, position) = float(margin_C[index]), where[chunk.start + index]
                kind: Literal["token", "near-tie"] = "near-tie" if margin <= self.rounding.near_tie else "token"
                expected = int(expected_C[index])
                self.note(Finding(kind, number, position, int(token_C1[index]), expected, margin))
        return undecided

    def judge_lengths(self, numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
        """A text ends with its first stop token, or else at the limit, as plain decoding does."""
        for number, output in zip(numbers, outputs, strict=True):
            stop = next((index for index, token in enumerate(output) if token in self.limits.stop_ids), None)
            wanted = self.limits.max_new_tokens if stop is None else min(stop + 1, self.limits.max_new_tokens)
            if len(output) != wanted:
                self.note(Finding("length", number, len(output), output[-1] if output else -1, None, None))

    def note(self, finding: Finding) -> None:
        if finding.kind in EXCUSED:
            self.near_ties += 1
        else:
            self.faults += 1
        if sum((found.kind in EXCUSED) == (finding.kind in EXCUSED) for found in self.findings) < _LISTED:
            self.findings.append(finding)

    def sampled(self) -> Certificate:
        """Two neighbouring rows share a prompt, so that shared random numbers show."""
        orders, planned = dict[str, Evidence](), self.plan.tokens
        for look in LOOKS + MORE:
            if look > 1 and not (self.claimed and self.doubtful):
                break
            wanted = max(1, math.ceil(self.plan.tokens * look))
            planned = max(planned, wanted)
            while self.tokens < wanted and not (self.claimed and self.faults):
                numbers = [(row // 2) % len(self.prompts) for row in range(self.rows, self.rows + self.plan.batch)]
                self.judge_sampled(orders, numbers, self.write([self.prompts[number] for number in numbers]))
                self.progress(min(self.tokens, planned), planned)
            self.look(orders, wanted)
            if self.claimed and self.convicted:
                break
        towards, evidence = list(orders.items())[-1]
        evidence = evidence.first(planned)
        count, variance = max(1, evidence.tokens), evidence.total_variance
        reach = 1.96 * math.sqrt(variance) / count
        bias = {"estimate": evidence.bias, "interval": [evidence.bias - reach, evidence.bias + reach]}
        level = self.tests[0]["level"]
        powers = {f"found_{power}": (count, level, power / 100, variance / count) for power in (80, 99)}
        found = {name: detectable_bias(*settings) for name, settings in powers.items()}
        sure = {"tokens": evidence.tokens, "level": level} | found
        early = self.claimed and self.convicted and evidence.tokens < planned
        return self.certificate(planned, bias | {"towards": towards}, sure, early, None)

    def look(self, orders: dict[str, Evidence], tokens: int) -> None:
        """All tests on the first so many tokens."""
        found = [
            (order, result)
            for order, evidence in orders.items()
            for result in uniformity_tests(evidence.first(tokens), self.spare)
        ]
        if self.reference.vocab_size**LENGTH <= MOST:
            # As many rows as there must be: what they say does not decide how many are looked at.
            found.append(("all continuations", self.joint(tokens // self.limits.max_new_tokens)))
        level = self.plan.level / (len(found) * len(LOOKS + MORE))
        self.tests = [{"order": order} | result._asdict() | {"level": level} for order, result in found]

    def joint(self, rows: int) -> Result:
        """The joint law of the first tokens of the first so many rows, by prompt."""
        sampling, stops = self.entry.sampling, self.limits.stop_ids
        while len(self.laws) < len(self.prompts):
            self.laws.append(joint_law(self.reference, self.prompts[len(self.laws)], sampling, stops))
        outcomes: list[list[int]] = [[] for _ in self.laws]
        for number, found in self.outcomes[:rows]:
            outcomes[number].append(found)
        return joint_test(self.laws, outcomes)

    @property
    def convicted(self) -> bool:
        """Whether a fault is certain, at the plan's level."""
        return self.faults > 0 or any(test["p_value"] < test["level"] for test in self.tests)

    @property
    def doubtful(self) -> bool:
        """Whether a test says what it rarely says of a correct method."""
        return any(test["p_value"] < DOUBT / len(self.tests) for test in self.tests)

    def judge_sampled(
        self, orders: dict[str, Evidence], numbers: Sequence[int], outputs: Sequence[Sequence[int]]
    ) -> None:
        """Add what the rows say to each order's evidence."""
        self.judge_lengths(numbers, outputs)
        vocab = self.reference.vocab_size
        self.outcomes += [(number, outcome(row, vocab)) for number, row in zip(numbers, outputs, strict=True)]
        if not any(outputs):
            return
        prompts, sampling = [self.prompts[number] for number in numbers], self.entry.sampling
        reading = read_back(self.reference, prompts, outputs)
        token_X = torch.tensor([token for output in outputs for token in output], device=reading.last_X.device)
        where = _positions(numbers, outputs)
        view = proposers_view(self.method.proposer, sampling, prompts, outputs, reading, vocab)
        uniform_X = torch.from_numpy(self.uniform.random(len(token_X))).to(token_X.device)
        found: dict[str, list[Tensor]] = {}
        for chunk in chunks(len(token_X), vocab):
            logits_CV, token_C = self.reference.logits(reading.hidden_XD[chunk]), token_X[chunk]
            probs_CV = judged(logits_CV, sampling)
            self.judge_support(logits_CV, probs_CV, token_C, where[chunk])
            best_CV = torch.zeros_like(probs_CV, dtype=torch.bool).scatter_(1, probs_CV.argmax(-1, keepdim=True), True)
            # By number, as tokens are drawn: draws by one random number then lie close to each other.
            number_V = torch.arange(probs_CV.shape[1], device=probs_CV.device)
            scores = {
                "token numbers": (-number_V.expand_as(probs_CV), (2 * number_V < len(number_V)).expand_as(probs_CV)),
                "the target's most likely token": (probs_CV, best_CV),
            }
            if view is not None:
                theirs_CV = view(chunk).double()
                scores["what its proposer prefers"] = (theirs_CV / probs_CV, theirs_CV > probs_CV)
            for order, (score_CV, favoured_CV) in scores.items():
                u_C = transform(probs_CV, score_CV.nan_to_num(nan=0.0, posinf=torch.inf), token_C, uniform_X[chunk])
                found.setdefault(order, []).append(torch.stack((u_C, *favour(probs_CV, favoured_CV, token_C))))
        ends = np.cumsum([len(output) for output in outputs])[:-1]
        for order, pieces in found.items():
            orders.setdefault(order, Evidence()).rows += np.split(torch.cat(pieces, 1).cpu().numpy(), ends, 1)

    def judge_support(
        self, logits_CV: Tensor, probs_CV: Tensor, token_C: Tensor, where: Sequence[tuple[int, int]]
    ) -> None:
        """A token that warping leaves no probability is a fault, unless rounding might have kept it."""
        own_C1 = token_C[:, None]
        for index in torch.nonzero(probs_CV.gather(1, own_C1)[:, 0] == 0)[:, 0].tolist():
            logits_V, token, (number, position) = logits_CV[index].float(), int(token_C[index]), where[index]
            kept = within_rounding(logits_V, token, self.entry.sampling, self.rounding.near_tie)
            expected, margin = int(logits_V.argmax()), float(logits_V.max() - logits_V[token])
            self.note(Finding("edge" if kept else "outside", number, position, token, expected, margin))

    def certificate(
        self, planned: int, bias: dict[str, Any], power: dict[str, Any], early: bool, undecided: int | None
    ) -> Certificate:
        verdict: Verdict = "lossless" if power["found_99"] <= VISIBLE else "too little text"
        if self.doubtful or self.convicted:
            verdict = "not lossless" if self.convicted else "undecided"
        return Certificate(
            label=self.entry.label,
            method=self.entry.method,
            options=dict(self.entry.options),
            sampling=dataclasses.asdict(self.entry.sampling),
            claimed=self.claimed,
            verdict=verdict if self.claimed else "not claimed",
            prompts=min(len(self.prompts), self.rows),
            rows=self.rows,
            batch=self.plan.batch,
            tokens=self.tokens,
            planned=planned,
            level=self.plan.level,
            faults=self.faults,
            near_ties=self.near_ties,
            undecided=undecided,
            findings=self.findings,
            tests=self.tests,
            bias=bias,
            power=power,
            rounding=self.rounding,
            seconds=time.monotonic() - self.start,
            early=early,
        )


def _positions(numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Prompt and position of each new token."""
    return [(number, index) for number, output in zip(numbers, outputs, strict=True) for index in range(len(output))]


def within_rounding(logits_V: Tensor, token: int, sampling: Sampling, near_tie: float) -> bool:
    """Whether top-k and top-p would keep a token if every logit [V] of the unwarped target were wrong by up to half of
    `near_tie`; False where neither is set."""
    own = logits_V[token]
    if 0 < sampling.top_k < len(logits_V) and own < logits_V.topk(sampling.top_k).values[-1] - near_tie:
        return False
    if sampling.top_p < 1:
        probs_V = warp(logits_V, Sampling(sampling.temperature, sampling.top_k))
        before = float(probs_V[logits_V > own + near_tie].sum())
        return before < sampling.top_p * math.exp(near_tie / sampling.temperature) + torch.finfo(torch.float32).eps
    return 0 < sampling.top_k < len(logits_V)
