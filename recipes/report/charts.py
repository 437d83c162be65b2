"""Charts as inline SVG: seen without scripts, printed in black and white; shapes, hatches and labels carry the meaning.

Every text is escaped. Sizes are in the drawing's own units, which are pixels where it is shown unscaled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 46
LETTER = 7.0
"""Width of a letter of a label, about."""
DEPTHS = 10
"""Depths of a method that are drawn at most."""
PHASE_FILLS = {
    "draft": ("#1d3557", "none"),
    "score": ("#a8c5e2", "up"),
    "verify": ("#fff", "dots"),
    "commit": ("#6b7f94", "none"),
    "host": ("#fff", "down"),
}
_HATCHES = {
    "up": '<path d="M0 6L6 0M-1 1L1 -1M5 7L7 5" stroke="#1d3557" stroke-width=".8"/>',
    "down": '<path d="M0 0L6 6M-1 5L1 7M5 -1L7 1" stroke="#8a8a8a" stroke-width=".8"/>',
    "dots": '<circle cx="3" cy="3" r="1.1" fill="#1d3557"/>',
}


_Box = tuple[float, float, float, float]


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


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        return nice_ticks(self.low, self.high)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers within [low, high], about `count` of them. Raises ValueError where high is not above low."""
    if not high > low:
        raise ValueError(f"an axis must end above its beginning, got {low:g} to {high:g}")
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, 1.08 * high or 1.0
    room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < room else low - room), high + room


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _svg(width: float, height: float, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(description)}">{"".join(parts)}</svg>'
    )


def scatter(
    points: Sequence[Point],
    x_title: str,
    y_title: str,
    description: str,
    *,
    diagonal: str | None = None,
    band: float = 0.0,
    frontier: bool = False,
    from_zero: bool = True,
) -> str:
    """Points with intervals, bounds and labels.

    Args:
        points: at least one.
        diagonal: what the line y = x stands for; None: it is not drawn.
        band: dashed lines at this share above and below the diagonal.
        frontier: join the points that no other beats, where less of x and more of y are better.
        from_zero: both axes begin at 0.
    """
    ys = [value for point in points for value in (point.y, point.low, point.high, point.bound) if value is not None]
    xs = [point.x for point in points]
    if diagonal and not from_zero:
        xs = ys = [*xs, *ys]
    x = _Axis(*_range(xs, from_zero), LEFT, WIDTH - RIGHT)
    y = _Axis(*_range(ys, from_zero), HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y, x_title, y_title)
    if diagonal:
        parts += _diagonal(x, y, diagonal, band, points)
    taken = [(x(p.x) - 7, y(p.y) - 7, x(p.x) + 7, y(p.y) + 7) for p in points]
    for p in points:
        reached = [y(value) for value in (p.y, p.low, p.high, p.bound) if value is not None]
        taken.append((x(p.x) - 3, min(reached), x(p.x) + 3, max(reached)))
        if p.bound is not None:
            taken.append((x(p.x) - 8, y(p.bound) - 2, x(p.x) + 8, y(p.bound) + 2))
    if frontier:
        drawn, boxes = _frontier(points, x, y)
        parts.append(drawn)
        taken += boxes
    parts += [_label(point, x(point.x), y(point.y), taken) for point in points]
    parts += [_marked(point, x, y) for point in points]
    return _svg(WIDTH, HEIGHT, description, parts)


def _axes(x: _Axis, y: _Axis, x_title: str, y_title: str) -> list[str]:
    parts = []
    for value in x.ticks():
        parts.append(_line(x(value), y.start, x(value), y.stop, "grid"))
        parts.append(_text(x(value), y.start + 16, f"{value:g}", "middle", ' class="tick"'))
    for value in y.ticks():
        parts.append(_line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(_text(x.start - 7, y(value) + 4, f"{value:g}", "end", ' class="tick"'))
    parts.append(_line(x.start, y.start, x.stop, y.start, "axis"))
    parts.append(_line(x.start, y.start, x.start, y.stop, "axis"))
    middle = (y.start + y.stop) / 2
    parts.append(_text((x.start + x.stop) / 2, y.start + 37, x_title, "middle", ' class="title"'))
    parts.append(_text(14, middle, y_title, "middle", f' class="title" transform="rotate(-90 14 {middle:g})"'))
    return parts


def _diagonal(x: _Axis, y: _Axis, name: str, band: float, points: Sequence[Point]) -> list[str]:
    start, end = max(x.low, y.low), min(x.high, y.high)
    parts = [_line(x(start), y(start), x(end), y(end), "diagonal")]
    for share in (1 + band, 1 - band) if band else ():
        reach = min(end, y.high / share)
        first = max(start, y.low / share)
        parts.append(_line(x(first), y(first * share), x(reach), y(reach * share), "band"))

    def room(share: float) -> float:
        """How far the nearest point is from a name that ends at this share of the line."""
        value = start + share * (end - start)
        middle_x, middle_y = x(value) - 40, y(value) + 30
        return min(120.0, *(math.hypot(x(point.x) - middle_x, y(point.y) - middle_y) for point in points))

    value = start + max((0.97, 0.75, 0.55, 0.35), key=room) * (end - start)
    angle = math.degrees(math.atan2(y(end) - y(start), x(end) - x(start)))
    at_x, at_y = x(value) - 5, y(value) - 5
    turned = f' class="note" transform="rotate({angle:.1f} {at_x:.1f} {at_y:.1f})"'
    return [*parts, _text(at_x, at_y, name, "end", turned)]


def best_points(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both, less of x and more of y being better; by x."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def _frontier(points: Sequence[Point], x: _Axis, y: _Axis) -> tuple[str, list[_Box]]:
    """Stairs through the best points, and the room they take."""
    corners: list[tuple[float, float]] = []
    for point in best_points(points):
        if corners:
            corners.append((x(point.x), corners[-1][1]))
        corners.append((x(point.x), y(point.y)))
    corners.append((x.stop, corners[-1][1]))
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up in corners)
    boxes = [
        (min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1)
        for a, b in itertools.pairwise(corners)
    ]
    return f'<path d="M{path}" class="frontier"/>', boxes


def _marked(point: Point, x: _Axis, y: _Axis) -> str:
    at_x, at_y = x(point.x), y(point.y)
    said = f"{point.number} {point.label}: {point.x:.4g}, {point.y:.4g}"
    parts = [f"<g><title>{escape(said)}</title>"]
    if point.bound is not None:
        parts.append(_line(at_x, at_y, at_x, y(point.bound), "reach"))
        parts.append(_line(at_x - 7, y(point.bound), at_x + 7, y(point.bound), "bound"))
    if point.low is not None and point.high is not None:
        parts.append(_line(at_x, y(point.low), at_x, y(point.high), "error"))
    if point.filled:
        parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4.5" class="dot"/>')
    else:
        parts.append(f'<path d="M{at_x:.1f} {at_y - 6:.1f}l6 6l-6 6l-6 -6z" class="open"/>')
    return "".join(parts) + "</g>"


def _label(point: Point, at_x: float, at_y: float, taken: list[_Box]) -> str:
    """The method's number and name beside its point where there is room, else its number alone."""
    name = point.label if len(point.label) <= 24 else point.label[:23] + "…"
    for text in (f"{point.number} {name}", str(point.number)):
        width = LETTER * len(text) + 2
        for shift in (0, 13, -13, 26, -26, 39, -39):
            for side in (1, -1):
                near = at_x + 10 * side
                box = (
                    min(near, near + side * width),
                    at_y + shift - 8,
                    max(near, near + side * width),
                    at_y + shift + 5,
                )
                inside = box[0] > LEFT and box[2] < WIDTH - 2 and box[1] > TOP and box[3] < HEIGHT - BOTTOM - 1
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    leader = _line(at_x, at_y, near, at_y + shift, "leader") if abs(shift) > 13 else ""
                    return leader + _text(near, at_y + shift + 4, text, "start" if side > 0 else "end")
    return _text(at_x + 8, at_y - 6, str(point.number))


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def depth_bars(number: int, label: str, shares: Sequence[float], deepest: int) -> str:
    """One method's acceptance by depth as bars, `deepest` places wide so that panels can be compared.

    Args:
        shares: of depth 1, 2 …, each in [0, 1]; the first `DEPTHS` are drawn.
    """
    width, height, base, full = 220, 120, 98, 64
    deepest = min(deepest, DEPTHS)
    each = min(40.0, (width - 16) / max(4, deepest))
    digits = 2 if each >= 30 else 1
    name = f"{number} {label}"
    more = f", first {DEPTHS} of {len(shares)}" if len(shares) > DEPTHS else ""
    room = 26 - len(more)
    title = (name if len(name) <= room else name[: room - 1] + "…") + more
    parts = [_text(8, 14, title, more=' class="panel"')]
    parts.append(_line(8, base - full, width - 8, base - full, "grid"))
    parts.append(_line(8, base, width - 8, base, "axis"))
    for depth, share in enumerate(shares[:DEPTHS], 1):
        left, top = 8 + (depth - 1) * each, base - share * full
        size = f'width="{each - 6:.1f}" height="{base - top:.1f}"'
        parts.append(f'<rect x="{left + 3:.1f}" y="{top:.1f}" {size} class="bar"/>')
        middle = left + each / 2
        if each >= 18:
            parts.append(_text(middle, top - 4, f"{share:.{digits}f}".removeprefix("0"), "middle", ' class="tick"'))
        if each >= 13 or depth % 2:
            parts.append(_text(middle, base + 14, str(depth), "middle", ' class="tick"'))
    said = f"{name}: accepted at depth " + ", ".join(f"{depth}: {share:.2f}" for depth, share in enumerate(shares, 1))
    return _svg(width, height, said, parts)


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, description: str, name: str) -> str:
    """One bar a row, of segments that follow one another in the order of `PHASE_FILLS`.

    Args:
        rows: label and lengths by phase.
        unit: of the lengths.
        name: sets the hatches of this chart apart from those of others on the page.
    """
    width, left, each = 720, 200, 26
    full = max(sum(row.values()) for _, row in rows) or 1.0
    x = _Axis(0.0, full * 1.001, left, width - 84)
    height = 34 + each * len(rows) + 26
    hatches = "".join(
        f'<pattern id="{name}-{key}" width="6" height="6" patternUnits="userSpaceOnUse">{drawn}</pattern>'
        for key, drawn in _HATCHES.items()
    )
    parts = [f"<defs>{hatches}</defs>", *_phase_legend(name, left)]
    bottom = 34 + each * len(rows)
    for value in x.ticks():
        parts.append(_line(x(value), 30, x(value), bottom, "grid"))
        parts.append(_text(x(value), bottom + 15, f"{value:g}", "middle", ' class="tick"'))
    parts.append(_text(width - 78, bottom + 15, unit, more=' class="tick"'))
    for place, (label, row) in enumerate(rows):
        top, at = 34 + each * place, 0.0
        parts.append(_text(left - 8, top + 15, label if len(label) <= 30 else label[:29] + "…", "end"))
        for phase in PHASE_FILLS:
            length = row.get(phase, 0.0)
            said = f"{label}, {phase}: {length:.3g} {unit} ({length / (sum(row.values()) or 1):.0%})"
            box = f'x="{x(at):.1f}" y="{top + 3}" width="{max(0.0, x(at + length) - x(at)):.1f}" height="{each - 8}"'
            parts.append(f"<g><title>{escape(said)}</title>{_filled(box, phase, name)}</g>")
            at += length
        parts.append(_text(x(at) + 6, top + 15, f"{at:,.3g} {unit}", more=' class="tick"'))
    return _svg(width, height, description, parts)


def _phase_legend(name: str, left: float) -> list[str]:
    parts, at = [], left
    for phase in PHASE_FILLS:
        parts.append(_filled(f'x="{at:g}" y="6" width="22" height="13"', phase, name))
        parts.append(_text(at + 28, 17, phase))
        at += 28 + LETTER * len(phase) + 24
    return parts


def _filled(box: str, phase: str, name: str) -> str:
    colour, hatch = PHASE_FILLS[phase]
    drawn = f'<rect {box} fill="{colour}" class="segment"/>'
    return drawn if hatch == "none" else drawn + f'<rect {box} fill="url(#{name}-{hatch})"/>'
