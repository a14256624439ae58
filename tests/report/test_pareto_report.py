"""Curves on a page and in a terminal: what is on them, what is marked, and nothing from elsewhere."""

from __future__ import annotations

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atoll.api.fleet_pareto import FleetPareto
from atoll.prove.front import AXES, Axis, ParetoFront, ParetoPoint, ParetoReport, mark
from atoll.report.pareto_report import (
    draw_curve,
    draw_pareto,
    format_value,
    list_points,
    render_pareto_page,
)


def point(asked: str, usd: float, value: float, **more: object) -> ParetoPoint:
    fields: dict[str, object] = {"asked": asked, "usd_per_hour": usd, "value": value}
    return ParetoPoint.model_validate(fields | more)


def report(against: Axis = "energy") -> ParetoReport:
    points = mark(
        [
            point("energy alone", 20.0, 1000.0, watts=1000.0),
            point("<b>$1/kWh</b>", 12.0, 1500.0, watts=1500.0),
            point("rent alone", 10.0, 2000.0, watts=2000.0, today=True),
            point("on the way", 15.0, 1800.0, watts=1800.0),
            point("a quarter", 1.0, 500.0, watts=500.0, served=0.25),
        ]
    )
    return ParetoReport(
        fleet="small", fronts=(ParetoFront(against=against, points=points),), plans=9
    )


def shown(made: ParetoReport) -> str:
    text = io.StringIO()
    Console(file=text, width=160, markup=False).print(draw_pareto(made))
    return text.getvalue()


def test_the_table_has_the_curve_and_counts_the_rest() -> None:
    text = shown(report())
    assert "What less energy costs" in text
    assert "20.00" in text
    assert "1.500" in text
    assert "today" in text
    assert "on the way" not in text
    assert "a quarter" not in text
    assert "2 plans beaten by others, or serving too little, left out." in text
    assert "small: 9 plans made." in text
    every = list_points(report().fronts[0], every=True)
    said = {row[-2]: row[-1] for row in every.rows}
    assert said["on the way"] == "dominated"
    assert said["a quarter"] == "serves 25%"


def test_the_page_is_one_file_with_a_curve_and_escapes_names() -> None:
    page = render_pareto_page(report())
    assert page.count("<svg") == 1
    assert page.count("<circle") == 5
    # What a dot is stands beside it, and axes say in words what they are.
    assert "today: $10.00/h</text>" in page
    assert "$20.00/h</text>" in page
    assert "$15.00/h</text>" not in page
    assert "power that its machines draw, kW" in page
    assert "dollars an hour" in page
    assert "&lt;b&gt;$1/kWh&lt;/b&gt;" in page
    assert "<b>$1/kWh" not in page
    assert not re.search(r"https?://", page.replace("http-equiv", ""))
    assert page == render_pareto_page(report())
    assert "svg" in FleetPareto.of(report())._repr_html_()
    assert "What less energy costs" in str(FleetPareto.of(report()))


def test_steps_go_down_to_the_right() -> None:
    drawing = draw_curve(report().fronts[0])
    corners = [tuple(map(float, pair.split(","))) for pair in drawing.steps.split()]
    # A plan stands for all that allows more, until a cheaper one comes: across, then down.
    assert len(corners) == 5
    assert [x for x, _ in corners] == sorted(x for x, _ in corners)
    assert [y for _, y in corners] == sorted(y for _, y in corners)
    (today,) = [dot for dot in drawing.dots if dot.today]
    assert corners[-1] == (round(today.x, 1), round(today.y, 1))
    assert [dot.faint for dot in drawing.dots] == [True, False, False, True, False]


def test_labels_of_plans_that_lie_together_do_not_lie_on_one_another() -> None:
    near = [point(f"p{i}", 10.0 + 0.01 * i, 2000.0 - i, watts=1.0) for i in range(8)]
    made = mark([*near, point("now", 10.5, 2100.0, watts=1.0, today=True)])
    drawing = draw_curve(ParetoFront(against="energy", points=made))
    said = [dot.says for dot in drawing.dots if dot.says]
    assert "today: $10.50/h" in said
    assert len(said) < 5


@given(
    values=st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)), min_size=0, max_size=5),
    axis=st.sampled_from(AXES),
)
def test_any_points_fit_into_the_drawing(values: list[tuple[float, float]], axis: Axis) -> None:
    points = mark(point(f"p{i}", usd, value) for i, (usd, value) in enumerate(values))
    front = ParetoFront(against=axis, points=points)
    drawing = draw_curve(front)
    for dot in drawing.dots:
        assert drawing.left - 1e-6 <= dot.x <= drawing.right + 1e-6
        assert drawing.top - 1e-6 <= dot.y <= drawing.bottom + 1e-6
    for ticks, low, high in (
        (drawing.x_ticks, drawing.left, drawing.right),
        (drawing.y_ticks, drawing.top, drawing.bottom),
    ):
        assert len(ticks) <= 7
        assert all(low - 1e-6 <= tick.at <= high + 1e-6 for tick in ticks)
        assert len({tick.label for tick in ticks}) == len(ticks)
    made = ParetoReport(fleet="any", fronts=(front,), plans=0)
    assert "any: 0 plans made." in shown(made)


def test_values_are_written_in_their_units() -> None:
    assert format_value("latency", 0.5) == "0.50"
    assert format_value("error", 0.025) == "2.5%"
    assert format_value("energy", 1592.0) == "1.592"
    assert format_value("carbon", 0.0478) == "0.0478"
