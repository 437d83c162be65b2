"""`draftsmith doctor TARGET DRAFTER`: are they a pair? What differs, who minds, and a drafter that fits."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..checkpoints.pair_checks import examine
from ..checkpoints.pair_repairs import Repairs, repair
from ..checkpoints.pairs import CONSUMERS, WORKS, Diagnosis, open_side
from ..data.tokenizers import load_tokenizer
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
        mine, theirs = (open_side(source, load_tokenizer) for source in (target, drafter))
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
