"""The main job on text that is already on the machine: corpus, tokenizer, target, drafter, heads, table, evaluation.

Each stage is a recipe of its own and runs through the same code as any other; a finished stage is reused.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ...checkpoints.artifact.compat import save_tokenizer
from ...checkpoints.storage.atomic import atomic_dir, check_writable
from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.storage.safe_read import load_json, sealed
from ...data.conversations import write_conversations
from ...data.rendering.templates import CHATML_JINJA
from ...data.sources.documentation import documentation_conversations
from ...data.sources.reading import read_conversations
from ...data.tokenizers import train_bpe
from ..schema.evaluation import QuickstartRecipe, RegenerateRecipe
from ..schema.loading import parse_recipe, read_recipe, write_recipe
from ..schema.papers import filled
from ..session.terminal import bar, log
from .evaluation.evaluate import run_evaluate
from .regenerate import run_regenerate
from .training.train import run_train

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REFERENCE_MINUTES = 8.0


def run_quickstart(recipe: QuickstartRecipe) -> dict[str, Any]:
    """Run what is not finished yet, then measure; the results. ValueError: `out` is that of other settings, or another
    process is at it."""
    out = Path(recipe.out)
    resolved = resolve(recipe)
    check_writable(out)
    with sole_writer(out):
        return _run(recipe, resolved, out)


def _run(recipe: QuickstartRecipe, resolved: QuickstartRecipe, out: Path) -> dict[str, Any]:
    _check_folder(out, recipe)
    write_recipe(recipe, out / "quickstart.yaml")
    start = time.monotonic()
    make_corpus(recipe, out / "corpus")
    make_tokenizer(recipe, out / "corpus", out / "tokenizer")
    for name in ("target", "drafter", "distilled", "answers", "heads", "table"):
        stage: Any = getattr(resolved, name)
        log(f"\n— {name} → {stage.out}")
        if isinstance(stage, RegenerateRecipe):
            run_regenerate(stage)
        else:
            run_train(stage)
    log(f"\n— evaluation → {resolved.evaluate.out}")
    results = run_evaluate(resolved.evaluate)
    log(f"quickstart: {(time.monotonic() - start) / 60:.1f} minutes")
    return results


def resolve(recipe: QuickstartRecipe) -> QuickstartRecipe:
    """The recipe with `{out}` filled in, the seed handed down, and training steps and the target's answers scaled by
    the minutes asked for."""
    values = filled(recipe.model_dump(mode="json"), "{out}", recipe.out)
    scale = recipe.minutes / REFERENCE_MINUTES
    for name in ("target", "drafter", "distilled", "heads"):
        train = values[name]["train"]
        train["seed"] = recipe.seed
        if train["steps"] is not None:
            train["steps"] = max(1, round(train["steps"] * scale))
    answers = values["answers"]
    answers["limit"] = None if answers["limit"] is None else max(20, round(answers["limit"] * scale))
    for name in ("answers", "evaluate"):
        values[name]["seed"] = recipe.seed
    resolved = parse_recipe(values, "quickstart")
    assert isinstance(resolved, QuickstartRecipe)
    return resolved


def make_corpus(recipe: QuickstartRecipe, folder: Path) -> None:
    """Conversations from the documentation of installed packages: train.jsonl, heldout.jsonl and report.json."""
    report_file = folder / "report.json"
    if report_file.is_file():
        report = load_json(report_file, "conversations")
        log(f"— corpus: reusing {folder} ({report['conversations']:,} conversations)")
        return
    log(f"— corpus → {folder}")
    section = recipe.corpus
    with bar("reading documentation", "files") as advance:
        train, heldout, report = documentation_conversations(
            section.packages,
            heldout_share=section.heldout_share,
            max_megabytes=section.megabytes,
            seed=recipe.seed,
            progress=advance,
        )
    with atomic_dir(folder) as unfinished:
        write_conversations(train, unfinished / "train.jsonl")
        write_conversations(heldout, unfinished / "heldout.jsonl")
        (unfinished / "report.json").write_text(json.dumps(sealed(report), indent=2) + "\n", encoding="utf-8")
    if report["skipped"]:
        log(f"corpus: not installed and skipped: {', '.join(report['skipped'])}")
    log(
        f"corpus: {report['conversations']:,} conversations, {report['bytes'] / 1e6:.1f} MB from "
        f"{len(report['packages'])} packages; {report['heldout']} held out"
    )


def make_tokenizer(recipe: QuickstartRecipe, corpus: Path, folder: Path) -> None:
    """A byte-level BPE trained on the corpus."""
    if (folder / "tokenizer_config.json").is_file():
        log(f"— tokenizer: reusing {folder}")
        return
    log(f"— tokenizer → {folder}")
    texts = (turn.text for row in read_conversations(str(corpus / "train.jsonl")) for turn in row.turns)
    tokenizer = train_bpe(texts, recipe.corpus.vocab_size, SPECIAL_TOKENS)
    tokenizer.chat_template = CHATML_JINJA  # so that servers can chat with the target
    with atomic_dir(folder) as unfinished:
        save_tokenizer(tokenizer, unfinished)


def _check_folder(out: Path, recipe: QuickstartRecipe) -> None:
    """Corpus and tokenizer know nothing of recipes, so the folder as a whole must belong to this one."""
    file = out / "quickstart.yaml"
    if not file.is_file():
        return
    theirs: Any = parse_recipe(read_recipe(file), str(file), kinds=["quickstart"])
    fields = type(recipe).model_fields.keys() - {"evaluate"}
    changed = sorted(name for name in fields if getattr(theirs, name) != getattr(recipe, name))
    if changed:
        raise ValueError(
            f"{out} holds a quickstart of other settings ({', '.join(changed)}): choose another folder with --out, "
            "or delete that one"
        )
