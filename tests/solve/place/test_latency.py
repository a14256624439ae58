"""Flows within a promise."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.instance import FlowInstance, Flows, Placement
from atoll.solve.place.latency import OUTSIDE, flow_within, hop_times, slowest, timing_of
from tests.plan.clusters import LINKS, NODES, cluster, problem, profile

CATALOG = Catalog.default()


def instance(**changes: object) -> FlowInstance:
    slow = profile(8, 4_000.0, prefill_s_per_layer=((0.0, 0.0), (1000.0, 0.25)))
    fast = profile(12, 12_000.0, prefill_s_per_layer=((0.0, 0.0), (1000.0, 0.08)))
    own = cluster(profiles={"chat": {"L40S:1": fast, "L4:1": slow}}, **changes)
    return flow_instance(problem(cluster=own), CATALOG, "chat")


def placed(own: FlowInstance) -> Placement:
    return placement_of(own, [(0, 8), (8, 16), (8, 16), (8, 16)])


def ways(own: FlowInstance, flows: Flows) -> list[list[int]]:
    """Every way along edges with flow, by trying everything."""
    found = []
    for count in range(1, own.size + 1):
        for way in product(range(own.size), repeat=count):
            hops = [flows.edge[a, b] for a, b in pairwise(way)]
            if min([flows.enter[way[0]], flows.leave[way[-1]], *hops]) > 1e-6:
                found.append(list(way))
    return found


def times(
    own: FlowInstance, placement: Placement, flows: Flows, way: list[int]
) -> tuple[float, float]:
    """Prompt and token seconds of one way, written out."""
    timing = timing_of(own)
    rate = (flows.enter + flows.edge.sum(axis=0)) / 200.0
    token, prompt = hop_times(timing, (placement.end - placement.start).astype(float), rate)
    first = own.enter_s[way[0]] + 150.0 / own.enter[way[0]]
    later = own.enter_s[way[0]] + 1.0 / own.enter[way[0]]
    for a, b in pairwise(way):
        first += own.latency[a, b] + 150.0 / own.link[a, b]
        later += own.latency[a, b] + 1.0 / own.link[a, b]
    last = own.leave_s[way[-1]] + 1.0 / own.leave[way[-1]]
    return first + prompt[way].sum() + last, later + token[way].sum() + last


def scaled(flows: Flows, share: float) -> Flows:
    return Flows(flows.value * share, flows.edge * share, flows.enter * share, flows.leave * share)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_the_slowest_way_is_the_slowest(share: float) -> None:
    own = instance()
    placement = placed(own)
    flows = scaled(max_flow(own, placement), share)
    every = [times(own, placement, flows, way) for way in ways(own, flows)]
    assert len(every) == 3
    found = slowest(own, placement, flows)
    assert found.prompt_s == pytest.approx(max(first for first, _ in every))
    assert found.token_s == pytest.approx(max(later for _, later in every))
    assert found.token_way[-1][0] == OUTSIDE
    assert found.token_way[0][1] == OUTSIDE


def test_hops_take_longer_with_load() -> None:
    own = instance()
    timing = timing_of(own)
    held = np.full(4, 8.0)
    idle, idle_prompt = hop_times(timing, held, np.zeros(4))
    # One sequence: 8 layers of 0.1 ms, half a step's wait; a prompt of 150 tokens on 8 layers adds 0.3 s.
    assert idle[1] == pytest.approx(1.5 * 8 * 0.0001)
    assert idle_prompt[1] - idle[1] == pytest.approx(8 * 150 * 0.25 / 1000)
    busy, _ = hop_times(timing, held, np.full(4, 2.0))
    assert (busy > idle).all()
    assert np.isinf(hop_times(timing, held, np.full(4, 4.0))[0][1])


def test_a_loose_promise_changes_nothing() -> None:
    own = instance()
    placement = placed(own)
    most = max_flow(own, placement).value
    light = flow_within(own, placement, 1e6, 1e6)
    assert light.value <= most * (1 + 1e-9)
    assert light.value > 0.5 * most


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(1.0, 1.0), (0.7, 0.5), (0.62, 1.0), (5.0, 0.04)])
def test_every_way_keeps_the_promise(ttft_s: float, tpot_s: float) -> None:
    own = instance()
    placement = placed(own)
    flows = flow_within(own, placement, ttft_s, tpot_s)
    assert flows.value > 0
    assert flows.enter.sum() == pytest.approx(flows.value)
    assert flows.leave.sum() == pytest.approx(flows.value)
    for way in ways(own, flows):
        first, later = times(own, placement, flows, way)
        assert first <= ttft_s * (1 + 1e-6)
        assert later <= tpot_s * (1 + 1e-6)


def test_a_slow_link_is_left_out() -> None:
    """Tokens over the line between sites take over 50 ms: with 40 ms only b, in the north, serves."""
    own = instance()
    flows = flow_within(own, placed(own), 5.0, 0.04)
    assert flows.edge[0, 1] > 0
    assert flows.edge[0, 2] == flows.edge[0, 3] == 0


def test_an_impossible_promise_carries_nothing() -> None:
    own = instance()
    assert flow_within(own, placed(own), 5.0, 1e-6).value == 0


def test_times_are_needed() -> None:
    from dataclasses import replace

    own = replace(instance(links=LINKS, nodes=NODES), timing=None)
    with pytest.raises(UsageError, match="nothing is known about the times"):
        flow_within(own, placed(own), 1.0, 1.0)
