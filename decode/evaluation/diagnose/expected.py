"""Tokens per step that a server should reach by this engine's own results, and what a difference points to.

With γ draft tokens per step it is 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j, where α_j is this engine's acceptance rate at depth j.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

_TOLERANCE = 0.05  # of tokens per step on the same prompts; near-ties and the ends of texts explain less


class Expected(NamedTuple):
    """Prediction of one row of an evaluation's results."""

    label: str
    gamma: int
    """Maximum number of draft tokens per step."""
    by_depth: list[float]
    """Acceptance rate by depth."""
    prompt_tokens: dict[str, int]
    """Prompt lengths as this engine encodes them."""
    measured: dict[str, tuple[int, int]]
    """Tokens and steps of each prompt's text; empty where the server's texts may have other lengths."""

    def tokens_per_step(self, gamma: int, prompts: Iterable[str]) -> float:
        """Return what these prompts reached with as many draft tokens, or what the acceptance rates predict."""
        texts = [self.measured[prompt] for prompt in prompts if prompt in self.measured]
        if texts and gamma == self.gamma:
            tokens, steps = map(sum, zip(*texts, strict=True))
            return tokens / steps
        return 1 + sum(accumulate(self.by_depth[:gamma], mul))


def expected_of(row: Mapping[str, Any], prompt_tokens: dict[str, int], same_length: bool) -> Expected:
    """Return the prediction of a row; `same_length`: its texts have the server's token limit."""
    texts = row["by_prompt"] if same_length else []
    measured = {text["prompt"]: (text["tokens"], text["steps"]) for text in texts if text["steps"]}
    return Expected(row["label"], draft_length(row), row["acceptance_by_depth"], prompt_tokens, measured)


def draft_length(row: Mapping[str, Any]) -> int:
    """Return the draft tokens per step; the acceptance by depth leaves out depths that were never reached."""
    return int(row["options"].get("gamma", len(row["acceptance_by_depth"])))


def compare_server(expected: Expected, row: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """Return the expected tokens per step of a server's row, and why it reaches others."""
    reasons = _prompt_differences(expected, row["prompt_tokens"])
    if row["drafted_per_step"] is None:
        return None, [*reasons, "the server does not report draft tokens: is speculative decoding on?"]
    gamma = round(row["drafted_per_step"])
    if gamma != expected.gamma:
        reasons.append(f"it drafts {gamma} tokens per step, {expected.label!r} drafts {expected.gamma}")
        if gamma > expected.gamma:
            return None, reasons
    wanted, reached = expected.tokens_per_step(gamma, row["prompt_tokens"]), row["tokens_per_step"]
    if reached is not None and abs(reached / wanted - 1) > _TOLERANCE:
        cause = "" if reasons else ": another drafter, number format or vocabulary, or a drafter with less context"
        reasons.append(f"it reaches {reached:.2f} tokens per step, {wanted:.2f} here{cause}")
    return wanted, reasons


def _prompt_differences(expected: Expected, lengths: Mapping[str, int]) -> list[str]:
    """Return how the server's prompt lengths differ from this engine's."""
    known = {name: own for name, own in expected.prompt_tokens.items() if name in lengths}
    apart = {name: lengths[name] - own for name, own in known.items()}
    if not any(apart.values()):
        return []
    longest = max(lengths.values())
    if all(own > longest for name, own in known.items() if apart[name]):
        return [f"it cuts prompts at {longest:,} tokens: its context is too short"]
    differences = set(apart.values())
    if len(differences) == 1:
        return [f"its prompts have {differences.pop():+d} tokens each: another chat template"]
    return [
        f"{sum(map(bool, apart.values()))} of {len(apart)} prompts have another number of tokens "
        f"({min(differences):+d} to {max(differences):+d}): another tokenizer or template"
    ]
