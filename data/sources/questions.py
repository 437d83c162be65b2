"""Questions on programming, mathematics and general topics, which are made from templates.

They were written for this package, and train drafters for instruction-tuned models without any download.
"""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...checkpoints.storage.safe_read import read_json
from ..conversations import Conversation, Turn

_FILE = Path(__file__).with_name("questions.json")
"""File with the templates by topic, and the values of their placeholders."""
_ATTEMPTS = 50  # mean number of draws per question, after which the templates are considered exhausted


def template_questions(count: int, seed: int = 0) -> list[Conversation]:
    """Return `count` different questions, a third each on code, mathematics and general topics, without answers.

    Raises ValueError if the templates yield fewer different questions.
    """
    rng, questions = random.Random(seed), dict[str, str]()
    source = read_json(_FILE)
    templates, values = source["templates"], source["values"]
    for number in range(_ATTEMPTS * count):
        if len(questions) == count:
            break
        kind = tuple(templates)[len(questions) % len(templates)]
        questions.setdefault(_fill(rng.choice(templates[kind]), values, rng), f"{kind}-{number}")
    if len(questions) < count:
        raise ValueError(
            f"the templates yield {len(questions):,} different questions, but {count:,} were requested: request fewer"
        )
    return [Conversation(name, (Turn("user", text),)) for text, name in questions.items()]


def _fill(template: str, values: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Replace the placeholders of a template with random values, which may contain placeholders for numbers."""
    low, high = sorted(rng.sample(range(2, 10), 2))
    chosen = {name: rng.choice(items) for name, items in values.items()}
    chosen["topic2"] = rng.choice([topic for topic in values["topic"] if topic != chosen["topic"]])
    ranges = {"m": (40, 99), "n": (10, 39), "n2": (40, 80), "p": (5, 30), "k": (100, 400), "t2": (10, 14)}
    numbers = {name: rng.randint(*limits) for name, limits in ranges.items()} | {"s": low, "t": high}
    numbers |= {"sum": low + high, "product": low * high}
    for _ in range(2):
        template = re.sub(r"{(\w+)}", lambda match: str({**chosen, **numbers}[match[1]]), template)
    return template
