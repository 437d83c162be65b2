"""Comparison of a server's tokens per step with this engine's results.

With γ draft tokens, a step yields 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j tokens, where α_j is the acceptance rate at depth j.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from ....checkpoints.pairs.sides import Finding

_TOLERANCE = 0.05  # relative, of tokens per step; near-ties and ends of texts cause smaller differences


class ServerPrediction(NamedTuple):
    """Expected results of a server, derived from one row of an evaluation."""

    label: str
    gamma: int
    """Maximum number of draft tokens per step."""
    by_depth: list[float]
    prompt_tokens: dict[str, int]
    """Number of tokens of each prompt in this engine."""
    measured: dict[str, tuple[int, int]]
    """Numbers of tokens and steps for each prompt. Empty if the server's token limit differs."""

    def tokens_per_step(self, gamma: int, prompts: Iterable[str]) -> float:
        """Return the tokens per step measured on `prompts`, or predicted from acceptance rates if `gamma` differs."""
        texts = [self.measured[prompt] for prompt in prompts if prompt in self.measured]
        if texts and gamma == self.gamma:
            tokens, steps = map(sum, zip(*texts, strict=True))
            return tokens / steps
        return 1 + sum(accumulate(self.by_depth[:gamma], mul))


def predict_server(row: Mapping[str, Any], prompt_tokens: dict[str, int], same_length: bool) -> ServerPrediction:
    """Predict a server's results from an evaluation row. `same_length`: whether both runs have the same token limit."""
    texts = row["by_prompt"] if same_length else []
    measured = {text["prompt"]: (text["tokens"], text["steps"]) for text in texts if text["steps"]}
    return ServerPrediction(row["label"], draft_length(row), row["acceptance_by_depth"], prompt_tokens, measured)


def draft_length(row: Mapping[str, Any]) -> int:
    """Return a row's option `gamma` or, if it has none, the number of depths with an acceptance rate."""
    return int(row["options"].get("gamma", len(row["acceptance_by_depth"])))


def compare_server(expected: ServerPrediction, row: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings for the differences between a server's results and the prediction."""
    label = row["label"]
    differences = {
        name: row["prompt_tokens"][name] - count
        for name, count in expected.prompt_tokens.items()
        if name in row["prompt_tokens"]
    }
    nonzero = [gap for gap in differences.values() if gap]
    if nonzero:
        counts = f"{len(nonzero)} of {len(differences)} prompts"
        what = f"the server's number of prompt tokens differs by {min(nonzero):+d} to {max(nonzero):+d} in {counts}"
        advice = "check its chat template, tokenizer and maximum context length"
        yield Finding("prompts", f"{label}: {what}", advice=advice, is_fault=True)
    if row["drafted_per_step"] is None:
        what = "the server does not report draft tokens"
        yield Finding("drafts", f"{label}: {what}", advice="enable speculative decoding", is_fault=True)
        return
    gamma = round(row["drafted_per_step"])
    if gamma != expected.gamma:
        what = f"the server drafts {gamma} tokens per step, but {expected.label!r} drafts {expected.gamma}"
        yield Finding("drafts", f"{label}: {what}", advice="set the same draft length", is_fault=True)
        if gamma > expected.gamma:
            return
    predicted, reached = expected.tokens_per_step(gamma, row["prompt_tokens"]), row["tokens_per_step"]
    if reached is not None and abs(reached / predicted - 1) > _TOLERANCE:
        what = f"the server reaches {reached:.2f} tokens per step, expected {predicted:.2f}"
        advice = "check if the server uses a different drafter, dtype or vocabulary, or a shorter drafter context"
        yield Finding("tokens per step", f"{label}: {what}", advice=advice, is_fault=True)
