"""Untrusted text is printed to a terminal unchanged, but without control sequences."""

import ast
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.report.tables import Cell, Column, Table
from draftsmith.recipes.session.terminal import console, log, write_json
from helpers.syntax import parse_file
from rich.table import Table as RichTable
from rich.text import Text

ROOT = Path(__file__).resolve().parents[3]
PRINT = (ROOT / "recipes/session/terminal.py", ROOT / "train/loop/progress.py")
MARKED = "[/x] [red]p[/red] :smile: \\[a]"
STEERING = "\x1b[31m\x1b]0;t\x07\x9b2J\u202eabc\u2066\u200f\u200b\r\x08\x7f\udcff\U000e0041\u2028"


def steering(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


def test_printed_text_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = MARKED + STEERING
    plain = RichTable(title=hostile)
    plain.add_column(hostile)
    plain.add_row(Text(hostile, "bold"))
    out = console()
    out.width = 300
    table = Table(hostile, [Column(hostile, numeric=False)], [[Cell(hostile)]])
    for what in (hostile, Text(hostile), plain, table.rich()):
        out.print(what)
    out.rule(hostile)
    log(hostile)
    write_json(json.dumps([hostile], ensure_ascii=False))
    output, errors = capsys.readouterr()
    output, written = output[: output.rindex("[")], output[output.rindex('["') :]
    assert not steering(output + errors + written)
    assert output.count(MARKED) == 9
    assert errors.count(MARKED) == 1
    assert "�" in errors
    assert "␛[31m␛]0;t" in errors
    assert json.loads(written) == [hostile]


def test_ordinary_text_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "na\u00efve 中文 👨\u200d👩 می\u200cخواهم 5\u00a0% \u00ad\ue0a0 x\ty"
    console().print(text, soft_wrap=True)
    assert capsys.readouterr().out == text.expandtabs() + "\n"


def test_error_messages_are_shown_literally(launcher: Any) -> None:
    code, errors = launcher.run("train", f"{MARKED}\x1b]0;t\x07\x9b\u202e.yaml")
    assert code == 2
    assert not steering(errors)
    code, errors = launcher.run("report", f"/tmp/{MARKED}\x1b]0;t\x07\u202e.json")
    assert code == 2
    assert MARKED in errors
    assert not steering(errors)


def test_only_the_terminal_module_prints() -> None:
    """Other ways to print could send control sequences in untrusted text to the terminal."""
    prints_in = []
    for path in sorted(ROOT.glob("[a-z]*/**/*.py")):
        if path.is_relative_to(ROOT / "tests") or path in PRINT:
            continue
        for node in ast.walk(parse_file(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            prints = called in ("print", "Console", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write")
            marks = called.endswith("from_markup") or (
                isinstance(node, ast.keyword) and node.arg in ("markup", "emoji")
            )
            if prints or marks or (isinstance(node, ast.ImportFrom) and node.module == "rich.markup"):
                prints_in.append(f"{path}:{getattr(node, 'lineno', 0)}")
    assert prints_in == []
