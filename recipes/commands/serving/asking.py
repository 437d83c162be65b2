"""One question to an OpenAI-compatible server, its answer timed as it comes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ....checkpoints.storage.messages import install_hint
from ....checkpoints.storage.redaction import redacted

_ATTEMPTS = 4
_FIRST_WAIT = 1.0  # seconds before the second attempt, twice as many before each further one


class Reply(NamedTuple):
    """An answer, or why there is none."""

    text: str = ""
    tokens: int = 0
    """New ones, as the server counts."""
    first: float = 0.0
    """Seconds until the first text came."""
    last: float = 0.0
    """Seconds until the last did."""
    cut: bool = False
    """Whether the limit of tokens ended it."""
    drafted: int | None = None
    """Draft tokens, and how many of them were kept, where the answer says so (llama.cpp)."""
    accepted: int | None = None
    prompt_tokens: int | None = None
    """Of the prompt, as the server counts."""
    attempts: int = 1
    """Times are those of the last."""
    failure: str | None = None


def check_client() -> Any:
    """The package that asks. Raises ValueError: it is not installed."""
    try:
        import openai
    except ImportError as error:
        raise ValueError(f"asking a server needs openai: {install_hint('regenerate')}") from error
    return openai


class Server:
    """What answers at an address, asked for one of its models; None: the first that it names."""

    def __init__(self, url: str, model: str | None, timeout: float, key_variable: str) -> None:
        self._openai = check_client()
        self.url, self.model, self._key, self._timeout = url, model, os.environ.get(key_variable, ""), timeout

    async def __aenter__(self) -> Server:
        # Given no key, the client would look for one in a variable of its own choice.
        limits: dict[str, Any] = {"timeout": self._timeout, "max_retries": 0}
        self._client = self._openai.AsyncOpenAI(api_key=self._key or "none", base_url=self.url, **limits)
        if self.model is None:
            try:
                models = (await self._client.models.list()).data
            except self._openai.APIError as error:
                raise ConnectionError(f"{self.url} does not say which models it has: {self._told(error)}") from None
            if not models:
                raise ValueError(f"{self.url} names no model: give `model`, or `baseline_model` of the baseline")
            self.model = models[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, messages: Sequence[dict[str, str]], **settings: Any) -> Reply:
        """Its answer; a server that refuses for now, fails or drops the line is asked again."""
        wait, why = _FIRST_WAIT, ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return (await self._ask(messages, settings))._replace(attempts=attempt)
            except self._openai.APITimeoutError:
                why = f"no answer within {self._timeout:g} s"
            except self._openai.APIStatusError as error:
                why = self._told(error)
                if error.status_code != 429 and error.status_code < 500:
                    break
            except (self._openai.APIError, _HalfError) as error:
                why = self._told(error.__cause__ or error)
            if attempt < _ATTEMPTS:
                await asyncio.sleep(wait)
                wait *= 2
        return Reply(attempts=attempt, failure=why)

    async def _ask(self, messages: Sequence[dict[str, str]], settings: dict[str, Any]) -> Reply:
        start, first, last, texts = time.perf_counter(), None, 0.0, list[str]()
        finish, tokens, read, timings = None, None, None, dict[str, Any]()
        asked = {"stream": True, "stream_options": {"include_usage": True}} | settings
        stream = await self._client.chat.completions.create(model=self.model, messages=list(messages), **asked)
        async for chunk in stream:
            now = time.perf_counter() - start
            for choice in chunk.choices:
                # What a model thinks is text too, that some servers name otherwise.
                delta = choice.delta
                text = (delta.content or "") + ((delta.model_extra or {}).get("reasoning_content") or "")
                finish = choice.finish_reason or finish
                if text:
                    texts.append(text)
                    first, last = now if first is None else first, now
            if chunk.usage is not None:
                tokens, read = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            timings = (chunk.model_extra or {}).get("timings") or timings
        if finish is None:
            raise _HalfError("the stream ended before the answer did")
        if tokens is None:
            raise _HalfError("the stream says not how many tokens the answer has (stream_options: include_usage)")
        drafts = timings.get("draft_n"), timings.get("draft_n_accepted")
        return Reply("".join(texts), tokens, first or 0.0, last, finish == "length", *drafts, read)

    def _told(self, what: object) -> str:
        """In a line, and never with the key, which some servers repeat."""
        text = str(what).replace(self._key, "…") if self._key else str(what)
        return redacted(" ".join(text.split()))[:300]


class _HalfError(Exception):
    """A stream that is no whole answer."""
