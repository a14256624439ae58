"""What certainty costs, as people see it."""

from __future__ import annotations

from xml.etree import ElementTree

from atoll.plan.plan import Plan
from atoll.plan.robustness import Robustness
from atoll.report.robustness_report import (
    describe_risk,
    draw_robustness,
    judge_robustness,
    list_levels,
    render_curve_svg,
)
from tests.plan.test_robustness import FOUND, LEVEL

PLAN = Plan(
    problem_hash="x",
    problem_name="fleet",
    usd_per_hour=3.0,
    status="feasible",
    solver="robust",
    robustness=FOUND,
)
CHEAP = LEVEL.model_copy(
    update={"asked": None, "holds": 0.4, "low": 0.3, "high": 0.5, "expected_usd_per_hour": 2.0}
)
PRICED = FOUND.model_copy(
    update={
        "levels": tuple(level.model_copy(update={"unserved_usd": 0.5}) for level in (CHEAP, LEVEL)),
        "unserved_usd_per_1000": 2.0,
        "best": 1,
    }
)


def test_a_line_says_how_often_it_holds_and_what_is_missing() -> None:
    (verdict,) = judge_robustness(PLAN)
    assert "holds in 93% of scenarios (95% asked for, 2.0 points less)" in verdict.text
    assert "no risk holds in 40%" in verdict.text
    assert verdict.is_kept is False
    assert judge_robustness(PLAN.model_copy(update={"robustness": None})) == []


def test_a_row_for_each_level_with_what_it_costs_more() -> None:
    grid = list_levels(PRICED)
    assert [row[0] for row in grid.rows] == ["no risk", "95%"]
    assert grid.rows[1][-1] == "this plan, least total"
    assert "+45%" in grid.rows[1]
    assert len(grid.columns) == len(grid.rows[0])
    assert "total $/h" not in list_levels(FOUND).columns
    assert len(draw_robustness(PLAN)) == 1
    # Machines of one's own that cost nothing: nothing costs more.
    free = [level.model_copy(update={"expected_usd_per_hour": 0.0}) for level in PRICED.levels]
    assert "+0%" in list_levels(PRICED.model_copy(update={"levels": tuple(free)})).rows[1]


def test_spot_is_spoken_of_where_there_is_some() -> None:
    assert "spot" not in describe_risk(FOUND)
    spot = FOUND.model_copy(update={"levels": (LEVEL.model_copy(update={"spot_nodes": 1}),)})
    assert "lost in an hour: 5%" in describe_risk(spot)
    assert "$2.00 per 1,000" in describe_risk(PRICED)


def drawn(found: Robustness) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(render_curve_svg(found))
    return [
        (float(c.attrib["cx"]), float(c.attrib["cy"]))
        for c in root.iter("{http://www.w3.org/2000/svg}circle")
    ]


def test_surer_is_further_right_and_dearer_further_up() -> None:
    (first, second) = drawn(PRICED)
    assert first[0] < second[0]
    assert first[1] > second[1]  # pixels are counted from the top


def test_levels_that_are_one_plan_are_one_point() -> None:
    same = PRICED.model_copy(
        update={"levels": (CHEAP, LEVEL, LEVEL.model_copy(update={"asked": 0.99}))}
    )
    assert len(drawn(same)) == 2
    assert "95%, 99%" in render_curve_svg(same)
