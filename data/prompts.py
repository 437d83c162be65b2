"""Loading and tokenization of evaluation prompts."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from .conversations import Prompt, Turn
from .rendering.encoding import first_token
from .rendering.render import prompt_renderer
from .rendering.templates import Template
from .sources.reading import read_prompts
from .sources.registry import find_corpus

_MAX_NAMES = 20


@dataclass
class SkippedPrompts:
    """Record of skipped prompts: ids of prompts that are too long, and counts for other reasons."""

    too_long: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.too_long or self.skipped)

    def summary(self) -> str:
        """Format the number of skipped prompts for each reason."""
        counts = Counter({"too long": len(self.too_long)}) + self.skipped
        return ", ".join(f"{count} prompts ({reason})" for reason, count in counts.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for each reason, and the ids of the first prompts that are too long."""
        counts = {"too long": len(self.too_long)} | dict(self.skipped)
        return {"counts": counts, "too_long": self.too_long[:_MAX_NAMES]}


def load_prompts(
    source: str,
    template: Template,
    tokenizer: Any,
    limit: int,
    max_tokens: int,
    *,
    path: str | None = None,
    groups: Sequence[str] | None = None,
    skipped: SkippedPrompts | None = None,
) -> list[tuple[Prompt, list[int]]]:
    """Load and tokenize up to `limit` prompts, alternating between categories; see `read_prompts` for the source.

    Prompts of more than `max_tokens` tokens are recorded in `skipped`. Raises ValueError if no prompt remains.
    """
    encode = prompt_renderer(template, tokenizer)
    lengths: list[int] = []
    skipped = SkippedPrompts() if skipped is None else skipped

    def filter_length() -> Iterator[tuple[Prompt, list[int]]]:
        for prompt in read_prompts(source, path=path, groups=groups, skipped=skipped.skipped):
            ids = encode(prompt.turns)
            lengths.append(len(ids))
            if len(ids) <= max_tokens:
                yield prompt, ids
            else:
                skipped.too_long.append(prompt.id)

    prompts = list(islice(_alternate_groups(source, filter_length()), limit))
    if not lengths:
        of = f" of {', '.join(groups)}" if groups else ""
        raise ValueError(f"no prompt{of} in {source}: {skipped.summary() or 'the source is empty'}")
    if not prompts:
        raise ValueError(f"all prompts in {source} exceed {max_tokens} tokens; the shortest has {min(lengths)}")
    return prompts


def ask_follow_ups(
    prompts: Sequence[tuple[Prompt, list[int]]],
    answer: Callable[[list[list[int]]], list[str]],
    encode: Callable[[Sequence[Turn]], list[int]],
    max_tokens: int,
    skipped: SkippedPrompts,
) -> list[tuple[Prompt, list[int]]]:
    """Return the prompts, followed by the prompts of all later turns of their conversations.

    `answer` generates the answers that are not recorded, given the token ids of a batch of prompts, and `encode`
    tokenizes prompts. Prompts of more than `max_tokens` tokens are recorded in `skipped`.
    """
    all_prompts, pending = list(prompts), [each for each in prompts if each[0].follow_ups]
    for number in count(2):
        if not pending:
            break
        missing = [ids for prompt, ids in pending if not prompt.follow_ups[0].answer]
        own = iter(answer(missing)) if missing else iter(())
        turns = [prompt.follow_up(number, prompt.follow_ups[0].answer or next(own)) for prompt, _ in pending]
        encoded = [(prompt, encode(prompt.turns)) for prompt in turns]
        skipped.too_long += [prompt.id for prompt, ids in encoded if len(ids) > max_tokens]
        fit = [each for each in encoded if len(each[1]) <= max_tokens]
        all_prompts += fit
        pending = [each for each in fit if each[0].follow_ups]
    return all_prompts


def load_questions(
    source: str, limit: int, *, path: str | None = None, groups: Sequence[str] | None = None
) -> list[Prompt]:
    """Load up to `limit` prompts without tokenizing them; see `read_prompts`. Raises ValueError if there are none."""
    read = ((prompt, list[int]()) for prompt in read_prompts(source, path=path, groups=groups, skipped=Counter()))
    prompts = [prompt for prompt, _ in islice(_alternate_groups(source, read), limit)]
    if not prompts:
        of = f" of {', '.join(groups)}" if groups else ""
        raise ValueError(f"no prompt{of} in {source}")
    return prompts


def _alternate_groups(source: str, prompts: Iterator[tuple[Prompt, list[int]]]) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield prompts, alternating between categories if the registry lists the categories of the source."""
    corpus = find_corpus(source)
    if corpus is None or not corpus.groups:
        yield from prompts
        return
    by_group: dict[str, list[tuple[Prompt, list[int]]]] = {}
    for prompt, ids in prompts:
        by_group.setdefault(prompt.category, []).append((prompt, ids))
    for index in range(max(map(len, by_group.values()), default=0)):
        yield from (group[index] for group in by_group.values() if index < len(group))


def end_ids(tokenizer: Any, template: Template, generation_config: Any, stop: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the ids of the tokens that end generation.

    These are the tokenizer's EOS token, the EOS tokens of the generation config, the chat template's end-of-turn token,
    and the `stop` tokens.

    Raises ValueError if a string in `stop` is not a single token.
    """
    named = getattr(generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, (list, tuple)) else [named])}
    start, end = first_token(template.end, tokenizer)
    ends |= {tokenizer.get_added_vocab().get(template.end[start:end])}
    for text in stop:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise ValueError(f"each string in `stop` must be a single token, but {text!r} has {len(ids)}")
        ends.update(ids)
    return tuple(sorted(int(token) for token in ends - {None}))
