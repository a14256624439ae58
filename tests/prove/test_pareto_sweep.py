"""Curves of dollars against what they buy: no point of them is beaten, and prices move plans one way."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import InputError, UsageError
from atoll.plan.choice import Choice, ModelMix, Variant
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.front import ON_THE_WAY, ParetoFront, ParetoPoint, mark
from atoll.prove.pareto_sweep import check_axes, find_pareto, geometric, mean_error
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.solve_progress import Progress
from tests.solve.test_weighted import CATALOG, problem

POINTS = st.lists(
    st.builds(
        ParetoPoint,
        asked=st.sampled_from("abc"),
        usd_per_hour=st.integers(1, 6).map(float),
        value=st.integers(1, 6).map(float),
        served=st.sampled_from((1.0, 1.0, 1.0, 0.5)),
        today=st.booleans(),
    ),
    max_size=12,
)


@given(points=POINTS)
def test_no_point_of_a_curve_is_beaten_and_all_others_are(points: list[ParetoPoint]) -> None:
    front = ParetoFront(against="energy", points=mark(points))
    fair = [point for point in points if point.served >= 1.0]

    def beaten(one: ParetoPoint) -> bool:
        return any(
            (p.usd_per_hour, p.value) != (one.usd_per_hour, one.value)
            and p.usd_per_hour <= one.usd_per_hour
            and p.value <= one.value
            for p in fair
        )

    assert not any(beaten(point) for point in front.curve)
    kept = {(p.usd_per_hour, p.value) for p in front.curve}
    assert kept == {(p.usd_per_hour, p.value) for p in fair if not beaten(p)}
    assert len(front.curve) + front.left_out == len(front.points) <= len(points)
    # Along the curve less of the one is more of the other.
    dollars = [point.usd_per_hour for point in front.curve]
    assert dollars == sorted(dollars, reverse=True)
    assert len(set(dollars)) == len(dollars)


def prices_of(asked: str) -> tuple[float, float]:
    """The lowest and the highest price per tonne at which a plan is best."""
    ends = {"rent alone": 0.0, "carbon alone": math.inf}
    found = [
        ends[text] if text in ends else float(text[1:-2].replace(",", ""))
        for text in asked.split(" to ")
    ]
    return found[0], found[-1]


def plain(asked: Problem, request: PlanRequest) -> Plan:
    assert request.capacity_only
    return solve(asked, request)


def test_a_price_of_carbon_lowers_it_and_promises_cost() -> None:
    told: list[Progress] = []
    report = find_pareto(
        problem(),
        ["carbon", "latency", "carbon"],
        PlanRequest(catalog=CATALOG, on_progress=told.append, capacity_only=True),
        points=6,
        find=plain,
    )
    carbon, latency = report.fronts
    assert (carbon.against, latency.against) == ("carbon", "latency")
    # The higher the price at which a plan is best, the less it emits, and the more it costs.
    named = sorted((prices_of(p.asked), p) for p in carbon.points if p.asked != ON_THE_WAY)
    assert all(low[0][1] < high[0][0] for low, high in pairwise(named))
    kg = [p.value for _, p in named]
    assert kg == sorted(kg, reverse=True)
    assert [p.usd_per_hour for _, p in named] == sorted(p.usd_per_hour for _, p in named)
    assert len(set(kg)) == len(kg) >= 2
    assert not any(p.dominated for _, p in named)
    assert carbon.curve[0].asked.endswith("carbon alone")
    assert carbon.curve[-1].today
    assert carbon.curve[-1].asked.startswith("rent alone")
    assert all(point.kg_per_hour == pytest.approx(point.value) for point in carbon.points)
    factors = [point.value for point in latency.points]
    assert factors == pytest.approx([0.5, 0.758, 1.0, 1.74, 2.64, 4.0], rel=1e-2)
    assert [point.today for point in latency.points] == [i == 2 for i in range(6)]
    assert latency.points[2].usd_per_hour == carbon.curve[-1].usd_per_hour
    # Work is counted, and told of in shares that rise.
    assert report.plans > 8
    shares = [progress.share for progress in told if progress.share is not None]
    assert shares == sorted(shares)
    assert len(told) == 12
    again = find_pareto(
        problem(),
        ["carbon", "latency"],
        PlanRequest(catalog=CATALOG, capacity_only=True),
        points=6,
        find=plain,
    )
    assert again == report


def chosen() -> Problem:
    """One choice between two models of the small problem, which err 2 % and 10 %."""
    asked = problem(rate=40.0)
    return asked.replace(
        choices=(
            Choice(
                name="ask",
                variants=(
                    Variant(service="chat", model="llama-3.1-8b", error=0.02),
                    Variant(service="mini", model="llama-3.2-1b", error=0.10),
                ),
                max_error=0.05,
                min_share={"llama-3.1-8b": 0.25},
            ),
        )
    )


def test_errors_are_swept_from_the_fewest_to_the_max_of_use() -> None:
    asked: list[float] = []

    def plan(unsettled: Problem, request: PlanRequest) -> Plan:
        limit = unsettled.choices[0].max_error
        assert limit is not None
        asked.append(limit)
        # As much as the limit allows goes to the model that errs more.
        share = (limit - 0.02) / 0.08
        mix = ModelMix.of(unsettled.choices[0], {"chat": 1.0 - share, "mini": share})
        made = plain(unsettled.settled([mix]), request)
        return made.model_copy(update={"mixes": (mix,)})

    report = find_pareto(
        chosen(), ["error"], PlanRequest(catalog=CATALOG, capacity_only=True), points=3, find=plan
    )
    assert asked == pytest.approx([0.02, 0.05, 0.08])
    (front,) = report.fronts
    assert [point.value for point in front.points] == pytest.approx([0.02, 0.05, 0.08])
    # Today's limit is asked for once.
    assert [point.today for point in front.points] == [False, True, False]
    assert report.plans == 3
    assert front.curve[0].usd_per_hour > front.curve[-1].usd_per_hour


def test_mean_error_counts_requests() -> None:
    asked = chosen()
    (choice,) = asked.choices
    mix = ModelMix.of(choice, {"chat": 0.5, "mini": 0.5})
    assert mean_error(asked, [mix]) == pytest.approx(0.06)
    assert mean_error(asked, []) == 0.0


def test_what_cannot_be_swept_is_refused_in_a_line() -> None:
    asked = problem()
    with pytest.raises(InputError, match="different errors"):
        check_axes(["error"], asked)
    with pytest.raises(UsageError, match="'wealth' is nothing to sweep against"):
        check_axes(["wealth"], asked)
    with pytest.raises(UsageError, match="nothing to sweep"):
        check_axes([], asked)
    with pytest.raises(UsageError, match="grid: "):
        check_axes(["carbon"], asked.replace(grid={}))
    with pytest.raises(UsageError, match="51 points"):
        find_pareto(
            asked,
            ["latency"],
            PlanRequest(catalog=Catalog.default(), capacity_only=True),
            points=51,
        )
    assert check_axes(["error", "energy", "error"], chosen()) == ("error", "energy")


def test_geometric_ends_where_it_is_told() -> None:
    assert geometric(0.5, 4.0, 4) == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert geometric(1.0, 4.0, 1) == pytest.approx([2.0])
