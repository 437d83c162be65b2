"""Training pipeline of a target/drafter pair: data, tokenizer, target, responses, drafters, heads, table, evaluation.

Each stage is a separate recipe. Finished stages are reused. `draftsmith forge` runs the same stages.
"""

import json
import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.compat import save_tokenizer
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.storage.atomic import atomic_dir, atomic_text, check_writable
from ....checkpoints.storage.gguf import gguf_file, is_gguf
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ....data.conversations import write_conversations
from ....data.rendering.templates import CHATML_JINJA
from ....data.sources.documentation import documentation_conversations
from ....data.sources.questions import template_questions
from ....data.sources.reading import draw_key, has_few_ids, hash_share, read_conversations
from ....data.tokenizers import train_bpe
from ...assemble.teacher import prepare_teacher
from ...schema.evaluation import QuickstartRecipe, RegenerateRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import parse_recipe, read_recipe, write_recipe
from ...session.machine import has_bfloat16
from ...session.terminal import bar, duration, log
from ..artifacts.imports import import_gguf
from ..evaluation.evaluate import evaluate_once
from ..training.regenerate import run_regenerate
from ..training.train import run_train

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
STAGES = ("target", "answers", "table", "trimmed", "eagle", "block", "drafter", "distilled", "heads")
"""Names of the stages with a recipe, in the order in which they run."""


class Ledger:
    """Record of the time spent in each stage, including earlier, interrupted runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = load_json(path, "seconds")["seconds"] if path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent in the `with` block to the stage `name`, even if the block raises an exception."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            atomic_text(self._path, json.dumps({"seconds": self.seconds}, indent=1) + "\n")

    @property
    def spent(self) -> float:
        """Total time of all stages in seconds, including earlier runs."""
        return sum(self.seconds.values())


def run_quickstart(recipe: QuickstartRecipe) -> dict[str, Any]:
    """Run the unfinished stages and the evaluation, and return the results.

    Raises ValueError if `out` contains a quickstart run with other settings.
    """
    out, resolved = Path(recipe.out), resolve(recipe)
    check_writable(out, folder=True)
    with sole_writer(out):
        if (out / "corpus").is_dir():
            check_folder(out / "quickstart.yaml", recipe, ("evaluate",))
        named = {"target": resolved.target, "small_model": resolved.small_model}
        models = {name: model for name, model in named.items() if isinstance(model, str) and not (out / name).is_dir()}
        for model in models.values():
            find_target(model)  # fails before any stage runs
        write_recipe(recipe, out / "quickstart.yaml")
        ledger = Ledger(out / "spent.json")
        with ledger.stage("corpus"):
            make_corpus(recipe, out / "corpus")
            for name, model in models.items():
                make_target(model, out / name, resolved.gguf_dtype)
            if recipe.corpus.vocab_size is not None:
                make_tokenizer(recipe.corpus.vocab_size, out / "corpus", out / "tokenizer")
        for name in STAGES:
            stage: Any = getattr(resolved, name)
            if stage is None or isinstance(stage, str):
                continue
            log(f"\n— {name} → {stage.out}")
            with ledger.stage(name):
                run_stage(stage)
        log(f"\n— evaluation → {resolved.evaluate.out}")
        with ledger.stage("evaluation"):
            results = evaluate_once(resolved.evaluate)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in ledger.seconds.items() if seconds >= 1)
    log(f"quickstart: {duration(ledger.spent)} ({parts})")
    return results


def resolve(recipe: QuickstartRecipe) -> QuickstartRecipe:
    """Set output directory, seed, precision and the numbers of steps, answers and prompts in the stages' recipes."""
    values = fill_placeholder(recipe.model_dump(mode="json"), "{out}", recipe.out)
    scale = recipe.minutes / recipe.reference_minutes
    trained = [values[name] for name in ("target", "trimmed", "eagle", "block", "drafter", "distilled", "heads")]
    for train in (part["train"] for part in trained if isinstance(part, dict)):
        train["seed"] = recipe.seed
        if train["steps"]:
            train["steps"] = max(1, round(train["steps"] * scale))
    answers = values["answers"]
    answers["limit"] = None if answers["limit"] is None else max(20, round(answers["limit"] * scale))
    values["evaluate"]["limit"] = max(2, round(values["evaluate"]["limit"] * min(1, scale)))
    if recipe.precision == "bfloat16" or (recipe.precision == "auto" and has_bfloat16()):
        answers["dtype"] = "bfloat16"
        values["drafter"]["teacher"]["dtype"] = "bfloat16"
        for part in (part for part in trained[1:] if part is not None):
            part["train"]["precision"] = "bf16"
            if "target_dtype" in part:
                part["target_dtype"] = "bfloat16"
    for name in ("answers", "evaluate"):
        values[name]["seed"] = recipe.seed
    return parse_recipe(values, "quickstart", kinds=[QuickstartRecipe])


def fill_placeholder(value: Any, mark: str, folder: str) -> Any:
    """Replace the placeholder `mark` with `folder` in all strings of a nested value."""
    if isinstance(value, str):
        return value.replace(mark, folder)
    if isinstance(value, dict):
        return {key: fill_placeholder(item, mark, folder) for key, item in value.items()}
    return [fill_placeholder(item, mark, folder) for item in value] if isinstance(value, list) else value


def run_stage(stage: Any) -> None:
    """Write the teacher cache of a stage if the stage uses one, and run its recipe. Finished work is reused."""
    if isinstance(stage, RegenerateRecipe):
        run_regenerate(stage)
        return
    source = {"drafter": "teacher", "heads": "hidden"}.get(stage.kind)
    has_cache = source is not None and getattr(stage, source).cache is not None
    if has_cache and not (Path(stage.out) / MANIFEST_FILE).is_file():
        prepare_teacher(stage)
    run_train(stage)


def find_target(name: str) -> Path:
    """Return the GGUF file or model directory of a target; raise ValueError if it does not exist."""
    return gguf_file(name) if is_gguf(name) else folder_of(name)


def make_target(name: str, folder: Path, dtype: str = "float32") -> None:
    """Convert a GGUF model to a model directory, or create a symbolic link to an existing model directory."""
    source = find_target(name)
    log(f"— {folder.name}: {source} → {folder}")
    import_gguf(source, folder, dtype) if is_gguf(source) else folder.symlink_to(source.resolve())


def make_corpus(recipe: QuickstartRecipe, folder: Path, *, min_heldout: int = 0) -> None:
    """Write train.jsonl, heldout.jsonl and report.json from documentation, templates of questions, and files.

    At least `min_heldout` conversations of each file are held out.
    """
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
    sources = {name: list(read_conversations(name, questions=True)) for name in section.files}
    if section.questions:
        sources["the templates"] = template_questions(section.questions, recipe.seed)
    for name, rows in sources.items():
        by_content = has_few_ids(rows)
        draws = [hash_share(f"held out {draw_key(row, by_content=by_content)}") for row in rows]
        least = sorted(draws)[:min_heldout]
        for row, draw in zip(rows, draws, strict=True):
            (heldout if draw < section.heldout_share or draw in least else train).append(row)
        log(f"corpus: {len(rows):,} conversations of {name}")
    if sources:
        for part in (train, heldout):
            random.Random(recipe.seed).shuffle(part)
        report |= {"files": section.files, "questions": section.questions}
        report |= {"conversations": len(train) + len(heldout), "heldout": len(heldout)}
    with atomic_dir(folder) as unfinished:
        write_conversations(train, unfinished / "train.jsonl")
        write_conversations(heldout, unfinished / "heldout.jsonl")
        (unfinished / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if report["skipped"]:
        log(f"corpus: skipped packages that are not installed: {', '.join(report['skipped'])}")
    read = f", {report['bytes'] / 1e6:.1f} MB from {len(report['packages'])} packages" if report["bytes"] else ""
    log(f"corpus: {report['conversations']:,} conversations{read}; {report['heldout']} held out")


def make_tokenizer(vocab_size: int, corpus: Path, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the corpus, and save it."""
    if (folder / "tokenizer_config.json").is_file():
        log(f"— tokenizer: reusing {folder}")
        return
    log(f"— tokenizer → {folder}")
    texts = (turn.text for row in read_conversations(str(corpus / "train.jsonl")) for turn in row.turns)
    tokenizer = train_bpe(texts, vocab_size, SPECIAL_TOKENS)
    tokenizer.chat_template = CHATML_JINJA  # so that servers can chat with the target
    with atomic_dir(folder) as unfinished:
        save_tokenizer(tokenizer, unfinished)


def check_folder(file: Path, recipe: QuickstartRecipe | ForgeRecipe, free: Collection[str]) -> None:
    """Raise ValueError if `recipe` differs from the recipe stored in `file`, except in the fields `free`.

    Corpus, tokenizer and target do not record their settings, so an output directory can only be used for one recipe.
    """
    if not file.is_file():
        return
    stored = parse_recipe(read_recipe(file), str(file), kinds=[type(recipe)])
    fields = type(recipe).model_fields.keys() - set(free)
    if differing := sorted(name for name in fields if getattr(stored, name) != getattr(recipe, name)):
        names = ", ".join(differing)
        raise ValueError(f"{file.parent} has a {recipe.kind} with other settings ({names}): choose another --out")
