"""Raising headroom until a simulation is satisfied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.catalog import Catalog
from atoll.core.errors import InfeasibleError
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.plan.validate.check import check
from atoll.prove import verify as verifying
from atoll.solve import registry
from atoll.solve.effort import Effort
from atoll.workload.lengths import LengthMix

CATALOG = Catalog.default()
CHAT = Service(
    name="chat",
    model="llama-3.1-8b",
    ttft_s=1.0,
    tpot_s=0.06,
    rate_per_s=30.0,
    lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
)
PROBLEM = Problem(
    name="small",
    services=(CHAT,),
    offers=(Offer(region="here", node_type="L40S:1", available=40, usd_per_hour=1.86),),
    settings=Settings(max_nodes_per_instance=1, engine="none"),
)


def solve(problem: Problem) -> Plan:
    return registry.solve(problem, effort=Effort(cached=False), catalog=CATALOG)


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

    def simulated(plan: Plan, problem: Problem, catalog: Catalog) -> dict[str, Any]:
        assert problem == PROBLEM  # it is the demand as given that is simulated
        capacity = min(
            sum(i.throughput_per_s for i in plan.of_role(role)) / problem.demand(role)
            for role in map(str, problem.roles)
        )
        return {"chat": seen(min(1.0, capacity / 1.5))}

    monkeypatch.setattr(verifying, "simulate_services", simulated)
    made = verifying.verify(first, PROBLEM, CATALOG, solve, 0.95)
    check(made, PROBLEM, CATALOG)
    assert made.usd_per_hour > first.usd_per_hour
    assert made.bound == first.bound
    assert made.gap == pytest.approx(1.0 - (first.bound or 0.0) / (made.objective or 1.0))
    assert simulated(made, PROBLEM, CATALOG)["chat"].attainment >= 0.95


def test_what_more_nodes_cannot_mend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "simulate_services", lambda *_: {"chat": seen(0.6)})
    with pytest.raises(InfeasibleError, match=r"chat keeps ttft for 60.0%") as caught:
        verifying.verify(solve(PROBLEM), PROBLEM, CATALOG, solve, 0.95)
    assert "input_tail" in (caught.value.hint or "")


def test_a_real_simulation() -> None:
    found = verifying.simulate_services(solve(PROBLEM), PROBLEM, CATALOG)["chat"]
    assert found.finished > 1000
    assert 0.0 <= (found.attainment or 0.0) <= 1.0
