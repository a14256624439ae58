"""Routes: they serve as much as can be paired, add up, and overload nobody."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_spot import spot_share
from atoll.solve.legs import _augment, routes_of
from tests.plan.builders import catalog, few, offer, service

REGIONS = ("east", "north", "west")
PROMPT, ANSWER = 512.0, 128.0
UNITS = {Phase.PREFILL: PROMPT, Phase.DECODE: ANSWER, Phase.BOTH: 1.0}


def standing(name: str, phase: Phase, region: str, rate: float) -> Instance:
    """An instance that carries so many requests/s of its phase."""
    per_s = rate * UNITS[phase]
    return Instance(
        id=name,
        service="chat",
        role=f"chat/llm/{phase}",
        region=region,
        stages=1,
        nodes=(Node(id="n0", node_type="L4:1", market="on-demand", start=0, end=32, tp=1),),
        flows=(Flow(src="source", dst="n0", per_s=per_s), Flow(src="n0", dst="sink", per_s=per_s)),
        throughput_per_s=per_s,
        usd_per_hour=1.0,
    )


def asked(rate: float, phases: str = "auto") -> Problem:
    return Problem(
        name="legs",
        services=(service(rate_per_s=rate, phases=phases),),
        offers=tuple(offer(region, "L4:1", 1.0, available=99) for region in REGIONS),
    )


def loads(routes: tuple[Route, ...], rate: float) -> dict[str, float]:
    """Requests/s that each instance gets."""
    found: defaultdict[str, float] = defaultdict(float)
    for route in routes:
        for name in route.instances:
            found[name] += route.share * rate
    return dict(found)


SPOT_GROUPS = st.lists(
    st.tuples(
        st.sampled_from((Phase.PREFILL, Phase.DECODE, Phase.BOTH)),
        st.sampled_from(REGIONS[:2]),
        st.floats(0.5, 20),
        st.booleans(),
    ),
    max_size=8,
)


@few
@given(SPOT_GROUPS, st.floats(0.5, 30), st.sampled_from((0.1, 0.3, 0.5, 0.9)))
def test_requests_on_spot_are_no_more_than_may_be(
    drawn: list[tuple[Phase, str, float, bool]], rate: float, share: float
) -> None:
    instances = []
    for n, (phase, region, each, spot) in enumerate(drawn):
        made = standing(f"i{n}", phase, region, each)
        node = made.nodes[0].model_copy(update={"market": "spot" if spot else "on-demand"})
        instances.append(made.model_copy(update={"nodes": (node,)}))
    problem = asked(rate).replace(limits={"spot_share": share})
    routes, served = routes_of(problem, catalog(), instances)
    bare = Plan(
        problem_hash="",
        problem_name="legs",
        instances=tuple(instances),
        routes=routes,
        usd_per_hour=0.0,
        status="partial",
        solver="legs",
    )
    assert spot_share(bare, problem.services[0]) <= share + 1e-9
    demand = problem.services[0].demand_per_s
    capacity = {f"i{n}": each for n, (_, _, each, _) in enumerate(drawn)}
    for name, load in loads(routes, demand * served["chat"]).items():
        assert load <= capacity[name] * (1.0 + 1e-9)
    off = [i for i, (*_, spot) in zip(instances, drawn, strict=True) if not spot]
    assert served["chat"] >= routes_of(problem, catalog(), off)[1]["chat"] - 1e-9


phases = st.sampled_from((Phase.PREFILL, Phase.DECODE, Phase.BOTH))
carried = st.floats(0, 20) | st.just(0.0)
groups = st.lists(st.tuples(phases, st.sampled_from(REGIONS), carried), max_size=14)


@given(groups, st.just(0.0) | st.floats(1e-3, 60), st.sampled_from(("auto", "apart", "together")))
def test_shares_add_up_and_nobody_is_overloaded(
    group: list[tuple[Phase, str, float]], rate: float, how: str
) -> None:
    problem = asked(rate, how)
    instances = [standing(f"i{n:02}", *entry) for n, entry in enumerate(group)]
    routes, served = routes_of(problem, catalog(), instances)
    own = {i.id: i for i in instances}
    allowed = {role.phase for role in problem.services[0].roles}
    total = defaultdict[tuple[Phase, str], float](float)
    for i in instances:
        if i.phase in allowed:
            total[i.phase, i.region] += i.throughput_per_s / UNITS[i.phase]
    true = sum(
        min(total[Phase.PREFILL, g], total[Phase.DECODE, g]) + total[Phase.BOTH, g] for g in REGIONS
    )
    assert served["chat"] == pytest.approx(1.0 if rate <= true else true / rate, abs=1e-6)
    if true > 1e-9:
        assert sum(route.share for route in routes) == pytest.approx(1.0)
    else:
        assert sum(route.share for route in routes) == pytest.approx(1.0 if routes else 0.0)
    for name, load in loads(routes, rate * served["chat"]).items():
        assert load <= own[name].throughput_per_s / UNITS[own[name].phase] * (1 + 1e-6)
    for route in routes:
        assert len({own[name].region for name in route.instances}) == 1
        assert tuple(own[name].phase for name in route.instances) in (
            (Phase.BOTH,),
            (Phase.PREFILL, Phase.DECODE),
        )


@few
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.5, 2.0))
def test_many_pairs_become_few(first: int, second: int, rate: float) -> None:
    """Each side is loaded in proportion to what it carries, whichever way pairs are made."""
    problem = asked(rate * 10, "apart")
    instances = [standing(f"p{n:02}", Phase.PREFILL, "east", 1 + n) for n in range(first)]
    instances += [standing(f"d{n:02}", Phase.DECODE, "east", 2 + n % 3) for n in range(second)]
    routes, _ = routes_of(problem, catalog(), instances)
    share = loads(routes, 1.0)
    for phase in (Phase.PREFILL, Phase.DECODE):
        side = [i for i in instances if i.phase is phase]
        whole = sum(i.throughput_per_s for i in side)
        for i in side:
            assert share[i.id] == pytest.approx(i.throughput_per_s / whole)
    most = first * second if first * second <= 64 else first + second - 1
    assert len(routes) <= most


def test_a_phase_without_a_partner_gets_no_route() -> None:
    instances = [
        standing("p", Phase.PREFILL, "east", 5.0),
        standing("d", Phase.DECODE, "west", 5.0),
        standing("b", Phase.BOTH, "north", 1.0),
    ]
    routes, served = routes_of(asked(4.0), catalog(), instances)
    assert [(route.instances, route.share) for route in routes] == [(("b",), 1.0)]
    assert served == {"chat": pytest.approx(0.25)}


def test_apart_and_together_share_by_what_they_carry() -> None:
    instances = [
        standing("p", Phase.PREFILL, "east", 9.0),
        standing("d", Phase.DECODE, "east", 3.0),
        standing("b", Phase.BOTH, "west", 1.0),
    ]
    routes, served = routes_of(asked(2.0), catalog(), instances)
    shares = {route.instances: route.share for route in routes}
    assert shares == {("p", "d"): pytest.approx(0.75), ("b",): pytest.approx(0.25)}
    assert served == {"chat": 1.0}


rates = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1)
links = st.dictionaries(
    st.sampled_from(list(itertools.permutations("abcd", 2))), st.floats(0, 10), max_size=8
)


@given(rates, rates, links, st.floats(0, 40))
def test_flows_between_regions_are_maximal(
    prefill: dict[str, float],
    decode: dict[str, float],
    room: dict[tuple[str, str], float],
    missing: float,
) -> None:
    """Against the linear program."""
    from scipy.optimize import linprog

    home = {(g, g): min(rate, decode[g]) for g, rate in prefill.items() if g in decode}
    legs = _augment(prefill, decode, home, room, missing)
    pairs = [(g, h) for g in prefill for h in decode]
    limits = [(0, None if g == h else room.get((g, h), 0.0)) for g, h in pairs]
    rows = [[float(g == side) for g, _ in pairs] for side in prefill]
    rows += [[float(h == side) for _, h in pairs] for side in decode]
    best = linprog(
        -np.ones(len(pairs)),
        A_ub=np.array(rows),
        b_ub=[*prefill.values(), *decode.values()],
        bounds=limits,
    )
    most = min(-best.fun, sum(home.values()) + missing)
    assert sum(legs.values()) == pytest.approx(most, abs=1e-6)
    for (g, h), rate in legs.items():
        assert rate > 0
        assert g == h or rate <= room[g, h] + 1e-9
    for g, carries in prefill.items():
        assert sum(rate for (a, _), rate in legs.items() if a == g) <= carries + 1e-9
    for h, carries in decode.items():
        assert sum(rate for (_, b), rate in legs.items() if b == h) <= carries + 1e-9
