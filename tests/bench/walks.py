"""Count the files whose functions three commands call, and their calls into a higher package.

    python tests/bench/walks.py

Each command runs on tiny random models. A climb is a call from a package into one above it, such as a callback.
"""

import argparse
import json
import os
import random
import runpy
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from types import FrameType
from typing import Any

import draftsmith
import yaml
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import train_bpe
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(draftsmith.__file__).parent
ROOMS = ("checkpoints", "data", "decode", "train", "recipes")
DATA = {"source": "rows.json", "template": "chatml", "block_tokens": 64, "heldout_share": 0.2}
TRAIN = {"steps": 2, "global_batch": 2, "micro_batch": 1, "precision": "no"}
DRAFTER = {"kind": "drafter", "target": "target", "model": {"source": "near"}, "data": DATA, "train": TRAIN}
EVALUATE = {"kind": "evaluate", "target": "target", "drafter": "trained", "prompts": "rows.json", "template": "chatml"}
EVALUATE |= {"methods": [{"method": "autoregressive"}, {"method": "speculative"}], "limit": 2, "max_new_tokens": 8}
WALKS = {
    "a row to a block": ("prepare", DRAFTER | {"out": "prepared"}),
    "a recipe to a drafter's artifact": ("train", DRAFTER | {"out": "trained"}),
    "an artifact to results and report": ("evaluate", EVALUATE | {"out": "results.json"}),
}


def make_folder() -> None:
    """Write conversations, a target and a drafter with their tokenizer into the current directory."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=8)) for _ in range(240)]
    roles = ("human", "gpt")
    rows = [
        {"conversations": [{"from": role, "value": texts[2 * i + j]} for j, role in enumerate(roles)]}
        for i in range(120)
    ]
    Path("rows.json").write_text(json.dumps(rows))
    tokenizer = train_bpe(texts, 320, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML_JINJA
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    for name in ("target", "near"):
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(name)
        tokenizer.save_pretrained(name)


def walk(command: str, recipe: dict[str, Any]) -> dict[str, int]:
    """Profile a command in a child process; count the files whose functions run, and the calls into higher packages."""
    passed: set[str] = set()
    climbs: set[tuple[str, str]] = set()

    def inside(path: str) -> str:
        """Return the path relative to draftsmith, or "" if it is outside of its five top-level packages."""
        relative = path.removeprefix(f"{ROOT}/") if path.startswith(f"{ROOT}/") else ""
        return relative if relative.partition("/")[0] in ROOMS else ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and (callee := inside(frame.f_code.co_filename)):
            passed.add(callee)
            caller = inside(frame.f_back.f_code.co_filename) if frame.f_back is not None else ""
            if caller and ROOMS.index(callee.partition("/")[0]) > ROOMS.index(caller.partition("/")[0]):
                climbs.add((caller, callee))

    Path("walk.yaml").write_text(yaml.safe_dump(recipe))
    if (child := os.fork()) == 0:
        sys.argv = ["draftsmith", command, "walk.yaml"]
        try:
            with open(os.devnull, "w") as sink:
                os.dup2(sink.fileno(), 1)
            sys.setprofile(note)
            runpy.run_module("draftsmith", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            sys.setprofile(None)
            Path("walk.json").write_text(json.dumps({"files": len(passed), "climbs": len(climbs)}))
            os._exit(int(ended.code or 0))
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"draftsmith {command} failed: {recipe}")
    return dict(json.loads(Path("walk.json").read_text()))


def main() -> None:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        make_folder()
        for name, (command, recipe) in WALKS.items():
            results[name] = walk(command, recipe)
            print(f"{name:36s} {results[name]['files']:4d} files  {results[name]['climbs']:4d} climbs")
    print(json.dumps(results))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # not with common.py, which imports the package
    main()
