"""From what was written to clean exchanges: each step is a named option, each cut and each drop has its count.

The steps, in their order; the first that drops a conversation is the one that it is counted under:

1. roles and contents: roles by a table (`roles`, `unknown_roles`), contents that are text, half emoji replaced;
2. texts: HTML (`html`), escaped Markdown (`escaped_markdown`);
3. exchanges: leading assistant turns and trailing user turns are cut, and empty messages with their question or answer;
   neighbours of one role (`non_alternating`);
4. what is said: refusals of the service (`drop_blocked`), length (`min_exchanges`, `min_characters`);
5. duplicates of a conversation that was kept (`duplicates`);
6. language (`languages`);
7. contamination with evaluation texts (`contamination`, `contamination_words`).

A row of bare text is no dialogue: steps 3 and `min_exchanges` ask for nothing but that it is not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any

from ...checkpoints.storage.messages import did_you_mean, install_hint
from ..conversations import Conversation, CorpusReport, Dialogue, Turn, encodable, tool_text
from .contamination import EvaluationTexts
from .markup import CODE_SPAN, holds_html, html_to_markdown, unescape_markdown
from .options import Cleaning

ROLES: dict[str, str] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
CALL_ROLE = "function_call"
TOOL_TAGS = {CALL_ROLE: "tool_call"} | dict.fromkeys(("tool", "function", "observation", "ipython"), "tool_response")
"""An assistant's calls and their results, which are known where tools are wanted: roles, and the tags around their
texts in the form of Hermes and Qwen."""
BLOCKED_ANSWERS = (  # what the service said in the model's place
    "Too many requests in 1 hour. Try again later.",
    "Only one message at a time. Please allow any other responses to complete before sending another message",
    "An error occurred. Either the engine you requested does not exist or there was another issue",
)
LANGUAGE_CHARACTERS = 1000

Messages = list[tuple[str | None, str]]  # the role by the table, None where it knows none


def role_of(written: Any, roles: Mapping[str, str] = ROLES) -> str | None:
    """What a role means by a table, in any case of letters."""
    return roles.get(written, roles.get(written.strip().lower())) if isinstance(written, str) else None


class _DroppedError(Exception):
    """The conversation is not kept; its text is the reason. The cleaner catches it."""


class Cleaner:
    """Dialogues to conversations, counting in `report` what became of each.

    Duplicates are found among the rows that one cleaner sees (about 70 bytes a conversation and kind).
    `evaluation_texts` are the texts of the sets that `cleaning.contamination` names. With `tools` calls and results are
    turns, as Hermes and Qwen write them. With `questions` a row of questions alone is kept, to be answered.

    Raises ValueError: a language that py3langid does not know; a package that is not installed; evaluation sets named
    without texts, or texts without a name.
    """

    def __init__(
        self,
        cleaning: Cleaning,
        report: CorpusReport,
        evaluation_texts: Iterable[str] = (),
        *,
        tools: bool = False,
        questions: bool = False,
    ) -> None:
        self.cleaning = cleaning
        self.report = report
        self._tools, self._questions = tools, questions
        calls = {role: "assistant" if role == CALL_ROLE else "user" for role in TOOL_TAGS}
        self._roles = ROLES | (calls if tools else {}) | cleaning.roles
        self._seen: set[int] = set()
        self._rewrites = cleaning.html != "keep" or cleaning.escaped_markdown != "keep"
        self._language = _language_identifier(cleaning.languages) if cleaning.languages else None
        texts = list(evaluation_texts)
        if bool(texts) != bool(cleaning.contamination):
            named = ", ".join(cleaning.contamination) or "no set"
            raise ValueError(f"contamination names {named}, and {len(texts)} evaluation texts were given")
        self._evaluation = EvaluationTexts(texts, cleaning.contamination_words) if texts else None

    def __call__(self, dialogue: Dialogue) -> Conversation | None:
        """Alternating whole exchanges, or the one turn of a bare text; None after counting why there are none."""
        report, changes = self.report, set[str]()
        report.rows += 1
        report.unused_columns.update(dialogue.unused)
        if dialogue.tools and not self._tools:
            report.unused_columns["tools (`template: tokenizer` shows them)"] += 1
        try:
            turns = self._turns(dialogue, changes)
            self._check_whole(dialogue.id, turns)
        except _DroppedError as reason:
            report.dropped[str(reason)] += 1
            self._count_exchanges(dialogue, 0, str(reason))
            return None
        report.kept += 1
        report.changed.update(changes)
        self._count_exchanges(dialogue, _exchanges([turn.role for turn in turns]), "empty messages cut")
        calls = any(str(role).lower() in TOOL_TAGS for role, _ in dialogue.messages)
        tools = (encodable(dialogue.tools) or "[]" * calls) if self._tools else ""
        return Conversation(encodable(dialogue.id), tuple(turns), tools)

    def _turns(self, dialogue: Dialogue, changes: set[str]) -> list[Turn]:
        bare = len(dialogue.messages) == 1 and dialogue.messages[0][0] == "text"
        # a role that is always known; what it means is not asked
        messages = self._mapped((("system", dialogue.messages[0][1]),) if bare else dialogue.messages, changes)
        if self._rewrites:
            messages = [(role, self._rewritten(text, changes)) for role, text in messages]
        if bare:
            if _blank(messages[0][1]):
                raise _DroppedError("empty")
            return [Turn("assistant", messages[0][1])]
        return [Turn(role, text) for role, text in self._whole_exchanges(messages, changes)]

    def _mapped(self, written: Iterable[tuple[Any, Any]], changes: set[str]) -> Messages:
        messages: Messages = []
        known = self._roles
        for written_role, content in written:
            role = role_of(written_role, known)
            if role is None:
                if "unmapped roles cut" not in changes:
                    self.report.unmapped_roles[encodable(str(written_role)[:60])] += 1
                if self.cleaning.unknown_roles == "drop":
                    raise _DroppedError("unmapped role")
                changes.add("unmapped roles cut")
                messages.append((None, ""))
            elif content is None:
                messages.append((role, ""))
            elif isinstance(content, str):
                text = encodable(content)
                if text is not content:
                    changes.add("broken characters replaced")
                tag = TOOL_TAGS.get(written_role.strip().lower()) if self._tools else None
                if tag is not None:
                    text, before = tool_text(tag, text), messages[-1] if messages else (None, "")
                    if before[0] == role and (tag == "tool_call" or before[1].endswith("</tool_response>")):
                        text = f"{messages.pop()[1]}\n{text}".lstrip("\n")
                messages.append((role, text))
            else:
                raise _DroppedError("content is not text")
        return messages

    def _rewritten(self, text: str, changes: set[str]) -> str:
        if self.cleaning.html == "drop" and holds_html(text):
            raise _DroppedError("HTML")
        if self.cleaning.html == "markdown":
            converted = html_to_markdown(text)
            if converted is None:
                raise _DroppedError("HTML nested too deep")
            if converted != text:
                changes.add("HTML to Markdown")
                text = converted
        if self.cleaning.escaped_markdown == "unescape":
            unescaped = unescape_markdown(text)
            if unescaped != text:
                changes.add("escaped Markdown unescaped")
                text = unescaped
        return text

    def _whole_exchanges(self, messages: Messages, changes: set[str]) -> Iterator[tuple[str, str]]:
        """The messages that make whole exchanges, after a system message with text."""
        asked = [text for role, text in messages if role == "user" and not _blank(text)]
        if asked and all(role in ("user", "system") for role, _ in messages):
            if not self._questions:
                raise _DroppedError("only questions")
            yield from (("system", text) for role, text in messages[:1] if role == "system" and not _blank(text))
            yield from (("user", text) for text in asked)
            return
        runs = [(role, [text for _, text in run]) for role, run in groupby(messages, lambda message: message[0])]
        runs = [(role, _without_surplus(texts, changes)) for role, texts in _without_unknown(runs)]
        if runs and runs[0][0] == "system":
            _, texts = runs.pop(0)
            if _blank(texts[0]):
                changes.add("empty messages cut")
            else:
                yield "system", self._merged(texts, changes)
        if runs and runs[0][0] == "assistant":  # nothing asked for it
            changes.add("leading assistant turns cut")
            runs = runs[1:]
        if runs and runs[-1][0] == "user":  # nothing answers it
            changes.add("trailing user turns cut")
            runs = runs[:-1]
        if any(role != ("user", "assistant")[i % 2] for i, (role, _) in enumerate(runs)):
            raise _DroppedError("roles do not alternate")  # a system message in between
        merged = [self._merged(texts, changes) for _, texts in runs]
        exchanges = [pair for pair in zip(merged[::2], merged[1::2], strict=True) if not any(map(_blank, pair))]
        if 2 * len(exchanges) < len(runs):
            changes.add("empty messages cut")
        if not exchanges:
            raise _DroppedError("no whole exchange")
        for question, answer in exchanges:
            yield "user", question
            yield "assistant", answer

    def _merged(self, texts: list[str], changes: set[str]) -> str:
        if len(texts) > 1:
            if self.cleaning.non_alternating == "drop":
                raise _DroppedError("roles do not alternate")
            changes.add("neighbouring messages merged")
        return "\n\n".join(texts)

    def _check_whole(self, identity: str, turns: list[Turn]) -> None:
        """Drop by what a whole conversation says; remember it if it is kept."""
        cleaning = self.cleaning
        if cleaning.drop_blocked or cleaning.min_characters:
            answers = [turn.text for turn in turns if turn.role == "assistant"]
            if cleaning.drop_blocked and any(text.lstrip("! \n").startswith(BLOCKED_ANSWERS) for text in answers):
                raise _DroppedError("blocked answer")
            if sum(map(len, answers)) < cleaning.min_characters:
                raise _DroppedError("too few characters")
        if 0 < len(turns) // 2 < cleaning.min_exchanges:
            raise _DroppedError("too few exchanges")
        keys = {kind: _key(kind, identity, turns) for kind in cleaning.duplicates}
        for kind, key in keys.items():
            if key in self._seen:
                raise _DroppedError(f"duplicate {kind.replace('-', ' ')}")
        if self._language is not None:
            language = self._language(_sample(turns))
            if language not in cleaning.languages:
                raise _DroppedError(f"language {language}")
        if self._evaluation is not None:
            asked = [turn.text for turn in turns if turn.role == "user"] or [turns[0].text]
            if any(map(self._evaluation.found_in, asked)):
                raise _DroppedError("contamination")
        self._seen.update(keys.values())

    def _count_exchanges(self, dialogue: Dialogue, kept: int, reason: str) -> None:
        """A question directly before an answer is an exchange; `reason` is why those that are not kept are lost."""
        found = _exchanges(role_of(role, self._roles) for role, _ in dialogue.messages)
        assert kept <= found
        self.report.exchanges += found
        self.report.exchanges_kept += kept
        if kept < found:
            self.report.exchanges_lost[reason] += found - kept


def _exchanges(roles: Iterable[str | None]) -> int:
    return sum(pair == ("user", "assistant") for pair in pairwise(roles))


def _without_unknown(runs: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """Cut runs of unknown roles, with the question before (its answer came elsewhere) and the answer after."""
    kept: list[tuple[str | None, list[str]]] = []
    after_unknown = False
    for role, texts in runs:
        if role is None and kept and kept[-1][0] == "user":
            kept.pop()
        elif role is not None and not (after_unknown and role == "assistant"):
            kept.append((role, texts))
        after_unknown = role is None
    return kept


def _without_surplus(texts: list[str], changes: set[str]) -> list[str]:
    """Of neighbours of one role, those with text: an empty one may be what is too much."""
    if len(texts) == 1:
        return texts
    kept = [text for text in texts if not _blank(text)] or texts[:1]
    if len(kept) < len(texts):
        changes.add("empty messages cut")
    return kept


def _blank(text: str) -> bool:
    return not text or text.isspace()


def _key(kind: str, identity: str, turns: list[Turn]) -> int:
    """60 bits, which Python keeps in 32 bytes; of 100 million conversations one in 200 runs meets a false duplicate."""
    first = [turn.text for turn in turns if turn.role != "system"][:2]
    parts = [identity] if kind == "id" else first
    text = "".join(f"{len(part)}:{part}" for part in (kind, *parts))
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 4


def _sample(turns: list[Turn]) -> str:
    """The first `LANGUAGE_CHARACTERS` characters in words, not code."""
    words = ""
    for turn in turns:
        if turn.role != "system" and len(words) < LANGUAGE_CHARACTERS:
            words += CODE_SPAN.sub(" ", turn.text[: 4 * LANGUAGE_CHARACTERS]) + "\n"
    return words[:LANGUAGE_CHARACTERS]


def _language_identifier(wanted: Iterable[str]) -> Callable[[str], str]:
    """A function from a text to its ISO 639 code."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ValueError(f"telling languages apart needs the package py3langid: {install_hint('clean')}") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=0.5)
    known = [*identifier.labels, "und"]
    for code in wanted:
        if code not in known:
            raise ValueError(f"unknown language {code!r}.{did_you_mean(code, known)} Known: {', '.join(sorted(known))}")
    return lambda text: str(identifier.classify(text)[0])
