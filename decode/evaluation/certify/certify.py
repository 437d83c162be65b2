"""Certificates of losslessness: tests that a method's output follows the target's distribution.

Each token that a method generated is checked against one forward of the target over the whole output
(`rescoring.py`). Differences are found at every position, and near-ties do not end the comparison.

- At temperature 0 each token must be the target's most likely one, up to near-ties: logits whose order rounding can
  change between forwards of different shapes.
- Otherwise the tokens must follow the target's warped distribution. `uniformity.py` tests this with the vocabulary
  ordered by token id, by the target's probabilities, and by the preference of the method's drafter, heads or table. A
  token of probability 0 is a fault.

Shape letters: X tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

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
from .rescoring import (
    Rounding,
    chunks,
    joint_distribution,
    judge_probs,
    make_draft_scorer,
    measure_rounding,
    teacher_force,
)
from .uniformity import Evidence, Result, detectable_bias, favoured_excess, joint_test, transform, uniformity_tests

Verdict = Literal["lossless", "too little text", "undecided", "not lossless", "not claimed"]
"""Verdict on a method. lossless: no test rejects, and a bias of `MAX_HIDDEN_BIAS` would be detected. too little text:
no test rejects, but such a bias might be missed. undecided: a p-value is still doubtful after all extra tokens."""
INTERIM_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the planned tokens at which tests run. The level is split among all interim and extra shares."""
EXTRA_SHARES = (2.0, 4.0, 8.0)
"""Multiples of the planned number of tokens at which tests run again while a p-value is doubtful."""
DOUBTFUL_LEVEL = 0.01
"""Probability that a lossless method has a doubtful p-value in one run of the tests."""
MAX_HIDDEN_BIAS = 0.1
"""Maximum `detectable_bias_99` at which a method is certified as lossless."""
WITHIN_ROUNDING = ("near-tie", "edge")
"""Kinds of findings that rounding errors explain."""
_LISTED = 20  # maximum number of listed faults, and of listed findings within rounding
_LENGTH, _MAX_CONTINUATIONS = 3, 1000  # joint distributions are tested if all continuations can be enumerated


@dataclass(frozen=True)
class Plan:
    """Test plan: number of tokens, significance level, batch size and seed.

    Raises ValueError if `tokens` or `batch` is below 1.
    """

    tokens: int = 4_000
    """Number of tokens to test per method. At temperature 0, every prompt is decoded at most once."""
    level: float = 1e-6
    """Significance level: probability that the tests reject a lossless method."""
    batch: int = 1
    seed: int = 0
    """Base seed. Row r uses seed + r."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch) < 1:
            raise ValueError(f"tokens and batch must be at least 1, got {self.tokens} and {self.batch}")


@dataclass(frozen=True)
class Finding:
    """Difference between a method's output and the target's distribution."""

    kind: Literal["token", "near-tie", "outside", "edge", "length"]
    """Kind of difference. token: not the target's most likely token. outside: token of probability 0 after warping.
    near-tie, edge: token and outside, explained by rounding. length: the output ends too early or too late."""
    prompt: int
    position: int
    """Index among the generated tokens."""
    token: int
    expected: int | None
    """Most likely token of the target."""
    margin: float | None
    """Logit of the expected token minus that of the generated token."""


class DecodedBatch(NamedTuple):
    """Outputs that a method generated for consecutive prompts, and the time that this took."""

    outputs: list[list[int]]
    seconds: float


@dataclass
class Certificate:
    """Result of testing whether a method is lossless with its settings."""

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
    """Planned number of tokens. Decoding stops earlier if a fault is certain."""
    faults: int = 0
    """Number of wrong tokens. `findings` lists the first ones."""
    near_ties: int = 0
    undecided: int | None = None
    """Number of positions at temperature 0 where several tokens are acceptable because of rounding."""
    findings: list[Finding] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    """Results of the last run of the tests, with the keys order, test, statistic, p_value and level."""
    bias: dict[str, Any] = field(default_factory=dict)
    """Estimate, 95 % interval and direction (`towards`) of the bias: the probability mass that the method shifts, a
    lower bound of the total variation distance from the target. At temperature 0: the share of wrong tokens."""
    power: dict[str, Any] = field(default_factory=dict)
    """Number of tokens, level, and the smallest biases that are detected with 80 and 99 % probability
    (`detectable_bias_80`, `detectable_bias_99`)."""
    seconds: float = 0.0

    @property
    def is_faulty(self) -> bool:
        """Return whether a token is wrong or a test rejects at its significance level."""
        return self.faults > 0 or any(test["p_value"] < test["level"] for test in self.tests)

    @property
    def is_doubtful(self) -> bool:
        """Return whether a p-value is unusually small for a lossless method."""
        return any(test["p_value"] < DOUBTFUL_LEVEL / len(self.tests) for test in self.tests)

    @property
    def is_suspect(self) -> bool:
        """Return whether the verdict is "not lossless" or "undecided"."""
        return self.verdict in ("not lossless", "undecided")

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it unless the maximum number of listed findings is reached."""
        excused = finding.kind in WITHIN_ROUNDING
        self.near_ties += excused
        self.faults += not excused
        if sum((listed.kind in WITHIN_ROUNDING) == excused for listed in self.findings) < _LISTED:
            self.findings.append(finding)

    def judge(self) -> None:
        """Set the verdict from the test results."""
        if self.claimed and self.is_faulty:
            self.verdict = "not lossless"
        elif self.claimed and self.is_doubtful:
            self.verdict = "undecided"
        elif self.claimed:
            self.verdict = "lossless" if self.power["detectable_bias_99"] <= MAX_HIDDEN_BIAS else "too little text"


LoadOrDecode = Callable[[int, Callable[[], DecodedBatch]], DecodedBatch]


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
    load_or_decode: LoadOrDecode = lambda _, work: work(),
    progress: Callable[[int, int], None] = lambda done, planned: None,
) -> Certificate:
    """Decode prompts with a method, and test whether the output follows the target's distribution.

    `method` is built from `entry` by default. `reference` is the model that scores the output (default: the target). A
    separate model with the same weights also tests the target's forward. `rounding` is measured by default.
    `load_or_decode` is called with a row number and a function that decodes a batch from this row on. It may return an
    earlier result instead. `progress` is called with the numbers of tested and planned tokens.
    """
    method = method or build_method(entry.method, parts, entry.sampling, **entry.options)
    reference = reference or target
    cert = Certificate(
        label=entry.label,
        method=entry.method,
        options=dict(entry.options),
        sampling=asdict(entry.sampling),
        claimed=method.verifier.lossless,
        batch=plan.batch,
        level=plan.level,
        rounding=rounding or measure_rounding(target, prompts, entry.sampling, reference=reference),
    )
    run = _Run(target, method, entry.sampling, prompts, limits, plan, reference, cert, load_or_decode, progress)
    if entry.sampling.greedy:
        run.greedy()
    else:
        run.sampled()
    cert.judge()
    cert.seconds = time.monotonic() - run.start
    return cert


@dataclass
class _Run:
    """Runner that generates the outputs for one certificate and tests them with the reference model."""

    target: LanguageModel
    method: Method
    sampling: Sampling
    prompts: Sequence[Sequence[int]]
    limits: Limits
    plan: Plan
    reference: LanguageModel
    cert: Certificate
    load_or_decode: LoadOrDecode
    progress: Callable[[int, int], None]
    evidence_by_order: dict[str, Evidence] = field(default_factory=dict)
    texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Prompt number and output of each sampled row."""
    distributions: list[np.ndarray] = field(default_factory=list)
    repeats: int = 0
    """Number of pairs of successive random numbers that occur more than once."""
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # These generators are independent of those that sample the text.
        self.uniform = np.random.default_rng([self.plan.seed, 1])
        self.spare = np.random.default_rng([self.plan.seed, 2])

    def greedy(self) -> None:
        """Decode every prompt once, and compare the output with the target's most likely tokens."""
        cert, available = self.cert, len(self.prompts) * self.limits.max_new_tokens
        cert.planned, cert.undecided = min(self.plan.tokens, available), 0
        while cert.rows < len(self.prompts) and cert.tokens < cert.planned and not (cert.claimed and cert.faults):
            numbers = range(cert.rows, min(cert.rows + self.plan.batch, len(self.prompts)))
            self.judge_greedy(numbers, self.write(numbers, cert.planned))
        decided = max(1, cert.tokens - cert.undecided)
        cert.bias = {"estimate": cert.faults / max(1, cert.tokens), "interval": None, "towards": "other tokens"}
        cert.power = {"tokens": decided, "level": 0.0}
        cert.power |= {f"detectable_bias_{power}": 1 - (1 - power / 100) ** (1 / decided) for power in (80, 99)}

    def write(self, numbers: Sequence[int], planned: int) -> list[list[int]]:
        """Decode the prompts with these indices, or load outputs of an earlier run, and check the output lengths.

        An output must end with its first stop token or at the token limit. `planned` is the total for progress reports.
        """
        cert, prompts = self.cert, [self.prompts[number] for number in numbers]

        def work() -> DecodedBatch:
            rng = Rng.for_rows(self.plan.seed + cert.rows, len(prompts), self.target.device)
            outputs = decode_texts(self.target, *self.method, prompts, self.limits, self.sampling, rng)
            self.repeats = self.repeats or repeated_draws(rng)
            return DecodedBatch(outputs, time.monotonic() - start)

        start = time.monotonic()
        batch = self.load_or_decode(cert.rows, work)
        self.start += time.monotonic() - start - batch.seconds  # loaded outputs count with their original time
        cert.rows += len(prompts)
        cert.tokens += sum(map(len, batch.outputs))
        for number, output in zip(numbers, batch.outputs, strict=True):
            stop = next((index for index, token in enumerate(output) if token in self.limits.stop_ids), math.inf)
            if len(output) != min(stop + 1, self.limits.max_new_tokens):
                cert.add(Finding("length", number, len(output), output[-1] if output else -1, None, None))
        self.progress(min(cert.tokens, planned), planned)
        return batch.outputs

    def judge_greedy(self, numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
        """Compare each generated token with the target's most likely token."""
        positions = _positions(numbers, outputs)
        if not positions:
            return
        hidden_XD = teacher_force(self.reference, [self.prompts[number] for number in numbers], outputs).hidden_XD
        token_X = torch.tensor([token for output in outputs for token in output], device=hidden_XD.device)
        near_tie, undecided = self.cert.rounding.near_tie, 0
        for chunk in chunks(len(token_X), self.reference.vocab_size):
            logits_CV, token_C1 = self.reference.logits(hidden_XD[chunk]).float(), token_X[chunk, None]
            best_C, expected_C = logits_CV.max(-1)
            margin_C = best_C - logits_CV.gather(1, token_C1)[:, 0]
            undecided += int(((logits_CV >= best_C[:, None] - near_tie).sum(1) > 1).sum())
            for index in torch.nonzero(token_C1[:, 0] != expected_C)[:, 0].tolist():
                margin = float(margin_C[index])
                finding = (*positions[chunk.start + index], int(token_C1[index]), int(expected_C[index]), margin)
                self.cert.add(Finding("near-tie" if margin <= near_tie else "token", *finding))
        self.cert.undecided = (self.cert.undecided or 0) + undecided

    def sampled(self) -> None:
        """Decode and test in stages until the verdict is clear. Four rows per prompt reveal reused random numbers."""
        cert = self.cert
        cert.planned = self.plan.tokens
        for share in INTERIM_SHARES + EXTRA_SHARES:
            if share > 1 and not (cert.claimed and cert.is_doubtful):
                break
            required = max(1, math.ceil(self.plan.tokens * share))
            cert.planned = max(cert.planned, required)
            while cert.tokens < required and not (cert.claimed and cert.faults):
                numbers = [(row // 4) % len(self.prompts) for row in range(cert.rows, cert.rows + self.plan.batch)]
                self.judge_sampled(numbers, self.write(numbers, cert.planned))
            self.run_tests(required)
            if cert.claimed and cert.is_faulty:
                break
        towards, evidence = list(self.evidence_by_order.items())[-1]
        evidence = evidence.first(cert.planned)
        tokens, level = evidence.joined.shape[1], cert.tests[0]["level"]
        count, variance = max(1, tokens), float(evidence.joined[2].sum())
        reach, estimate = 1.96 * math.sqrt(variance) / count, evidence.bias
        cert.bias = {"estimate": estimate, "interval": [estimate - reach, estimate + reach], "towards": towards}
        cert.power = {"tokens": tokens, "level": level}
        for power in (80, 99):
            cert.power[f"detectable_bias_{power}"] = detectable_bias(count, level, power / 100, variance / count)

    def run_tests(self, tokens: int) -> None:
        results = [
            (order, result)
            for order, evidence in self.evidence_by_order.items()
            for result in uniformity_tests(evidence.first(tokens), self.spare)
        ]
        if self.reference.vocab_size**_LENGTH <= _MAX_CONTINUATIONS:
            # The number of rows must not depend on their content.
            results.append(("all continuations", self.joint(tokens // self.limits.max_new_tokens)))
        results.append(("random numbers", Result("repeated draws", float(self.repeats), 0.0 if self.repeats else 1.0)))
        level = self.plan.level / (len(results) * len(INTERIM_SHARES + EXTRA_SHARES))
        self.cert.tests = [{"order": order} | result._asdict() | {"level": level} for order, result in results]

    def joint(self, rows: int) -> Result:
        """Test if the first tokens of the first `rows` outputs follow the reference model's joint distribution."""
        for prompt in self.prompts[len(self.distributions) :]:
            settings = (self.sampling, self.limits.stop_ids, _LENGTH)
            self.distributions.append(joint_distribution(self.reference, prompt, *settings))
        outcomes: list[list[int]] = [[] for _ in self.distributions]
        powers = [self.reference.vocab_size**power for power in reversed(range(_LENGTH))]
        for number, output in self.texts[:rows]:
            outcomes[number].append(sum(token * power for token, power in zip(output, powers, strict=False)))
        return joint_test(self.distributions, outcomes)

    def judge_sampled(self, numbers: Sequence[int], outputs: list[list[int]]) -> None:
        """Compute the test statistics of generated tokens for each order of the vocabulary, and store them."""
        self.texts += zip(numbers, outputs, strict=True)
        if not any(outputs):
            return
        prompts, vocab = [self.prompts[number] for number in numbers], self.reference.vocab_size
        reading = teacher_force(self.reference, prompts, outputs)
        token_X = torch.tensor([token for output in outputs for token in output], device=reading.last_X.device)
        positions = _positions(numbers, outputs)
        view = make_draft_scorer(self.method.proposer, self.sampling, prompts, outputs, reading, vocab)
        uniform_X = torch.from_numpy(self.uniform.random(len(token_X))).to(token_X.device)
        statistics: dict[str, list[Tensor]] = {}
        for chunk in chunks(len(token_X), vocab):
            logits_CV, token_C = self.reference.logits(reading.hidden_XD[chunk]), token_X[chunk]
            probs_CV = judge_probs(logits_CV, self.sampling)
            self.judge_support(logits_CV, probs_CV, token_C, positions[chunk])
            best_CV = torch.zeros_like(probs_CV, dtype=torch.bool).scatter_(1, probs_CV.argmax(-1, keepdim=True), True)
            # Sampling inverts the distribution by token id, so equal random numbers give close values in this order.
            ids_V = torch.arange(probs_CV.shape[1], device=probs_CV.device)
            scores = {
                "token ids": (-ids_V.expand_as(probs_CV), (2 * ids_V < len(ids_V)).expand_as(probs_CV)),
                "most likely token": (probs_CV, best_CV),
            }
            if view is not None:
                drafted_CV = view(chunk).double()
                scores["tokens preferred by the proposer"] = (drafted_CV / probs_CV, drafted_CV > probs_CV)
            for order, (score_CV, favoured_CV) in scores.items():
                u_C = transform(probs_CV, score_CV.nan_to_num(nan=0.0, posinf=torch.inf), token_C, uniform_X[chunk])
                statistics_3C = torch.stack((u_C, *favoured_excess(probs_CV, favoured_CV, token_C)))
                statistics.setdefault(order, []).append(statistics_3C)
        ends = np.cumsum([len(output) for output in outputs])[:-1]
        for order, pieces in statistics.items():
            rows = np.split(torch.cat(pieces, 1).cpu().numpy(), ends, 1)
            self.evidence_by_order.setdefault(order, Evidence()).rows += rows

    def judge_support(
        self, logits_CV: Tensor, probs_CV: Tensor, token_C: Tensor, positions: Sequence[tuple[int, int]]
    ) -> None:
        """Add a finding for each token that warping excludes: "edge" if rounding explains it, otherwise "outside"."""
        for index in torch.nonzero(probs_CV.gather(1, token_C[:, None])[:, 0] == 0)[:, 0].tolist():
            logits_V, token, (number, position) = logits_CV[index].float(), int(token_C[index]), positions[index]
            is_kept = within_rounding(logits_V, token, self.sampling, self.cert.rounding.near_tie)
            expected, margin = int(logits_V.argmax()), float(logits_V.max() - logits_V[token])
            self.cert.add(Finding("edge" if is_kept else "outside", number, position, token, expected, margin))


def repeated_draws(rng: Rng) -> int:
    """Draw numbers for up to 16 rows, and count pairs of successive numbers that repeat (by chance: almost never)."""
    draws_BU = torch.cat([rng.uniform(1000)[:16] for _ in range(3)], 1).cpu().contiguous().numpy()
    return draws_BU.size // 2 - len(np.unique(draws_BU.view(np.complex128)))


def _positions(numbers: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(number, index) for number, output in zip(numbers, outputs, strict=True) for index in range(len(output))]


def within_rounding(logits_V: Tensor, token: int, sampling: Sampling, near_tie: float) -> bool:
    """Return whether top-k and top-p would keep a token if each logit changed by at most half of `near_tie`."""
    logit = logits_V[token]
    if 0 < sampling.top_k < len(logits_V) and logit < logits_V.topk(sampling.top_k).values[-1] - near_tie:
        return False
    if sampling.top_p < 1:
        probs_V = warp(logits_V, Sampling(sampling.temperature, sampling.top_k))
        before = float(probs_V[logits_V > logit + near_tie].sum())
        return before < sampling.top_p * math.exp(near_tie / sampling.temperature) + torch.finfo(torch.float32).eps
    return 0 < sampling.top_k < len(logits_V)
