"""What requests to a server say of it, and of it beside another.

Times are the client's. A text's first token comes from reading its prompt, without a draft: what is kept a step is
counted behind it, as tokens over steps. Steps are the engine's drafts or, where it does not count them or leaves some
out, tokens less accepted ones, which is fewer by what was accepted behind the ends of texts.

Letters: P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....decode.evaluation.bootstrap import Floats, percentile_interval, resampled_ratios
from .asking import Reply


class Block(NamedTuple):
    """Requests that were made together, by one load."""

    seconds: float
    """From the first request to the last answer."""
    replies: list[Reply]
    counters: dict[str, float]
    """What the server counted meanwhile."""


def numbers_of(blocks: Sequence[Block]) -> dict[str, Any]:
    """Of one server under one load; times are None where no request was answered."""
    replies = [reply for block in blocks for reply in block.replies]
    good = [reply for reply in replies if reply.failure is None and reply.tokens]
    failures = [reply.failure for reply in replies if reply.failure is not None]
    seconds = sum(block.seconds for block in blocks)
    found: dict[str, Any] = {
        "requests": len(replies),
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "retried": sum(reply.attempts > 1 for reply in good),
        "cut": sum(reply.cut for reply in good),
        "tokens": sum(reply.tokens for reply in good),
        "seconds": seconds,
        "tokens_per_second": sum(reply.tokens for reply in good) / seconds if seconds else None,
        "requests_per_second": len(good) / seconds if seconds else None,
    }
    paced = [reply for reply in good if _counts(reply)]
    times_P = np.array([reply.last - reply.first for reply in paced])
    after_P = np.array([reply.tokens - 1.0 for reply in paced])
    found["ms_to_first"] = _quantiles([1e3 * reply.first for reply in good])
    found["ms_per_token"] = 1e3 * times_P.sum() / after_P.sum() if after_P.sum() else None
    found["ms_per_token_interval"] = _interval(1e3 * times_P, after_P)
    found["ms_per_token_by_request"] = _quantiles([1e3 * t / n for t, n in zip(times_P, after_P, strict=True)])
    return found | _acceptance(blocks, good)


def beside(mine: Mapping[str, Reply], theirs: Mapping[str, Reply], greedy: bool) -> dict[str, Any]:
    """One server's answers beside a baseline's to the same prompts: how many times faster a token came behind the
    first, with its interval by prompts, and at temperature 0 how many texts are the same."""
    both = [name for name, reply in mine.items() if name in theirs and _counts(reply) and _counts(theirs[name])]
    if not both:
        return {"prompts": 0, "speedup": None, "speedup_interval": None, "same": None}
    theirs_P, mine_P = (
        np.array([(side[name].last - side[name].first) / (side[name].tokens - 1) for name in both])
        for side in (theirs, mine)
    )
    same = sum(mine[name].text == theirs[name].text for name in both)
    return {
        "prompts": len(both),
        "speedup": float(theirs_P.sum() / mine_P.sum()),
        "speedup_interval": _interval(theirs_P, mine_P),
        "same": [same, len(both)] if greedy else None,
    }


def _counts(reply: Reply) -> bool:
    """Whether it says what a token takes: what came all at once does not."""
    return reply.failure is None and reply.tokens > 1 and reply.last > reply.first


def _acceptance(blocks: Sequence[Block], good: Sequence[Reply]) -> dict[str, Any]:
    """By the server's own page, or by what each answer says; None where neither tells."""
    total: dict[str, float] = {}
    for block in blocks:
        for key, value in block.counters.items():
            total[key] = total.get(key, 0.0) + value
    drafted, accepted = total.get("drafted"), total.get("accepted")
    if drafted is None and any(reply.drafted is not None for reply in good):
        drafted = float(sum(reply.drafted or 0 for reply in good))
        accepted = float(sum(reply.accepted or 0 for reply in good))
    later = sum(reply.tokens - 1 for reply in good)
    found: dict[str, Any] = {"drafted": drafted, "accepted": accepted, "acceptance_rate": None, "tokens_per_step": None}
    found["drafted_per_step"] = None
    if drafted and accepted is not None:
        steps = total.get("drafts") or later - accepted
        found["drafted_per_step"] = drafted / steps if steps > 0 else None
        found["acceptance_rate"] = accepted / drafted
        steps = max(steps, later - accepted)
        found["tokens_per_step"] = later / steps if steps > 0 else None
    drafts = total.get("drafts")
    by_depth = [total[f"accepted {i}"] for i in range(len(total)) if f"accepted {i}" in total]
    found["acceptance_by_depth"] = [
        here / before if before else 0.0 for here, before in zip(by_depth, [drafts or 0.0, *by_depth], strict=False)
    ]
    return found


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _interval(over_P: Floats, under_P: Floats) -> list[float] | None:
    """Of the ratio of two sums, 95 %, by prompts."""
    found_R1 = resampled_ratios(over_P[:, None], under_P[:, None])
    interval = percentile_interval(None if found_R1 is None else found_R1[:, 0])
    return None if interval is None else list(interval)
