"""`draftsmith doctor TARGET DRAFTER`: are they a pair? What differs, who minds, and a drafter that fits."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..checkpoints.artifact import MANIFEST_FILE, load_manifest
from ..checkpoints.export_drafter import is_adapter
from ..checkpoints.pair_checks import examine
from ..checkpoints.pair_repairs import Repairs, repair
from ..checkpoints.pairs import CONSUMERS, TOKENIZER_FILES, WORKS, Diagnosis, Side, find_folder, open_side
from ..data.tokenizers import load_tokenizer
from .import_drafter import whole_model
from .terminal import console, say

_COLOURS = {
    "fault": "red",
    "weakness": "yellow",
    "note": "dim",
    "works": "green",
    "works but": "yellow",
    "refused": "red",
}
_MUST_WORK = ("transformers", "draftsmith")


def examine_pair(target: str, drafter: str, fix: Path | None = None, as_json: bool = False) -> bool:
    """Compare a target and a drafter, and show what was found; with `fix`, write a repaired drafter and compare that.

    Returns:
        Whether transformers and this engine both take the pair, the repaired one with `fix`, without a "but".

    Raises:
        ValueError: what `open_side` and `repair` raise.
    """
    with redirect_stdout(sys.stderr):  # what libraries say when they are first used is no result
        mine, theirs = open_side(target, load_tokenizer), _open_drafter(target, drafter, fix)
        diagnosis = examine(mine, theirs)
    shown = {"pair": diagnosis.plain()}
    if not as_json:
        show(diagnosis)
    if fix is not None:
        command = shlex.join(["draftsmith", "doctor", target, drafter, "--fix", str(fix)])
        with redirect_stdout(sys.stderr):
            repairs = repair(mine, theirs, diagnosis.findings, fix, command)
            diagnosis = examine(mine, open_side(str(fix), load_tokenizer))
        shown |= {"repairs": {"done": repairs.done, "left": repairs.left}, "repaired": diagnosis.plain()}
        if not as_json:
            _show_repairs(repairs, fix)
            show(diagnosis)
    if as_json:
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    verdicts = diagnosis.verdicts
    return all(verdicts[name].outcome == WORKS for name in _MUST_WORK)


def _open_drafter(target: str, drafter: str, fix: Path | None) -> Side:
    """The drafter's side; of a LoRA adapter that of its model with the adapter merged."""
    folder = find_folder(drafter, ["*.json", "adapter_model.safetensors", *TOKENIZER_FILES])
    if not is_adapter(folder):
        return open_side(drafter, load_tokenizer)
    if fix is not None:
        ours = (folder / MANIFEST_FILE).is_file()
        merge = ["export", drafter, "--to", "transformers"] if ours else ["import", drafter, "--target", target]
        first = shlex.join(["draftsmith", *merge, "--out", "MERGED"])
        second = shlex.join(["draftsmith", "doctor", target, "MERGED", "--fix", str(fix)])
        raise ValueError(f"{drafter} is a LoRA adapter, and rows of its model are repaired: `{first}`, then `{second}`")
    with whole_model(drafter, folder) as whole:
        manifest = load_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
        return replace(open_side(str(whole), load_tokenizer), source=drafter, folder=folder, manifest=manifest)


def show(diagnosis: Diagnosis) -> None:
    """The facts, the findings and the verdicts, as tables."""
    out = console()
    facts = Table(box=None, title="compared", title_justify="left")
    for heading in ("", f"target {diagnosis.target}", f"drafter {diagnosis.drafter}"):
        facts.add_column(escape(heading), overflow="fold")
    for name, mine, theirs in diagnosis.facts:
        facts.add_row(name, mine, theirs, style=None if mine == theirs else "bold")
    out.print(facts)
    _show_findings(diagnosis, out)
    verdicts = Table(box=None, title="verdicts", title_justify="left")
    for heading in ("", "verdict", "why, and what that was read of"):
        verdicts.add_column(heading, no_wrap=len(heading) < 10)
    for name, verdict in diagnosis.verdicts.items():
        why = "".join(f"{escape(reason)}; " for reason in verdict.reasons)
        colour = _COLOURS[verdict.outcome]
        verdicts.add_row(name, f"[{colour}]{verdict.outcome}[/]", f"{why}[dim]{escape(CONSUMERS[name])}[/]")
    out.print(verdicts)


def _show_findings(diagnosis: Diagnosis, out: Console) -> None:
    if not diagnosis.findings:
        out.print("nothing differs that matters\n")
        return
    table = Table(box=None, title="findings", title_justify="left")
    for heading in ("", "check", "what", "target", "drafter"):
        table.add_column(heading, no_wrap=heading == "", overflow="fold")
    for finding in sorted(diagnosis.findings, key=lambda one: ("fault", "weakness", "note").index(one.severity)):
        state = f"[{_COLOURS[finding.severity]}]{finding.severity}[/]"
        table.add_row(state, finding.check, *map(escape, (finding.what, finding.target, finding.drafter)))
    out.print(table)


def _show_repairs(repairs: Repairs, folder: Path) -> None:
    for line in repairs.done:
        say(f"doctor: repaired: {line}")
    for line in repairs.left:
        say(f"doctor: left: {line}")
    say(f"doctor: wrote {folder}; the same checks of it follow")
