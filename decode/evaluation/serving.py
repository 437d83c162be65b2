"""Metrics of a server with speculative decoding, computed from its responses.

The client measures all times. Tokens per step are tokens ÷ steps, without the first token of a response, which comes
from the prefill. The number of steps is the number of drafts that the engine reports, but at least tokens minus
accepted tokens. This difference is too small if the engine accepted tokens after the end of a text.

Shape letters: P prompts, R resamples.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .bootstrap import Floats, percentile_interval, resampled_ratios
from .measure import BASELINE


class Reply(NamedTuple):
    """Response of a server to a request, or the reason why the request failed."""

    text: str = ""
    tokens: int = 0
    """Number of new tokens reported by the server."""
    first: float = 0.0
    """Seconds until the first part of the text arrived."""
    last: float = 0.0
    """Seconds until the last part of the text arrived."""
    cut: bool = False
    """True if the response ended at the token limit."""
    drafted: int | None = None
    """Number of draft tokens, if the response reports it (llama.cpp)."""
    accepted: int | None = None
    """Number of accepted draft tokens, if reported."""
    prompt_tokens: int | None = None
    """Number of prompt tokens reported by the server."""
    failure: str | None = None

    @property
    def is_timed(self) -> bool:
        """Return whether the time per token is known. This requires a response that arrived in several parts."""
        return self.failure is None and self.tokens > 1 and self.last > self.first


class Block(NamedTuple):
    """Requests that were sent at one concurrency level, and their responses."""

    seconds: float
    """Seconds from the first request to the last response."""
    replies: list[Reply]
    counters: dict[str, float]
    """Server counters during the block: `drafts`, `drafted`, `accepted`, and `accepted 0`, … for each position."""


def load_rows(
    concurrency: int,
    prompts: Sequence[tuple[str, str]],
    sides: Sequence[Sequence[Block]],
    temperature: float,
    context: int | None = None,
) -> list[dict[str, Any]]:
    """Create the result rows of a server and, if it was measured, of its baseline at one concurrency.

    Args:
        concurrency: Number of requests in flight.
        prompts: Name and category of each prompt, in the order of the replies.
        sides: Blocks of the server and, if it was measured, blocks of the baseline.
        temperature: Sampling temperature of the requests.
        context: Approximate number of prompt tokens; None if the prompts are unchanged.
    """
    load = f"concurrency {concurrency}" + (f", {context} prompt tokens" if context else "")
    names, categories = [name for name, _ in prompts], dict(prompts)
    replies_by_side = [[reply for block in blocks for reply in block.replies] for blocks in sides]
    answers = [dict(zip(names, replies, strict=True)) for replies in replies_by_side]
    greedy, rows = temperature == 0, []
    for number, (replies, blocks) in enumerate(zip(answers, sides, strict=True)):
        label, method = (f"{load}, baseline", BASELINE) if number else (load, "server")
        row: dict[str, Any] = {"label": label, "method": method, "options": {}, "context": context}
        lengths = {name: reply.prompt_tokens for name, reply in replies.items() if reply.prompt_tokens is not None}
        row |= {"temperature": temperature, "concurrency": concurrency, "prompt_tokens": lengths, "by_category": {}}
        row |= serving_metrics(blocks)
        rows.append(row | {"speedup": 1.0 if number else None, "speedup_interval": None, "identical_to_greedy": None})
    if len(sides) > 1:
        rows[0] |= compare_replies(answers[0], answers[1], greedy)
        for category in dict.fromkeys(categories.values()):
            chosen = {name: reply for name, reply in answers[0].items() if categories[name] == category}
            rows[0]["by_category"][category] = {"prompts": len(chosen)} | compare_replies(chosen, answers[1], greedy)
    return rows


def serving_metrics(blocks: Sequence[Block]) -> dict[str, Any]:
    """Compute the metrics of a server from blocks of requests. Times are None if no request succeeded."""
    replies = [reply for block in blocks for reply in block.replies]
    good = [reply for reply in replies if reply.failure is None and reply.tokens]
    failures = [reply.failure for reply in replies if reply.failure is not None]
    seconds, tokens = sum(block.seconds for block in blocks), sum(reply.tokens for reply in good)
    timed = [reply for reply in good if reply.is_timed]
    times_P = np.array([reply.last - reply.first for reply in timed])
    after_P = np.array([reply.tokens - 1.0 for reply in timed])
    return {
        "requests": len(replies),
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "cut": sum(reply.cut for reply in good),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "ms_to_first": _quantiles([1e3 * reply.first for reply in good]),
        "ms_per_token": 1e3 * times_P.sum() / after_P.sum() if after_P.sum() else None,
        "ms_per_token_interval": _interval(1e3 * times_P, after_P),
    } | _acceptance(blocks, good)


def compare_replies(replies: Mapping[str, Reply], base_replies: Mapping[str, Reply], greedy: bool) -> dict[str, Any]:
    """Compare a server's responses with a baseline's responses to the same prompts.

    The speedup is the ratio of the times per token after the first token, with its 95 % interval over prompts. If
    `greedy` is True, identical responses are counted.
    """
    timed = [{name for name, reply in group.items() if reply.is_timed} for group in (replies, base_replies)]
    names = [name for name in replies if name in timed[0] & timed[1]]
    if not names:
        return {"speedup": None, "speedup_interval": None, "identical_to_greedy": None}
    base_P, seconds_P = (
        np.array([(answers[name].last - answers[name].first) / (answers[name].tokens - 1) for name in names])
        for answers in (base_replies, replies)
    )
    same = sum(replies[name].text == base_replies[name].text for name in names)
    return {
        "speedup": float(base_P.sum() / seconds_P.sum()),
        "speedup_interval": _interval(base_P, seconds_P),
        "identical_to_greedy": [same, len(names)] if greedy else None,
    }


def _acceptance(blocks: Sequence[Block], good: Sequence[Reply]) -> dict[str, Any]:
    """Compute acceptance metrics from the server's counters or responses. They are None if neither reports them."""
    total: dict[str, float] = {}
    for block in blocks:
        for key, value in block.counters.items():
            total[key] = total.get(key, 0.0) + value
    drafted, accepted = total.get("drafted"), total.get("accepted")
    if drafted is None and any(reply.drafted is not None for reply in good):
        drafted = float(sum(reply.drafted or 0 for reply in good))
        accepted = float(sum(reply.accepted or 0 for reply in good))
    metrics: dict[str, Any] = {"drafted": drafted, "accepted": accepted, "tokens_per_step_interval": None}
    metrics |= dict.fromkeys(("acceptance_rate", "tokens_per_step", "drafted_per_step"))
    if drafted and accepted is not None:
        later_tokens = sum(reply.tokens - 1 for reply in good)
        steps = total.get("drafts") or later_tokens - accepted
        metrics["drafted_per_step"] = drafted / steps if steps > 0 else None
        metrics["acceptance_rate"] = accepted / drafted
        steps = max(steps, later_tokens - accepted)
        metrics["tokens_per_step"] = later_tokens / steps if steps > 0 else None
    by_depth = [total[f"accepted {i}"] for i in range(len(total)) if f"accepted {i}" in total]
    before = [total.get("drafts", 0.0), *by_depth]
    pairs = zip(by_depth, before, strict=False)
    metrics["acceptance_by_depth"] = [accepted / reached if reached else 0.0 for accepted, reached in pairs]
    return metrics


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _interval(over_P: Floats, under_P: Floats) -> list[float] | None:
    """Return the 95 % interval of the ratio of two sums over prompts."""
    interval = percentile_interval(resampled_ratios(over_P[:, None], under_P[:, None]))
    return None if interval is None else list(interval)
