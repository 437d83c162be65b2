"""Client for OpenAI-compatible servers. It measures latency and reads the counters of speculative decoding."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from ....checkpoints.storage.messages import install_hint
from ....checkpoints.storage.redaction import redacted
from ....data.conversations import THOUGHT_KEYS
from ....decode.evaluation.serving import Reply

MAX_REPLY_BYTES = 64 << 20
"""Maximum size of a server response in bytes."""
_LINE = re.compile(r"^(?:vllm|llamacpp):spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+)$")
_POSITION = re.compile(r'position="(\d+)"')
_COUNTERS = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}


def check_client() -> Any:
    """Return the package `openai`; raise ValueError if it is not installed."""
    try:
        import openai
    except ImportError as error:
        raise ValueError(f"requests to a server require openai: {install_hint('regenerate')}") from error
    return openai


def open_client(openai: Any, url: str, key: str, timeout: float, retries: int = 0) -> Any:
    """Return an asynchronous client that raises OSError for responses larger than `MAX_REPLY_BYTES`."""

    class LimitedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, *, stream: bool = False, **settings: Any) -> Any:
            response = await super().send(request, stream=True, **settings)
            unlimited = response.aiter_bytes

            async def limit_size(chunk_size: int | None = None) -> AsyncIterator[bytes]:
                size = 0
                async for piece in unlimited(chunk_size):
                    if (size := size + len(piece)) > MAX_REPLY_BYTES:
                        raise OSError(f"the reply is larger than {MAX_REPLY_BYTES >> 20} MiB")
                    yield piece

            response.aiter_bytes = limit_size
            if not stream:
                await response.aread()
            return response

    # Without a key, the client would read one from an environment variable.
    settings: dict[str, Any] = {"api_key": key or "none", "base_url": url, "timeout": timeout, "max_retries": retries}
    return openai.AsyncOpenAI(http_client=LimitedClient(base_url=url, timeout=timeout), **settings)


class Server:
    """Connection to a model on a server. The default model is the first one that the server lists."""

    def __init__(self, url: str, model: str | None, timeout: float, key_variable: str) -> None:
        self._openai = check_client()
        self.url, self.model, self._key, self._timeout = url, model, os.environ.get(key_variable, ""), timeout

    async def __aenter__(self) -> "Server":
        self._client = open_client(self._openai, self.url, self._key, self._timeout)
        if self.model is None:
            try:
                models = (await self._client.models.list()).data
            except self._openai.APIError as error:
                raise ConnectionError(f"{self.url} does not list its models: {self._redact(error)}") from None
            if not models:
                raise ValueError(f"{self.url} lists no models: set `model` (for the baseline: `baseline_model`)")
            self.model = models[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, messages: Sequence[dict[str, str]], **settings: Any) -> Reply:
        """Send chat messages, and return the response or the reason for a failure."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._ask(messages, settings)
        except (TimeoutError, self._openai.APITimeoutError):
            return Reply(failure=f"no answer within {self._timeout:g} s")
        except (self._openai.APIError, _IncompleteError, OSError) as error:
            return Reply(failure=self._redact(error.__cause__ or error))

    async def _ask(self, messages: Sequence[dict[str, str]], settings: dict[str, Any]) -> Reply:
        start, first, last, texts = time.perf_counter(), None, 0.0, list[str]()
        finish, tokens, read, timings = None, None, None, dict[str, Any]()
        request = {"stream": True, "stream_options": {"include_usage": True}} | settings
        stream = await self._client.chat.completions.create(model=self.model, messages=list(messages), **request)
        async for chunk in stream:
            now = time.perf_counter() - start
            for choice in chunk.choices:
                # Some servers send the reasoning of a model in another field.
                delta = choice.delta
                extra = delta.model_extra or {}
                text = (delta.content or "") + "".join(extra.get(key) or "" for key in THOUGHT_KEYS)
                finish = choice.finish_reason or finish
                if text:
                    texts.append(text)
                    first, last = now if first is None else first, now
            if chunk.usage is not None:
                tokens, read = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            timings = (chunk.model_extra or {}).get("timings") or timings
        if finish is None:
            raise _IncompleteError("the stream ended before the answer was complete")
        if tokens is None:
            raise _IncompleteError("the stream does not report the number of tokens (stream_options: include_usage)")
        drafts = timings.get("draft_n"), timings.get("draft_n_accepted")
        return Reply("".join(texts), tokens, first or 0.0, last, finish == "length", *drafts, read)

    def _redact(self, message: object) -> str:
        """Format an error message on one line, without the API key, which some servers include in messages."""
        text = str(message).replace(self._key, "…") if self._key else str(message)
        return redacted(" ".join(text.split()))[:300]


class _IncompleteError(Exception):
    """Error for a stream that ended without a complete response."""


def read_counters(url: str, timeout: float = 10.0) -> dict[str, float]:
    """Read the speculative-decoding counters of a server's `/metrics` page.

    vLLM and llama.cpp (with `--metrics`) count since their start. The keys are `drafts`, `drafted`, `accepted` and, for
    each draft position, `accepted 0`, `accepted 1` … The result is empty if the server has no counters.
    """
    try:
        with urlopen(url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=timeout) as page:
            text = page.read().decode(errors="replace")
    except (URLError, OSError, ValueError):
        return {}
    counters: dict[str, float] = {}
    for line in filter(None, map(_LINE.match, text.splitlines())):
        name, labels, value = line.groups()
        position = _POSITION.search(labels or "")
        key = _COUNTERS.get(name)
        if name == "accepted_tokens_per_pos" and position is not None:
            key = f"accepted {position.group(1)}"
        if key is not None:  # summed over the engines of the server
            counters[key] = counters.get(key, 0.0) + float(value)
    return counters
