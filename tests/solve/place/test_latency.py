"""Flows within a promise."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement, part_of
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.latency import (
    flow_of_groups,
    flow_within,
    max_within,
    rates_within,
    scale_flows,
    ways_of,
)
from tests.plan.clusters import cluster, problem, profile, service

CATALOG = Catalog.default()


def instance(ttft_s: float = 10.0, tpot_s: float = 1.0, **changes: object) -> FlowInstance:
    slow = profile(8, 4_000.0, prefill_s_per_layer=((0.0, 0.0), (1000.0, 0.25)))
    fast = profile(12, 12_000.0, prefill_s_per_layer=((0.0, 0.0), (1000.0, 0.08)))
    own = cluster(profiles={"chat": {"L40S:1": fast, "L4:1": slow}}, **changes)
    asked = problem(cluster=own, services=(service(ttft_s=ttft_s, tpot_s=tpot_s),))
    return flow_instance(asked, CATALOG, "chat")


def placed(own: FlowInstance) -> Placement:
    return placement_of(own, [(0, 8), (8, 16), (8, 16), (8, 16)])


def all_ways(own: FlowInstance, flows: Flows) -> list[list[int]]:
    """Every way along edges with flow, by trying everything."""
    found = []
    for count in range(1, own.size + 1):
        for way in product(range(own.size), repeat=count):
            hops = [flows.edge[a, b] for a, b in pairwise(way)]
            if min([flows.enter[way[0]], flows.leave[way[-1]], *hops]) > 1e-6:
                found.append(list(way))
    return found


def wires(own: FlowInstance, flows: Flows, way: list[int], stages: int) -> tuple[float, float]:
    """Prompt and token seconds on the links of one way, written out: requests of 150 + 50 tokens."""
    tpot_s = own.promise.service.tpot_s if own.promise else 0.0

    def tokens(flow: float) -> float:
        return max(1.0, flow / 200.0 * 50.0 * tpot_s / stages)

    first = own.enter_s[way[0]] + 150.0 / own.enter[way[0]]
    later = own.enter_s[way[0]] + tokens(flows.enter[way[0]]) / own.enter[way[0]]
    for a, b in pairwise(way):
        first += own.latency[a, b] + 150.0 / own.link[a, b]
        later += own.latency[a, b] + tokens(flows.edge[a, b]) / own.link[a, b]
    last = way[-1]
    first += own.leave_s[last] + 1.0 / own.leave[last]
    later += own.leave_s[last] + tokens(flows.leave[last]) / own.leave[last]
    return first, later


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_the_slowest_way_is_the_slowest(share: float) -> None:
    own = instance()
    flows = scale_flows(max_flow(own, placed(own)), share)
    every = [wires(own, flows, way, 2) for way in all_ways(own, flows)]
    assert len(every) == 3
    found = ways_of(own, placed(own), flows, 2)
    assert found.hops == 2
    assert found.wires_s[0] == pytest.approx(max(first for first, _ in every))
    assert found.wires_s[1] == pytest.approx(max(later for _, later in every))
    assert found.longest[-1][0] == found.longest[0][1] == -1


def test_a_loose_promise_allows_the_largest_flow() -> None:
    own = instance(1e6, 1e6)
    most = max_flow(own, placed(own)).value
    assert flow_within(own, placed(own)).value <= most * (1 + 1e-9)
    assert flow_within(own, placed(own)).value > 0.5 * most


@given(
    st.floats(0.3, 5.0),
    st.floats(0.005, 1.0),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=4, max_size=4),
)
def test_every_way_keeps_the_promise(
    ttft_s: float, tpot_s: float, ranges: list[tuple[int, int]]
) -> None:
    own = instance(ttft_s, tpot_s)
    held = [
        (s, min(16, s + min(n, int(m)))) for (s, n), m in zip(ranges, own.max_layers, strict=True)
    ]
    placement = placement_of(own, held)
    flows = flow_within(own, placement)
    if flows.value <= 0:
        return
    assert flows.enter.sum() == pytest.approx(flows.value)
    assert flows.leave.sum() == pytest.approx(flows.value)
    ways = all_ways(own, flows)
    stages = max(len(way) for way in ways)
    times = [wires(own, flows, way, stages) for way in ways]
    slowest = max(first for first, _ in times), max(later for _, later in times)
    through = flows.enter + flows.edge.sum(axis=0)
    assert (through <= rates_within(own, placement, stages, slowest) * (1 + 1e-6) + 1e-9).all()


def test_a_slow_link_is_left_out() -> None:
    """Tokens over the line between sites take over 50 ms: with 40 ms only b, in the north, serves."""
    own = instance(5.0, 0.04)
    flows = flow_within(own, placed(own))
    assert flows.edge[0, 1] > 0
    assert flows.edge[0, 2] == flows.edge[0, 3] == 0


def test_an_impossible_promise_carries_nothing() -> None:
    own = instance(5.0, 1e-6)
    assert flow_within(own, placed(own)).value == 0


def test_a_looser_promise_never_carries_less() -> None:
    values = [
        flow_within(instance(ttft, tpot), placed(instance())).value
        for ttft, tpot in ((0.5, 0.01), (0.7, 0.06), (1.0, 0.1), (3.0, 0.3), (10.0, 1.0))
    ]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_a_part_keeps_the_units_and_promises_of_its_nodes() -> None:
    own = instance()
    nodes = np.array([3, 0])
    part = part_of(own, nodes)
    assert own.promise is not None
    assert part.promise is not None
    assert part.units == tuple(own.units[i] for i in nodes)
    assert part.promise.nodes == tuple(own.promise.nodes[i] for i in nodes)
    assert part.promise.service == own.promise.service
    assert part.kind.tolist() == np.unique(own.kind[nodes], return_inverse=True)[1].tolist()


def test_groups_are_pipelines_of_their_own() -> None:
    own = instance()
    placement = placement_of(own, [(0, 8), (8, 16), (0, 8), (8, 16)])
    apart = flow_of_groups(own, placement, [[0, 1], [2, 3]])
    assert apart.edge[0, 3] == apart.edge[2, 1] == 0
    assert apart.edge[0, 1] > 0
    assert apart.edge[2, 3] > 0
    assert apart.value == pytest.approx(apart.enter.sum())


def test_bounds_hold_for_any_number_of_stages() -> None:
    own = instance(2.0, 0.1)
    best = max_within(own).rate
    for start, end in ((0, 8), (8, 16), (4, 12), (0, 4)):
        placement = placement_of(own, [(start, end)] * own.size)
        for stages in (2, 3, 5):
            rates = rates_within(own, placement, stages)
            assert (rates <= best[np.arange(own.size), end - start] * (1 + 1e-12)).all()


def test_times_are_needed() -> None:
    from dataclasses import replace

    own = replace(instance(), promise=None)
    with pytest.raises(UsageError, match="nothing is known about the times"):
        flow_within(own, placed(own))
