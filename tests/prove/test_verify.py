"""Raising headroom until a simulation is satisfied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.plan.validate.check import check
from atoll.prove import verify as verifying
from atoll.prove.deadline import SimulationCutShortError, keep_deadline
from atoll.solve import registry
from atoll.solve.effort import Countdown, Effort
from atoll.workload.lengths import LengthMix

CATALOG = Catalog.default()
CHAT = Service(
    name="chat",
    model="llama-3.1-8b",
    ttft_s=1.0,
    tpot_s=0.06,
    rate_per_s=30.0,
    lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
    phases="apart",
)
PROBLEM = Problem(
    name="small",
    services=(CHAT,),
    offers=(Offer(region="here", node_type="L40S:1", available=40, usd_per_hour=1.86),),
    settings=Settings(max_nodes_per_instance=1, engine="none"),
)


def solve(problem: Problem, _seconds: float = 60.0) -> Plan:
    return registry.solve(problem, effort=Effort(cached=False), catalog=CATALOG)


def with_headroom(headroom: float) -> Problem:
    return PROBLEM.replace(services=(CHAT.model_copy(update={"headroom": headroom}),))


def seen(share: float) -> Any:
    return SimpleNamespace(
        name="chat", attainment=share, attainment_ttft=share, attainment_tpot=1.0
    )


def test_a_plan_that_holds_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "simulate_services", lambda *_: {"chat": seen(0.97)})
    first = solve(PROBLEM)
    made = verifying.verify(first, PROBLEM, CATALOG, solve, 0.95)
    assert made.instances == first.instances
    assert (made.status, made.bound) == (first.status, first.bound)
    assert "97.0%" in made.notes[0]
    assert "headroom 1.00" in made.notes[0]


def test_headroom_grows_until_promises_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = solve(PROBLEM)

    def capacity(plan: Plan) -> float:
        """Return what the plan can carry as a multiple of the demand."""
        return min(
            sum(i.throughput_per_s for i in plan.of_role(role)) / PROBLEM.demand(role)
            for role in map(str, PROBLEM.roles)
        )

    needed = 1.5 * capacity(first)

    def simulated(
        plan: Plan, problem: Problem, _catalog: Catalog, _deadline: Countdown | None = None
    ) -> dict[str, Any]:
        assert problem == PROBLEM  # it is the demand as given that is simulated
        return {"chat": seen(min(1.0, capacity(plan) / needed))}

    monkeypatch.setattr(verifying, "simulate_services", simulated)
    made = verifying.verify(first, PROBLEM, CATALOG, solve, 0.95)
    check(made, PROBLEM, CATALOG)
    assert made.usd_per_hour > first.usd_per_hour
    assert made.bound == first.bound
    assert made.gap == pytest.approx(1.0 - (first.bound or 0.0) / (made.objective or 1.0))
    assert simulated(made, PROBLEM, CATALOG)["chat"].attainment >= 0.95


def test_what_more_nodes_cannot_mend_is_an_error_with_the_closest_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = iter([0.5, 0.6, 0.55, 0.55, 0.55, 0.94])
    monkeypatch.setattr(verifying, "simulate_services", lambda *_: {"chat": seen(next(shares))})
    first = solve(PROBLEM)
    with pytest.raises(verifying.UnverifiedError, match=r"chat keeps ttft for 60.0%") as caught:
        verifying.verify(first, PROBLEM, CATALOG, solve, 0.95)
    assert "input_tail" in (caught.value.hint or "")
    # Three rounds without any gain are enough, and of all plans the closest is kept.
    assert next(shares) == 0.94
    # The second plan simulated is the first one that more headroom makes another.
    headroom = next(
        headroom
        for headroom in (1.1**step for step in range(1, 10))
        if solve(with_headroom(headroom)).instances != first.instances
    )
    assert caught.value.plan.notes == (
        f"chat keeps its promises for 60.0% of requests, with headroom {headroom:.2f}",
    )
    check(caught.value.plan, PROBLEM, CATALOG)


def test_phases_are_taken_apart_where_headroom_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = PROBLEM.replace(services=(CHAT.model_copy(update={"phases": "auto"}),))

    def simulated(plan: Plan, *_: Any) -> dict[str, Any]:
        return {"chat": seen(0.5 if plan.of_role("chat/llm/both") else 0.97)}

    monkeypatch.setattr(verifying, "simulate_services", simulated)
    first = solve(both)
    assert first.of_role("chat/llm/both")
    made = verifying.verify(first, both, CATALOG, solve, 0.95)
    assert not made.of_role("chat/llm/both")
    assert "97.0%" in made.notes[0]
    check(made, both, CATALOG)


def test_the_deadline_leaves_the_last_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Countdown(60.0)
    asked: list[float] = []

    def late(*_: Any) -> dict[str, Any]:
        if asked:
            raise SimulationCutShortError("late")
        return {"chat": seen(0.5)}

    def plan(problem: Problem, seconds: float) -> Plan:
        asked.append(seconds)
        return solve(problem)

    monkeypatch.setattr(verifying, "simulate_services", late)
    first = solve(PROBLEM)
    made = verifying.verify(first, PROBLEM, CATALOG, plan, 0.95, deadline=deadline)
    assert made.cut_short
    assert made.notes == ("not simulated to its end: the deadline came first",)
    assert made.usd_per_hour >= first.usd_per_hour
    assert made.problem_hash == first.problem_hash
    assert 0 < asked[0] <= 30.0
    check(made, PROBLEM, CATALOG)


def test_no_time_left_after_a_simulation_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "simulate_services", lambda *_: {"chat": seen(0.5)})
    first = solve(PROBLEM)
    made = verifying.verify(first, PROBLEM, CATALOG, solve, 0.95, deadline=Countdown(0.0))
    assert made.cut_short
    assert made.instances == first.instances
    assert "50.0%" in made.notes[0]
    assert registry.CUT_SHORT in made.reasons


def test_planning_again_that_is_cut_short_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "simulate_services", lambda *_: {"chat": seen(0.5)})
    first = solve(PROBLEM)
    late = first.model_copy(update={"status": "partial", "cut_short": True})
    made = verifying.verify(first, PROBLEM, CATALOG, lambda *_: late, 0.95)
    assert made.cut_short
    assert made.instances == first.instances
    assert made.status == first.status


def test_simulations_keep_the_deadline() -> None:
    assert keep_deadline(None) is None
    watch = keep_deadline(Countdown(60.0))
    assert watch is not None
    watch(1, 2, 3.0)
    late = keep_deadline(Countdown(0.0))
    assert late is not None
    with pytest.raises(SimulationCutShortError):
        late(1, 2, 3.0)


def test_a_real_simulation() -> None:
    found = verifying.simulate_services(solve(PROBLEM), PROBLEM, CATALOG)["chat"]
    assert found.finished > 1000
    assert 0.0 <= (found.attainment or 0.0) <= 1.0
