"""The report's drawings: what is drawn lies where its numbers say."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from draftsmith.recipes.report.charts import (
    PHASE_FILLS,
    Point,
    best_points,
    depth_bars,
    nice_ticks,
    scatter,
    stacked_bars,
)
from draftsmith.recipes.report.tables import flops_unit
from hypothesis import assume, given
from hypothesis import strategies as st

numbers = st.floats(0.01, 1e4)
points = st.lists(st.builds(Point, st.integers(1, 40), st.text(max_size=30), numbers, numbers), min_size=1, max_size=14)


@given(drawn=points, diagonal=st.booleans(), frontier=st.booleans(), from_zero=st.booleans())
def test_points_lie_where_their_numbers_say(
    drawn: list[Point], diagonal: bool, frontier: bool, from_zero: bool
) -> None:
    options: dict[str, Any] = {"diagonal": "same" if diagonal else None, "frontier": frontier, "from_zero": from_zero}
    labels = [point.label for point in drawn]
    assume(all(label.isprintable() for label in labels))
    svg = ElementTree.fromstring(scatter(drawn, "x", "y", "d", **options))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in svg.iter("circle")]
    assert len(dots) == len(drawn)
    for (one, at), (other, there) in itertools.combinations(zip(drawn, dots, strict=True), 2):
        assert (one.x - other.x) * (at[0] - there[0]) >= 0  # to the right is more
        assert (one.y - other.y) * (at[1] - there[1]) <= 0  # and up
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in dots)


def test_lossy_points_are_of_another_shape_and_bounds_stand_above() -> None:
    lossy = Point(2, "b", 3.0, 1.5, filled=False)
    svg = ElementTree.fromstring(scatter([Point(1, "a", 2.0, 1.0, True, 0.9, 1.1, 1.6), lossy], "x", "y", "d"))
    (dot,) = svg.iter("circle")
    assert [path.attrib["class"] for path in svg.iter("path")] == ["open"]
    bar = next(line for line in svg.iter("line") if line.attrib["class"] == "bound")
    error = next(line for line in svg.iter("line") if line.attrib["class"] == "error")
    assert float(bar.attrib["y1"]) < float(error.attrib["y2"]) < float(dot.attrib["cy"]) < float(error.attrib["y1"])


@given(drawn=points)
def test_the_frontier_is_what_nothing_beats(drawn: list[Point]) -> None:
    best = best_points(drawn)
    for point in drawn:
        beaten = any(
            (other.x <= point.x and other.y > point.y) or (other.x < point.x and other.y >= point.y) for other in drawn
        )
        kept = any((other.x, other.y) == (point.x, point.y) for other in best)
        assert kept != beaten
    assert [point.x for point in best] == sorted(point.x for point in best)


@given(low=st.floats(-1e6, 1e6), size=st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, size: float) -> None:
    ticks = nice_ticks(low, low + size)
    assert 3 <= len(ticks) <= 8
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0])
    assert min(ticks) >= low - 1e-6 * size
    assert max(ticks) <= low + size * (1 + 1e-6)
    assert f"{steps[0]:.1e}"[:3] in ("1.0", "2.0", "2.5", "5.0")


def test_bars_are_as_long_as_their_numbers() -> None:
    rows = [("a", {"draft": 10.0, "score": 30.0}), ("b", {"score": 20.0, "host": 5.0})]
    svg = ElementTree.fromstring(stacked_bars(rows, "ms", "time", "n"))
    widths = []
    for group in svg.iter("g"):
        rect = next(group.iter("rect"))
        widths.append(float(rect.attrib["width"]))
    assert len(widths) == 2 * len(PHASE_FILLS)
    lengths = [row.get(phase, 0.0) for _, row in rows for phase in PHASE_FILLS]
    scale = max(widths) / 30.0
    assert widths == pytest.approx([length * scale for length in lengths], abs=0.15)
    hatched = {rect.attrib["fill"] for rect in svg.iter("rect") if rect.attrib["fill"].startswith("url")}
    assert len(hatched) == 3  # beside a dark and a middle grey: five that differ without colour


def test_acceptance_is_drawn_by_depth() -> None:
    svg = ElementTree.fromstring(depth_bars(3, "m", [1.0, 0.5, 0.0], 8))
    heights = [float(bar.attrib["height"]) for bar in svg.iter("rect")]
    assert heights == pytest.approx([64, 32, 0], abs=0.1)
    deep = ElementTree.fromstring(depth_bars(3, "m", [1.0] * 14, 14))
    assert len(list(deep.iter("rect"))) == 10
    assert "3 m, first 10 of 14" in [text.text for text in deep.iter("text")]


def test_flops_have_a_unit_that_suits() -> None:
    assert [flops_unit(most)[0] for most in (2e12, 2e9, 2e6, 5.0)] == ["TFLOP", "GFLOP", "MFLOP", "kFLOP"]
