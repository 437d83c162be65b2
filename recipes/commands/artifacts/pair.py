"""`draftsmith doctor TARGET DRAFTER`: check a pair, repair its drafter, and measure where acceptance is lost."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Column, Table
from rich.text import Text

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import find_folder
from ....checkpoints.heads.published import is_published_eagle
from ....checkpoints.pairs.checks import examine
from ....checkpoints.pairs.eagle import examine_eagle
from ....checkpoints.pairs.repair import repair
from ....checkpoints.pairs.sides import REFUSED, WEIGHTS, WORKS, Diagnosis, Side, open_side
from ....checkpoints.storage.names import MANIFEST_FILE, TOKENIZER_FILES
from ....checkpoints.storage.safe_read import pickles_allowed
from ....checkpoints.verify.model_files import is_adapter
from ....data.tokenizers import load_tokenizer
from ...session.terminal import console, log, write_json
from .imports import PICKLED, whole_model

if TYPE_CHECKING:
    from ..diagnosis.readings import Reading

_COLOURS = {"fault": "red", "weakness": "yellow", "works": "green", "works but": "yellow", "refused": "red"}
_MUST_WORK = ("transformers", "draftsmith")


class Measured(NamedTuple):
    """Settings of the measured part of a check."""

    prompts: str
    """Evaluation set by name, file, folder or hub id."""
    out: Path | None = None
    """File of the diagnosis."""
    overrides: tuple[str, ...] = ()
    """Changes to the evaluation, of the form `key=value`."""


def examine_pair(
    target: str, drafter: str, fix: Path | None = None, as_json: bool = False, measured: Measured | None = None
) -> bool:
    """Check a target and a draft and show the findings.

    Args:
        target: Folder or hub id of the target.
        drafter: Folder or hub id of a drafter, heads or a table.
        fix: Folder of a repaired drafter, which is written and then checked.
        as_json: Whether the findings are printed as JSON.
        measured: Prompts on which acceptance is measured after the static checks.

    Returns:
        Whether transformers and this engine take the pair as it is; of EAGLE-3 heads, whether all known engines do.
    """
    with redirect_stdout(sys.stderr):
        folder = find_folder(drafter, ["*.json"])
    if is_published_eagle(folder):
        return _examine_eagle(target, drafter, fix, measured.prompts if measured else None, as_json)
    if measured is not None and (as_json or fix is not None):
        raise ValueError("--prompts writes its own JSON file: leave out --json and --fix, or use `--out FILE.json`")
    part = load_manifest(folder).kind if (folder / MANIFEST_FILE).is_file() else "drafter"
    if measured is not None and part in ("heads", "table"):
        return _measure(target, part, drafter, measured)
    with ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # what libraries say when they are first used is no result
            mine = open_side(target, load_tokenizer)
            theirs, whole = stack.enter_context(_open_drafter(drafter, fix is not None))
            diagnosis = examine(mine, theirs)
        shown = {"pair": diagnosis.as_json()}
        if not as_json:
            show(diagnosis)
        if fix is not None:
            command = shlex.join(["draftsmith", "doctor", target, drafter, "--fix", str(fix)])
            with redirect_stdout(sys.stderr):
                repairs = repair(mine, theirs, diagnosis.findings, fix, command, whole)
                diagnosis = examine(mine, open_side(str(fix), load_tokenizer))
            shown |= {"repairs": {"done": repairs.done, "left": repairs.left}, "repaired": diagnosis.as_json()}
            if not as_json:
                for line in [f"repaired: {one}" for one in repairs.done] + [f"left: {one}" for one in repairs.left]:
                    log(f"doctor: {line}")
                log(f"doctor: wrote {fix}; the same checks of it follow")
                show(diagnosis)
    if as_json:
        write_json(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    if measured is not None:
        _measure(target, "drafter", drafter, measured)
    verdicts = diagnosis.verdicts
    return all(verdicts[name].outcome == WORKS for name in _MUST_WORK)


def _measure(target: str, part: str, source: str, measured: Measured) -> bool:
    """Measure where acceptance is lost; return whether no fault was found."""
    from ..diagnosis.diagnose import run_diagnose
    from ..evaluation.recipe import evaluate_recipe

    given = {"target": target, part: source, "prompts": measured.prompts}
    recipe = evaluate_recipe(None, measured.overrides, given, "doctor")
    (found,) = run_diagnose(recipe, [part], measured.out)["parts"]
    return not any(each["fault"] for each in found["findings"])


def pair_verdict(target: str, drafter: str, consumer: str) -> str | None:
    """What one who decodes with a pair minds of it; None: nothing. Raises ValueError: no drafter's files."""
    with _open_drafter(drafter, is_repaired=False) as (theirs, _):
        verdict = examine(open_side(target, load_tokenizer), theirs).verdicts[consumer]
    return None if verdict.outcome == WORKS else f"{verdict.outcome}: {'; '.join(verdict.reasons)}"


def _examine_eagle(target: str, heads: str, fix: Path | None, prompts: str | None, as_json: bool) -> bool:
    if fix is not None:
        again = shlex.join(["draftsmith", "import", heads, "--target", target, "--out", str(fix)])
        raise ValueError(f"--fix is for drafters; heads are mended by `{again}`")
    found: list[Reading] = []
    best: Reading | None = None
    with redirect_stdout(sys.stderr):
        folder = find_folder(heads, ["*.json", WEIGHTS])
        diagnosis = examine_eagle(open_side(target, load_tokenizer), heads, folder)
        if prompts is not None:
            if diagnosis.verdicts["draftsmith"].outcome == REFUSED:
                raise ValueError(f"{heads} is not decoded: {'; '.join(diagnosis.verdicts['draftsmith'].reasons)}")
            from ..diagnosis.readings import better, decoded

            found = decoded(target, folder, prompts)
            best = better(found)
    if as_json:
        shown = {"pair": diagnosis.as_json(), "readings": [reading._asdict() for reading in found]}
        write_json(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    else:
        show(diagnosis)
        show_readings(found)
    if best is not None:
        log(f"doctor: fed {best} the heads agree more with the target than as their config says: so they were trained")
    return best is None and all(verdict.outcome == WORKS for verdict in diagnosis.verdicts.values())


@contextmanager
def _open_drafter(drafter: str, is_repaired: bool) -> Iterator[tuple[Side, Path | None]]:
    """The drafter's side. Of a LoRA adapter that of its model with the adapter merged, and the folder of that; the same
    of pickled weights that are to be repaired, where they may be read."""
    converts = is_repaired and pickles_allowed()
    weights = [WEIGHTS, PICKLED] if converts else []
    folder = find_folder(drafter, ["*.json", "adapter_model.safetensors", *TOKENIZER_FILES, *weights])
    if not is_adapter(folder) and not (converts and not any(folder.glob(WEIGHTS)) and any(folder.glob(PICKLED))):
        yield open_side(drafter, load_tokenizer), None
        return
    with whole_model(drafter, folder, unpickle=converts) as whole:
        manifest = load_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
        yield replace(open_side(str(whole), load_tokenizer), source=drafter, folder=folder, manifest=manifest), whole


def show(diagnosis: Diagnosis) -> None:
    """The facts, the findings and the verdicts, as tables."""
    facts = _table("compared", "", f"target {diagnosis.target}", f"drafter {diagnosis.drafter}")
    for name, mine, theirs in diagnosis.facts:
        facts.add_row(name, mine, theirs, style=None if mine == theirs else "bold")
    findings = _table("findings", Column(no_wrap=True), "check", "what", "target", "drafter")
    for finding in sorted(diagnosis.findings, key=lambda one: one.severity):
        state = Text(finding.severity, _COLOURS[finding.severity])
        findings.add_row(state, finding.check, finding.what, finding.target, finding.drafter)
    short = Column(no_wrap=True), Column("verdict", no_wrap=True)
    verdicts = _table("verdicts", *short, "why, and what that was read of")
    for name, verdict in diagnosis.verdicts.items():
        why = Text("".join(f"{reason}; " for reason in verdict.reasons))
        verdicts.add_row(
            name, Text(verdict.outcome, _COLOURS[verdict.outcome]), why.append(diagnosis.consumers[name], "dim")
        )
    console().print(facts, findings if diagnosis.findings else "nothing differs that matters\n", verdicts, sep="\n")


def show_readings(found: Sequence[Reading]) -> None:
    """What heads are worth fed in several ways, as a table."""
    if not found:
        return
    numbers = (Column("agrees, step by step", no_wrap=True), Column("tokens a step", no_wrap=True))
    rows = _table("fed as", "reading", "", *numbers)
    for reading in found:
        steps = " ".join(f"{share:.3f}" for share in reading.by_step)
        rate = reading.tokens_per_step
        kept = "–" if rate is None else f"{rate:.2f} ± {reading.error:.2f}"
        rows.add_row(str(reading), "; ".join(reading.who), steps, kept)
    console().print(rows)


def _table(title: str, *columns: Column | str) -> Table:
    whole = [Column(each, overflow="fold") if isinstance(each, str) else each for each in columns]
    return Table(*whole, box=None, title=title, title_justify="left")
