"""Certificates of losslessness: tests that a method's output follows the target's distribution.

Each token that a method generated is checked against one wide forward of the target over the method's own text
(`rescoring.py`). Differences are found at every position, and near-ties do not end the comparison.

- At temperature 0 each token must be the target's most likely one, up to near-ties: logits whose order rounding can
change between forwards of different shapes. - Otherwise the tokens must follow the target's warped distribution
(`uniformity.py`), with the vocabulary ordered by token id, by the target's probabilities, and by the preference of the
method's drafter, heads or table relative to the target. A token outside the support of the warped distribution is a
fault by itself.

Shape letters: X tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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
from .rescoring import Rounding, chunks, joint_law, judged, measure_rounding, proposers_view, read_back
from .uniformity import Evidence, Result, detectable_bias, favour, joint_test, transform, uniformity_tests

Verdict = Literal["lossless", "too little text", "undecided", "not lossless", "not claimed"]
"""Verdict on a method. lossless: no test rejects, and a bias of `VISIBLE` would have been detected. too little text: it
might not have been. undecided: after all of `MORE` a p-value remains that a correct method has with probability `DOUBT`
at most."""
LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the planned tokens after which the tests are run. The level is divided among these and `MORE`."""
MORE = (2.0, 4.0, 8.0)
"""Further shares of the planned tokens, for texts that are neither clear nor a certain fault."""
DOUBT = 0.01
"""Probability that any test of a correct method is doubtful at one look."""
VISIBLE = 0.1
"""Largest detectable bias (`found_99`) with which a method is certified as lossless."""
EXCUSED = ("near-tie", "edge")
"""Kinds of findings that rounding explains."""
_LISTED = 20  # maximum number of listed faults, and of listed excused findings
_LENGTH, _MAX_CONTINUATIONS = 3, 1000  # joint laws are tested if all continuations can be enumerated


@dataclass(frozen=True)
class Plan:
    """Amount of text and significance level. Raises ValueError for less than one token or row."""

    tokens: int = 4_000
    """Number of tokens to judge per method. At temperature 0 every prompt is decoded at most once."""
    level: float = 1e-6
    """Probability of a false alarm in any test of one method."""
    batch: int = 1
    seed: int = 0
    """Base seed. Row r uses seed + r."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch) < 1:
            raise ValueError(f"tokens and batch must be at least 1, got {self.tokens} and {self.batch}")


@dataclass(frozen=True)
class Finding:
    """Token that is wrong, or that differs only within rounding."""

    kind: Literal["token", "near-tie", "outside", "edge", "length"]
    """Kind. token: not the most likely one. near-tie: the same, within rounding. outside: probability 0 after warping.
    edge: the same, within rounding. length: the text ends too early or too late."""
    prompt: int
    position: int
    """Index among the new tokens."""
    token: int
    expected: int | None
    """Most likely token of the target."""
    margin: float | None
    """Difference between the logits of the expected token and this one."""


class DecodedBatch(NamedTuple):
    """Texts that a method generated for consecutive prompts."""

    outputs: list[list[int]]
    seconds: float


@dataclass
class Certificate:
    """Findings about one method with its settings."""

    label: str
    method: str
    options: dict[str, Any]
    sampling: dict[str, Any]
    claimed: bool
    """True if the method claims to be lossless."""
    batch: int
    level: float
    rounding: Rounding
    verdict: Verdict = "not claimed"
    rows: int = 0
    tokens: int = 0
    planned: int = 0
    """Planned number of tokens. A certain fault ends decoding earlier."""
    faults: int = 0
    """Number of wrong tokens. `findings` lists the first ones."""
    near_ties: int = 0
    undecided: int | None = None
    """Number of positions at temperature 0 where rounding makes another token acceptable too."""
    findings: list[Finding] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    """Results of the last look: order, test, statistic, p_value, level."""
    bias: dict[str, Any] = field(default_factory=dict)
    """Estimate, interval (95 %) and direction (`towards`) of the probability that moved, at most the mean total
    variation from the target's distribution. At temperature 0 this is the share of wrong tokens."""
    power: dict[str, Any] = field(default_factory=dict)
    """Number of tokens, level, and smallest bias that is detected with 80 and 99 % probability (`found_80`,
    `found_99`)."""
    seconds: float = 0.0

    @property
    def convicted(self) -> bool:
        """Return whether a fault is certain at the plan's level."""
        return self.faults > 0 or any(test["p_value"] < test["level"] for test in self.tests)

    @property
    def doubtful(self) -> bool:
        """Return whether a p-value is too small for most correct methods."""
        return any(test["p_value"] < DOUBT / len(self.tests) for test in self.tests)

    @property
    def failed(self) -> bool:
        """Return whether there is reason to doubt a method that claims to be lossless."""
        return self.verdict in ("not lossless", "undecided")

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it unless enough of its category are listed."""
        excused = finding.kind in EXCUSED
        self.near_ties += excused
        self.faults += not excused
        if sum((listed.kind in EXCUSED) == excused for listed in self.findings) < _LISTED:
            self.findings.append(finding)

    def judge(self) -> None:
        """Set the verdict from the test results."""
        if self.claimed and self.convicted:
            self.verdict = "not lossless"
        elif self.claimed and self.doubtful:
            self.verdict = "undecided"
        elif self.claimed:
            self.verdict = "lossless" if self.power["found_99"] <= VISIBLE else "too little text"


Keep = Callable[[int, Callable[[], DecodedBatch]], DecodedBatch]


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
    keep: Keep = lambda _, work: work(),
    progress: Callable[[int, int], None] = lambda done, planned: None,
) -> Certificate:
    """Decode with a method and judge its text. Methods that do not claim to be lossless always run to the end.

    `method` defaults to that of `entry`, `reference` (the judge) to the target, and `rounding` to a measurement under
    this sampling. Another scorer of the same weights as judge also tests the target's forward. `keep` is called with a
    row number and the function that decodes from there on, and may return an earlier process's result. `progress`
    receives the judged and the planned number of tokens.
    """
    method, reference = (
        method or build_method(entry.method, parts, entry.sampling, **entry.options),
        reference or target,
    )
    certificate = Certificate(
        label=entry.label,
        method=entry.method,
        options=dict(entry.options),
        sampling=asdict(entry.sampling),
        claimed=method.verifier.lossless,
        batch=plan.batch,
        level=plan.level,
        rounding=rounding or measure_rounding(target, prompts, entry.sampling, reference=reference),
    )
    run = _Run(target, method, entry.sampling, prompts, limits, plan, reference, certificate, keep, progress)
    if entry.sampling.greedy:
        run.greedy()
    else:
        run.sampled()
    certificate.judge()
    certificate.seconds = time.monotonic() - run.start
    return certificate


@dataclass
class _Run:
    """Decoding and judging of the texts of one certificate."""

    target: LanguageModel
    method: Method
    sampling: Sampling
    prompts: Sequence[Sequence[int]]
    limits: Limits
    plan: Plan
    reference: LanguageModel
    found: Certificate
    keep: Keep
    progress: Callable[[int, int], None]
    orders: dict[str, Evidence] = field(default_factory=dict)
    texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Prompt number and output of each sampled row."""
    laws: list[np.ndarray] = field(default_factory=list)
    repeats: int = 0
    """Number of repeated pairs of successive random numbers, in any row."""
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # These generators are independent of those that the text is sampled with.
        self.uniform = np.random.default_rng([self.plan.seed, 1])
        self.spare = np.random.default_rng([self.plan.seed, 2])

    def greedy(self) -> None:
        """Decode every prompt once and compare with the most likely tokens."""
        found = self.found
        found.planned, found.undecided = min(self.plan.tokens, len(self.prompts) * self.limits.max_new_tokens), 0
        while found.rows < len(self.prompts) and found.tokens < found.planned and not (found.claimed and found.faults):
            numbers = range(found.rows, min(found.rows + self.plan.batch, len(self.prompts)))
            self.judge_greedy(numbers, self.write(numbers, found.planned))
        decided = max(1, found.tokens - found.undecided)
        found.bias = {"estimate": found.faults / max(1, found.tokens), "interval": None, "towards": "other tokens"}
        found.power = {"tokens": decided, "level": 0.0}
        found.power |= {f"found_{power}": 1 - (1 - power / 100) ** (1 / decided) for power in (80, 99)}

    def write(self, numbers: Sequence[int], planned: int) -> list[list[int]]:
        """Decode these prompts, or return the texts that were decoded before, and check their lengths.

        A text ends with its first stop token or at the limit, as in autoregressive decoding.
        """
        found, prompts = self.found, [self.prompts[number] for number in numbers]

        def work() -> DecodedBatch:
            rng = Rng.for_rows(self.plan.seed + found.rows, len(prompts), self.target.device)
            outputs = decode_texts(self.target, *self.method, prompts, self.limits, self.sampling, rng)
            self.repeats = self.repeats or repeated_draws(rng)
            return DecodedBatch(outputs, time.monotonic() - start)

        start = time.monotonic()
        written = self.keep(found.rows, work)
        self.start += time.monotonic() - start - written.seconds  # cached texts count with their original time
        found.rows += len(prompts)
        found.tokens += sum(map(len, written.outputs))
        for number, output in zip(numbers, written.outputs, strict=True):
            stop = next((index for index, token in enumerate(output) if token in self.limits.stop_ids), math.inf)
            if len(output) != min(stop + 1, self.limits.max_new_tokens):
                found.add(Finding("length", number, len(output), output[-1] if output else -1, None, None))
        self.progress(min(found.tokens, planned), planned)
        return written.outputs

    def judge_greedy(self, numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
        """Compare each token with the most likely one."""
        where = _positions(numbers, outputs)
        if not where:
            return
        hidden_XD = read_back(self.reference, [self.prompts[number] for number in numbers], outputs).hidden_XD
        token_X = torch.tensor([token for output in outputs for token in output], device=hidden_XD.device)
        near_tie, undecided = self.found.rounding.near_tie, 0
        for chunk in chunks(len(token_X), self.reference.vocab_size):
            logits_CV, token_C1 = self.reference.logits(hidden_XD[chunk]).float(), token_X[chunk, None]
            best_C, expected_C = logits_CV.max(-1)
            margin_C = best_C - logits_CV.gather(1, token_C1)[:, 0]
            undecided += int(((logits_CV >= best_C[:, None] - near_tie).sum(1) > 1).sum())
            for index in torch.nonzero(token_C1[:, 0] != expected_C)[:, 0].tolist():
                margin = float(margin_C[index])
                finding = (*where[chunk.start + index], int(token_C1[index]), int(expected_C[index]), margin)
                self.found.add(Finding("near-tie" if margin <= near_tie else "token", *finding))
        self.found.undecided = (self.found.undecided or 0) + undecided

    def sampled(self) -> None:
        """Decode and test until a look is clear. Four adjacent rows share a prompt, which reveals shared draws."""
        found = self.found
        found.planned = self.plan.tokens
        for look in LOOKS + MORE:
            if look > 1 and not (found.claimed and found.doubtful):
                break
            wanted = max(1, math.ceil(self.plan.tokens * look))
            found.planned = max(found.planned, wanted)
            while found.tokens < wanted and not (found.claimed and found.faults):
                numbers = [(row // 4) % len(self.prompts) for row in range(found.rows, found.rows + self.plan.batch)]
                self.judge_sampled(numbers, self.write(numbers, found.planned))
            self.look(wanted)
            if found.claimed and found.convicted:
                break
        towards, evidence = list(self.orders.items())[-1]
        evidence = evidence.first(found.planned)
        tokens, level = evidence.joined.shape[1], found.tests[0]["level"]
        count, variance = max(1, tokens), float(evidence.joined[2].sum())
        reach, estimate = 1.96 * math.sqrt(variance) / count, evidence.bias
        found.bias = {"estimate": estimate, "interval": [estimate - reach, estimate + reach], "towards": towards}
        found.power = {"tokens": tokens, "level": level}
        for power in (80, 99):
            found.power[f"found_{power}"] = detectable_bias(count, level, power / 100, variance / count)

    def look(self, tokens: int) -> None:
        """Run all tests on the first `tokens` tokens."""
        found = [
            (order, result)
            for order, evidence in self.orders.items()
            for result in uniformity_tests(evidence.first(tokens), self.spare)
        ]
        if self.reference.vocab_size**_LENGTH <= _MAX_CONTINUATIONS:
            # The number of rows must not depend on their content.
            found.append(("all continuations", self.joint(tokens // self.limits.max_new_tokens)))
        found.append(("random numbers", Result("repeated draws", float(self.repeats), 0.0 if self.repeats else 1.0)))
        level = self.plan.level / (len(found) * len(LOOKS + MORE))
        self.found.tests = [{"order": order} | result._asdict() | {"level": level} for order, result in found]

    def joint(self, rows: int) -> Result:
        """Test the joint law of the first tokens of the first `rows` rows, by prompt."""
        for prompt in self.prompts[len(self.laws) :]:
            self.laws.append(joint_law(self.reference, prompt, self.sampling, self.limits.stop_ids, _LENGTH))
        outcomes: list[list[int]] = [[] for _ in self.laws]
        places = [self.reference.vocab_size**place for place in reversed(range(_LENGTH))]
        for number, output in self.texts[:rows]:
            outcomes[number].append(sum(token * place for token, place in zip(output, places, strict=False)))
        return joint_test(self.laws, outcomes)

    def judge_sampled(self, numbers: Sequence[int], outputs: list[list[int]]) -> None:
        """Add the rows to the evidence of each order."""
        self.texts += zip(numbers, outputs, strict=True)
        if not any(outputs):
            return
        prompts, vocab = [self.prompts[number] for number in numbers], self.reference.vocab_size
        reading = read_back(self.reference, prompts, outputs)
        token_X = torch.tensor([token for output in outputs for token in output], device=reading.last_X.device)
        where = _positions(numbers, outputs)
        view = proposers_view(self.method.proposer, self.sampling, prompts, outputs, reading, vocab)
        uniform_X = torch.from_numpy(self.uniform.random(len(token_X))).to(token_X.device)
        found: dict[str, list[Tensor]] = {}
        for chunk in chunks(len(token_X), vocab):
            logits_CV, token_C = self.reference.logits(reading.hidden_XD[chunk]), token_X[chunk]
            probs_CV = judged(logits_CV, self.sampling)
            self.judge_support(logits_CV, probs_CV, token_C, where[chunk])
            best_CV = torch.zeros_like(probs_CV, dtype=torch.bool).scatter_(1, probs_CV.argmax(-1, keepdim=True), True)
            # Sampling inverts the distribution by token id, so equal random numbers give close values in this order.
            ids_V = torch.arange(probs_CV.shape[1], device=probs_CV.device)
            scores = {
                "token numbers": (-ids_V.expand_as(probs_CV), (2 * ids_V < len(ids_V)).expand_as(probs_CV)),
                "the target's most likely token": (probs_CV, best_CV),
            }
            if view is not None:
                drafted_CV = view(chunk).double()
                scores["what its proposer prefers"] = (drafted_CV / probs_CV, drafted_CV > probs_CV)
            for order, (score_CV, favoured_CV) in scores.items():
                u_C = transform(probs_CV, score_CV.nan_to_num(nan=0.0, posinf=torch.inf), token_C, uniform_X[chunk])
                found.setdefault(order, []).append(torch.stack((u_C, *favour(probs_CV, favoured_CV, token_C))))
        ends = np.cumsum([len(output) for output in outputs])[:-1]
        for order, pieces in found.items():
            self.orders.setdefault(order, Evidence()).rows += np.split(torch.cat(pieces, 1).cpu().numpy(), ends, 1)

    def judge_support(
        self, logits_CV: Tensor, probs_CV: Tensor, token_C: Tensor, where: Sequence[tuple[int, int]]
    ) -> None:
        """Add a fault for each token of probability 0 after warping, unless rounding explains it."""
        for index in torch.nonzero(probs_CV.gather(1, token_C[:, None])[:, 0] == 0)[:, 0].tolist():
            logits_V, token, (number, position) = logits_CV[index].float(), int(token_C[index]), where[index]
            kept = within_rounding(logits_V, token, self.sampling, self.found.rounding.near_tie)
            expected, margin = int(logits_V.argmax()), float(logits_V.max() - logits_V[token])
            self.found.add(Finding("edge" if kept else "outside", number, position, token, expected, margin))


def repeated_draws(rng: Rng) -> int:
    """Count the pairs of successive numbers that occur twice in the next draws of up to 16 rows (53 bits each)."""
    draws_BU = torch.cat([rng.uniform(1000)[:16] for _ in range(3)], 1).cpu().contiguous().numpy()
    return draws_BU.size // 2 - len(np.unique(draws_BU.view(np.complex128)))


def _positions(numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(number, index) for number, output in zip(numbers, outputs, strict=True) for index in range(len(output))]


def within_rounding(logits_V: Tensor, token: int, sampling: Sampling, near_tie: float) -> bool:
    """Return whether top-k and top-p would keep a token if each logit were off by at most half of `near_tie`."""
    own = logits_V[token]
    if 0 < sampling.top_k < len(logits_V) and own < logits_V.topk(sampling.top_k).values[-1] - near_tie:
        return False
    if sampling.top_p < 1:
        probs_V = warp(logits_V, Sampling(sampling.temperature, sampling.top_k))
        before = float(probs_V[logits_V > own + near_tie].sum())
        return before < sampling.top_p * math.exp(near_tie / sampling.temperature) + torch.finfo(torch.float32).eps
    return 0 < sampling.top_k < len(logits_V)
