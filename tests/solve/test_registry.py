"""Whole plans: what every solver must keep, and how cost moves when the problem does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.check import validate
from atoll.solve import registry
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.rent import rent_solver as rent
from atoll.solve.rent.rent_solver import BASELINES
from atoll.workload.lengths import LengthMix
from tests.seeds import examples

CATALOG = Catalog.default()
TYPES = ("L4:1", "L40S:1", "A10G:1")
PRICES = {"L4:1": 0.8, "L40S:1": 1.86, "A10G:1": 1.0}


def service(
    name: str, model: str, rate: float, *, ttft_s: float = 1.0, tpot_s: float = 0.06
) -> Service:
    mix = LengthMix.fixed(600.0, 120.0)
    return Service(
        name=name,
        model=model,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        rate_per_s=rate,
        lengths=Lengths.of(mix),
    )


def problem(
    rate: float = 8.0,
    available: int = 12,
    *,
    ttft_s: float = 1.0,
    tpot_s: float = 0.06,
    budget: float | None = None,
    phases: str = "apart",
) -> Problem:
    chat = service("chat", "llama-3.1-8b", rate, ttft_s=ttft_s, tpot_s=tpot_s)
    tiny = service("tiny", "llama-3.2-3b", rate / 2)
    offers = [
        Offer(
            region=region, node_type=kind, available=available, usd_per_hour=PRICES[kind] * factor
        )
        for region, factor in (("here", 1.0), ("there", 1.2))
        for kind in TYPES
    ]
    return Problem(
        name="small",
        services=(chat.model_copy(update={"phases": phases}), tiny),
        offers=tuple(offers),
        limits=Limits(budget_usd_per_hour=budget),
        settings=Settings(max_nodes_per_instance=3, engine="none"),
    )


def solve(own: Problem, solver: str | None = None, gap: float = 1e-3) -> Plan:
    effort = Effort(gap=gap, cached=False)
    return registry.solve(own, PlanRequest(solver=solver, effort=effort, catalog=CATALOG))


def cost(own: Problem) -> float:
    plan = solve(own, gap=1e-6)
    assert plan.status == "optimal", plan.reasons
    assert plan.objective is not None
    return plan.objective


@pytest.mark.parametrize("name", rent.NAMES)
@pytest.mark.parametrize("phases", ["apart", "together"])
def test_every_solver_passes_the_validator_and_meets_demand(name: str, phases: str) -> None:
    own = problem(phases=phases)
    plan = solve(own, solver=name)
    assert validate(plan, own, CATALOG) == []
    assert min(plan.served_fraction.values()) >= 1.0
    assert plan.solver == name


@examples(6)
@given(rate=st.floats(1.0, 60.0))
def test_no_baseline_is_cheaper(rate: float) -> None:
    own = problem(rate, available=40)
    best = cost(own)
    for name in BASELINES:
        plan = solve(own, solver=name)
        if min(plan.served_fraction.values()) >= 1.0:
            assert plan.usd_per_hour >= best * (1 - 1e-6), name


@examples(6)
@given(rate=st.floats(1.0, 30.0), more=st.floats(1.0, 2.0))
def test_cost_never_falls_when_demand_rises(rate: float, more: float) -> None:
    assert cost(problem(rate * more, 60)) >= cost(problem(rate, 60)) * (1 - 2e-6)


@examples(5)
@given(available=st.integers(8, 20), extra=st.integers(0, 20))
def test_cost_never_rises_when_more_is_available(available: int, extra: int) -> None:
    assert cost(problem(20.0, available + extra)) <= cost(problem(20.0, available)) * (1 + 2e-6)


@pytest.mark.parametrize("looser", [{"ttft_s": 2.0}, {"tpot_s": 0.12}])
def test_cost_never_rises_when_a_promise_loosens(looser: dict[str, float]) -> None:
    assert cost(problem(12.0, 40, **looser)) <= cost(problem(12.0, 40)) * (1 + 2e-6)  # type: ignore[arg-type]


def test_order_of_inputs_changes_nothing() -> None:
    own = problem()
    turned = own.replace(services=own.services[::-1], offers=own.offers[::-1])
    one = solve(own)
    other = solve(turned)
    assert one.instances == other.instances
    assert one.objective == other.objective


def test_same_input_same_plan() -> None:
    own = problem(17.0)
    one, other = (solve(own).to_json() for _ in range(2))
    assert one == other


@pytest.mark.slow
def test_shortage_serves_a_common_fraction_and_says_so() -> None:
    own = problem(400.0, 2)
    plan = solve(own)
    assert plan.status == "partial"
    shares = list(plan.served_fraction.values())
    assert 0.0 < min(shares) < 1.0
    assert plan.reasons
    assert validate(plan, own, CATALOG) == []


def test_budget_is_kept() -> None:
    own = problem(20.0, 40)
    full = cost(own)
    limited = problem(20.0, 40, budget=full * 0.6)
    plan = solve(limited)
    assert plan.usd_per_hour <= full * 0.6 * (1 + 1e-9)
    assert plan.status == "partial"


def test_what_runs_is_kept_when_starting_costs() -> None:
    own = problem(9.0).replace(
        settings=Settings(max_nodes_per_instance=3, engine="none", init_penalty=0.5)
    )
    first = solve(own)
    again = solve(own.replace(running=first.instances))
    assert all(instance.kept for instance in again.instances)
    assert again.init_usd == 0.0
    assert {i.id for i in again.instances} == {i.id for i in first.instances}


def test_unknown_solvers_are_named() -> None:
    own = problem()
    with pytest.raises(UnknownNameError, match="optimal"):
        solve(own, solver="best")
