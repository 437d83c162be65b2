"""Tables for HTML reports and the terminal. Missing values are shown as dashes, and cells have sort keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from jinja2 import Environment

Row = Mapping[str, Any]
Numbered = tuple[int, Row]
"""Pair of a row number in the report and a row of the results."""
DASH = "–"
_DEPTHS = 12  # maximum number of columns of the table by depth


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(template: str, **values: Any) -> str:
    """Render a Jinja template. Strings are escaped, but objects with an `__html__` method, such as `Table`, are not."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values))


class Column(NamedTuple):
    """Column heading of a table."""

    heading: str
    unit: str = ""
    numeric: bool = True


class Cell(NamedTuple):
    """Cell of a table."""

    text: str
    value: float | str | None = None
    """Sort key (default: `text`)."""
    note: str = ""
    """Note in small print below the text; only shown in HTML."""
    style: str = ""
    """Style of the text in the terminal; `bold` also applies to HTML."""
    mark: str = ""
    """Prefix of the text; only shown in HTML."""


@dataclass(frozen=True)
class Table:
    """Table with a caption. The first column contains the row headings."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    kinds: Sequence[str] = ()
    """Kind of each row: `best`, `slower` or an empty string. Without kinds, all rows have the same style."""

    def __html__(self) -> str:
        return render("table.html", table=self)

    def rich(self) -> RichTable:
        """Convert the table to a `rich` table for the terminal."""
        look: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
        look |= {"padding": (0, 0 if len(self.columns) > 7 else 1), "show_header": any(c.heading for c in self.columns)}
        table = RichTable(title=self.caption, **look)
        for column in self.columns:
            heading = f"{column.heading} {column.unit}".strip().replace(" %", "\N{NO-BREAK SPACE}%")
            if column.numeric:  # as narrow as possible without breaking numbers or words
                table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
            else:
                table.add_column(heading, overflow="fold")
        for row, kind in zip(self.rows, self.kinds or [""] * len(self.rows), strict=True):
            cells = (Text(c.text, c.style) if c.style else c.text for c in row)
            table.add_row(*cells, style={"best": "bold", "slower": "dim"}.get(kind))
        return table


def number(value: Any, digits: int = 2) -> str:
    """Format a finite number with `digits` decimals. Any other value, including NaN, becomes a dash."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return DASH
    return f"{value:,.{digits}f}"


def number_cell(value: Any, digits: int = 2) -> Cell:
    """Return a cell with a formatted number."""
    return Cell(number(value, digits), value)


def interval_cell(pair: Any, digits: int = 2) -> Cell:
    """Return a cell with an interval such as `1.80–2.10`, or a dash. Its sort key is the lower bound."""
    if not pair:
        return Cell(DASH)
    return Cell(f"{number(pair[0], digits)}–{number(pair[1], digits)}", pair[0])


def metric_of(row: Row, metric: str) -> float | None:
    """Return the number at a dotted path in a row, such as `flops_per_token.total`, or None if there is none."""
    value: Any = row
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


class Metric(NamedTuple):
    """Column of a table of methods, with a function that returns the cell for a row."""

    column: Column
    cell: Callable[[Row], Cell]


def _metric(heading: str, key: str, digits: int = 2, unit: str = "", scale: float = 1.0) -> Metric:
    def cell(row: Row) -> Cell:
        value = metric_of(row, key)
        return number_cell(None if value is None else value * scale, digits)

    return Metric(Column(heading, unit), cell)


def _lossless(row: Row) -> Cell:
    """Return a cell that shows whether a method is lossless and how many outputs are identical to greedy decoding."""
    same, ties = row.get("identical_to_greedy"), row.get("near_ties")
    identical = f" {same[0]}/{same[1]}" if same and row.get("lossless") else ""
    note = f"{ties} near-tie{'s' * (ties > 1)}" if ties else ""
    return Cell(("yes" if row.get("lossless") else "no") + identical, int(bool(row.get("lossless"))), note)


def speedup_cell(row: Row) -> Cell:
    """Return a cell with the speedup of a row. The cell is marked if the time measurements are unsteady."""
    cell = number_cell(row.get("speedup"))
    if row.get("steady") is not False:
        return cell
    return cell._replace(text=f"{cell.text}{UNSTEADY}", note="unsteady")


UNSTEADY = "?"
"""Suffix of speedups whose time measurements are unsteady."""
_LOSSLESS = Metric(Column("lossless", "greedy text"), _lossless)
_STEP = (
    _metric("tokens per step", "tokens_per_step", unit="τ"),
    _metric("accepted", "acceptance_at_k", unit="α"),
    _metric("speed", "tokens_per_second", 0, "tokens/s"),
    Metric(Column("speedup", "×"), speedup_cell),
    Metric(Column("interval", "95 %, ×"), lambda row: interval_cell(row.get("speedup_interval"))),
)
_BOUND = (_metric("bound", "bound", unit="×"), _metric("share", "efficiency", unit="of bound"))
_PERPLEXITY = _metric("perplexity", "perplexity", unit="of output")
_ROUGE = _metric("ROUGE-L", "rouge_l", 3, "F-measure")
_TEMPERATURE = Metric(Column("T", "temperature"), lambda row: Cell(f"{row['temperature']:g}", row["temperature"]))
_OVER_TRANSFORMERS = _metric("over transformers", "speedup_over_transformers", unit="×")
SPEED = (_TEMPERATURE, _LOSSLESS, *_STEP, *_BOUND, _OVER_TRANSFORMERS)
QUALITY = (_LOSSLESS, _PERPLEXITY, _ROUGE, _metric("output", "tokens", 0, "tokens"))
TERMINAL = (*_STEP, *_BOUND, _LOSSLESS)
"""Table columns that fit into a terminal with a width of 80 characters."""
_PER_TOKEN = _metric("per token", "ms_per_token", 1, "ms")
_SAME = Metric(
    Column("same", "greedy text"), lambda row: Cell("/".join(map(str, row.get("identical_to_greedy") or [DASH])))
)
BENCH_TERMINAL = (*_STEP, _PER_TOKEN, _SAME)
BENCH_COLUMNS = (
    _TEMPERATURE,
    *_STEP,
    _metric("first token", "ms_to_first.median", 0, "ms"),
    _PER_TOKEN,
    Metric(Column("interval", "95 %, ms"), lambda row: interval_cell(row.get("ms_per_token_interval"), 1)),
    _SAME,
)
_BY_CATEGORY = (_metric("prompts", "prompts", 0), *_STEP, _PERPLEXITY, _ROUGE)


def cost_metrics(rows: Sequence[Row]) -> tuple[Metric, ...]:
    """Return the columns of the cost table, with a unit for FLOPs that fits the largest value."""
    most = max((metric_of(row, "flops_per_token.total") or 0 for row in rows), default=0)
    units = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
    name, size = next(((name, size) for name, size in units if most >= size), ("kFLOP", 1e3))
    sources = sorted({row["energy_source"] for row in rows if row.get("energy_source")})
    joules = "J/token" + (f", {'/'.join(sources)}" if sources else "")
    parts = {"verification": "verification", "drafting": "drafting", "both": "total"}
    flops = [_metric(title, f"flops_per_token.{part}", 2, f"{name}/token", 1 / size) for title, part in parts.items()]
    return (
        _metric("nodes", "nodes_per_step", 1, "per step"),
        _metric("accepted", "acceptance_rate", unit="of examined"),
        *flops,
        _metric("energy", "joules_per_token", 3, joules),
        _metric("cost ratio", "cost_ratio", unit="c"),
        _metric("ideal", "ideal", unit="τ ÷ (1 + cγ), ×"),
    )


PHASES = tuple(_metric(name, f"phases_us.{name}", 0, "µs") for name in ("draft", "score", "verify", "commit", "host"))
METHOD = Column("method", numeric=False)
BASELINE = "autoregressive"
_KINDS = {"best": "fastest lossless method", "slower": "slower than the baseline"}


def best_lossless(rows: Iterable[Row]) -> Row | None:
    """Return the row of the fastest lossless method except the baseline. Steady measurements are preferred."""
    fit = [row for row in rows if row.get("lossless") and row["method"] != BASELINE and row.get("speedup") is not None]
    return max(fit, key=lambda row: (row.get("steady") is not False, float(row["speedup"])), default=None)


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Return a line for each temperature that reports the fastest lossless method and its speedup."""
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        best = best_lossless(row for row in rows if row["temperature"] == temperature)
        if best is None:
            continue
        low, high = best.get("speedup_interval") or (None, None)
        text = f"{best['label']}, {speedup_cell(best).text}x" + ("" if low is None else f" ({low:.2f}–{high:.2f})")
        if same := best.get("identical_to_greedy"):
            text += f"; {same[0]} of {same[1]} texts identical"
        name = "fastest lossless method" if best["speedup"] > 1 else "no lossless speedup; the best method"
        lines.append(f"{name} at temperature {temperature:g}: {text}")
    return lines


def kinds_of(rows: Sequence[Row]) -> list[str]:
    """Return the kind of each row: `best` (at its temperature), `slower` (than the baseline) or an empty string."""
    best = [best_lossless(row for row in rows if row["temperature"] == each["temperature"]) for each in rows]
    slower = [row["method"] != BASELINE and (row.get("speedup") or 1) < 1 for row in rows]
    return [
        "slower" if slow else "best" if row is first else ""
        for row, first, slow in zip(rows, best, slower, strict=True)
    ]


def method_cell(index: int, row: Row, kind: str = "") -> Cell:
    """Return the first cell of a row, with the method's number in the charts, its label and its options."""
    options = options_text(row)
    named = "" if row["label"].startswith(row["method"]) else f"{row['method']}, " if options else row["method"]
    notes = [named + options, _KINDS.get(kind, "")]
    return Cell(row["label"], row["label"].lower(), "; ".join(filter(None, notes)), mark=f"{index} ")


def options_text(row: Row) -> str:
    """Format the options of a row, for example `gamma 4, beams 8`."""
    return ", ".join(f"{name} {value}" for name, value in (row.get("options") or {}).items())


def method_table(caption: str, rows: Sequence[Row], metrics: Sequence[Metric] = TERMINAL) -> Table:
    """Return a table with a row for each method and a column for each metric."""
    columns, kinds = [METHOD, *(metric.column for metric in metrics)], kinds_of(rows)
    cells = [
        [method_cell(index, row, kind), *(metric.cell(row) for metric in metrics)]
        for index, (row, kind) in enumerate(zip(rows, kinds, strict=True), 1)
    ]
    return Table(caption, columns, cells, kinds)


def category_table(rows: Sequence[Row]) -> Table:
    """Return a table with a row for each method and category of prompts."""
    columns = [METHOD, Column("category", numeric=False), *(metric.column for metric in _BY_CATEGORY)]
    known = [(n, row, *part) for n, row in enumerate(rows, 1) for part in (row.get("by_category") or {}).items()]
    cells = [
        [method_cell(index, row), Cell(name or DASH), *(metric.cell(part) for metric in _BY_CATEGORY)]
        for index, row, name, part in known
    ]
    return Table("By category", columns, cells)


def depth_table(rows: Sequence[Row]) -> Table:
    """Return a table of the acceptance rate at each draft depth."""
    deepest = max((len(row.get("acceptance_by_depth") or ()) for row in rows), default=0)
    metrics = [_metric(str(n + 1), f"acceptance_by_depth.{n}") for n in range(min(deepest, _DEPTHS))]
    return method_table("Acceptance by depth", rows, metrics)


def energy_table(section: Mapping[str, Any]) -> Table:
    """Return a table of the energy and time of the target's forward passes for each batch size."""
    metrics = [_metric("energy", f"joules_per_{part}", 3, f"J/{part}") for part in ("run", "input")]
    metrics.append(_metric("above idle", "joules_per_run_above_idle", 3, "J/run"))
    metrics += [_metric("time", f"seconds_per_{part}", 2, f"ms/{part}", 1e3) for part in ("run", "input")]
    rows = [[Cell(row["label"]), *(metric.cell(row) for metric in metrics)] for row in section["rows"]]
    counted = f"energy of {section['covers']}" if section["source"] else f"no energy: {section['covers']}"
    caption = f"Forward passes of one token with {section['context']} tokens of context; {counted}"
    return Table(caption, [Column("batch", numeric=False), *(metric.column for metric in metrics)], rows)
