"""Plans for energy and carbon: never worse than the cheapest, above their bound, limits in true dollars."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.plan.footprint import ObjectiveWeights, PowerGrid
from atoll.plan.plan import Plan
from atoll.plan.power import draw_of
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.check import check
from atoll.prove.planning import plan as prove
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.weighted import plan_weighted, stamp_power
from atoll.workload.lengths import LengthMix
from tests.seeds import examples

CATALOG = Catalog.default()
DIRTY, CLEAN = "dirty", "clean"
GRID = PowerGrid(g_per_kwh={DIRTY: 600.0, CLEAN: 30.0}, pue=1.2)
SEEN: list[Plan] = []
few = examples(6)


def problem(rate: float = 6.0, **changes: object) -> Problem:
    """Two services; machines cost more where electricity is clean."""

    def service(name: str, model: str, per_s: float) -> Service:
        return Service(
            name=name,
            model=model,
            ttft_s=1.0,
            tpot_s=0.06,
            rate_per_s=per_s,
            lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
            phases="together",
        )

    values: dict[str, object] = {
        "name": "weighed",
        "services": (
            service("chat", "llama-3.1-8b", rate),
            service("mini", "llama-3.2-1b", 2.0 * rate),
        ),
        "offers": tuple(
            Offer(region=region, node_type=kind, available=12, usd_per_hour=usd * factor)
            for region, factor in ((DIRTY, 1.0), (CLEAN, 1.3))
            for kind, usd in (("L4:1", 1.5), ("L40S:1", 1.4), ("A10G:1", 0.7))
        ),
        "settings": Settings(max_nodes_per_instance=1),
        "grid": GRID,
    }
    return Problem.model_validate(values | changes)


@cache
def cheapest() -> Plan:
    return solve(problem())


def value(made: Plan, weights: ObjectiveWeights) -> float:
    """The objective from first principles: rent, kW and tonnes, each with its price."""
    asked = problem()
    draw = draw_of(made, asked, CATALOG)
    kw = {region: watts * 1.2 / 1e3 for region, watts in draw.region_watts().items()}
    tonnes = sum(drawn * GRID.g_per_kwh[region] / 1e6 for region, drawn in kw.items())
    energy = weights.usd_per_kwh * sum(kw.values())
    return weights.usd * made.usd_per_hour + energy + weights.usd_per_tonne * tonnes


WEIGHTS = st.builds(
    ObjectiveWeights,
    usd=st.sampled_from((0.0, 1.0, 1.0)),
    usd_per_kwh=st.sampled_from((0.0, 0.2, 3.0, 30.0)),
    usd_per_tonne=st.sampled_from((0.0, 100.0, 5e3, 1e5)),
).filter(lambda weights: not weights.rent_only)


@pytest.mark.slow
@few
@given(weights=WEIGHTS)
def test_no_worse_than_the_cheapest_and_above_the_bound(weights: ObjectiveWeights) -> None:
    asked = problem(weights=weights)
    made = solve(asked)
    check(made, asked, CATALOG)
    assert made.power is not None
    reached = made.power.weighted_usd_per_hour
    assert reached is not None
    assert reached == pytest.approx(value(made, weights))
    assert reached <= value(cheapest(), weights) * (1.0 + 1e-9)
    assert made.usd_per_hour >= cheapest().usd_per_hour * (1.0 - 2e-3)
    # The bound holds for every plan that serves all, whatever that one was made for.
    bound = made.power.weighted_bound
    assert bound is not None
    SEEN.append(made)
    assert 0.0 < bound <= min(value(plan, weights) for plan in SEEN) * (1.0 + 1e-9)
    # Nothing is claimed of its dollars, and those of the cheapest plan stand beside.
    assert (made.bound, made.gap, made.status) == (None, None, "feasible")
    assert made.power.cheapest_usd_per_hour == pytest.approx(cheapest().usd_per_hour)


def test_carbon_moves_a_fleet_to_clean_electricity() -> None:
    asked = problem(weights=ObjectiveWeights(usd=0.0, usd_per_tonne=1.0))
    made = solve(asked)
    assert {instance.region for instance in cheapest().instances} == {DIRTY}
    assert {instance.region for instance in made.instances} == {CLEAN}
    assert made.power is not None
    assert made.power.kg_per_hour is not None
    kg = value(cheapest(), ObjectiveWeights(usd=0.0, usd_per_tonne=1e3))
    assert made.power.kg_per_hour < 0.1 * kg
    assert made == solve(asked)


def test_of_equal_energy_the_cheaper_market_is_taken() -> None:
    asked = problem(weights=ObjectiveWeights(usd=0.0, usd_per_kwh=1.0))
    spot = tuple(
        offer.model_copy(update={"market": "spot", "usd_per_hour": 0.4 * offer.usd_per_hour})
        for offer in asked.offers
    )
    both = asked.replace(offers=(*asked.offers, *spot))

    def find_dear(given: Problem, request: PlanRequest) -> Plan:
        """A plan that is as good as any by energy, and rents on demand."""
        dear = tuple(offer for offer in given.offers if offer.market == "on-demand")
        found = solve(given.replace(offers=dear), request)
        return found.model_copy(update={"problem_hash": given.content_hash()})

    made = plan_weighted(both, PlanRequest(), find_dear)
    alone = plan_weighted(asked, PlanRequest(), solve)
    assert {node.market for one in made.instances for node in one.nodes} == {"spot"}
    assert made.usd_per_hour == pytest.approx(0.4 * alone.usd_per_hour)
    assert draw_of(made, both, CATALOG).watts == pytest.approx(draw_of(alone, asked, CATALOG).watts)
    check(made, both, CATALOG)


def test_rent_alone_plans_as_ever() -> None:
    asked = problem()
    plain = asked.replace(grid=PowerGrid())
    for weights in (ObjectiveWeights(), ObjectiveWeights(usd=3.0)):
        made = solve(asked.replace(weights=weights))
        renamed = made.model_copy(update={"problem_hash": plain.content_hash()})
        assert renamed == solve(plain)
        assert made.power is None
    stamped = prove(asked, PlanRequest(capacity_only=True))
    assert stamped.power is not None
    assert stamped.model_copy(update={"power": None}) == cheapest()
    assert prove(plain, PlanRequest(capacity_only=True)).power is None


def test_budgets_are_in_true_dollars() -> None:
    energy = ObjectiveWeights(usd=0.0, usd_per_kwh=1.0)
    free = solve(problem(weights=energy))
    assert free.usd_per_hour > cheapest().usd_per_hour * 1.05
    budget = 0.5 * (free.usd_per_hour + cheapest().usd_per_hour)
    asked = problem(weights=energy, limits=Limits(budget_usd_per_hour=budget))
    made = solve(asked)
    check(made, asked, CATALOG)
    assert made.status == "feasible"
    assert made.usd_per_hour <= budget
    assert free.power is not None
    assert made.power is not None
    assert free.power.watts <= made.power.watts <= value(cheapest(), energy) * 1e3 + 1e-6


def test_promises_are_kept_at_the_prices_that_count() -> None:
    asked = problem(weights=ObjectiveWeights(usd=0.0, usd_per_tonne=1.0))
    kept: list[Problem] = []

    def keep(priced: Problem, request: PlanRequest) -> Plan:
        kept.append(priced)
        return solve(priced, request)

    made = plan_weighted(asked, PlanRequest(catalog=CATALOG), solve, keep=keep)
    # The cheapest one, and one at prices that stand for carbon: there clean machines are cheaper.
    assert len(kept) == 2
    assert kept[0].offers == asked.offers
    prices = {offer.key: offer.usd_per_hour for offer in kept[1].offers}
    assert prices[CLEAN, "L4:1", "on-demand"] < prices[DIRTY, "L4:1", "on-demand"]
    assert {instance.region for instance in made.instances} == {CLEAN}
    assert made.problem_hash == asked.content_hash()


def test_what_cannot_be_weighed_is_refused_in_a_line() -> None:
    carbon = ObjectiveWeights(usd_per_tonne=10.0)
    with pytest.raises(UsageError, match=f"grid: .*{CLEAN}"):
        solve(problem(weights=carbon, grid=PowerGrid(g_per_kwh={DIRTY: 400.0})))
    # A region without machines needs no grid.
    offers = tuple(
        o.model_copy(update={"available": 0}) if o.region == CLEAN else o for o in problem().offers
    )
    made = solve(problem(weights=carbon, grid=PowerGrid(g_per_kwh={DIRTY: 400.0}), offers=offers))
    assert made.power is not None


def test_demand_that_cannot_be_met_is_said_as_ever() -> None:
    asked = problem(
        rate=40.0,
        weights=ObjectiveWeights(usd_per_kwh=1.0),
        offers=(Offer(region=DIRTY, node_type="L4:1", available=2, usd_per_hour=1.0),),
        settings=Settings(max_nodes_per_instance=1, on_shortage="fail"),
    )
    made = solve(asked)
    assert made.status == "infeasible"
    assert made.problem_hash == asked.content_hash()
    assert stamp_power(made, asked, CATALOG) is made
    partial = solve(asked.replace(settings=Settings(max_nodes_per_instance=1)))
    assert partial.status == "partial"
    assert partial.power is not None
    assert partial.power.weighted_bound is None
