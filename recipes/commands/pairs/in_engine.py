"""What a forge's drafts are worth in the engine that shall run them."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.export.base import ExportOptions, export_artifact
from ....checkpoints.export.forms import FORMS
from ....checkpoints.export.gguf import find_converter
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.gguf import gguf_file, is_gguf
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ...schema.forge import ForgeRecipe
from ..artifacts.export import FORMATS
from ..artifacts.import_drafter import import_drafter
from ..serving.asking import check_client
from ..serving.engines import ENGINES, HOST, commands_of, measure_engine, measured_recipe
from .rules import Measured, Place
from .stages import row_named

OF_ENGINES = ("engine", "engine_options", "llama_cpp")
"""Fields of a forge that may change when it goes on."""


class Draft(NamedTuple):
    """What an engine shall draft with."""

    artifact: Path | None
    """Or a model that was given as a drafter; None: the engine's own look-up in the text."""
    tokens: int | None
    """That it drafts a step; None: as many as the export says."""


def check_engine(recipe: ForgeRecipe) -> None:
    """Raises ValueError: the engine of a forge is not installed, or cannot serve its target; nothing can ask it."""
    if recipe.engine is None:
        return
    check_client()
    shlex.split(recipe.engine_options)
    program = ENGINES[recipe.engine].command(recipe.target, None)[0]
    if shutil.which(program) is None:
        raise ValueError(f"{program} is not on the PATH: install {recipe.engine}, or activate its environment")
    if program == "python":  # which is there in any case
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({recipe.engine!r}) is None)"
        if subprocess.run([program, "-c", look], check=False).returncode:
            raise ValueError(f"the python on the PATH has no {recipe.engine}: install it, or activate its environment")
    if recipe.engine == "llama.cpp" and (recipe.llama_cpp is None or not is_gguf(recipe.target)):
        raise ValueError(
            f"llama.cpp serves a GGUF file, and its own converter writes drafts: the target is {recipe.target}, "
            f"llama_cpp={recipe.llama_cpp or 'FOLDER'} should name a checkout"
        )
    if recipe.llama_cpp is not None:
        find_converter(Path(recipe.llama_cpp))


def drafts_of(
    best: Sequence[Measured], trained: Mapping[str, Mapping[str, Any]], given: Sequence[str]
) -> dict[str, Draft]:
    """By name what was measured best, with the lengths of drafts that were best here."""
    found: dict[str, Draft] = {}
    for each in best:
        tokens = row_named(each.label)[1].get("gamma")
        if own := trained.get(each.name):
            artifact = Path(own["heads"] if "heads" in own else own["drafters"][0])
            found.setdefault(artifact.name, Draft(artifact, tokens))
        elif each.name in given:
            found.setdefault(f"given-{1 + given.index(each.name)}", Draft(folder_of(each.name), tokens))
        else:
            found.setdefault("look-up", Draft(None, None))
    return found


def form_for(engine: str, artifact: Path) -> str | None:
    """The form in which an engine reads an artifact; None: it reads none of its kind."""
    kind, eagle = load_manifest(artifact).kind, is_eagle(artifact)
    fitting = [form for form in ENGINES[engine].forms if FORMS[form].kind == kind]
    fitting = [form for form in fitting if kind != "heads" or form.startswith("eagle3") == eagle]
    return fitting[0] if fitting else None


def worth_in_engine(recipe: ForgeRecipe, name: str, draft: Draft, prompts: int) -> list[str]:
    """Export what drafts for a forge's engine, measure it there beside the engine alone at each temperature, and say
    what came out; what was measured already is not measured again."""
    assert recipe.engine is not None
    out, engine = Path(recipe.out), ENGINES[recipe.engine]
    target = str(gguf_file(recipe.target)) if recipe.engine == "llama.cpp" else f"{out}/target"
    if draft.artifact is not None:
        export = out / f"{name}-{recipe.engine}"
        if refused := _export(recipe, draft.artifact, out / "trained" / name, export):
            return [refused]
        sides = commands_of(export, recipe.engine, target, draft.tokens)
        how = f"draftsmith serve {export} --engine {recipe.engine}"
        how += f" --speculative-tokens {draft.tokens}" if draft.tokens else ""
    elif engine.looks_up:
        sides = [[*engine.command(target, None), *engine.looks_up], engine.command(target, None)]
        how = shlex.join(sides[0])
    else:
        return [f"a look-up of {recipe.engine}'s own is not known here"]
    lines = []
    for temperature in dict.fromkeys(recipe.temperature):
        asking = {"prompts": str(out / "corpus" / "heldout.jsonl"), "concurrency": ",".join(map(str, recipe.batch))}
        changes = [f"limit={prompts}", f"max_new_tokens={recipe.new_tokens}", f"temperature={temperature}"]
        same = hashlib.sha256(json.dumps([sides, recipe.engine_options, asking, changes]).encode()).hexdigest()[:8]
        served = out / f"{name}-{recipe.engine}-{same}.json"
        if not served.is_file():
            asking |= {"out": str(served)} | dict(zip(("server", "baseline"), _free_urls(2), strict=True))
            asked = measured_recipe(None, changes, asking)
            measure_engine(asked, sides, shlex.split(recipe.engine_options), str(out / f"serve-{recipe.engine}"))
        what = f"{recipe.engine}, {name}"
        lines += [f"{what}, {_said(load, temperature)}" for load in load_json(served, "loads")["loads"]]
    return [*lines, f"to serve it: {how}"]


def _export(recipe: ForgeRecipe, artifact: Path, imported: Path, export: Path) -> str | None:
    """Write what an engine reads of an artifact, or of a model, which becomes one first; or why it cannot be."""
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
            return f"{recipe.engine} reads no drafts such as {artifact}"
        checkout = Path(recipe.llama_cpp) if recipe.llama_cpp and recipe.engine == "llama.cpp" else None
        export_artifact(artifact, form, export, FORMATS, ExportOptions(target=target, llama_cpp=checkout))
    except ValueError as error:  # such as a given drafter with a tokenizer of its own, which decodes here alone
        return f"{recipe.engine} cannot draft with {artifact}: {error}"
    return None


def _free_urls(count: int) -> list[str]:
    """Addresses on this machine at which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [f"http://{HOST}:{each.getsockname()[1]}/v1" for each in sockets]


def _said(load: dict[str, Any], temperature: float) -> str:
    beside, kept = load["beside"], load["server"]["tokens_per_step"]
    said = Place(load["concurrency"], temperature).words
    if kept is not None:
        said += f": {kept:.2f} tokens a step"
    if beside["speedup"] is None:
        return f"{said}; its answers say nothing of its speed"
    low, high = beside["speedup_interval"] or (beside["speedup"], beside["speedup"])
    pays = "" if beside["speedup"] > 1 else ": drafts do not pay there"
    return f"{said}, {beside['speedup']:.2f} x ({low:.2f}–{high:.2f}) without drafts{pays}"
