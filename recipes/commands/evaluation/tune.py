"""`draftsmith tune`: search for the fastest settings of each method, with more prompts in each round."""

from collections.abc import Sequence
from pathlib import Path

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.heads.dspark import draft_tokens_of
from ....checkpoints.heads.layouts import drafts_blocks, is_eagle
from ....checkpoints.storage.atomic import check_writable
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.table.texts import TEXTS_FILE
from ....checkpoints.verify.model_files import load_config
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.measure import BASELINE
from ....decode.evaluation.tuning.space import (
    GRIDS,
    Available,
    format_setting,
    list_settings,
    tunable_methods,
    tuned_name,
)
from ....decode.evaluation.tuning.tuner import Measurement, choose_winner, tune
from ...assemble.evaluation import locate_part, prompts_of
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.loading import write_recipe
from ...session.terminal import console, log
from .evaluate import evaluate_once

FIRST_PROMPTS, GROWTH = 8, 4
"""Number of prompts in the first round, and growth factor of this number from one round to the next."""


def run_tune(recipe: EvaluateRecipe) -> list[Measurement]:
    """Find the fastest settings of the recipe's methods, and return the measurements of the last round.

    Options without a search space keep their values. If the recipe has only the baseline, all methods that its
    artifacts support are tuned. Each round is an evaluation in a directory next to `recipe.out`, so that an interrupted
    run resumes. The settings of the last round are written to `recipe.yaml`.
    """
    folder = Path(recipe.out).with_suffix(".tune")
    check_writable(folder, folder=True)
    rows, skipped = rows_to_tune(recipe)
    rounds = prompts_of_rounds(len(prompts_of(recipe, load_tokenizer(recipe.target))), recipe.batch)
    log(f"tune: {len(rows)} settings, in rounds of {', '.join(map(str, rounds))} prompts")

    def measure(labels: Sequence[str], number: int, prompts: int) -> list[Measurement]:
        own = _select_rows(recipe, [rows[label] for label in labels], folder / f"round-{number}.json")
        return [
            Measurement.of_row(row) for row in evaluate_once(own.model_copy(update={"limit": prompts}))["methods"][1:]
        ]

    measured = tune(list(rows), measure, rounds)
    last = _select_rows(recipe, [rows[each.label] for each in measured], folder / "results.json")
    write_recipe(last, folder / "recipe.yaml")
    lines = [f"not tuned: {name}: {reason}" for name, reason in skipped.items()]
    lines += [f"best: {choose_winner(measured)[1]}"] if any(each.is_lossless for each in measured) else []
    results = folder / f"round-{len(rounds)}.json"
    console().print(*lines, f"results: {results}; chosen settings: {folder / 'recipe.yaml'}", sep="\n", soft_wrap=True)
    return measured


def prompts_of_rounds(prompts: int, batch: int) -> list[int]:
    """Return the increasing number of prompts per round for a batch size. The last round uses all prompts."""
    rounds = [max(FIRST_PROMPTS, FIRST_PROMPTS // 2 * batch)]
    while rounds[-1] < prompts:
        rounds.append(GROWTH * rounds[-1])
    return [*rounds[:-1], prompts]


def available_in(recipe: EvaluateRecipe) -> Available:
    """Return the artifacts of a recipe and their features, which determine the settings that can be tuned."""
    heads, table, parallel, block_tokens = 0, False, False, None
    if recipe.heads is not None:
        heads = load_manifest(Path(locate_part(recipe.heads, "heads"))).shapes["num_heads"]
    if recipe.table is not None:
        table = (Path(locate_part(recipe.table, "table")) / TEXTS_FILE).is_file()
    if recipe.drafter is not None:
        folder = Path(locate_part(recipe.drafter, "drafter"))
        if drafts_blocks(folder):
            block_tokens = draft_tokens_of(folder)
        elif not is_eagle(folder):
            parallel = mask_token(load_config(str(folder))) is not None
    parts = (part for part in ("drafter", "heads", "table") if getattr(recipe, part) is not None)
    return Available(frozenset(parts), heads, table, parallel, block_tokens)


def rows_to_tune(recipe: EvaluateRecipe) -> tuple[dict[str, MethodSection], dict[str, str]]:
    """Return the settings to tune and the reasons for skipped rows, by label; raise ValueError if all are skipped."""
    available, at = available_in(recipe), recipe.temperature
    known, skipped = tunable_methods(available, at), dict[str, str]()
    listed = [
        (label, row) for label, row in zip(recipe.labels(), recipe.methods, strict=True) if row.method != BASELINE
    ]
    chosen = [] if listed else [(name, dict[str, object]()) for name in known]
    for label, row in listed:
        name = tuned_name(row.method, row.options, at)
        if row.temperature not in (None, at):
            skipped[label] = f"its temperature differs from the recipe's {at:g}: set `temperature={row.temperature:g}`"
        elif name not in GRIDS:
            skipped[label] = "it has no settings to tune"
        else:
            chosen.append((name, row.options))
    if not chosen:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in skipped.items()) or "no drafter, heads or table"
        raise ValueError(f"no method can be tuned ({reasons}). Known: {', '.join(known)}")
    rows = {}
    for name, fixed in chosen:
        for method, options in list_settings(name, available, at):
            merged = fixed | options
            rows[format_setting(method, merged)] = MethodSection(method=method, options=merged)
    return {label: row.model_copy(update={"label": label}) for label, row in rows.items()}, skipped


def _select_rows(recipe: EvaluateRecipe, rows: Sequence[MethodSection], out: Path) -> EvaluateRecipe:
    """Return a copy of the recipe that evaluates the baseline and `rows`, and writes the results to `out`."""
    changes = {"methods": [MethodSection(method=BASELINE), *rows], "out": str(out), "energy": "off"}
    return recipe.model_copy(update=changes | {"compare_with_transformers": False})
