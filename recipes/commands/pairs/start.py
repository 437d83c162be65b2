"""The start of a forge: the target's folder, the prompts, and the costs of the target's forwards and answers."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.safe_read import load_json
from ....data.prompts import load_prompts
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.tuning.costs import measure_forwards
from ....decode.evaluation.tuning.plan import MIN_ANSWERS, MIN_BATCHES, ModelShape
from ....decode.methods import Parts
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...schema.evaluation import QuickstartRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import load_recipe, write_recipe
from ..training.regenerate import run_regenerate
from .in_engine import ENGINE_FIELDS
from .quickstart import make_corpus, make_target
from .stages import answers_of

_PROBED = 24  # answers that show how fast the target answers
_CONTEXT = 200
FROM_THE_END = "heldout-from-the-end.jsonl"
"""The questions that are held out, the last first: what decides is measured on others than what chose."""


class Questions(NamedTuple):
    """Sizes of the prompts."""

    answered: int
    """Number of prompts that the target may answer."""
    held_out: int
    """Number of held-out prompts that are short enough to measure with."""
    tokens: float
    """Mean length of a held-out prompt, with the template."""


class Ledger:
    """Seconds that each stage took, in all processes of a forge."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = load_json(path, "seconds")["seconds"] if path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a stage, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            atomic_text(self._path, json.dumps({"seconds": self.seconds}, indent=1) + "\n")

    @property
    def spent(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())


def prepared(recipe: ForgeRecipe, base: QuickstartRecipe, out: Path) -> Questions:
    """The target's folder and the questions. Raises ValueError: too few of them, or a folder of another forge."""
    written = out / "forge.yaml"
    if known := written.is_file():
        theirs = load_recipe(str(written), kinds=("forge",)).model_dump()
        mine, free = recipe.model_dump(), ("hours", "more_hours", "out", *ENGINE_FIELDS)
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
        make_target(base.target, target)
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
    if answered < MIN_ANSWERS or len(found) < MIN_BATCHES * batch:
        raise ValueError(
            f"{answered} questions, and {len(found)} of {report['heldout']} held out have at most {most} tokens: with "
            f"`batch` {batch} at least {MIN_ANSWERS} and {MIN_BATCHES * batch} are needed; `heldout_share` is "
            f"{recipe.heldout_share:g}"
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
    shape = ModelShape(layers, count / layers, model.config.hidden_size, len(head))
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
