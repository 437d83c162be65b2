"""`draftsmith regenerate`: replace the answers in a corpus with responses of the target model."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.model_ref import resolve_model
from ....checkpoints.storage.atomic import check_writable
from ....checkpoints.storage.redaction import redacted
from ....checkpoints.storage.safe_read import parse_json
from ....data.cleaning.cleaner import Cleaning
from ....data.conversations import Conversation, CorpusReport, encodable, with_thought
from ....data.prompts import end_ids
from ....data.regeneration import SEEDS, Answer, Failure, Question, RegenerationReport, Store, keyed, regenerate
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import OWN, get_template
from ....data.sources.reading import read_conversations
from ....data.tokenizers import load_tokenizer
from ....decode.engine import Limits, generate
from ....decode.methods import Parts, build_method
from ....decode.models.loading import wrap_model
from ....decode.models.seq2seq import Seq2SeqModel
from ....decode.pool import Pool
from ....decode.rng import Rng
from ....decode.warpers import Sampling
from ...assemble.evaluation import device_of, load_with_progress
from ...schema.data import PlaceSection
from ...schema.evaluation import RegenerateRecipe, ServerSection
from ...schema.loading import write_recipe
from ...session.stopping import Stoppable
from ...session.terminal import bar, log
from ..serving.client import check_client, open_client

_RETRIES = 4
_REACTION = 0.0005
"""Seconds to wait for new questions after a response is finished, so that the batch stays full."""
_MAX_CONSECUTIVE_FAILURES = 32
_STOPPED = ("stop", "eos_token", "stop_sequence")  # the last two are from TGI


def run_regenerate(recipe: RegenerateRecipe) -> RegenerationReport:
    """Generate responses for all conversations of the source that are not in `recipe.out` yet.

    Failures are written to `<out>.errors.jsonl` and retried by the next run.

    Raises:
        ConnectionError: The server does not respond, or too many consecutive requests fail.
    """
    if recipe.template != OWN:
        get_template(recipe.template)  # fails for a misspelt name before models are loaded
    out = Path(recipe.out)
    check_writable(out)
    with Stoppable("regenerate") as stopping, Store(out, _settings(recipe)) as store:
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        remaining = _count(recipe, store, stopping)
        start, report = time.monotonic(), RegenerationReport()
        if remaining and not stopping():
            with bar("regenerating", "conversations") as advance:
                report = asyncio.run(_answer_all(recipe, store, stopping, lambda done: advance(done, remaining)))
        _log_report(report, store, time.monotonic() - start)
    stopping.check()
    return report


def _log_report(report: RegenerationReport, store: Store, seconds: float) -> None:
    rate = f", {report.answers / seconds:.1f} answers per second" if report.answers else ""
    log(f"regenerate: wrote {report.written:,} conversations{rate}; {store.path} has {len(store):,}")
    if report.cut:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.cut.most_common())
        log(f"regenerate: {sum(report.cut.values()):,} of them are incomplete ({reasons})")
    if report.failed:
        log(f"error: {report.failed:,} conversations failed: see {store.errors_path}; rerun the command to retry them")


def _settings(recipe: RegenerateRecipe) -> dict[str, Any]:
    """Return all settings that affect the generated responses."""
    if recipe.server is not None:
        target: dict[str, Any] = {"server.model": recipe.server.model}
    else:
        target = {"target": recipe.target, "dtype": recipe.dtype}
        target |= {"target's hash": resolve_model(str(recipe.target)).sha256}
    names = {"template", "system", "max_new_tokens", "on_length", "temperature", "top_k", "top_p", "seed", "sampled"}
    return target | recipe.model_dump(mode="json", include=names)


def _temperature(recipe: RegenerateRecipe, question: Question) -> float:
    """Return the sampling temperature for the response to a question."""
    return 1.0 if question.seed < recipe.sampled * SEEDS else recipe.temperature


def _read(recipe: RegenerateRecipe, report: CorpusReport | None = None) -> Iterator[Conversation]:
    options = recipe.model_dump(include=set(PlaceSection.model_fields))
    options |= {"cleaning": Cleaning(**recipe.clean), "report": report, "questions": True}
    return read_conversations(recipe.source, **options)


def _count(recipe: RegenerateRecipe, store: Store, stopping: Callable[[], bool]) -> int:
    """Count the conversations that do not have a response yet, and log the number."""
    report, remaining = CorpusReport(), 0
    for key, _ in keyed(_read(recipe, report)):
        remaining += key not in store
        if stopping():
            return remaining
    if not report.kept:
        raise ValueError(f"no usable rows in {recipe.source}: {report.explain_empty()}")
    log(f"data: {report.summary()}" + (f". {advice}" if (advice := report.advice()) else ""))
    log(f"regenerate: {remaining:,} conversations to answer; {store.path} already has {report.kept - remaining:,}")
    return remaining


async def _answer_all(
    recipe: RegenerateRecipe, store: Store, stopping: Callable[[], bool], progress: Callable[[int], None]
) -> RegenerationReport:
    options: dict[str, Any] = {"seed": recipe.seed, "system": recipe.system, "keep_cut": recipe.on_length == "keep"}
    options |= {"stopping": stopping, "progress": progress}
    if recipe.server is None:
        target = LocalTarget(recipe)
        return await regenerate(_read(recipe), store, target.answer, concurrency=recipe.batch, **options)
    spaced = recipe.template != OWN and get_template(recipe.template).middle.endswith(" ")
    server = _Server(recipe, recipe.server, spaced)
    async with server.client:
        return await regenerate(_read(recipe), store, server.answer, concurrency=recipe.server.concurrency, **options)


class LocalTarget:
    """Target that generates responses in this process, in batches with a random generator for each sequence."""

    def __init__(self, recipe: RegenerateRecipe) -> None:
        target = str(recipe.target)
        self._tokenizer = load_tokenizer(target)
        model = load_with_progress(target, dtype=recipe.dtype, device=device_of(recipe))
        self._template = get_template(recipe.template, self._tokenizer, recipe.template_options)
        self._prompt = prompt_renderer(self._template, self._tokenizer)
        self._target = wrap_model(model, graphs=False, share=True)  # graphs require a fixed batch size
        self._recipe = recipe
        self._sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
        ends = end_ids(self._tokenizer, self._template, model.generation_config, recipe.stop)
        self._limits = Limits(recipe.max_new_tokens, ends)
        positions = self._target.max_positions
        self._longest = positions - recipe.max_new_tokens + 1
        if self._longest < 1:
            raise ValueError(f"`max_new_tokens` must be at most {positions} (positions), got {recipe.max_new_tokens}")
        self._pool = None
        if not isinstance(self._target, Seq2SeqModel):
            self._pool = Pool(self._target, recipe.batch, self._limits, self._sampling)
        self._asked: dict[int, asyncio.Future[list[int]]] = {}
        self._decoding: asyncio.Task[None] | None = None

    async def answer(self, question: Question) -> Answer | Failure | None:
        """Generate the response to a question, in a batch with other pending questions."""
        prompt = self._prompt(question.turns)
        if len(prompt) > self._longest:
            new = self._limits.max_new_tokens
            reason = f"the prompt has {len(prompt)} tokens, but at most {self._longest} fit with {new} new tokens"
            return Failure(reason, lasting=True)
        if self._pool is None:
            return self._read(self._alone(prompt, question.seed, self._sampling_of(question)))
        answered = asyncio.get_running_loop().create_future()
        self._asked[self._pool.add(prompt, question.seed, self._sampling_of(question))] = answered
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode(self._pool))
        await asyncio.wait({answered, self._decoding}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            self._decoding.result()  # raises the exception of the decoding task
        return self._read(answered.result())

    async def _decode(self, pool: Pool) -> None:
        while pool.busy:
            ended = pool.step()
            for ticket, ids in ended:
                self._asked.pop(ticket).set_result(ids)
            await asyncio.sleep(_REACTION if ended else 0)

    def _sampling_of(self, question: Question) -> Sampling:
        return replace(self._sampling, temperature=_temperature(self._recipe, question))

    def _alone(self, prompt: list[int], seed: int, sampling: Sampling) -> list[int]:
        method = build_method("autoregressive", Parts(), sampling)
        rng = Rng([seed], self._target.device)
        steps = generate(self._target, *method, [prompt], self._limits, sampling, rng)
        return [token for step in steps for token in step.new_ids[0]]

    def _read(self, ids: list[int]) -> Answer:
        stopped = ids[-1] in self._limits.stop_ids
        # the tokenizer's own template parses special tokens inside an answer, such as channel names
        skip = self._template.name != OWN
        text = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=skip)
        if self._template.middle.endswith(" "):
            text = text.removeprefix(" ")  # the template adds it again
        return Answer(text, "stop" if stopped else "length")


class _Server:
    """Client for an OpenAI-compatible server. If `spaced` is True, a leading space is removed from each response."""

    def __init__(self, recipe: RegenerateRecipe, server: ServerSection, spaced: bool) -> None:
        openai = self._openai = check_client()
        self._recipe, self._server, self._spaced = recipe, server, spaced
        self._key = os.environ.get(server.key_variable, "")
        self.client = open_client(openai, server.url, self._key, server.timeout, _RETRIES)
        self._settings: dict[str, Any] = {
            "model": server.model,
            "max_tokens": recipe.max_new_tokens,  # fewer servers support its successor, max_completion_tokens
            "top_p": recipe.top_p,
        }
        if recipe.stop:
            self._settings["stop"] = recipe.stop
        if recipe.top_k:
            self._settings["extra_body"] = {"top_k": recipe.top_k}
        self._refusals = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
        self._has_answered = False
        self._consecutive_failures = 0

    async def answer(self, question: Question) -> Answer | Failure | None:
        """Request the response to a question from the server."""
        openai, url = self._openai, self._server.url
        messages = [{"role": turn.role, "content": turn.text} for turn in question.turns]
        temperature = _temperature(self._recipe, question)
        own = {"temperature": temperature} | ({"seed": question.seed} if temperature > 0 else {})
        try:
            client = self.client.chat.completions.with_raw_response
            async with asyncio.timeout(self._server.timeout):
                reply = await client.create(messages=messages, **self._settings, **own)
            outcome = self._read(reply.content)
        except (TimeoutError, openai.APITimeoutError):
            outcome = Failure(f"no answer within {self._server.timeout:g} s")
        except OSError as error:
            outcome = Failure(self._one_line(error))
        except openai.APIError as error:
            cause = self._one_line(error.__cause__ or error)
            if type(error.__cause__).__name__ == "ConnectError":  # an exception of httpx or of a compatible package
                raise ConnectionError(f"{url} does not respond ({cause}): to resume, run the command again") from None
            if isinstance(error, self._refusals) and not self._has_answered:
                raise ValueError(
                    f"{url} rejected the request: {cause}; check `server.url`, which usually ends in /v1, "
                    f"`server.model` ({self._server.model}) and the environment variable {self._server.key_variable}"
                ) from None
            outcome = Failure(cause)
        self._has_answered = self._has_answered or isinstance(outcome, Answer)
        self._consecutive_failures = self._consecutive_failures + 1 if isinstance(outcome, Failure) else 0
        if isinstance(outcome, Failure) and self._consecutive_failures >= _MAX_CONSECUTIVE_FAILURES:
            raise ConnectionError(f"{url} failed on {self._consecutive_failures} questions in a row: {outcome.error}")
        return outcome

    def _read(self, reply: bytes) -> Answer | Failure:
        """Parse the body of an HTTP response. Return the generated answer, or the reason for a failure."""
        try:
            values = parse_json(reply.decode())
        except ValueError as error:
            return Failure(f"the reply cannot be read: {self._one_line(error)}")
        match values:
            case {"choices": [{"message": {"tool_calls": [_, *_]}}, *_]}:
                return Failure("the answer calls tools, which `regenerate` does not support")
            case {"choices": [{"message": {"content": str() | None} as message, "finish_reason": str() as finish}, *_]}:
                text = encodable(with_thought(message, message["content"] or ""))  # JSON may have unpaired surrogates
            case _:
                return Failure(f"no answer in the reply: {self._one_line(values)}")
        if finish != "length" and finish not in _STOPPED:
            return Failure(f"the answer has the finish reason {finish!r}, expected stop or length")
        return Answer(text.removeprefix(" ") if self._spaced else text, "length" if finish == "length" else "stop")

    def _one_line(self, message: object) -> str:
        """Format an error message on one line of at most 500 characters, without the API key."""
        text = str(message).replace(self._key, "…") if self._key else str(message)
        return redacted(" ".join(text.split()))[:500]
