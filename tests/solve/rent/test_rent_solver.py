"""Planning against the clock: time may cost templates and proof, but never a plan that serves everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Settings
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import CUT_SHORT, solve
from atoll.solve.rent import optimal
from atoll.solve.templates import library
from tests.plan.builders import EAST, WEST, catalog, offer, problem, service
from tests.seeds import examples

DEADLINE_S = 10.0


def fleet(available: int = 64, services: int = 4) -> Problem:
    return problem(
        offers=(
            offer(EAST, "L4:1", 0.6, available=available),
            offer(EAST, "L4:4", 5.0, available=available),
            offer(EAST, "L40S:1", 2.1, available=available),
            offer(WEST, "L40S:1", 2.2, available=available),
        ),
        services=tuple(
            service(f"s{i}", model="qwen3-32b", rate_per_s=0.5 + i, ttft_s=3.0 + i % 2, tpot_s=0.15)
            for i in range(services)
        ),
        settings=Settings(max_nodes_per_instance=4),
    )


def plan_with_ticks(monkeypatch: pytest.MonkeyPatch, own: Problem, tick_s: float) -> Plan:
    """Plan with a clock that goes on by so much whenever it is asked."""
    clock = itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr("time.perf_counter", lambda: tick_s * next(clock))
        library._KEPT.clear()
        return solve(
            own, PlanRequest(catalog=catalog(), deadline_s=DEADLINE_S, effort=Effort(cached=False))
        )


@pytest.mark.parametrize("tick_s", [0.0, 1e-4])
def test_time_that_suffices_shapes_nothing(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> None:
    plan = plan_with_ticks(monkeypatch, fleet(), tick_s)
    library._KEPT.clear()
    assert plan == solve(fleet(), PlanRequest(catalog=catalog(), effort=Effort(cached=False)))
    assert not plan.cut_short
    assert plan.status == "optimal"


def test_a_first_plan_that_is_not_needed_shapes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is short at first: a plan over single nodes is made, and forgotten."""
    monkeypatch.setattr("atoll.solve.rent.rent_solver._SHORT_TIME_SHARE", -1.0)
    drafts: list[optimal.Draft] = []
    draft = optimal.draft

    def note(*args: object, **options: object) -> optimal.Draft:
        drafts.append(draft(*args, **options))  # type: ignore[arg-type]
        return drafts[-1]

    monkeypatch.setattr(optimal, "draft", note)
    library._KEPT.clear()
    hurried = solve(fleet(), PlanRequest(catalog=catalog(), effort=Effort(cached=False)))
    assert [found.libraries.cut_short for found in drafts] == [True, False]
    assert drafts[0].merit < drafts[1].merit
    monkeypatch.undo()
    library._KEPT.clear()
    assert hurried == solve(fleet(), PlanRequest(catalog=catalog(), effort=Effort(cached=False)))


@examples(13)
@given(power=st.floats(-3.0, 1.5), services=st.integers(1, 5))
def test_however_fast_time_goes_everything_is_served(power: float, services: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plan = plan_with_ticks(monkeypatch, fleet(services=services), 10.0**power)
    assert min(plan.served_fraction.values()) == 1.0
    if plan.cut_short:
        assert CUT_SHORT in plan.reasons
        assert plan.status == "feasible"
    else:
        assert plan.status == "optimal"


def test_no_time_at_all_leaves_single_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with_ticks(monkeypatch, fleet(), 100.0)
    assert plan.cut_short
    assert (plan.bound, plan.gap) == (None, None)
    assert plan.solver == optimal.SOLVER
    assert {len(instance.nodes) for instance in plan.instances} == {1}


def test_what_is_short_of_demand_is_worse_than_what_costs_more() -> None:
    own = fleet(services=2)
    known = library.libraries(own, catalog())
    all_of_it = optimal.draft(own, catalog(), known, deadline_s=60.0, gap=1e-3, work=1.0)
    short = fleet(available=1, services=2)
    some = optimal.draft(short, catalog(), known, deadline_s=60.0, gap=1e-3, work=1.0)
    assert some.allocation.objective < all_of_it.allocation.objective
    assert some.merit < all_of_it.merit
    assert float(some.allocation.served.min()) < 1.0
    assert np.all(all_of_it.allocation.served == 1.0)


def test_large_programs_are_not_begun_when_time_is_nearly_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    deadline = Deadline(10.0)
    assert deadline.allows(100_000)
    assert not deadline.missed
    now[0] = 9.0
    assert deadline.allows(1_000)
    assert not deadline.missed
    assert not deadline.allows(100_000)
    assert deadline.missed
