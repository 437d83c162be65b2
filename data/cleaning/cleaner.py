"""Cleaning of conversations, so that they consist of complete question-answer exchanges.

The steps run in this order. A dropped conversation is counted under the first step that drops it:

1. map roles and check contents (`roles`, `unknown_roles`): contents must be text; lone surrogates are replaced;
2. convert HTML (`html`) and escaped Markdown (`escaped_markdown`);
3. remove leading assistant turns, trailing user turns and exchanges with an empty message; merge or drop consecutive
   messages of one role (`non_alternating`);
4. drop error messages of the service (`drop_blocked`);
5. drop duplicates of earlier conversations (`duplicates`);
6. filter by language (`languages`);
7. drop conversations that contain evaluation data (`contamination`, `contamination_words`).

For plain text without roles, step 3 only checks that the text is not empty.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...checkpoints.storage.messages import did_you_mean, install_hint
from ..conversations import ContextText, Conversation, CorpusReport, Dialogue, Turn, encodable, tool_text
from .markup import CODE_SPAN, html_to_markdown, unescape_markdown

ROLES: dict[str, str] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
CALL_ROLE = "function_call"
TOOL_TAGS = {CALL_ROLE: "tool_call"} | dict.fromkeys(("tool", "function", "observation", "ipython"), "tool_response")
"""Tags around tool calls and tool results in the format of Hermes and Qwen, by role."""
BLOCKED_ANSWERS = (  # error messages that the service returned instead of answers
    "Too many requests in 1 hour. Try again later.",
    "Only one message at a time. Please allow any other responses to complete before sending another message",
    "An error occurred. Either the engine you requested does not exist or there was another issue",
)
LANGUAGE_CHARACTERS = 1000
FIRST_WORDS = 4
# Chinese, Japanese and Korean use few or no spaces, so each character counts as a word.
_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]+")

Messages = list[tuple[str | None, str]]
"""List of (role, text) pairs; unknown roles are None."""


class Cleaning(BaseModel):
    """Options for cleaning conversations. By default, complete exchanges are kept unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    non_alternating: Literal["drop", "merge"] = "drop"
    """Consecutive messages of one role: "drop" the conversation, or "merge" them, separated by a blank line."""
    unknown_roles: Literal["drop", "cut"] = "drop"
    """Unknown roles: "drop" the conversation, or "cut" the message, the question before it and the answer after it."""
    roles: dict[str, Literal["user", "assistant", "system"]] = {}
    """Additional role names, mapped to user, assistant or system."""
    html: Literal["keep", "markdown"] = "keep"
    """HTML outside of code: "keep" it or convert it to "markdown" (requires markdownify)."""
    escaped_markdown: Literal["keep", "unescape"] = "keep"
    r"""Backslash escapes such as `\_` outside of code: "keep" or "unescape" them."""
    drop_blocked: bool = False
    """Drop conversations in which an answer begins with one of the messages in `BLOCKED_ANSWERS`."""
    duplicates: tuple[Literal["id", "first-exchange"], ...] = ()
    """Drop conversations that repeat an earlier "id" or "first-exchange" (first question and answer)."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes of the languages to keep; "und": undetermined, "zxx": no language (requires py3langid)."""
    contamination: tuple[str, ...] = ()
    """Evaluation sets. Conversations whose questions share a word n-gram with a text in one are dropped."""
    contamination_words: int = Field(13, ge=FIRST_WORDS)
    """Length n of the shared n-gram in words. A shorter evaluation text must be contained in full."""


def role_of(written: Any, roles: Mapping[str, str] = ROLES) -> str | None:
    """Map a role name to user, assistant or system, ignoring case; None if the name is unknown."""
    return roles.get(written, roles.get(written.strip().lower())) if isinstance(written, str) else None


class _DroppedError(Exception):
    """Exception that drops a conversation. Its message is the reason."""


class Cleaner:
    """Cleaner that converts dialogues to conversations.

    `report` counts kept, changed and dropped rows. `evaluation_texts` are the texts of the evaluation sets in
    `cleaning.contamination`. With `tools`, tool calls and results are converted to turns, in the format of Hermes and
    Qwen. With `questions`, rows that contain only questions are kept.

    Raises ValueError if a language is unknown, or a package is not installed.
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
        self.cleaning, self.report = cleaning, report
        self._tools, self._questions = tools, questions
        calls = {role: "assistant" if role == CALL_ROLE else "user" for role in TOOL_TAGS}
        self._roles = ROLES | (calls if tools else {}) | cleaning.roles
        self._seen: set[int] = set()
        self._rewrites = cleaning.html != "keep" or cleaning.escaped_markdown != "keep"
        self._language = _language_identifier(cleaning.languages) if cleaning.languages else None
        self._evaluation = EvaluationTexts(evaluation_texts, cleaning.contamination_words)

    def __call__(self, dialogue: Dialogue) -> Conversation | None:
        """Clean a dialogue. Return None if it is dropped, and count the reason in the report."""
        report, changes = self.report, set[str]()
        report.rows += 1
        report.forms[dialogue.form] += 1
        try:
            turns = self._turns(dialogue, changes)
            self._check_whole(dialogue.id, turns)
        except _DroppedError as reason:
            report.dropped[str(reason)] += 1
            return None
        report.kept += 1
        if not all(turn.is_learned for turn in turns):
            changes.add("answers kept as context")
        report.changed.update(changes.union(dialogue.notes))
        calls = any(str(role).lower() in TOOL_TAGS for role, _ in dialogue.messages)
        tools = (encodable(dialogue.tools) or "[]" * calls) if self._tools else ""
        return Conversation(encodable(dialogue.id), tuple(turns), tools)

    def _turns(self, dialogue: Dialogue, changes: set[str]) -> list[Turn]:
        if not self._questions and len(dialogue.messages) == 1 and dialogue.references:
            changes.add("references used as answers")
            dialogue = replace(dialogue, messages=(*dialogue.messages, ("assistant", dialogue.references[0])))
        bare = len(dialogue.messages) == 1 and dialogue.messages[0][0] == "text"
        # The role "system" is always known, so plain text passes the role check.
        messages = self._map_role((("system", dialogue.messages[0][1]),) if bare else dialogue.messages, changes)
        if self._rewrites:
            messages = [(role, _copy_context_mark(text, self._rewrite(text, changes))) for role, text in messages]
        if bare:
            if _blank(messages[0][1]):
                raise _DroppedError("empty")
            return [Turn("assistant", messages[0][1])]
        whole = self._whole_exchanges(messages, changes)
        return [Turn(role, str(text), not isinstance(text, ContextText)) for role, text in whole]

    def _map_role(self, written: Iterable[tuple[Any, Any]], changes: set[str]) -> Messages:
        messages: Messages = []
        known = self._roles
        for written_role, content in written:
            role = role_of(written_role, known)
            if role is None:
                if self.cleaning.unknown_roles == "drop":
                    raise _DroppedError(f"unmapped role {encodable(str(written_role)[:60])}")
                changes.add("unmapped roles removed")
                messages.append((None, ""))
            elif content is None:
                messages.append((role, ""))
            elif isinstance(content, str):
                text = _copy_context_mark(content, encodable(content))
                if text != content:
                    changes.add("invalid characters replaced")
                if self._tools and (tag := TOOL_TAGS.get(written_role.strip().lower())) is not None:
                    text, before = tool_text(tag, text), messages[-1] if messages else (None, "")
                    if before[0] == role and (tag == "tool_call" or before[1].endswith("</tool_response>")):
                        text = f"{messages.pop()[1]}\n{text}".lstrip("\n")
                messages.append((role, text))
            else:
                raise _DroppedError("content is not text")
        return messages

    def _rewrite(self, text: str, changes: set[str]) -> str:
        converted = html_to_markdown(text) if self.cleaning.html == "markdown" else text
        if converted != text:
            changes.add("HTML to Markdown")
        unescaped = unescape_markdown(converted) if self.cleaning.escaped_markdown == "unescape" else converted
        if unescaped != converted:
            changes.add("escaped Markdown unescaped")
        return unescaped

    def _whole_exchanges(self, messages: Messages, changes: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the messages of complete exchanges, after the system message if it is not empty."""
        questions = [text for role, text in messages if role == "user" and not _blank(text)]
        if questions and all(role in ("user", "system") for role, _ in messages):
            if not self._questions:
                raise _DroppedError("only questions")
            yield from (("system", text) for role, text in messages[:1] if role == "system" and not _blank(text))
            yield from (("user", text) for text in questions)
            return
        runs = [(role, [text for _, text in run]) for role, run in groupby(messages, lambda message: message[0])]
        runs = [(role, _without_surplus(texts, changes)) for role, texts in _without_unknown(runs)]
        if runs and runs[0][0] == "system":
            _, texts = runs.pop(0)
            if _blank(texts[0]):
                changes.add("empty messages removed")
            else:
                yield "system", self._merge(texts, changes)
        if runs and runs[0][0] == "assistant":  # it has no question
            changes.add("leading assistant turns removed")
            runs = runs[1:]
        if runs and runs[-1][0] == "user":  # it has no answer
            changes.add("trailing user turns removed")
            runs = runs[:-1]
        if any(role != ("user", "assistant")[i % 2] for i, (role, _) in enumerate(runs)):
            raise _DroppedError("system message after the first turn")
        merged = [self._merge(texts, changes) for _, texts in runs]
        exchanges = [pair for pair in zip(merged[::2], merged[1::2], strict=True) if not any(map(_blank, pair))]
        if 2 * len(exchanges) < len(runs):
            changes.add("empty messages removed")
        if not exchanges:
            raise _DroppedError("no complete exchange")
        for question, answer in exchanges:
            yield "user", question
            yield "assistant", answer

    def _merge(self, texts: list[str], changes: set[str]) -> str:
        if len(texts) > 1:
            if self.cleaning.non_alternating == "drop":
                raise _DroppedError("roles do not alternate")
            changes.add("consecutive messages merged")
        return _copy_context_mark(texts[-1], "\n\n".join(texts))

    def _check_whole(self, identity: str, turns: list[Turn]) -> None:
        """Apply the filters for blocked answers, duplicates, languages and contamination."""
        cleaning = self.cleaning
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        if cleaning.drop_blocked and any(text.lstrip("! \n").startswith(BLOCKED_ANSWERS) for text in answers):
            raise _DroppedError("blocked answer")
        keys = {kind: _key(kind, identity, turns) for kind in cleaning.duplicates}
        for kind, key in keys.items():
            if key in self._seen:
                raise _DroppedError(f"duplicate {kind.replace('-', ' ')}")
        if self._language is not None:
            language = self._language(_sample(turns))
            if language not in cleaning.languages:
                raise _DroppedError(f"language {language}")
        if cleaning.contamination:
            texts = [turn.text for turn in turns if turn.role == "user"] or [turns[0].text]
            if any(map(self._evaluation.found_in, texts)):
                raise _DroppedError("contamination")
        self._seen.update(keys.values())


def _copy_context_mark(text: str, other: str) -> str:
    """Return `other`, as `ContextText` (not supervised) if `text` is of that type."""
    return ContextText(other) if isinstance(text, ContextText) else other


def _without_unknown(runs: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """Remove messages of unknown roles, together with the preceding question and the following answer."""
    known: list[tuple[str | None, list[str]]] = []
    after_unknown = False
    for role, texts in runs:
        if role is None and known and known[-1][0] == "user":
            known.pop()
        elif role is not None and not (after_unknown and role == "assistant"):
            known.append((role, texts))
        after_unknown = role is None
    return known


def _without_surplus(texts: list[str], changes: set[str]) -> list[str]:
    """Remove empty messages from consecutive messages of one role, and record this in `changes`."""
    if len(texts) == 1:
        return texts
    remaining = [text for text in texts if not _blank(text)] or texts[:1]
    if len(remaining) < len(texts):
        changes.add("empty messages removed")
    return remaining


def _blank(text: str) -> bool:
    return not text or text.isspace()


def _key(kind: str, identity: str, turns: list[Turn]) -> int:
    """Return a 60-bit hash of a conversation's id or first exchange. Collisions are unlikely up to 10^8 rows."""
    first = [turn.text for turn in turns if turn.role != "system"][:2]
    parts = [identity] if kind == "id" else first
    text = "".join(f"{len(part)}:{part}" for part in (kind, *parts))
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 4


def _sample(turns: list[Turn]) -> str:
    """Return the first `LANGUAGE_CHARACTERS` characters outside of code, for language identification."""
    sample = ""
    for turn in turns:
        if turn.role != "system" and len(sample) < LANGUAGE_CHARACTERS:
            sample += CODE_SPAN.sub(" ", turn.text[: 4 * LANGUAGE_CHARACTERS]) + "\n"
    return sample[:LANGUAGE_CHARACTERS]


def _language_identifier(languages: Iterable[str]) -> Callable[[str], str]:
    """Return a function that identifies the language of a text as an ISO 639 code."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ValueError(f"language identification requires the package py3langid: {install_hint('clean')}") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=0.5)
    known = [*identifier.labels, "und"]
    for code in languages:
        if code not in known:
            raise ValueError(f"unknown language {code!r}.{did_you_mean(code, known)} Known: {', '.join(sorted(known))}")
    return lambda text: str(identifier.classify(text)[0])


class EvaluationTexts:
    """Index of the word n-grams of evaluation texts, which ignores case and punctuation.

    A text matches if it shares `run_words` consecutive words with an evaluation text, or contains a shorter evaluation
    text in full. Evaluation texts of fewer than `FIRST_WORDS` words match only equal texts. The index takes about 160
    bytes per word.
    """

    def __init__(self, texts: Iterable[str], run_words: int) -> None:
        self._whole: set[int] = set()
        self._starts: set[int] = set()
        self._runs: dict[int, set[int]] = {}
        for tokens in map(_split_words, texts):
            if len(tokens) < FIRST_WORDS:
                self._whole.add(hash(tuple(tokens)))
                continue
            length = min(run_words, len(tokens))
            runs = self._runs.setdefault(length, set())
            for start in range(len(tokens) - length + 1):
                runs.add(hash(tuple(tokens[start : start + length])))
                self._starts.add(hash(tuple(tokens[start : start + FIRST_WORDS])))
        self._whole.discard(hash(()))

    def found_in(self, text: str) -> bool:
        """Check if a text matches an evaluation text."""
        tokens = _split_words(text)
        if len(tokens) < FIRST_WORDS:
            return hash(tuple(tokens)) in self._whole
        starts = map(hash, zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        return any(
            hash(tuple(tokens[i : i + length])) in runs
            for i, start in enumerate(starts)
            if start in self._starts
            for length, runs in self._runs.items()
        )


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
