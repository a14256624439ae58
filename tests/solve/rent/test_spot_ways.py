"""A limit on spot: at most a share of every service's requests, whatever else stands; against trying all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Offer, Problem, Settings
from atoll.plan.validate.check import validate
from atoll.plan.validate.validate_spot import spot_share
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.choosing import search as level_search
from tests.plan.builders import EAST, catalog, offer, service
from tests.reference.rent_ilp import RentReference, layouts
from tests.seeds import examples
from tests.solve.rent.test_choosing_plans import fleet as choosing_fleet

KINDS = ("L4:1", "L40S:1")


def limited(phases: str, rate: float, share: float, offers: Sequence[Offer]) -> Problem:
    return Problem(
        name="limited",
        services=(service(phases=phases, rate_per_s=rate),),
        offers=tuple(offers),
        limits=Limits(spot_share=share),
        settings=Settings(max_nodes_per_instance=1, simplicity=0.0),
    )


def carried(problem: Problem, phase: Phase, kind: str) -> float:
    """Share of all demand that one node of a kind carries."""
    role = next(role for role in problem.services[0].roles if role.phase is phase)
    return layouts(problem, catalog(), role).get((kind,), 0.0) / problem.demand(role)


def cheapest_together(problem: Problem) -> float | None:
    """The least cost over all numbers of machines: all of the demand, and enough of it off spot."""
    share = problem.limits.spot_share or 0.0
    each = [carried(problem, Phase.BOTH, o.node_type) for o in problem.offers]
    best = None
    for numbers in itertools.product(*(range(o.available + 1) for o in problem.offers)):
        parts = list(zip(problem.offers, numbers, each, strict=True))
        off = sum(n * rate for o, n, rate in parts if o.market != "spot")
        if off + sum(n * rate for o, n, rate in parts if o.market == "spot") < 1.0 - 1e-9:
            continue
        if off < 1.0 - share - 1e-9:
            continue
        usd = sum(n * o.usd_per_hour for o, n, _ in parts)
        best = usd if best is None else min(best, usd)
    return best


def cheapest_apart(problem: Problem) -> float | None:
    """The least cost over all numbers of machines for prefill and decode: enough of both, also off spot."""
    share = problem.limits.spot_share or 0.0
    jobs = list(itertools.product(problem.offers, (Phase.PREFILL, Phase.DECODE)))
    rates = [carried(problem, phase, o.node_type) for o, phase in jobs]
    best = None
    for numbers in itertools.product(*(range(o.available + 1) for o, _ in jobs)):
        used = {o.key: 0 for o in problem.offers}
        total = dict.fromkeys((Phase.PREFILL, Phase.DECODE), 0.0)
        off = dict.fromkeys(total, 0.0)
        for (o, phase), n, rate in zip(jobs, numbers, rates, strict=True):
            used[o.key] += n
            total[phase] += n * rate
            off[phase] += n * rate * (o.market != "spot")
        if any(used[o.key] > o.available for o in problem.offers):
            continue
        if min(off.values()) < 1.0 - share - 1e-9 or min(total.values()) < 1.0 - 1e-9:
            continue
        usd = sum(used[o.key] * o.usd_per_hour for o in problem.offers)
        best = usd if best is None else min(best, usd)
    return best


def check_against(problem: Problem, least: float | None) -> Plan:
    """The plan costs the least there is, says so, and the fast one keeps the limit, too."""
    found = solve(problem, PlanRequest(catalog=catalog()))
    quick = solve(problem, PlanRequest(catalog=catalog(), solver="fast"))
    for plan in (found, quick):
        assert validate(plan, problem, catalog()) == []
    if least is None:
        assert found.status in ("partial", "infeasible")
        return found
    assert found.status == "optimal"
    assert found.objective == pytest.approx(least, abs=1e-6)
    assert found.bound is not None
    assert found.bound <= least + 1e-6
    if quick.status == "feasible":
        assert (quick.objective or 0.0) >= least - 1e-6
    return found


prices = st.integers(1, 40).map(lambda n: n / 10.0)
shares = st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.9))


@examples(5)
@given(st.lists(st.tuples(prices, st.integers(1, 3)), min_size=4, max_size=4), shares, st.data())
def test_no_numbers_of_machines_cost_less(
    drawn: list[tuple[float, int]], share: float, data: st.DataObject
) -> None:
    sold = [
        offer(EAST, kind, usd, market=market, available=n)
        for (kind, market), (usd, n) in zip(
            itertools.product(KINDS, ("on-demand", "spot")), drawn, strict=True
        )
    ]
    one = limited("together", 1.0, share, sold)
    rate = carried(one, Phase.BOTH, "L40S:1") * data.draw(st.floats(0.3, 6.0))
    problem = limited("together", rate, share, sold)
    check_against(problem, cheapest_together(problem))


@pytest.mark.slow
@examples(3)
@given(st.tuples(prices, prices), st.sampled_from((0.2, 0.5, 0.7)), st.floats(0.3, 1.8))
def test_no_pairs_cost_less(drawn: tuple[float, float], share: float, factor: float) -> None:
    sold = [
        offer(EAST, "L40S:1", usd, market=market, available=3)
        for market, usd in zip(("on-demand", "spot"), drawn, strict=True)
    ]
    rate = factor * carried(limited("apart", 1.0, share, sold), Phase.DECODE, "L40S:1")
    problem = limited("apart", rate, share, sold)
    check_against(problem, cheapest_apart(problem))


def shared_decode(share: float) -> Problem:
    """Prefill that takes two machines, and decode that takes almost one: of seed 31 of promise_truth."""
    sold = [
        offer(EAST, "A100-40:1", usd, market=market, available=3)
        for market, usd in (("on-demand", 2.0), ("spot", 0.9))
    ]
    one = limited("apart", 1.0, share, sold)
    return limited("apart", 1.3 * carried(one, Phase.PREFILL, "A100-40:1"), share, sold)


def test_one_decode_instance_serves_what_is_prefilled_on_spot_and_off_it() -> None:
    problem = shared_decode(0.5)
    assert carried(problem, Phase.DECODE, "A100-40:1") > 1.0
    least = cheapest_apart(problem)
    # Prefill on demand and on spot, and one decode on demand for both.
    assert least == pytest.approx(2.0 + 0.9 + 2.0)
    assert RentReference(problem, catalog()).min_cost().value == pytest.approx(least)
    found = check_against(problem, least)
    decode = [i.id for i in found.instances if i.phase is Phase.DECODE]
    assert len(decode) == 1
    assert all(decode[0] in route.instances for route in found.routes)
    # Both prefill instances are equally busy.
    assert spot_share(found, problem.services[0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("share", "factor"),
    [
        (0.5, 1.0),
        (0.25, 2.0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((0.25, 0.5), (0.25, 1.0), (0.5, 0.5), (0.5, 2.0))
        ),
    ],
)
def test_bounds_by_prices_hold_where_phases_are_shared(
    share: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger problems are not solved whole: what prices prove of them is no more than the least cost."""
    monkeypatch.setattr(level_search, "SMALL", 0)
    given = shared_decode(share)
    more = (*given.offers, offer(EAST, "L4:1", 0.8), offer(EAST, "L4:1", 0.3, market="spot"))
    rate = factor * given.services[0].rate_per_s
    problem = limited("apart", rate, share, more)
    optimum = RentReference(problem, catalog()).min_cost()
    assert optimum.proved
    check_against(problem, optimum.value)


SPOT = """
name: spot
models:
  a: {model: qwen3-32b@fp8, ttft: 5s, tpot: 200ms, rate: 0.2/s, lengths: 512x64, phases: together}
pool:
  offers:
    - {region: r, node_type: H100:1, available: 2, usd_per_hour: 4.0}
    - {region: r, node_type: H100:1, market: spot, available: 2, usd_per_hour: 0.5}
    - {region: r, node_type: T4:1, market: owned, available: 1, usd_per_hour: 0}
limits: {spot_share: 50%}
settings: {max_nodes_per_instance: 2}
"""


def test_machines_that_serve_nothing_buy_no_room_on_spot() -> None:
    """With one's own idle T4 half of the GPUs would be off spot, and all requests on it."""
    problem = parse_fleet(SPOT)
    found = solve(problem)
    assert (found.status, found.usd_per_hour) == ("optimal", 4.0)
    free = solve(problem.replace(limits=Limits()))
    assert free.usd_per_hour == 0.5
    found_there = {v.rule for v in validate(free, problem, same_problem=False)}
    assert found_there == {"spot-share"}


def test_pipelines_slices_and_regions_against_the_program() -> None:
    offers = (
        offer(EAST, "L4:1", 0.8, available=4),
        offer(EAST, "L4:1", 0.3, market="spot", available=4),
        offer(EAST, "L40S:2", 3.6, available=2),
        offer(EAST, "L40S:2", 1.5, market="spot", available=2),
        offer("lab", "T4:1", 0.2, market="owned", available=2),
    )
    for number, share in enumerate((0.2, 0.6)):
        problem = Problem(
            name="program",
            services=(
                service("chat", phases="auto", rate_per_s=5.0 + 2 * number),
                service("mini", model="llama-3.2-1b", phases="together", rate_per_s=8.0),
            ),
            offers=offers,
            limits=Limits(spot_share=share),
            settings=Settings(max_nodes_per_instance=2, simplicity=0.0, init_penalty=0.1),
        )
        optimum = RentReference(problem, catalog()).min_cost()
        assert optimum.proved
        found = check_against(problem, optimum.value)
        assert all(spot_share(found, each) <= share + 1e-9 for each in problem.services)


def test_choices_between_models_keep_the_limit_for_each() -> None:
    given_fleet = choosing_fleet()
    spot = tuple(
        o.model_copy(update={"market": "spot", "usd_per_hour": 0.4 * o.usd_per_hour})
        for o in given_fleet.offers
    )
    problem = given_fleet.replace(
        offers=(*given_fleet.offers, *spot), limits=Limits(spot_share=0.3)
    )
    found = solve(problem, PlanRequest(catalog=catalog()))
    assert validate(found, problem, catalog()) == []
    assert found.bound is not None
    # No mix on a grid costs less, planned on its own.
    for small in (0.0, 0.25, 0.5):
        levels = dict(zip(problem.variants["chat"], (small, 1.0 - small), strict=True))
        mixes = problem.mixes_at(levels)
        settled = solve(problem.settled(mixes), PlanRequest(catalog=catalog()))
        assert (settled.objective or 0.0) >= found.bound * (1.0 - 1e-6)
        assert all(spot_share(settled, s) <= 0.3 + 1e-9 for s in problem.settled(mixes).services)


def test_a_simpler_plan_keeps_the_limit() -> None:
    sold = [
        offer(EAST, kind, usd, market=market, available=6)
        for kind, usd, market in (
            ("L4:1", 0.8, "on-demand"),
            ("L4:1", 0.3, "spot"),
            ("L40S:1", 1.9, "on-demand"),
            ("L40S:1", 0.75, "spot"),
        )
    ]
    problem = limited("together", 20.0, 0.4, sold)
    problem = problem.replace(settings={**dict(problem.settings), "simplicity": 0.2})
    cheapest = solve(problem, PlanRequest(catalog=catalog()))
    effort = Effort(simpler_than=cheapest)
    simple = solve(problem, PlanRequest(catalog=catalog(), effort=effort))
    for found in (cheapest, simple):
        assert validate(found, problem, catalog()) == []
        assert 0.0 < spot_share(found, problem.services[0]) <= 0.4 + 1e-9
    assert (simple.objective or 0.0) <= 1.2 * (cheapest.objective or 0.0) + 1e-9
    assert len(simple.instances) <= len(cheapest.instances)
