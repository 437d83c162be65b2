"""Evaluations that have finished, and need not run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .... import __version__
from ....checkpoints.artifact.model_ref import source_hash
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.safe_read import load_json
from ...assemble.evaluation import device_of
from ...report.certificate import KIND
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import beside, load_results
from ...session.machine import machine
from ...session.terminal import log
from .certify import run_certify
from .evaluate import run_evaluate


def evaluated(recipe: EvaluateRecipe) -> dict[str, Any]:
    """The results of an evaluation, which is run only where the same has not finished: of the same settings, files,
    version and machine. Raises what `run_evaluate` raises."""
    out = Path(recipe.out)
    stamp = out.with_suffix(".stamp.json")
    # before decoding: what changes meanwhile was not decoded
    identity = identity_of(recipe.recorded(exclude={"out"}), recipe.sources(), recipe)
    if out.is_file() and read_finished(stamp, identity) is not None:
        log(f"{out} had finished already")
        return load_results(out)
    stamp.unlink(missing_ok=True)
    results = run_evaluate(recipe)
    atomic_text(stamp, json.dumps({"identity": identity}) + "\n")
    return results


def certified(recipe: EvaluateRecipe, tokens: int) -> dict[str, str]:
    """Verdicts by row of a certificate over so many tokens, which is made only where the same has not been."""
    stamp = beside(Path(recipe.out), KIND).with_suffix(".stamp.json")
    identity = identity_of([recipe.recorded(exclude={"out"}), tokens], recipe.sources(), recipe)
    if (found := read_finished(stamp, identity)) is None:
        found = {"identity": identity, "verdicts": {each.label: each.verdict for each in run_certify(recipe, tokens)}}
        atomic_text(stamp, json.dumps(found) + "\n")
    return dict(found["verdicts"])


def identity_of(settings: Any, sources: Sequence[str], evaluation: EvaluateRecipe) -> str:
    """What results belong to: they may only be used again where all of it is the same."""
    states = {source: source_hash(source) for source in sources}
    known = [__version__, settings, states, machine(device_of(evaluation))]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def read_finished(path: Path, identity: str) -> dict[str, Any] | None:
    """What an earlier run has left with the same identity; None: nothing, or it is damaged."""
    try:
        found = load_json(path)
    except (OSError, ValueError):
        return None
    return found if found.get("identity") == identity else None
