"""Clusters of more than 100 machines: simulations are few and short, and say as much."""

from __future__ import annotations

import math
from functools import cache

import pytest

from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.prove import kept, place_promises
from atoll.prove.equal_parts import equal_part
from atoll.prove.kept import FRESH_SEED, is_large, simulate_kept
from atoll.prove.planning import NOT_FOR_LARGE, plan
from atoll.solve.effort import Effort
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.plan_request import PlanRequest
from benchmarks.planning.scale_placement import fleet

MACHINES = 104
WORK = 0.05


@cache
def asked(per_s: float = 2.0 * MACHINES) -> Problem:
    return parse_fleet(fleet(MACHINES)).scale_demand(per_s / (2.0 * MACHINES))


@cache
def largest() -> Plan:
    """The placement of the largest flow: two equal sites."""
    problem = asked()
    return solve("flow.search", problem, problem.catalog(), FlowEffort(promise=True, work=WORK))


def test_equal_sites_are_one_site_with_half_of_the_demand() -> None:
    problem, whole = asked(), largest()
    part = equal_part(whole, problem)
    assert part.number == len(whole.instances) == 2
    assert part.plan.instances == whole.instances[:1]
    assert [route.share for route in part.plan.routes] == [1.0]
    assert part.problem.services[0].rate_per_s == problem.services[0].rate_per_s / 2.0


def test_sites_that_differ_are_simulated_both() -> None:
    problem, whole = asked(), largest()
    first, second = whole.instances
    flows = (second.flows[0].model_copy(update={"per_s": 0.0}), *second.flows[1:])
    other = second.model_copy(update={"flows": flows})
    unlike = whole.model_copy(update={"instances": (first, other)})
    assert equal_part(unlike, problem).number == 1
    assert equal_part(unlike, problem).plan is unlike


def test_a_large_cluster_is_simulated_for_as_long_as_fills_it() -> None:
    problem, whole = asked(), largest()
    (service,) = problem.services
    stay_s = service.ttft_s + service.tpot_s * service.lengths.output_mean
    assert is_large(problem)
    assert kept._seconds(whole, problem, 6000) == pytest.approx(2.0 * stay_s)
    # Few requests need no limit.
    few = asked(1.0)
    assert kept._seconds(whole, few, 600) == pytest.approx(600.0)


def keeping_up_to(per_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, list[float]]:
    """The plan where simulation finds that promises are kept up to so many requests/s, and what was asked."""
    looked: list[float] = []

    def look_at(_plan: Plan, problem: Problem, *_: object, first_seed: int = FRESH_SEED) -> object:
        (service,) = problem.services
        looked.append(service.rate_per_s)
        share = 1.0 if service.rate_per_s <= per_s else 0.0
        return (
            KeptPromise(
                service=service.name,
                target=service.target,
                kept=share,
                low=share,
                high=share,
                kept_ttft=share,
                kept_tpot=share,
                cause=None if share else "tokens come too slowly",
            ),
        )

    monkeypatch.setattr(place_promises, "look_at", look_at)
    monkeypatch.setattr(place_promises, "fit_steps", lambda plan, *_: plan)
    request = PlanRequest(effort=Effort(work=WORK), deadline_s=math.inf)
    return plan(asked(), request), looked


def test_too_much_demand_is_placed_for_the_largest_share_that_keeps_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, most = asked(), min(largest().served_fraction.values())
    found, looked = keeping_up_to(30.0, monkeypatch)
    check(found, problem, problem.catalog())
    assert found.status == "partial"
    assert found.bound == largest().bound
    tried = [rate for rate in looked if rate <= 30.0]
    # No sixteenth more of what is carried would have been kept.
    assert max(tried) > 30.0 - most / 16.0 * problem.services[0].rate_per_s
    assert (
        min(found.served_fraction.values()) * problem.services[0].rate_per_s >= max(tried) * 0.999
    )
    (promise,) = found.promises
    share = max(tried) / problem.services[0].rate_per_s
    assert promise.cause == f"tokens come too slowly; would keep it at {share:.0%} of the demand"
    assert NOT_FOR_LARGE in found.notes


@pytest.mark.slow
def test_demand_below_the_capacity_is_kept_and_above_it_is_not() -> None:
    request = PlanRequest(deadline_s=3600.0)
    light = plan(asked(20.0), request)
    assert light.status == "feasible"
    assert all(promise.is_surely_kept for promise in light.promises)
    heavy = plan(asked(), request)
    assert heavy.status == "partial"
    assert heavy.promises[0].kept < 0.5
    assert not heavy.cut_short
    # At the share that it says the promise is kept, on arrivals of other seeds as well.
    (promise,) = heavy.promises
    percent = float(str(promise.cause).split("keep it at ")[1].split("%")[0])
    assert percent > 5.0
    problem = asked()
    less = problem.scale_demand((percent - 1.0) / 100.0)
    one = simulate_kept(heavy, less, problem.catalog(), 7)
    assert one["chat"].both >= promise.target
    assert plan(asked(), request) == heavy
