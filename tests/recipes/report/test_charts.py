"""The report's drawings: what is drawn lies where its numbers say."""

from __future__ import annotations

from xml.etree import ElementTree

from draftsmith.recipes.report import charts
from draftsmith.recipes.report.charts import PHASES, Point, best_points, stacked_bars
from hypothesis import given
from hypothesis import strategies as st

numbers = st.floats(0.01, 1e4)
points = st.lists(st.builds(Point, st.integers(1, 40), st.just("m"), numbers, numbers), min_size=1, max_size=14)


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter("text") if text.text]


def test_points_lie_where_their_numbers_say() -> None:
    drawn = [Point(7, "a", 2.0, 1.0, True, 0.9, 1.1, 1.6), Point(8, "b", 3.0, 1.5, filled=False)]
    titles = ("x title", "y title", "what it shows")
    for svg in (charts.scatter(drawn, *titles), charts.scatter(drawn, *titles, "same")):
        assert 'aria-label="what it shows"' in svg
        places = {text.text: text for text in ElementTree.fromstring(svg).iter("text")}
        assert {"7", "8", "x title", "y title"} <= set(places)
        x7, y7 = (float(places["7"].attrib[axis]) for axis in "xy")
        x8, y8 = (float(places["8"].attrib[axis]) for axis in "xy")
        assert x7 < x8  # to the right is more
        assert y7 > y8  # and up


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


def test_bars_carry_their_numbers_and_phases_differ_without_colour() -> None:
    shown = texts(stacked_bars([("a", {"draft": 10.0, "score": 30.0}), ("b $x$ <b>", {"host": 5.0})], "ms", "time"))
    assert {*PHASES, "ms", "a", "b $x$ <b>", "40", "5"} <= set(shown)
    looks = {(hatch or fill) for fill, hatch in PHASES.values()}
    assert len(looks) == len(PHASES)
