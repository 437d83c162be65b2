"""Measurement of the drafters from `draftsmith forge` in a serving engine."""

import shlex
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.export.base import ExportOptions, export_artifact
from ....checkpoints.export.gguf import find_converter
from ....checkpoints.heads.layouts import drafts_blocks, is_dspark, is_eagle
from ....checkpoints.storage.gguf import gguf_file, is_gguf
from ....checkpoints.storage.names import MANIFEST_FILE
from ....decode.evaluation.tuning.tuner import Workload
from ...schema.forge import ForgeRecipe
from ..artifacts.export import FORMATS
from ..artifacts.imports import import_drafter
from ..serving.client import check_client
from ..serving.engines import ENGINES, HOST, commands_of, engine_recipe
from ..serving.lengths import MAX_TOKENS, max_draft_tokens, run_tune_lengths

ENGINE_FIELDS = ("engine", "engine_options", "llama_cpp")
"""Fields of a forge recipe that may be changed when an interrupted run resumes."""


def check_engine(recipe: ForgeRecipe) -> None:
    """Raise ValueError if the engine of a forge recipe is not installed or cannot serve the target."""
    if recipe.engine is None:
        return
    check_client()
    shlex.split(recipe.engine_options)
    program = ENGINES[recipe.engine].command(recipe.target, None)[0]
    if shutil.which(program) is None:
        raise ValueError(f"{program} is not on PATH: install {recipe.engine}, or activate its environment")
    if program == "python":
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({recipe.engine!r}) is None)"
        if subprocess.run([program, "-c", look], check=False).returncode:
            raise ValueError(f"python on PATH cannot import {recipe.engine}: install it, or activate its environment")
    if recipe.engine == "llama.cpp" and (recipe.llama_cpp is None or not is_gguf(recipe.target)):
        needed = "a GGUF file as `target`, and a llama.cpp checkout as `llama_cpp`"
        raise ValueError(f"llama.cpp requires {needed}: got target {recipe.target} and llama_cpp {recipe.llama_cpp}")
    if recipe.llama_cpp is not None:
        find_converter(Path(recipe.llama_cpp))


def form_for(engine: str, artifact: Path) -> str | None:
    """Return the format for exporting an artifact to an engine, or None if the engine does not support its kind."""
    kind = load_manifest(artifact).kind
    block = "dspark" if is_dspark(artifact) else "dflash"
    prefix = "eagle3" if is_eagle(artifact) else block if drafts_blocks(artifact) else "medusa"
    fitting = [form for form in ENGINES[engine].forms if FORMATS[form].kind == kind]
    fitting = [form for form in fitting if kind != "heads" or form.startswith(prefix)]
    return fitting[0] if fitting else None


def tune_in_engine(recipe: ForgeRecipe, name: str, artifact: Path | None, prompts: int) -> list[str]:
    """Export a drafter for the engine, tune the number of draft tokens, and return the results as lines of text."""
    assert recipe.engine is not None
    out, engine = Path(recipe.out), recipe.engine
    target = str(gguf_file(recipe.target)) if engine == "llama.cpp" else f"{out}/target"
    most, export = MAX_TOKENS, out / f"{name}-{engine}"
    if artifact is not None:
        if refused := _export(recipe, artifact, out / "trained" / name, export):
            return [refused]
        most = max_draft_tokens(export)
    elif ENGINES[engine].lookup is None:
        return [f"{engine} is not tuned: its prompt lookup is not supported"]

    def commands(tokens: int | None) -> list[list[str]]:
        lookup, plain = ENGINES[engine].lookup, ENGINES[engine].command(target, None)
        if artifact is not None or lookup is None:
            return commands_of(export, engine, target, tokens)
        return [[*plain, *lookup(tokens or most)], plain]

    lines: dict[str, None] = {}
    for temperature in dict.fromkeys(recipe.temperature):
        asking = {"prompts": str(out / "corpus" / "heldout.jsonl"), "concurrency": ",".join(map(str, recipe.batch))}
        asking["out"] = str(out / f"{name}-{engine}-{temperature:g}.json")
        asking |= dict(zip(("server", "baseline"), _free_urls(2), strict=True))
        changes = [f"limit={prompts}", f"max_new_tokens={recipe.new_tokens}", f"temperature={temperature}"]
        served = engine_recipe(changes, asking)
        stem, more = str(out / f"serve-{engine}"), shlex.split(recipe.engine_options)
        results = run_tune_lengths(served, engine, commands, most, more, stem)
        for load in results["loads"]:
            lines[f"{engine}, {name}, {_describe(load, temperature)}"] = None
            lines[f"serve it with `{results['commands'][str(load['best'])]}`"] = None
    return list(lines)


def _export(recipe: ForgeRecipe, artifact: Path, imported: Path, export: Path) -> str | None:
    """Export a drafter, which is first imported to `imported` if it is not an artifact. Return a failure's reason."""
    if (export / MANIFEST_FILE).is_file():
        return None
    assert recipe.engine is not None
    target = f"{recipe.out}/target"
    try:
        if not (artifact / MANIFEST_FILE).is_file():
            if not imported.is_dir():
                import_drafter(str(artifact), artifact, imported, target)
            artifact = imported
        if (form := form_for(recipe.engine, artifact)) is None:
            return f"{recipe.engine} has no export format for {artifact}"
        checkout = Path(recipe.llama_cpp) if recipe.llama_cpp and recipe.engine == "llama.cpp" else None
        export_artifact(artifact, form, export, FORMATS, ExportOptions(target=target, llama_cpp=checkout))
    except ValueError as error:  # for example, if a given drafter has a different tokenizer
        return f"{recipe.engine} cannot draft with {artifact}: {error}"
    return None


def _free_urls(count: int) -> list[str]:
    """Return `count` URLs of this machine with unused ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [f"http://{HOST}:{each.getsockname()[1]}/v1" for each in sockets]


def _describe(load: dict[str, Any], temperature: float) -> str:
    workload = Workload(load["concurrency"], temperature)
    if not load["best"]:
        return f"{workload}: autoregressive decoding is fastest"
    best = load["lengths"][load["best"] - 1]
    low, high = best["speedup_interval"] or (best["speedup"],) * 2
    text = f"{workload}: {load['best']} draft tokens, {best['tokens_per_step']:.2f} tokens per step"
    return f"{text}, {best['speedup']:.2f}x ({low:.2f}–{high:.2f})"
