"""What a forge begins with: the target's folder, questions, and what the target's forwards and answers take."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.gguf import is_gguf
from ....checkpoints.storage.safe_read import load_json, sealed
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


def prepared(recipe: ForgeRecipe, base: QuickstartRecipe, out: Path) -> tuple[int, int]:
    """The target's folder and the questions: how many may be asked, and how many are held out. Raises ValueError: too
    few of them, or a folder of another forge."""
    written = out / "forge.yaml"
    if written.is_file():
        theirs = load_recipe(str(written), kinds=("forge",)).model_dump()
        mine, free = recipe.model_dump(), ("hours", "more_hours", "out", *OF_ENGINES)
        if changed := [name for name in mine if name not in free and mine[name] != theirs[name]]:
            raise ValueError(
                f"{out} holds a forge with another `{changed[0]}` ({theirs[changed[0]]!r}, not "
                f"{mine[changed[0]]!r}): choose another folder with --out"
            )
    target = out / "target"
    out.mkdir(parents=True, exist_ok=True)
    if not target.is_dir():
        assert isinstance(base.target, str)
        found = find_target(base.target)
        import_gguf(found, target) if is_gguf(found) else target.symlink_to(found.resolve())
    make_corpus(base, out / "corpus")
    report = load_json(out / "corpus" / "report.json", "conversations")
    held_out, questions = report["heldout"], report["conversations"] - report["heldout"]
    if questions < LEAST_ANSWERS or held_out < FEWEST * max(recipe.batch):
        raise ValueError(
            f"{questions} questions and {held_out} held out: with `batch` {max(recipe.batch)} at least "
            f"{LEAST_ANSWERS} and {FEWEST * max(recipe.batch)} are needed; `heldout_share` says how many are held out, "
            f"{recipe.heldout_share:g} (in another folder)"
        )
    write_recipe(recipe, written)
    return questions, held_out


def costs_of(base: QuickstartRecipe, out: Path, questions: int) -> dict[str, Any]:
    """What the target takes, measured once."""
    path, answers = out / "costs.json", min(_PROBED, questions)
    probe = answers_of(base, answers, "probe")
    if path.is_file():
        return dict(load_json(path, "seconds_per_answer"))
    model = load_target(base.evaluate)
    head, inner = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters())
    count -= head.numel() + (0 if head is inner else inner.numel())
    layers = model.config.num_hidden_layers
    shape = Shape(layers, count / layers, model.config.hidden_size, len(head))
    curve = measure_forwards(wrap_model(model), Parts(), _CONTEXT).target
    Path(probe.out).unlink(missing_ok=True)
    began = time.monotonic()
    run_regenerate(probe)
    found: dict[str, Any] = {"shape": asdict(shape), "nodes": curve.nodes, "seconds": curve.seconds}
    found |= {"seconds_per_answer": (time.monotonic() - began) / answers, "eagle": _has_eagle(model.config)}
    atomic_text(path, json.dumps(sealed(found), indent=1) + "\n")
    return found


def _has_eagle(config: Any) -> bool:
    """Whether EAGLE-3's layer can be made for a target."""
    try:
        EagleHeads.for_target(config)
    except ValueError:
        return False
    return True
