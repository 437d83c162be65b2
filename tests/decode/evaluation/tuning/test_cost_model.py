"""What steps cost: curves, overheads, and measurements of tiny models that must come out positive and consistent."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith.decode.evaluation.tuning.costs import CostModel, Curve, Overhead
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling

GREEDY = Sampling()


def test_curves_rise_and_go_on_straight() -> None:
    curve = Curve.through((1, 2, 4, 8), (1.0, 3.0, 2.0, 6.0))
    assert curve.seconds == (1.0, 2.5, 2.5, 6.0)  # the falling pair is levelled out
    assert [curve(nodes) for nodes in (1, 1.5, 3, 6, 8)] == pytest.approx([1.0, 1.75, 2.5, 4.25, 6.0])
    assert curve(12) == pytest.approx(6.0 + 4 * 3.5 / 4)
    assert Curve((3,), (2.0,))(7) == 2.0


def test_overheads_are_lines_that_do_not_fall() -> None:
    line = Overhead.through([(5, 2.0), (9, 4.0)])
    assert line(7) == pytest.approx(3.0)
    assert line.per_node == pytest.approx(0.5)
    assert Overhead.through([(5, 4.0), (9, 2.0)]) == Overhead(3.0)
    assert Overhead.through([(5, 4.0)]) == Overhead(4.0)


def test_a_step_is_its_forwards_and_its_overhead(make_llama: Any, make_heads: Any) -> None:
    drafter = wrap_model(make_llama(16))
    parts = Parts(drafter, make_heads(3, 32, 16))
    costs = CostModel(
        Curve((1, 9), (1.0, 3.0)),
        Curve((1, 5), (0.1, 0.5)),
        heads=0.05,
        baseline=0.2,
        overheads={"multi-candidate": Overhead(0.3, 0.01)},
        default=Overhead(0.7),
    )
    tree = build_method("multi-candidate", parts, GREEDY, k_config="2x2x1")  # 1 + 2 + 4 + 4 nodes, levels of 1, 2, 4
    forwards = (3.0 + 2 * 0.25) + 0.1 + 0.2 + 0.4
    assert costs.step_seconds("multi-candidate", tree, 11) == pytest.approx(forwards + 0.3 + 0.11)
    heads = build_method("medusa", parts, GREEDY, tree="2x1")
    assert costs.step_seconds("medusa", heads, 5) == pytest.approx(2.0 + 0.05 + 0.7)
    beyond = CostModel(costs.target, costs.drafter, 0.05, 0.2, {"medusa": Overhead(-9.0)})
    assert beyond.step_seconds("medusa", heads, 5) == pytest.approx(1.2)  # no step is cheaper than a plain one
    assert costs.speedup(3.0, 2.4) == pytest.approx(3.0 * 1.2 / 2.4)
