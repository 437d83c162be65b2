"""What this engine's own results say that a server should keep of the same drafts, and what a difference points to.

With γ drafted tokens a step the server should keep 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j, with this engine's acceptance
α by depth; so lengths up to the one that was measured are known too. Of that one itself what was kept on the very
prompts is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from ....data.prompts import Prompt
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import EVALUATION, load_results
from ...schema.serving import BenchRecipe

_APART = 0.05  # of tokens a step on the same prompts; near-ties and the ends of texts explain less


class Expected(NamedTuple):
    """By one row of results."""

    label: str
    drafted: int
    """Tokens a step at most."""
    by_depth: list[float]
    interval: list[float] | None
    """Of that row's tokens per step, by prompts."""
    prompt_tokens: dict[str, int]
    """By prompt, as this engine reads it."""
    kept: dict[str, tuple[int, int]]
    """By prompt the tokens of its text and their steps; empty where texts may be of other lengths than the server's."""

    def tokens_per_step(self, drafted: int, prompts: Iterable[str]) -> float:
        """With so many drafted tokens a step: of these prompts, if as many were drafted here and they are known."""
        texts = [self.kept[prompt] for prompt in prompts if prompt in self.kept]
        if texts and drafted == self.drafted:
            tokens, steps = map(sum, zip(*texts, strict=True))
            return tokens / steps
        return 1 + sum(accumulate(self.by_depth[:drafted], mul))


def expected_of(recipe: BenchRecipe, prompts: Sequence[Prompt]) -> Expected | None:
    """What the results that a recipe names say; None: it names none. Raises ValueError: no row of them is of a chain of
    a drafter at this temperature."""
    if recipe.expect is None:
        return None
    results = load_results(Path(recipe.expect), EVALUATION)
    rows = [row for row in results["methods"] if row["method"] == "speculative"]
    fitting = [row for row in rows if row["temperature"] == recipe.temperature]
    if not fitting:
        there = sorted({row["temperature"] for row in rows})
        raise ValueError(
            f"{recipe.expect} has no row of `speculative` at temperature {recipe.temperature:g}, only at "
            f"{', '.join(f'{each:g}' for each in there) or 'none'}"
        )
    row = max(fitting, key=_drafted)
    own = EvaluateRecipe.model_validate(results["recipe"])
    tokenizer = load_tokenizer(own.target)
    encode = prompt_renderer(get_template(own.template, tokenizer), tokenizer)
    lengths = {prompt.id: len(encode(prompt.turns)) for prompt in prompts}
    texts = row["by_prompt"] if own.max_new_tokens == recipe.max_new_tokens else []
    kept = {text["prompt"]: (text["tokens"], text["steps"]) for text in texts if text["steps"]}
    by_depth, interval = row["acceptance_by_depth"], row["tokens_per_step_interval"]
    return Expected(row["label"], _drafted(row), by_depth, interval, lengths, kept)


def _drafted(row: Mapping[str, Any]) -> int:
    """Tokens a step at most: depths that nothing was kept up to are in no list of acceptance."""
    return int(row["options"].get("gamma", len(row["acceptance_by_depth"])))


def compared(expected: Expected, side: Mapping[str, Any]) -> dict[str, Any]:
    """What was expected of a server under a load, and why it is not so (`why`)."""
    drafted = side["drafted_per_step"]
    found: dict[str, Any] = {"label": expected.label, "tokens_per_step": None, "acceptance_by_depth": expected.by_depth}
    found["why"] = _prompts_differ(expected, side)
    if drafted is None:
        return found | {"why": [*found["why"], "the server does not say what it drafts: is it on?"]}
    tokens = round(drafted)
    if tokens > expected.drafted:
        found["why"].append(f"it drafts {tokens} tokens a step, in {expected.label!r} {expected.drafted}")
        return found
    wanted = found["tokens_per_step"] = expected.tokens_per_step(tokens, side["prompt_tokens"])
    if tokens < expected.drafted:
        found["why"].append(f"it drafts {tokens} tokens a step, in {expected.label!r} {expected.drafted}")
    kept = side["tokens_per_step"]
    if kept is not None and abs(kept / wanted - 1) > _APART:
        reason = "" if found["why"] else ": another drafter, number format or vocabulary, or a drafter that sees less"
        found["why"].append(f"it keeps {kept:.2f} tokens a step, {wanted:.2f} here{reason}")
    return found


def _prompts_differ(expected: Expected, side: Mapping[str, Any]) -> list[str]:
    """Whether the server reads other prompts than this engine."""
    theirs = side["prompt_tokens"]
    apart = {name: theirs[name] - own for name, own in expected.prompt_tokens.items() if name in theirs}
    if not any(apart.values()):
        return []
    longer = {name for name, own in expected.prompt_tokens.items() if name in theirs and own > max(theirs.values())}
    if longer and not any(apart[name] for name in apart if name not in longer):
        return [f"it cuts prompts at {max(theirs.values()):,} tokens: its context is too short"]
    differences = set(apart.values())
    if len(differences) == 1:
        return [f"its prompts have {differences.pop():+d} tokens each: another chat template"]
    return [
        f"{sum(map(bool, apart.values()))} of {len(apart)} prompts have another number of tokens ("
        f"{min(differences):+d} to {max(differences):+d}): another tokenizer, or another template"
    ]
