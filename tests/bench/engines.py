"""Decoding speed beside serving engines on the same processor: vLLM, llama.cpp, transformers.

    python tests/bench/engines.py [--quick] [--pair runs/quickstart] [--gamma 4]

Batch 1, greedy, float32, the same number of threads, each engine alone and with the pair's drafter, in turns prompt by
prompt, medians of each prompt's runs, the reading of the prompt included. vLLM runs in the Python that DRAFTSMITH_VLLM
names (see tests/engines/test_vllm.py), compiled as by default; llama.cpp is `build/bin/llama-server` in the folder
DRAFTSMITH_LLAMA_CPP, by its own times; engines that are not named are left out. Texts are compared with those of
transformers. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from common import Pair, finish, parser_of
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode, decode_reference
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS

Job = Callable[[Sequence[int], int], tuple[list[int], float]]
"""Prompt and number of new tokens to these tokens and seconds."""

ANSWER = "answer: "
PATIENCE = 600
CONTEXT = 512
VLLM = f"""
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
engine = LLM(asked["target"], speculative_config=asked["speculative"], dtype="float32", max_model_len={CONTEXT},
             enable_prefix_caching=False, max_num_seqs=1)
print("{ANSWER}{{}}", flush=True)
for line in sys.stdin:
    prompt, tokens = json.loads(line)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    (said,) = engine.generate([{{"prompt_token_ids": prompt}}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    print("{ANSWER}" + json.dumps([list(said.outputs[0].token_ids), seconds]), flush=True)
"""


def own(pair: Pair, gamma: int) -> dict[str, Job]:
    """This engine's jobs, and those of transformers."""
    sampling = Sampling()
    methods = {
        "draftsmith": build_method("autoregressive", Parts(), sampling),
        "draftsmith, drafter": build_method("speculative", Parts(pair.drafter), sampling, gamma=gamma),
    }

    def run(method: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        found = decode(pair.target, method, sampling, 0, prompt, Limits(tokens))
        return found.ids, found.seconds

    def plain(prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        found = decode_reference(pair.target_model, prompt, Limits(tokens))
        return found.ids, found.seconds

    return {"transformers": plain} | {label: partial(run, method) for label, method in methods.items()}


def started(command: list[str], held: ExitStack, **pipes: Any) -> tuple[Any, Any]:
    """A process that ends with `held`, and its log."""
    log = held.enter_context((Path(held.enter_context(tempfile.TemporaryDirectory())) / "log").open("w+"))
    child = subprocess.Popen(command, **{"stdout": log, "stderr": log, "text": True, **pipes})
    held.callback(child.wait)
    held.callback(child.terminate)
    return child, log


def vllm(python: str, pair: Path, speculative: dict[str, Any] | None, threads: int, held: ExitStack) -> Job:
    """A vLLM of its own, ready."""
    known = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    known |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    known |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
    asked = json.dumps({"target": str(pair / "target"), "speculative": speculative})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": known | {"HF_HUB_OFFLINE": "1"}}
    child, log = started([python, "-c", VLLM, asked], held, **pipes)
    said, hear = child.stdout, child.stdin
    assert said is not None
    assert hear is not None

    def answer() -> Any:
        for line in said:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        log.seek(0)
        raise RuntimeError(f"vLLM ended: {log.read()[-2000:]}")

    def run(prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        hear.write(json.dumps([list(prompt), tokens]) + "\n")
        hear.flush()
        ids, seconds = answer()
        return ids, seconds

    answer()
    return run


def llama_cpp(engine: Path, options: Sequence[str], threads: int, held: ExitStack) -> Job:
    """A llama-server of its own, ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = f"-c {CONTEXT} -np 1 -t {threads} -ctk f32 -ctv f32 -fa off --host 127.0.0.1 --port {port}".split()
    command = [str(engine / "build" / "bin" / "llama-server"), *options, *settings]
    child, log = started(command, held, stdin=subprocess.DEVNULL)
    last = time.monotonic() + PATIENCE
    while True:
        if child.poll() is not None or time.monotonic() > last:
            log.seek(0)
            raise RuntimeError(f"llama-server does not answer: {log.read()[-2000:]}")
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except (URLError, OSError):
            time.sleep(0.2)

    def run(prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        asked = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "return_tokens": True}
        body = json.dumps(asked | {"cache_prompt": False, "ignore_eos": True}).encode()
        request = Request(f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=PATIENCE) as answered:
            answer = json.load(answered)
        told = answer["timings"]
        return answer["tokens"], (told["prompt_ms"] + told["predicted_ms"]) / 1000

    return run


def jobs_of(folder: Path, jobs: dict[str, Job], gamma: int, threads: int, held: ExitStack) -> dict[str, Job]:
    """Everything to be compared, ready."""
    if python := os.environ.get("DRAFTSMITH_VLLM"):
        drafting = {"method": "draft_model", "model": str(folder / "drafter"), "num_speculative_tokens": gamma}
        jobs["vLLM"] = vllm(python, folder, None, threads, held)
        jobs["vLLM, drafter"] = vllm(python, folder, drafting, threads, held)
    if built := os.environ.get("DRAFTSMITH_LLAMA_CPP"):
        engine, out = Path(built), Path(held.enter_context(tempfile.TemporaryDirectory()))
        for name in ("target", "drafter"):
            export_artifact(folder / name, "gguf", out / name, FORMATS, ExportOptions(llama_cpp=engine))
        target, drafter = (str(out / name / "model.gguf") for name in ("target", "drafter"))
        more = f"-td {threads} -ctkd f32 -ctvd f32 --spec-type draft-simple --spec-draft-n-max {gamma}".split()
        jobs["llama.cpp"] = llama_cpp(engine, ["-m", target], threads, held)
        jobs["llama.cpp, drafter"] = llama_cpp(engine, ["-m", target, "-md", drafter, *more], threads, held)
    return jobs


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by engine, and this engine's over each."""
    threads = torch.get_num_threads()
    pair = Pair(arguments.pair.resolve(), 3 if arguments.quick else 16)
    prompts = pair.prompts
    tokens, rounds = (48, 2) if arguments.quick else (128, 5)
    with ExitStack() as held:
        jobs = jobs_of(pair.folder, own(pair, arguments.gamma), arguments.gamma, threads, held)
        for job in jobs.values():
            for prompt in prompts[:2]:
                job(prompt, tokens)
        seconds: dict[str, list[list[float]]] = {label: [[] for _ in prompts] for label in jobs}
        texts: dict[str, list[list[int]]] = {label: [[] for _ in prompts] for label in jobs}
        for _ in range(rounds):
            for place, prompt in enumerate(prompts):
                for label, job in jobs.items():
                    texts[label][place], taken = job(prompt, tokens)
                    seconds[label][place].append(taken)
    speeds = {
        label: len(prompts) * tokens / sum(statistics.median(one) for one in each) for label, each in seconds.items()
    }
    same = {label: sum(map(list.__eq__, each, texts["transformers"])) for label, each in texts.items()}
    print(f"{len(prompts)} prompts, {tokens} new tokens, gamma {arguments.gamma}, {threads} threads, {rounds} rounds")
    for label, speed in speeds.items():
        print(f"{label:22s} {speed:8.1f} tokens/s   text of transformers {same[label]}/{len(prompts)}")
    plain, drafted = speeds["draftsmith"], speeds["draftsmith, drafter"]
    return {
        "tokens_per_second": speeds,
        "same_text_prompts": same,
        "prompts": len(prompts),
        "vs": {label: (drafted if "drafter" in label else plain) / speed for label, speed in speeds.items()},
        "speedup_of_drafting": {
            label: speed / speeds[label.removesuffix(", drafter")] for label, speed in speeds.items() if "," in label
        },
    }


def main() -> None:
    parser = parser_of(__doc__, "3 prompts, two rounds; engines take their time to start", pair=True, gamma=4)
    arguments = parser.parse_args()
    if not (arguments.pair / "drafter").is_dir():
        parser.error(f"there is no trained pair at {arguments.pair}: run `make quickstart` first")
    finish(bench(arguments))


if __name__ == "__main__":
    main()
