"""What a forge begins with: the target's folder, questions, and what the target's forwards and answers take."""

from __future__ import annotations

import gc
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.gguf import is_gguf
from ....checkpoints.storage.safe_read import load_json
from ....data.prompts import load_prompts
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.replay.costs import measure_forwards
from ....decode.methods import Parts
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...schema.evaluation import QuickstartRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import load_recipe, write_recipe
from ..artifacts.import_drafter import import_gguf
from ..training.regenerate import run_regenerate
from .budget import FEWEST
from .in_engine import OF_ENGINES
from .quickstart import find_target, make_corpus
from .rules import LEAST_ANSWERS, Shape
from .stages import answers_of

_PROBED = 24  # answers that show how fast the target answers
_CONTEXT = 200
FROM_THE_END = "heldout-from-the-end.jsonl"
"""The questions that are held out, the last first: what decides is measured on others than what chose."""


class Questions(NamedTuple):
    """What is asked."""

    answered: int
    """That the target may answer."""
    held_out: int
    """That are measured on: those which are short enough."""
    tokens: float
    """Of one that is held out, its template's included."""


def prepared(recipe: ForgeRecipe, base: QuickstartRecipe, out: Path) -> Questions:
    """The target's folder and the questions. Raises ValueError: too few of them, or a folder of another forge."""
    written = out / "forge.yaml"
    if known := written.is_file():
        theirs = load_recipe(str(written), kinds=("forge",)).model_dump()
        mine, free = recipe.model_dump(), ("hours", "more_hours", "out", *OF_ENGINES)
        if changed := [name for name in mine if name not in free and mine[name] != theirs[name]]:
            raise ValueError(
                f"{out} holds a forge with another `{changed[0]}` ({theirs[changed[0]]!r}, not "
                f"{mine[changed[0]]!r}): choose another folder with --out"
            )
    target = out / "target"
    out.mkdir(parents=True, exist_ok=True)
    write_recipe(recipe, written)  # before anything that would be taken for another forge's
    if not target.is_dir():
        assert isinstance(base.target, str)
        found = find_target(base.target)
        import_gguf(found, target) if is_gguf(found) else target.symlink_to(found.resolve())
    corpus = out / "corpus"
    make_corpus(base, corpus)
    try:
        return _questions(recipe, base, corpus)
    except ValueError:
        if not known:  # the folder is free for what should be changed
            shutil.rmtree(corpus)
            target.unlink() if target.is_symlink() else shutil.rmtree(target)
            written.unlink()
        raise


def _questions(recipe: ForgeRecipe, base: QuickstartRecipe, corpus: Path) -> Questions:
    """Raises ValueError: too few, or all too long. Writes those held out once more from the end."""
    report = load_json(corpus / "report.json", "conversations")
    answered, batch = report["conversations"] - report["heldout"], max(recipe.batch)
    asked = corpus / "heldout.jsonl"
    tokenizer, most = load_tokenizer(f"{recipe.out}/target"), recipe.max_prompt_tokens
    found = load_prompts(str(asked), base.evaluate.template, tokenizer, report["heldout"], most)
    if answered < LEAST_ANSWERS or len(found) < FEWEST * batch:
        raise ValueError(
            f"{answered} questions, and {len(found)} of {report['heldout']} held out have at most {most} tokens: with "
            f"`batch` {batch} at least {LEAST_ANSWERS} and {FEWEST * batch} are needed; `heldout_share` says how many "
            f"are held out, {recipe.heldout_share:g}"
        )
    if not (turned := corpus / FROM_THE_END).is_file():  # what is measured on it would be measured again
        atomic_text(turned, "".join(reversed(asked.read_text().splitlines(keepends=True))))
    return Questions(answered, len(found), sum(len(ids) for _, ids in found) / len(found))


def costs_of(base: QuickstartRecipe, out: Path, questions: int) -> dict[str, Any]:
    """What the target takes, measured once."""
    path, answers = out / "costs.json", min(_PROBED, questions)
    probe = answers_of(base, answers, "probe")
    if path.is_file():
        return dict(load_json(path, "seconds_per_answer"))
    began = time.monotonic()
    model = load_target(base.evaluate)
    loading = time.monotonic() - began
    head, inner = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters())
    count -= head.numel() + (0 if head is inner else inner.numel())
    layers = model.config.num_hidden_layers
    shape = Shape(layers, count / layers, model.config.hidden_size, len(head))
    curve = measure_forwards(wrap_model(model), Parts(), _CONTEXT).target
    found: dict[str, Any] = {"shape": asdict(shape), "nodes": curve.nodes, "seconds": curve.seconds}
    found["eagle"] = _has_eagle(model.config)
    del model, head, inner  # answering loads it again
    gc.collect()
    torch.cuda.empty_cache()
    Path(probe.out).unlink(missing_ok=True)
    began = time.monotonic()
    run_regenerate(probe)
    took = time.monotonic() - began
    found["seconds_per_answer"] = max(took - loading, took / 2) / answers
    atomic_text(path, json.dumps(found, indent=1) + "\n")
    return found


def _has_eagle(config: Any) -> bool:
    """Whether EAGLE-3's layer can be made for a target."""
    try:
        EagleHeads.for_target(config)
    except ValueError:
        return False
    return True
