"""Quick plans over known templates: as cheap as the best, and as the usual allocation's."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.virtual.template_planner import TemplatePlanner, _CoverItem, _covers, _find_cover
from atoll.plan.plan import Instance, count_machines
from atoll.plan.problem import Limits, Problem
from atoll.plan.validate.check import validate
from atoll.prove.sized_templates import SizedTemplate, size_for_share
from atoll.solve.derating import Derating
from tests.control.virtual.toys import planner, problem, templates
from tests.plan import builders

ITEMS = st.lists(
    st.tuples(st.floats(0.1, 20.0), st.floats(0.2, 12.0), st.integers(0, 4)), min_size=1, max_size=4
)


@given(ITEMS, st.floats(0.5, 60.0))
def test_a_cover_is_the_cheapest_to_within_the_grid(
    drawn: list[tuple[float, float, int]], demand: float
) -> None:
    items = [_CoverItem(cost, per_s, most, ((0, 1),)) for cost, per_s, most in drawn]
    found = _find_cover(items, demand)
    choices = itertools.product(*(range(item.most + 1) for item in items))
    costs = [
        sum(item.cost * n for item, n in zip(items, some, strict=True))
        for some in choices
        if _covers(items, some, demand)
    ]
    if not costs:
        assert found is None or not _covers(items, found, demand)
        return
    assert found is not None or demand > 0.99 * sum(item.per_s * item.most for item in items)
    if found is not None:
        assert _covers(items, found, demand)
        cost = sum(item.cost * n for item, n in zip(items, found, strict=True))
        # A cover of a little more is never cheaper than one of this on the grid.
        more = [
            sum(item.cost * n for item, n in zip(items, some, strict=True))
            for some in itertools.product(*(range(item.most + 1) for item in items))
            if _covers(items, some, 1.02 * demand)
        ]
        assert min(costs) <= cost * (1.0 + 1e-9)
        assert cost <= min(more, default=cost) * (1.0 + 1e-9)


def test_what_runs_is_kept_unless_another_saves_more_than_starting_costs() -> None:
    plan = planner()
    asked = problem()
    first = plan(asked)
    assert plan.quick == 1
    names = {one.id: f"{one.id}-tabcd" for one in first.instances}
    running = tuple(one.model_copy(update={"id": names[one.id]}) for one in first.instances)
    again = plan(asked.replace(running=running))
    assert {one.id for one in again.instances} == set(names.values())
    assert all(one.kept for one in again.instances)
    assert again.usd_per_hour == pytest.approx(first.usd_per_hour)
    dear = asked.replace(
        running=running,
        offers=tuple(
            o
            if o.market != "spot" or o.region == asked.regions[0]
            else o.model_copy(update={"usd_per_hour": 0.97 * o.usd_per_hour})
            for o in asked.offers
        ),
        settings=asked.settings.model_copy(update={"init_penalty": 0.2}),
    )
    assert all(one.kept for one in plan(dear).instances)


def test_services_that_want_the_same_machines_share_them() -> None:
    plan = planner()
    found = plan(problem(40.0, 40.0, available=2))
    used = count_machines(found.instances)
    assert all(count <= 2 for count in used.values())
    assert found.solver == "cover"
    carried = {"chat": 0.0, "code": 0.0}
    for one in found.instances:
        carried[one.service] += one.throughput_per_s
    assert min(carried.values()) >= 40.0


def test_equal_problems_have_equal_plans_whatever_was_planned_before() -> None:
    warm = planner()
    for rate in (10.0, 20.0, 33.3):
        warm(problem(rate))
    assert warm(problem(41.5)) == planner()(problem(41.5))


def test_a_template_must_be_known() -> None:
    from atoll.core.errors import UsageError

    with pytest.raises(UsageError, match="no template"):
        TemplatePlanner(problem().catalog(), ())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is timed by its own work, not by who else is there."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def real_problem() -> Problem:
    return Problem(
        name="real",
        services=(
            builders.service("mini", model="llama-3.2-1b", phases="together", rate_per_s=30.0),
            builders.service("chat", phases="together", rate_per_s=12.0),
        ),
        offers=tuple(
            builders.offer(region, kind, usd, available=16, market=market)
            for region in ("aws/us-east-2", "aws/us-west-2")
            for kind, price in (("L4:1", 0.8), ("L40S:1", 1.9))
            for market, usd in (("on-demand", price), ("spot", 0.4 * price))
        ),
        settings=builders.problem().settings.model_copy(update={"max_nodes_per_instance": 2}),
    )


def real_templates(asked: Problem) -> tuple[SizedTemplate, ...]:
    """Templates as the performance model has them: what they carry is not simulated here."""
    from atoll.prove.prospects import find_prospects
    from atoll.solve.templates.library import template_libraries

    sized = size_for_share(asked)
    libraries = template_libraries(sized, asked.catalog())
    roles = [str(role) for role in asked.roles]
    found = find_prospects(sized, asked.catalog(), libraries, Derating(), roles, 6, 0.0)
    return tuple(SizedTemplate(*key, one, 1.0) for key, one in sorted(found.items()))


@pytest.mark.usefixtures("unhurried")
def test_quick_plans_cost_what_the_usual_allocation_finds() -> None:
    asked = real_problem()
    plan = TemplatePlanner(asked.catalog(), real_templates(asked))
    running: tuple[Instance, ...] = ()
    for factor in (1.0, 0.6, 1.7):
        now = asked.replace(
            services=tuple(
                s.model_copy(update={"rate_per_s": factor * s.rate_per_s}) for s in asked.services
            ),
            running=running,
            settings=asked.settings.model_copy(update={"init_penalty": 1.0 / 12.0}),
        )
        quick, slow = plan(now), plan._allocate(now)
        assert quick.solver == "cover"
        assert quick.objective == pytest.approx(slow.objective, rel=0.01)
        assert not [v for v in validate(quick, size_for_share(now)) if v.rule in ("offer", "count")]
        running = quick.instances


@pytest.mark.usefixtures("unhurried")
def test_limits_of_the_whole_are_for_the_usual_allocation() -> None:
    asked = real_problem().replace(limits=Limits(spot_share=0.5))
    plan = TemplatePlanner(asked.catalog(), real_templates(asked))
    found = plan(asked)
    assert (plan.quick, plan.slow) == (0, 1)
    spot = sum(n.gpus for i in found.instances for n in i.nodes if n.market == "spot")
    assert 0 < spot <= 0.5 * found.gpus


def test_toys_are_templates() -> None:
    assert {one.per_s for one in templates(("chat",))} == {10.0, 4.0, 3.0}
