"""What a forge's drafts are worth in the engine that shall run them."""

from __future__ import annotations

import shlex
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.export.base import ExportOptions, export_artifact
from ....checkpoints.export.forms import FORMS
from ....checkpoints.export.gguf import find_converter
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ...schema.forge import ForgeRecipe
from ..artifacts.export import FORMATS
from ..artifacts.import_drafter import import_drafter
from ..serving.asking import check_client
from ..serving.engines import ENGINES, HOST, commands_of, measure_engine, measured_recipe
from .rules import Place

OF_ENGINES = ("engine", "engine_options", "llama_cpp")
"""Fields of a forge that may change when it goes on."""


def check_engine(recipe: ForgeRecipe) -> None:
    """Raises ValueError: the engine of a forge is not installed, or cannot serve its target; nothing can ask it."""
    if recipe.engine is None:
        return
    check_client()
    shlex.split(recipe.engine_options)
    program = ENGINES[recipe.engine].command(recipe.target, None)[0]
    if shutil.which(program) is None:
        raise ValueError(f"{program} is not on the PATH: install {recipe.engine}, or activate its environment")
    if recipe.engine == "llama.cpp" and (recipe.llama_cpp is None or not recipe.target.endswith(".gguf")):
        raise ValueError(
            f"llama.cpp serves a GGUF file, and its own converter writes drafts: the target is {recipe.target}, "
            f"llama_cpp={recipe.llama_cpp or 'FOLDER'} should name a checkout"
        )
    if recipe.llama_cpp is not None:
        find_converter(Path(recipe.llama_cpp))


def form_for(engine: str, artifact: Path) -> str | None:
    """The form in which an engine reads an artifact; None: it reads none of its kind."""
    kind, eagle = load_manifest(artifact).kind, is_eagle(artifact)
    fitting = [form for form in ENGINES[engine].forms if FORMS[form].kind == kind]
    fitting = [form for form in fitting if kind != "heads" or form.startswith("eagle3") == eagle]
    return fitting[0] if fitting else None


def worth_in_engine(recipe: ForgeRecipe, artifact: Path, name: str, prompts: int) -> list[str]:
    """Export an artifact, or a model that was given as a drafter, for a forge's engine, measure it there beside the
    engine alone at each temperature, and say what came out; what was measured already is not measured again."""
    assert recipe.engine is not None
    out, loads = Path(recipe.out), ",".join(map(str, recipe.batch))
    export = out / f"{name}-{recipe.engine}"
    if not (export / MANIFEST_FILE).is_file():
        try:
            form = _export(recipe, artifact, out / "trained" / name, export)
        except ValueError as error:  # such as a given drafter with a tokenizer of its own, which decodes here alone
            return [f"{recipe.engine} cannot draft with {artifact}: {error}"]
        if form is None:
            return [f"{recipe.engine} reads no drafts such as {artifact}"]
    sides = commands_of(export, recipe.engine, recipe.target if recipe.engine == "llama.cpp" else f"{out}/target")
    lines = []
    for temperature in dict.fromkeys(recipe.temperature):
        served = out / f"{export.name}-{loads}-{temperature:g}.json"
        if not served.is_file():
            asking = {"prompts": str(out / "corpus" / "heldout.jsonl"), "out": str(served), "concurrency": loads}
            asking |= dict(zip(("server", "baseline"), _free_urls(2), strict=True))
            changes = [f"limit={prompts}", f"max_new_tokens={recipe.new_tokens}", f"temperature={temperature}"]
            asked = measured_recipe(None, changes, asking)
            measure_engine(asked, sides, shlex.split(recipe.engine_options), str(out / f"serve-{recipe.engine}"))
        lines += [f"{recipe.engine}, {_said(load, temperature)}" for load in load_json(served, "loads")["loads"]]
    return [*lines, f"to serve it: draftsmith serve {export} --engine {recipe.engine}"]


def _export(recipe: ForgeRecipe, artifact: Path, imported: Path, export: Path) -> str | None:
    """Write what an engine reads of an artifact, or of a model, which becomes one first; the form, None: it reads none.
    Raises ValueError: no pair with the target, or a form that its kind does not allow."""
    assert recipe.engine is not None
    target = f"{recipe.out}/target"
    if not (artifact / MANIFEST_FILE).is_file():
        if not imported.is_dir():
            import_drafter(str(artifact), artifact, imported, target)
        artifact = imported
    form = form_for(recipe.engine, artifact)
    if form is not None:
        checkout = Path(recipe.llama_cpp) if recipe.llama_cpp and recipe.engine == "llama.cpp" else None
        export_artifact(artifact, form, export, FORMATS, ExportOptions(target=target, llama_cpp=checkout))
    return form


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
