"""`draftsmith train RECIPE --saturation`: whether a table's corpus is large enough (`slim.txt`, section 4.3, figure 7).

Tables of growing parts of the corpus come from one pass over it; each prunes SLiM's tree while held-out prompts are
decoded, and is compared, prompt by prompt, with r = 1 for all pairs and with the table of the whole corpus.

Letters: P prompts; counts_P2 are the tokens kept and the steps taken for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from ....checkpoints.artifact.artifact import load_manifest, tokenizer_fingerprint, verify_artifact
from ....checkpoints.heads.files import load_heads
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.table.table import BigramTable
from ....data.prompts import load_prompts, stop_ids
from ....data.tokenizers import load_tokenizer
from ....decode.engine import Limits
from ....decode.evaluation.metrics import speedup_interval
from ....decode.methods import Parts, build_method
from ....decode.models.base import LanguageModel
from ....decode.models.loading import load_model, wrap_model
from ....decode.proposers.head_trees import attach_projection, states_of
from ....decode.warpers import Sampling
from ....train.parallel.interrupts import StopSignals
from ...assemble.acceptance import decode_prompts
from ...assemble.data import check_heldout, prepare_data
from ...assemble.evaluation import state_of
from ...assemble.table.count import table_vocabulary
from ...report.plots import draw_saturation, missing_matplotlib
from ...schema.loading import write_recipe
from ...schema.training import SaturationSection, TableRecipe
from ...session.machine import machine
from ...session.terminal import bar, console, log
from .saturation_tables import COUNTS_FILE, PartTable, part_tables, raise_if_stopped

SCHEMA = 2
LENGTHS = ("all", "full")
"""Of sequences: each is tried where r is 1."""
RULE = (
    "n conversations are enough if neither their table nor any larger one falls short of the whole corpus's tokens per "
    "step by {least:.1%} or more with a 95 % interval (bootstrap over prompts, paired) above 0"
)


class Verdict(NamedTuple):
    """What a curve says, in conversations."""

    enough: int | None
    """The smallest size from which on more does not pay; None: more paid up to the end of the corpus."""
    most_lost: float
    """Upper end of the interval of what the whole corpus gains over that size (over the last part, if more paid)."""
    helps_from: int | None
    """The smallest size from which on every table beats r = 1, its interval above 0; None: not even the largest."""

    def sentence(self, whole: int) -> str:
        """For people; `whole` is the size of the corpus."""
        helps = (
            "no table is distinguishably better than r = 1"
            if self.helps_from is None
            else f"better than r = 1 from {self.helps_from:,} conversations on"
        )
        if self.enough is None:
            return f"more still pays at {whole:,} conversations, the whole corpus: a larger one may pay too; {helps}"
        could = f"the whole corpus gains at most {max(self.most_lost, 0.0):.1%} over that (95 %)"
        return f"more than {self.enough:,} conversations does not pay: {could}; {helps}"


def run_saturation(recipe: TableRecipe) -> dict[str, Any]:
    """Count the parts, decode with each, and write `saturation.json` and `saturation.png` into `<out>.saturation`.

    The parts are the first n conversations of the corpus in its own order. What a killed run has counted and measured
    is kept: the same command goes on from there. Other data or other counts begin anew, unless much would be lost;
    other settings of the section measure anew with the tables that are there.

    The corpus is held to be large enough from the smallest size on at which, and above which, no table falls short of
    the whole corpus's tokens per step by `least_gain` or more with a paired 95 % interval above 0. Few prompts see
    little: the upper end of that interval, which stands beside the verdict, says what may have been missed.

    Returns:
        What `saturation.json` holds.

    Raises:
        ValueError: the recipe has no `saturation`; several processes; heads of another tokenizer or vocabulary; no
            prompts held out; considerable counts of other settings; what reading the corpus and loading models raise.
        Interrupted: a signal came; what was done is kept.
    """
    section = recipe.saturation
    if section is None:
        raise ValueError("--saturation needs a section `saturation` in the recipe, with `target` and `heads` at least")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--saturation runs in one process: start it without accelerate launch")
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    _check_heads(recipe, section, tokenizer)
    if (missing := missing_matplotlib()) is not None:
        log(f"saturation: {missing}")
    folder = Path(f"{recipe.out}.saturation")
    with StopSignals() as signals:
        parts = part_tables(recipe, tokenizer, folder, signals)
        write_recipe(recipe, folder / "recipe.yaml")
        results = _measured(recipe, section, tokenizer, folder, parts, partial(raise_if_stopped, signals, folder))
    _show(results)
    if missing is None:
        draw_saturation(results, folder / "saturation.png")
    log(f"saturation: wrote {folder / 'saturation.json'}" + ("" if missing else f" and {folder / 'saturation.png'}"))
    return results


def enough_from(counts: Sequence[np.ndarray], least_gain: float) -> tuple[int, float]:
    """The first of growing tables from which on more does not pay, and the upper end of the interval of what the last
    gains over it; see `run_saturation` for the rule. The last is always enough for itself.

    Args:
        counts: of each table, int [P, 2], tokens and steps of the same prompts; the last is that of the whole corpus.
    """
    found, most_lost = len(counts) - 1, 0.0
    for place in reversed(range(len(counts) - 1)):
        gain, (low, high) = paired_gain(counts[-1], counts[place])
        if gain >= least_gain and low > 0:
            break
        found, most_lost = place, high
    return found, most_lost


def paired_gain(counts_P2: np.ndarray, base_P2: np.ndarray) -> tuple[float, tuple[float, float]]:
    """How much more tokens per step than the base's, as a share of it (0.01: 1 %), with a 95 % bootstrap interval over
    prompts that are drawn for both alike. At least 3 prompts."""
    ratio, interval = speedup_interval(*counts_P2.T.tolist(), *base_P2.T.tolist())
    assert interval is not None, "a saturation section asks for 3 prompts or more"
    return ratio - 1, (interval[0] - 1, interval[1] - 1)


def per_step(counts_P2: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Tokens per step with a 95 % bootstrap interval over prompts."""
    plain_P2 = np.ones_like(counts_P2)  # decoding without drafts: one token a step
    gain, (low, high) = paired_gain(counts_P2, plain_P2)
    return gain + 1, (low + 1, high + 1)


@dataclass(frozen=True)
class _Bench:
    """What decodes."""

    section: SaturationSection
    scorer: LanguageModel
    heads: Any
    prompts: list[list[int]]
    limits: Limits

    def counts(self, table: BigramTable | None, sequences: int, tick: Callable[[], None]) -> list[list[int]]:
        """Tokens and steps of each prompt.

        Without a table with r = 1, among sequences of all lengths or of full length, whichever does better: among all
        the shortest is always the likeliest, which hurts heads that are often right and helps those that are not.
        """
        section = self.section
        shared: dict[str, Any] = {"sequences": sequences, "candidates": section.candidates, "unseen": section.unseen}
        if table is None:
            ways = [shared | {"correlation": "none", "lengths": lengths} for lengths in LENGTHS]
        else:
            ways = [shared | {"smoothing": section.smoothing, "strength": section.strength}]
        return max(
            (self._decoded(table, options, tick) for options in ways), key=lambda pairs: per_step(np.array(pairs))
        )

    def _decoded(self, table: BigramTable | None, options: dict[str, Any], tick: Callable[[], None]) -> list[list[int]]:
        sampling = Sampling(self.section.temperature)
        method = build_method("slim-s", Parts(heads=self.heads, table=table), sampling, **options)
        found = []
        for decoded in decode_prompts(self.scorer, method, sampling, self.prompts, self.limits, self.section.seed):
            found.append([decoded.tally.tokens, decoded.tally.steps])
            tick()
        return found


def _check_heads(recipe: TableRecipe, section: SaturationSection, tokenizer: Any) -> None:
    """Raises ValueError for heads that cannot use the table and for want of prompts, before the corpus is counted."""
    if section.prompts is None:
        check_heldout(recipe.data)
    manifest = verify_artifact(Path(section.heads), "heads")
    vocab_size = table_vocabulary(recipe, tokenizer)
    if manifest.vocab_size != vocab_size:
        raise ValueError(
            f"the heads {section.heads} have a vocabulary of {manifest.vocab_size} tokens, the table of {vocab_size}: "
            "set `vocab_size` to the target's if its embeddings are padded"
        )
    mine, theirs = tokenizer_fingerprint(tokenizer), manifest.tokenizer_fingerprint
    if mine is not None and theirs is not None and mine != theirs:
        raise ValueError(
            f"the heads {section.heads} were made with another tokenizer than {recipe.tokenizer}: the fingerprints are "
            f"{theirs[:16]}… and {mine[:16]}…"
        )


def _open(recipe: TableRecipe, section: SaturationSection, tokenizer: Any) -> _Bench:
    device = section.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(section.target, dtype=section.dtype, device=device)
    heads = load_heads(Path(section.heads), device=device)
    scorer = wrap_model(model, states=states_of(heads))
    heads = heads.to(scorer.dtype)
    attach_projection(heads, model, scorer.device)
    source = section.prompts
    if source is None:
        # streaming: what is held out is read and kept, and no blocks are made
        held = recipe.data.model_copy(update={"streaming": True})
        source = str(prepare_data(held, tokenizer, quiet=True).folder / "heldout.jsonl")
    longest = min(section.max_prompt_tokens, scorer.max_positions - section.new_tokens - 1 - heads.num_heads)
    found = load_prompts(source, recipe.data.template, tokenizer, section.limit, longest)
    if len(found) < 3:
        raise ValueError(f"{source} has {len(found)} prompts of at most {longest} tokens, and intervals need 3 or more")
    return _Bench(section, scorer, heads, [ids for _, ids in found], Limits(section.new_tokens, stop_ids(tokenizer)))


def _measured(
    recipe: TableRecipe,
    section: SaturationSection,
    tokenizer: Any,
    folder: Path,
    parts: Sequence[PartTable],
    stop_if_asked: Callable[[], None],
) -> dict[str, Any]:
    """Decode with every table that was not decoded with yet."""
    file = folder / "saturation.json"
    identity = {
        "schema": SCHEMA,
        "counts": json.loads((folder / COUNTS_FILE).read_text(encoding="utf-8"))["identity"],
        "section": section.model_dump(mode="json", exclude={"sizes", "least_gain", "device"}),
        "prune": None if recipe.prune is None else recipe.prune.model_dump(mode="json"),
        "heads": load_manifest(Path(section.heads)).files,
        "read": {source: state_of(source) for source in (section.target, section.prompts) if source is not None},
    }
    kept = _kept(file, identity)
    wanted = ["none", *(str(part.conversations) for part in parts)]
    left = [name for name in wanted if any(str(number) not in kept.get(name, {}) for number in section.sequences)]
    if left:
        bench = _open(recipe, section, tokenizer)
        with bar("saturation: decoding", "prompts") as advance:
            ways = len(left) + ("none" in left) * (len(LENGTHS) - 1)
            done, total = 0, ways * len(section.sequences) * len(bench.prompts)

            def tick() -> None:
                nonlocal done
                done += 1
                advance(done, total)
                stop_if_asked()

            for name in left:
                table = None
                if name != "none":
                    part = next(part for part in parts if str(part.conversations) == name)
                    table = part.load(recipe)
                kept[name] = {str(number): bench.counts(table, number, tick) for number in section.sequences}
                _write(file, {"identity": identity, "counts": kept})
    results = _results(recipe, section, parts, {name: kept[name] for name in wanted})
    _write(file, results | {"identity": identity, "counts": {name: kept[name] for name in wanted}})
    return results


def _kept(file: Path, identity: dict[str, Any]) -> dict[str, dict[str, list[list[int]]]]:
    """What an earlier run with the same settings has measured: counts by table and sequences."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    theirs = found["identity"]
    if theirs != json.loads(json.dumps(identity)):
        other = sorted(key for key in identity if theirs.get(key) != json.loads(json.dumps(identity[key])))
        log(f"saturation: {file} was measured with other settings ({', '.join(other)}): measuring anew")
        return {}
    kept: dict[str, dict[str, list[list[int]]]] = found["counts"]
    return kept


def _results(
    recipe: TableRecipe,
    section: SaturationSection,
    parts: Sequence[PartTable],
    kept: dict[str, dict[str, list[list[int]]]],
) -> dict[str, Any]:
    counts = {name: {number: np.array(rows) for number, rows in by.items()} for name, by in kept.items()}
    base = counts.pop("none")
    sizes = []
    for part, by in zip(parts, counts.values(), strict=True):
        entries = {}
        for number, counts_P2 in by.items():
            value, interval = per_step(counts_P2)
            gain, gain_interval = paired_gain(counts_P2, base[number])
            entries[number] = {"tokens_per_step": value, "interval": interval}
            entries[number] |= {"gain": gain, "gain_interval": gain_interval}
        sizes.append(part.describe(recipe) | {"sequences": entries})
    verdicts = {}
    for number in base:
        curve = [by[number] for by in counts.values()]
        verdicts[number] = _verdict([part.conversations for part in parts], curve, base[number], section.least_gain)
    whole = parts[-1].conversations
    return {
        "schema": SCHEMA,
        "machine": machine("cpu" if section.device == "cpu" or not torch.cuda.is_available() else "cuda"),
        "recipe": recipe.model_dump(mode="json"),
        "prompts": len(next(iter(base.values()))),
        "rule": RULE.format(least=section.least_gain),
        "baseline": {
            number: dict(zip(("tokens_per_step", "interval"), per_step(counts_P2), strict=True))
            for number, counts_P2 in base.items()
        },
        "sizes": sizes,
        "verdict": {
            number: verdict._asdict() | {"sentence": verdict.sentence(whole)} for number, verdict in verdicts.items()
        },
    }


def _verdict(sizes: Sequence[int], curve: Sequence[np.ndarray], base_P2: np.ndarray, least_gain: float) -> Verdict:
    place, most_lost = enough_from(curve, least_gain)
    pays_still = place == len(sizes) - 1
    if pays_still and len(sizes) > 1:
        most_lost = paired_gain(curve[-1], curve[-2])[1][1]
    helps = len(sizes)
    while helps and paired_gain(curve[helps - 1], base_P2)[1][0] > 0:
        helps -= 1
    return Verdict(None if pays_still else sizes[place], most_lost, sizes[helps] if helps < len(sizes) else None)


def _write(file: Path, results: dict[str, Any]) -> None:
    atomic_text(file, json.dumps(results, indent=1, allow_nan=False) + "\n")


def _show(results: dict[str, Any]) -> None:
    console().print(saturation_table(results))
    for number, verdict in results["verdict"].items():
        console().print(f"{number} sequence{'s' * (number != '1')}: {verdict['sentence']}", markup=False)
    console().print(f"rule: {results['rule']}", markup=False)


def saturation_table(results: dict[str, Any]) -> Table:
    """A row a size, r = 1 first; for each number of sequences tokens per step and the gain over r = 1."""
    target = results["recipe"]["saturation"]["target"]
    table = Table(title=f"saturation: {target}, {results['prompts']} prompts", title_justify="left", box=None)
    for heading in ("conversations", "tokens", "entries", "density", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number in results["baseline"]:
        table.add_column(f"tokens/step, {number} seq.", justify="right")
        table.add_column("gain over r = 1", justify="right")
    cells = [cell for base in results["baseline"].values() for cell in (_shown(base), "")]
    table.add_row("r = 1", "", "", "", "", *cells)
    for row in results["sizes"]:
        cells = []
        for entry in row["sequences"].values():
            low, high = entry["gain_interval"]
            cells += [_shown(entry), f"{entry['gain']:+.1%} ({low:+.1%} to {high:+.1%})"]
        size = f"{row['conversations']:,}" + " (all)" * row["whole"]
        sizes = (f"{row['tokens']:,}", f"{row['entries']:,}", f"{row['density']:.2%}", f"{row['megabytes']:.2f}")
        table.add_row(size, *sizes, *cells)
    return table


def _shown(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{entry['tokens_per_step']:.2f} ({low:.2f}–{high:.2f})"
