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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import finish, parser_of
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import Decoded, decode, decode_reference
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.serving.engines import running
from pair import Pair

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
import serving

Job = Callable[[Sequence[int], int], tuple[list[int], float]]
"""Prompt and number of new tokens to these tokens and seconds."""

ANSWER = "answer: "
CONTEXT = 512
VLLM = f"""
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
engine = LLM(asked["target"], speculative_config=asked["speculative"], dtype=asked["dtype"],
             max_model_len=asked["context"], enable_prefix_caching=False, max_num_seqs=1)
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
    drafted = build_method("speculative", pair.parts, sampling, gamma=gamma)
    ways = {
        "transformers": partial(decode_reference, pair.target_model),
        "draftsmith": partial(decode, pair.target, build_method("autoregressive", Parts(), sampling), sampling, 0),
        "draftsmith, drafter": partial(decode, pair.target, drafted, sampling, 0),
    }

    def run(way: Callable[..., Decoded], prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        found = way(prompt, Limits(tokens))
        return found.ids, found.seconds

    return {label: partial(run, way) for label, way in ways.items()}


def vllm(
    python: str,
    target: Path,
    speculative: dict[str, Any] | None,
    threads: int,
    held: ExitStack,
    dtype: str = "float32",
    context: int = CONTEXT,
) -> Job:
    """A vLLM of its own, ready."""
    known = serving.environment(
        OMP_NUM_THREADS=str(threads), VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1", VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip
    asked = json.dumps({"target": str(target), "speculative": speculative, "dtype": dtype, "context": context})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child: Any = subprocess.Popen([python, "-c", VLLM, asked], env=known, **pipes)
    held.callback(child.wait)
    held.callback(child.terminate)

    def answer() -> Any:
        for line in child.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError("vLLM ended")

    def run(prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        child.stdin.write(json.dumps([list(prompt), tokens]) + "\n")
        child.stdin.flush()
        ids, seconds = answer()
        return ids, seconds

    answer()
    return run


def vllm_ways(
    python: str,
    target: Path,
    exported: Path,
    dtype: str,
    gammas: Sequence[int],
    threads: int,
    context: int,
    held: ExitStack,
) -> Iterator[tuple[str, int, Any]]:
    """Name, γ and job of each way in which vLLM decodes, for realpair.py; each is a process of its own."""

    def decoded(job: Job, prompt: Sequence[int], limits: Limits) -> Decoded:
        ids, seconds = job(prompt, limits.max_new_tokens)
        return Decoded(ids, Tally(tokens=len(ids), steps=len(ids)), seconds, 0.0)

    asked: list[tuple[str, int, dict[str, Any] | None]] = [("vLLM", 0, None)]
    for gamma in gammas:
        drafting = {"method": "draft_model", "model": str(exported), "num_speculative_tokens": gamma}
        looking = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": gamma}
        asked += [("vLLM, drafter", gamma, drafting), ("vLLM, prompt look-up", gamma, looking)]
    for name, gamma, speculative in asked:
        yield name, gamma, partial(decoded, vllm(python, target, speculative, threads, held, dtype, context))


def llama_cpp(engine: Path, options: Sequence[str], threads: int, held: ExitStack) -> Job:
    """A llama-server of its own, ready."""
    settings = f"-c {CONTEXT} -np 1 -t {threads} -ctk f32 -ctv f32 -fa off".split()
    command = [str(engine / "build" / "bin" / "llama-server"), *options, *settings]
    folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
    url = held.enter_context(running(command, folder / "log")).url

    def run(prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        more = {"return_tokens": True, "cache_prompt": False, "ignore_eos": True}
        answer = serving.ask(f"{url}/completion", prompt=list(prompt), n_predict=tokens, temperature=0, **more)
        return answer["tokens"], (answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"]) / 1000

    return run


def jobs_of(folder: Path, jobs: dict[str, Job], gamma: int, threads: int, held: ExitStack) -> dict[str, Job]:
    """Everything to be compared, ready."""
    if python := os.environ.get("DRAFTSMITH_VLLM"):
        drafting = {"method": "draft_model", "model": str(folder / "drafter"), "num_speculative_tokens": gamma}
        jobs["vLLM"] = vllm(python, folder / "target", None, threads, held)
        jobs["vLLM, drafter"] = vllm(python, folder / "target", drafting, threads, held)
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
    quick = "3 prompts, two rounds; engines take their time to start"
    arguments = parser_of(__doc__, quick, pair=True, gamma=4).parse_args()
    finish(bench(arguments))


if __name__ == "__main__":
    main()
