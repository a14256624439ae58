"""Plans sized by simulation: enough requests keep their promises, on arrivals that no plan was sized with."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.catalog import Catalog
from atoll.plan.files.examples import find_example
from atoll.plan.files.read import read_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.plan.validate.check import validate
from atoll.prove import kept as keeping
from atoll.prove import rent_promises
from atoll.prove.kept import KeptSample, KeptShares, look_at, sample_kept
from atoll.prove.place_promises import see_promises
from atoll.prove.planning import plan as plan_fleet
from atoll.prove.rent_promises import _Prover, keep_promises
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve import registry
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.workload.lengths import LengthMix
from tests.sim.builders import cluster_plan, cluster_problem

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
FRESH = Effort(cached=False)


def solve(problem: Problem, effort: Effort, seconds: float) -> Plan:
    return registry.solve(problem, PlanRequest(effort=effort, deadline_s=seconds, catalog=CATALOG))


def kept(problem: Problem, seconds: float = 300.0) -> Plan:
    return keep_promises(problem, PlanRequest(effort=FRESH, deadline_s=seconds, catalog=CATALOG))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return kept(PROBLEM)


def test_enough_requests_keep_their_promises(plan: Plan) -> None:
    (found,) = plan.promises
    assert found.target == 0.95
    assert found.kept >= found.target
    assert found.low <= found.kept <= min(found.kept_ttft, found.kept_tpot) <= 1.0
    assert found.cause is None
    assert validate(plan, PROBLEM) == []
    assert plan.problem_hash == PROBLEM.content_hash()


def test_what_the_plan_says_holds_on_yet_other_arrivals(plan: Plan) -> None:
    (again,) = look_at(plan, PROBLEM, CATALOG, first_seed=5001)
    assert again.kept >= 0.95 - 0.005
    assert again.kept == pytest.approx(plan.promises[0].kept, abs=0.03)


def test_a_plan_for_capacity_alone_costs_less_and_keeps_less(plan: Plan) -> None:
    bare = registry.solve(PROBLEM, PlanRequest(effort=FRESH, catalog=CATALOG))
    assert plan.capacity_bound is not None
    assert plan.capacity_bound <= bare.usd_per_hour <= plan.usd_per_hour
    assert look_at(bare, PROBLEM, CATALOG)[0].kept <= plan.promises[0].kept + 1e-9
    assert plan.bound is not None
    assert plan.bound <= plan.usd_per_hour


def test_more_asked_for_costs_no_less(plan: Plan) -> None:
    strict = kept(PROBLEM.replace(services=(CHAT.model_copy(update={"attainment": 0.999}),)))
    assert strict.usd_per_hour >= plan.usd_per_hour
    assert strict.promises[0].kept >= 0.999


@pytest.mark.slow
def test_bursts_cost_no_less(plan: Plan) -> None:
    bursty = kept(PROBLEM.replace(services=(CHAT.model_copy(update={"burstiness": 3.0}),)))
    assert bursty.usd_per_hour >= plan.usd_per_hour


def test_the_same_plan_every_time(plan: Plan) -> None:
    assert kept(PROBLEM).to_json() == plan.to_json()


def test_prompts_that_take_too_long_alone_are_named() -> None:
    # Most prompts are short; the longest twentieth take longer than ttft, or nearly, alone.
    spread = Lengths.of(LengthMix(600.0, 50.0, 600.0**2 * 11.0, 2500.0))
    late = CHAT.model_copy(update={"lengths": spread, "ttft_s": 0.15, "rate_per_s": 1.0})

    found = kept(PROBLEM.replace(services=(late,)))

    (seen,) = found.promises
    assert seen.kept < seen.target
    assert seen.cause is not None
    assert "longest prompts" in seen.cause
    assert found.instances


def test_a_deadline_returns_the_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> list[float]:
        raise SimulationCutShortError("late")

    monkeypatch.setattr(keeping, "simulate_kept", late)
    found = kept(PROBLEM)
    assert found.cut_short
    assert found.instances
    assert validate(found, PROBLEM) == []


def test_no_plan_on_the_way_is_begun_after_the_deadline(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a moment, rules instead of it included: a dozen of them overran 3 s by 10 s."""
    prover = _Prover(PROBLEM, PlanRequest(effort=FRESH, deadline_s=60.0, catalog=CATALOG))
    prover.deadline = Deadline(0.0)
    monkeypatch.setattr(rent_promises, "solve", lambda *_: pytest.fail("planned"))
    for step in (prover._size, lambda: prover._simplest(PROBLEM, FRESH, plan)):
        with pytest.raises(SimulationCutShortError):
            step()


def test_an_empty_plan_stays_empty() -> None:
    none = PROBLEM.replace(
        offers=(PROBLEM.offers[0].model_copy(update={"node_type": "T4:1"}),),
        services=(CHAT.model_copy(update={"tpot_s": 0.001}),),
    )
    found = kept(none)
    assert found.status == "infeasible"
    assert not found.promises


def test_a_sample_has_the_mean_of_its_runs_and_is_surer_with_more() -> None:
    runs = (KeptShares(0.8, 0.9, 1.0), KeptShares(1.0, 1.0, 1.0))
    few, many = KeptSample(runs), KeptSample(runs * 8)

    assert few.mean == many.mean == KeptShares(0.9, 0.95, 1.0)
    assert few.half == pytest.approx(12.706 * few.error, rel=1e-3)
    assert many.half < few.half
    assert not few.is_sure(0.95)
    assert many.is_sure(0.5)


def test_services_that_are_sure_are_simulated_no_more(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, list[str]]] = []

    def shares(*given: object, services: list[str]) -> dict[str, KeptShares]:
        seed = given[3]
        assert isinstance(seed, int)
        asked.append((seed, services))
        near = 0.95 + (0.02 if seed % 2 else -0.02)
        both = {
            "below": KeptShares(0.9, 0.9, 1.0),
            "hopeless": KeptShares(0.5, 0.5, 1.0),
            "near": KeptShares(near, near, 1.0),
        }
        return {name: both[name] for name in services if name in both}

    monkeypatch.setattr(keeping, "simulate_kept", shares)
    names = ("below", "hopeless", "near", "nobody")
    problem = PROBLEM.replace(services=[CHAT.model_copy(update={"name": n}) for n in names])
    targets = dict.fromkeys(names, 0.95)

    def sample(**more: Any) -> dict[str, KeptSample]:
        asked.clear()
        return sample_kept(
            plan, problem, CATALOG, targets, first_seed=7, min_runs=3, max_runs=6, **more
        )

    found = sample()
    three = ["below", "hopeless", "near"]
    assert asked == [
        (7, list(names)),
        *((n, three) for n in (8, 9)),
        *((n, ["near"]) for n in (10, 11, 12)),
    ]
    assert {name: len(one.runs) for name, one in found.items()} == {
        "below": 3, "hopeless": 3, "near": 6
    }  # fmt: skip
    # One that is far below needs no second look; once one is surely below, the rest is no matter.
    short = sample(until_short=True)
    assert asked == [(7, list(names)), *((n, ["below", "near"]) for n in (8, 9))]
    assert {name: len(one.runs) for name, one in short.items()} == {
        "below": 3, "hopeless": 1, "near": 3
    }  # fmt: skip
    # What was simulated before goes on where it was.
    again = sample(known={"near": KeptSample(short["near"].runs[:2]), "below": short["below"]})
    assert asked == [
        (7, ["hopeless", "nobody"]),
        (8, ["hopeless"]),
        (9, ["hopeless", "near"]),
        *((n, ["near"]) for n in (10, 11, 12)),
    ]
    assert again == found


def test_a_cluster_says_what_it_keeps_and_at_which_load(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cluster_problem([1000.0])
    plan = cluster_plan(own, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])

    def shares(_plan: Plan, asked: Problem, *_: object, **__: object) -> dict[str, KeptShares]:
        good = asked.services[0].rate_per_s <= 0.6
        return {"m": KeptShares(0.99, 1.0, 0.99) if good else KeptShares(0.4, 0.9, 0.4)}

    monkeypatch.setattr(keeping, "simulate_kept", shares)
    (found,) = see_promises(plan, own, CATALOG).promises
    assert found.kept == pytest.approx(0.4)
    assert found.cause == "tokens come too slowly; would keep it at 56% of the demand"


@pytest.mark.parametrize(
    ("rate", "ttft_s", "tpot_s"),
    [(30.0, 1.0, 0.06), pytest.param(55.0, 0.4, 0.04, marks=pytest.mark.slow)],
)
def test_no_smaller_number_of_replicas_keeps_the_promises(
    rate: float, ttft_s: float, tpot_s: float
) -> None:
    update = {"rate_per_s": rate, "ttft_s": ttft_s, "tpot_s": tpot_s, "phases": "together"}
    own = PROBLEM.replace(services=(CHAT.model_copy(update=update),))
    found = kept(own)

    # All there is to choose is how many replicas of one template stand: each number once, fewest first.
    number, tried = 0, set[int]()
    for step in range(400):
        asked = own.services[0].model_copy(update={"rate_per_s": rate * 1.02**step})
        bare = solve(own.replace(services=(asked,)), FRESH, 60.0)
        number = len(bare.instances)
        if number in tried:
            continue
        tried.add(number)
        if look_at(bare, own, CATALOG)[0].is_surely_kept:
            break

    assert len(found.instances) == number


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.7, 1.3])
def test_a_fleet_is_planned_at_any_demand(share: float) -> None:
    """At 0.7 a template that nobody had simulated came in with the last plan, and there was none at all."""
    own = read_problem(find_example("quickstart"))
    services = [
        each.model_copy(update={"rate_per_s": each.rate_per_s * share}) for each in own.services
    ]
    found = plan_fleet(own.replace(services=services))
    assert found.status in ("optimal", "feasible")
    assert all(promise.is_kept for promise in found.promises)


@pytest.mark.slow
def test_the_engine_that_carries_most_in_simulation_is_taken() -> None:
    """By the model SGLang carries 4 % more on two L40S, and breaks the promise of every fourth answer there.

    With it the plan cost 19 % more than its bound.
    """
    found = plan_fleet(read_problem(find_example("quickstart")), PlanRequest(error_bars=False))
    assert all(promise.is_kept for promise in found.promises)
    assert found.gap is not None
    assert found.gap < 0.08
