"""Charts for the page as SVG, with matplotlib (the extra `report`), readable in black and white."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...checkpoints.storage.messages import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {
    "draft": ("#1d3557", ""),
    "score": ("#a8c5e2", "//"),
    "verify": ("#ffffff", "xx"),
    "commit": ("#6b7f94", ""),
    "host": ("#ffffff", r"\\"),
}
"""Phases of a step in their order, each with its fill and hatch."""
_LINE = 0.16
"""Inches between the names of points."""
_INK, _SOFT, _BLUE, _RED = "#1b1b1b", "#666666", "#1d3557", "#b3261e"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "draftsmith", "text.parse_math": False, "font.size": 9,
    "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e8e8e8", "xtick.color": _SOFT, "ytick.color": _SOFT, "hatch.linewidth": 0.6,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One method in a chart of points."""

    number: int
    label: str
    x: float
    y: float
    filled: bool = True
    """Lossless: a filled circle; otherwise an open diamond."""
    low: float | None = None
    high: float | None = None
    """Interval of y."""
    bound: float | None = None
    """The most that y can be, a bar above the point."""


def missing_matplotlib() -> str | None:
    """What to tell a user who has no matplotlib; None where it is installed."""
    if find_spec("matplotlib") is not None:
        return None
    return f"matplotlib draws the charts and is not installed: {install_hint('report')}, then the same again"


@contextmanager
def _figure(
    width: float, height: float, left: float = 0.6, bottom: float = 0.5, top: float = 0.1, right: float = 0.1
) -> Iterator[Figure]:
    """A figure of so many inches with such margins, in our style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has its own fonts
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, 0.15, 0.45)
        yield figure


def _svg(figure: Figure, description: str) -> str:
    """The figure as an element for the page, without what other figures have too (names of groups) or HTML has no use
    for (metadata, name spaces)."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    drawn = re.sub(r'(?<=<g) id="[^"]*"| xmlns(:xlink)?="[^"]*"', "", drawn[drawn.index("<svg") :])
    drawn = drawn.replace("xlink:href", "href")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def scatter(points: Sequence[Point], x_title: str, y_title: str, description: str, diagonal: str | None = None) -> str:
    """Draw numbered points with intervals and bounds, and their names on the right.

    With `diagonal`, the name of the line y = x, draw that line and start both axes at 0; otherwise join `best_points`.
    """
    with _figure(8.2, max(3.9, 0.8 + _LINE * len(points)), right=2.6) as figure:
        axes = figure.subplots()
        axes.set(xlabel=x_title, ylabel=y_title)
        look: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
        for line, point in enumerate(points):
            _draw_point(axes, point)
            name, place = f"{point.number}  {_shortened(point.label, 34)}", (10, -6 - 72 * _LINE * line)
            axes.annotate(name, (1, 1), place, va="top", fontsize=8, color=_BLUE if point.filled else _RED, **look)
        axes.margins(0.12)
        if diagonal is not None:
            axes.set(xlim=(0, None), ylim=(0, None))
            end = max(axes.get_xlim()[1], axes.get_ylim()[1])
            axes.autoscale(False)
            axes.plot([0, end], [0, end], color=_SOFT, linestyle=":", linewidth=1, label=diagonal)
            axes.legend(loc="lower right", frameon=False, labelcolor=_SOFT)
        else:
            best, right = best_points(points), axes.get_xlim()[1]
            axes.autoscale(False)
            xs, ys = [*(point.x for point in best), right], [*(point.y for point in best), best[-1].y]
            axes.plot(xs, ys, drawstyle="steps-post", color=_BLUE, linestyle="--", linewidth=1.2)
        return _svg(figure, description)


def _draw_point(axes: Axes, point: Point) -> None:
    if point.bound is not None:
        axes.plot([point.x, point.x], [point.y, point.bound], color="#98a1ab", linestyle=":", linewidth=1)
        axes.plot(point.x, point.bound, marker="_", markersize=12, markeredgewidth=2, color=_INK)
    if point.low is not None and point.high is not None:
        axes.plot([point.x, point.x], [point.low, point.high], color=_INK, linewidth=1.2)
    shape, colour, fill = ("o", _BLUE, _BLUE) if point.filled else ("D", _RED, "#ffffff")
    axes.plot(point.x, point.y, marker=shape, color=colour, markerfacecolor=fill, markersize=6, zorder=3)
    axes.annotate(str(point.number), (point.x, point.y), (6, 4), textcoords="offset points", color=_INK)


@dataclass(frozen=True)
class Line:
    """Points that belong together, by x."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    spans: Sequence[Sequence[float] | None]
    """Interval of each y."""


def lines(known: Sequence[Line], x_title: str, y_title: str, description: str, level: float | None = None) -> str:
    """Lines over a logarithmic x, which has a tick at each point, with intervals; `level`: a dotted line there."""
    with _figure(8.2, 3.9, right=2.6) as figure:
        axes = figure.subplots()
        axes.set(xlabel=x_title, ylabel=y_title, xscale="log")
        for number, line in enumerate(known):
            colour, dash = (_BLUE, _RED, _SOFT, _INK)[number // 2 % 4], ("-", "--")[number % 2]
            shape = "osD^v"[number % 5]
            axes.plot(line.xs, line.ys, color=colour, linestyle=dash, marker=shape, label=_shortened(line.label, 34))
            for x, span in zip(line.xs, line.spans, strict=True):
                if span:
                    axes.plot([x, x], span, color=colour, linewidth=1)
        if level is not None:
            axes.axhline(level, color=_SOFT, linestyle=":", linewidth=1)
        ticks = sorted({x for line in known for x in line.xs})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
        return _svg(figure, description)


def best_points(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both, less of x and more of y being better; by x."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, description: str) -> str:
    """One bar a row (a label, and lengths by phase), of segments in the order of `PHASES`."""
    with _figure(9.0, 0.9 + 0.32 * len(rows), left=2.4, top=0.4) as figure:
        axes = figure.subplots()
        heights = range(len(rows))
        lefts = [0.0] * len(rows)
        for phase, (fill, hatch) in PHASES.items():
            lengths = [row.get(phase, 0.0) for _, row in rows]
            look: dict[str, Any] = {"color": fill, "hatch": hatch, "edgecolor": _BLUE, "linewidth": 0.7, "height": 0.66}
            axes.barh(heights, lengths, left=lefts, label=phase, **look)
            lefts = [left + length for left, length in zip(lefts, lengths, strict=True)]
        for height, total in zip(heights, lefts, strict=True):
            axes.annotate(f"{total:,.3g}", (total, height), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(heights, [_shortened(label, 36) for label, _ in rows], color=_INK)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.07)
        axes.set_xlabel(unit)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PHASES), frameon=False)
        return _svg(figure, description)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
