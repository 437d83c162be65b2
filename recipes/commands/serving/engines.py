"""Local serving engines, which `draftsmith bench --engine` starts with an exported drafter.

The commands are the same as in the export's SERVING.md, but they are not read from that file.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.pairs.speculation import SPECULATIVE_TOKENS
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.storage.messages import did_you_mean
from ....checkpoints.storage.places import split_revision
from ....checkpoints.verify.model_files import load_config
from ...schema.serving import BenchRecipe
from ...session.launch import end_with_parent
from ...session.stopping import Stoppable
from ...session.terminal import duration, log
from .bench import bench_recipe, prompts_of, run_bench

HOST = "127.0.0.1"
_STARTING = 1800  # maximum seconds to load weights and capture graphs
_ENDING = 30
_LINES = 20  # lines of the log to print if an engine fails
_LOG_EVERY = 30  # seconds


@dataclass(frozen=True)
class Draft:
    """Exported drafter or prediction heads, with the number of draft tokens per step."""

    form: str
    folder: str
    tokens: int
    mixes_attention: bool = False
    parallel: bool = False
    """Whether all draft tokens are generated in one forward pass (parallel drafting)."""


@dataclass(frozen=True)
class Engine:
    """Serving engine that can load exported drafters."""

    forms: Mapping[str, str]
    """Mapping from supported export formats to the engine's names of the speculative methods."""
    command: Callable[[str, Draft | None], list[str]]
    """Function that returns the command for a target and an optional draft, without host and port."""
    lookup: Callable[[int], list[str]] | None = None
    """Function that maps a number of draft tokens to the arguments for prompt lookup; None if unsupported."""


def _vllm(target: str, draft: Draft | None) -> list[str]:
    command = ["vllm", "serve", target]
    if draft is None:
        return command
    if draft.mixes_attention:  # otherwise vLLM allocates a KV cache for each kind of attention
        command.append("--disable-hybrid-kv-cache-manager")
    speculative: dict[str, Any] = {"method": ENGINES["vllm"].forms[draft.form], "model": draft.folder}
    speculative |= {"num_speculative_tokens": draft.tokens} | ({"parallel_drafting": True} if draft.parallel else {})
    return [*command, "--speculative-config", json.dumps(speculative)]


def _vllm_lookup(tokens: int) -> list[str]:
    config = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    return ["--speculative-config", json.dumps(config)]


def _sglang(target: str, draft: Draft | None) -> list[str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", target]
    if draft is None:
        return command
    command += ["--speculative-algorithm", ENGINES["sglang"].forms[draft.form]]
    command += ["--speculative-draft-model-path", draft.folder]
    if draft.form not in ("dflash", "dspark"):
        command += ["--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1"]
    return [*command, "--speculative-num-draft-tokens", str(draft.tokens + 1)]


def _llama_cpp(target: str, draft: Draft | None) -> list[str]:
    command = ["llama-server", "-m", target]
    if draft is None:
        return command
    command += ["-md", f"{draft.folder}/model.gguf", "--spec-type", ENGINES["llama.cpp"].forms[draft.form]]
    return [*command, "--spec-draft-n-max", str(draft.tokens), "--metrics"]


def _llama_cpp_lookup(tokens: int) -> list[str]:
    sizes = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(tokens)]
    return ["--spec-type", "ngram-simple", *sizes]


ENGINES = {
    "vllm": Engine(
        {"vllm-sglang": "draft_model"} | {name: name for name in ("eagle3", "medusa", "dflash", "dspark")},
        *(_vllm, _vllm_lookup),
    ),
    "sglang": Engine(
        {"vllm-sglang": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK"}, _sglang
    ),
    "llama.cpp": Engine({"gguf": "draft-simple", "eagle3-gguf": "draft-eagle3"}, _llama_cpp, _llama_cpp_lookup),
}


class Running(NamedTuple):
    """Running process of a serving engine."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def failure(self) -> str:
        """Error message with the state of the engine and the last lines of its log."""
        code = self.process.poll()
        state = "does not respond" if code is None else f"ended with code {code}"
        return "\n".join((f"the engine {state}; last lines of {self.log_file}:", *_last_lines(self.log_file, _LINES)))


def commands_of(
    export: Path | str | None, engine: str, target: str | None = None, tokens: int | None = None
) -> list[list[str]]:
    """Return two commands that serve a target, first with an exported drafter and then without speculative decoding.

    Raises ValueError if the engine is unknown, does not support the export, or cannot serve the target.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}.{did_you_mean(engine, ENGINES)} Known: {', '.join(ENGINES)}")
    if export is None:
        raise ValueError(f"{engine} requires an export: pass its directory")
    chosen, manifest = ENGINES[engine], load_manifest(Path(export).expanduser())
    form = None if manifest.export is None else manifest.export["format"]
    if form not in chosen.forms:
        problem = "is not an export" if form is None else f"is an export in the format {form}"
        remedy = f"use `draftsmith export ARTIFACT --to {next(iter(chosen.forms))}`"
        raise ValueError(f"{export} {problem}, but {engine} reads {', '.join(chosen.forms)}: {remedy}")
    named = target or (manifest.target or {}).get("id")
    if named is None:
        raise ValueError(f"{export} does not name its target: pass --target")
    if engine == "llama.cpp" and not named.endswith(".gguf"):
        raise ValueError(f"llama.cpp requires a GGUF file as target, got {named}: pass the file with --target")
    stored = manifest.export.get("speculative_tokens") if manifest.export else None
    drafted = tokens or stored or manifest.shapes.get("num_heads") or SPECULATIVE_TOKENS
    config = load_config(str(export)) if form == "vllm-sglang" else None
    kinds = getattr(config, "layer_types", None)
    assert form is not None
    draft = Draft(form, str(export), drafted, len(set(kinds or ())) > 1, mask_token(config) is not None)
    return [chosen.command(split_revision(named)[0], each) for each in (draft, None)]


@contextmanager
def running(
    command: Sequence[str], log_file: Path, port: int | None = None, signals: Stoppable | None = None, **process: Any
) -> Iterator[Running]:
    """Start a server, by default on a free port, yield it when it is ready, and terminate it afterwards.

    Raises ConnectionError if the server fails to start, and ValueError if it is not installed or the port is in use.
    """
    if shutil.which(command[0], path=process.get("env", os.environ).get("PATH")) is None:
        raise ValueError(f"{command[0]} is not on PATH: install it, or activate its environment")
    with socket.socket() as free:
        try:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((HOST, port or 0))
        except OSError:
            raise ValueError(f"port {port} of {HOST} is in use: choose another --port") from None
        port = free.getsockname()[1]
    with log_file.open("w") as log:
        server = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
            **process,
        )
    engine = Running(f"http://{HOST}:{port}", server, log_file)
    try:
        _wait(engine, signals)
        yield engine
    finally:
        _stop_server(server)


def _wait(engine: Running, signals: Stoppable | None) -> None:
    began = logged = time.monotonic()
    while not _is_healthy(engine, 5):
        if signals is not None:
            signals.check()
        now = time.monotonic()
        if engine.process.poll() is not None or now > began + _STARTING:
            raise ConnectionError(engine.failure)
        if signals is not None and now > logged + _LOG_EVERY:
            logged = now
            log(f"bench: starting for {duration(now - began)}: {''.join(_last_lines(engine.log_file, 1))}")
        time.sleep(0.2)


def _check(engines: Sequence[Running]) -> None:
    """Raise ConnectionError with the last log lines if an engine has terminated or is not healthy."""
    for engine in engines:
        if not _is_healthy(engine, 30):
            raise ConnectionError(engine.failure)


def _is_healthy(engine: Running, timeout: float) -> bool:
    try:
        urlopen(f"{engine.url}/health", timeout=timeout).close()
    except OSError:
        return False
    return True


def _last_lines(log_file: Path, lines: int) -> list[str]:
    return log_file.read_text(errors="replace").splitlines()[-lines:]


def _stop_server(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, number)
            server.wait(_ENDING)
    server.wait()


@contextmanager
def started(
    commands: Sequence[Sequence[str]], ports: Sequence[int], more: Sequence[str], stem: str, signals: Stoppable
) -> Iterator[list[Running]]:
    """Start one or two engines, yield them when they are ready, and terminate them afterwards.

    The second command starts a baseline. Engines start sequentially, because each engine allocates all free memory.
    `more` contains additional arguments. The log files are `stem`.log and `stem`-baseline.log.
    """
    with ExitStack() as stack:
        engines = []
        for command, port, name in zip(commands, ports, ("", "-baseline"), strict=False):
            log_file = Path(f"{stem}{name}.log")
            log(f"bench: starting {command[0]}; its log is {log_file}")
            engines.append(stack.enter_context(running([*command, *more], log_file, port, signals)))
        _check(engines)  # one engine may fail because the other allocates memory
        yield engines


def serve_engine(command: Sequence[str], port: int, more: Sequence[str], stem: str) -> None:
    """Start an engine (see `started`) and serve until a signal arrives; raise ConnectionError if it terminates."""
    with Stoppable("bench", "") as signals, started([command], [port], more, stem, signals) as engines:
        (engine,) = engines
        log(f"bench: serving at {engine.url}/v1")
        while True:
            signals.check()
            if engine.process.poll() is not None:
                raise ConnectionError(engine.failure)
            time.sleep(0.2)


def engine_recipe(overrides: Sequence[str], options: Mapping[str, str | None], port: int = 8000) -> BenchRecipe:
    """Return a recipe that compares an engine with a baseline, by default at `port` and the next port."""
    urls = {"server": f"http://{HOST}:{port}/v1", "baseline": f"http://{HOST}:{port + 1}/v1"}
    urls |= {name: url for name in urls if (url := options.get(name))}
    return bench_recipe(None, overrides, **{**options, **urls})


def measure_engine(recipe: BenchRecipe, commands: Sequence[Sequence[str]], more: Sequence[str], stem: str) -> None:
    """Start an engine and its baseline (see `started`) at the recipe's URLs, run the benchmark, and stop them."""
    assert recipe.baseline is not None
    ports = [_port(recipe.server), _port(recipe.baseline)]
    prompts_of(recipe)  # fails before an engine is started
    with Stoppable("bench") as signals, started(commands, ports, more, stem, signals) as engines:
        try:
            run_bench(recipe)
        except ConnectionError:
            _check(engines)
            raise


def _port(url: str) -> int:
    """Return the port of a local URL; raise ValueError if the URL is not local or has no port."""
    address = urlsplit(url)
    if address.hostname not in (HOST, "localhost") or address.port is None:
        raise ValueError(f"engines are started on this machine only: expected http://{HOST}:PORT/v1, got {url}")
    return address.port
