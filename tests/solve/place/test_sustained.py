"""Sustained throughput: closed forms and laws it must keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.compiling import entry
from atoll.core.errors import InputError
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance, Placement, Timing
from atoll.solve.place.sustained.residence import NEVER, SITE_TYPE, Arcs, Site, round_trips, step_of
from atoll.solve.place.sustained.sustained import (
    ADMITTED,
    SPARE,
    SPREAD,
    TOGETHER,
    best_flows,
    evaluator,
    site_of,
    sustain,
)
from tests.seeds import examples

few = examples(15)

DECODE_S, PROMPT_S = 0.002, 0.02


@entry(f"({SITE_TYPE}, float64, float64)")
def step(site: tuple[Any, ...], layers: float, rate: float) -> tuple[float, float]:
    """`step_of` the first node, for Python to call."""
    return step_of(Site(*site), 0, layers, rate)


@entry(f"({SITE_TYPE}, int64[::1], int64[::1], float64[::1], float64, float64[:, ::1])")
def mean_trip(
    site: tuple[Any, ...], tail: Ints, head: Ints, flow: Floats, scale: float, nodes: Floats
) -> float:
    """`round_trips`, for Python to call; rows of `nodes`: layers run, flow through, and scratch."""
    return round_trips(
        Site(*site), Arcs(tail, head, flow), scale, nodes[0], nodes[1], np.zeros(len(tail)),
        nodes[2], nodes[3], nodes[4], nodes[5], nodes[6], nodes[7],
    )  # fmt: skip


def instance(
    nodes: int,
    layers: int,
    *,
    kv: float = 40_000.0,
    latency: float = 0.001,
    speed: float = 1e6,
    most: int = 8,
) -> FlowInstance:
    """Equal nodes: a step takes 2 ms a layer whatever its batch, a prompt of 500 tokens 20 ms a layer."""
    grid = np.tile([0.0, 1.0, 1000.0], (nodes, 1))
    held = np.arange(most + 1.0)
    return FlowInstance(
        layers=layers,
        names=tuple(f"n{i}" for i in range(nodes)),
        node_types=("L4:1",) * nodes,
        regions=("lab",) * nodes,
        kind=np.zeros(nodes, np.int64),
        max_layers=np.full(nodes, most),
        rate=np.tile(np.where(held > 0, 8000.0 / np.maximum(held, 1), 0.0), (nodes, 1)),
        link=np.where(np.eye(nodes) > 0, 0.0, speed),
        enter=np.full(nodes, 1e9),
        leave=np.full(nodes, 1e9),
        latency=np.full((nodes, nodes), latency),
        enter_s=np.full(nodes, latency),
        leave_s=np.full(nodes, latency),
        timing=Timing(
            input_mean=500.0,
            output_mean=100.0,
            activation_bytes=16384.0,
            token_bytes=2.0,
            kv_tokens=np.tile(np.where(held > 0, kv, 0.0), (nodes, 1)),
            fill=1.0,
            prefill_tokens=np.tile([0.0, 500.0, 1000.0], (nodes, 1)),
            prefill_s=np.tile([0.0, PROMPT_S, 2 * PROMPT_S], (nodes, 1)),
            decode_sequences=grid,
            decode_s=np.tile([0.0, DECODE_S, DECODE_S], (nodes, 1)),
            step_s=np.zeros(nodes),
        ),
    )


def equal_site(own: FlowInstance) -> Site:
    """Requests of one length that may fill the whole KV cache."""
    return site_of(own, fill=1.0, input_square=500.0**2, held=600.0)


def lane(hops: int, held: int = 4) -> tuple[Placement, Arcs]:
    """One pipeline of equal hops with a flow of 1 token/s."""
    start = np.arange(hops) * held
    tail = np.arange(-1, hops)
    head = np.array([*range(hops), -2])
    return Placement(start, start + held), Arcs(tail, head, np.ones(hops + 1))


def trip_of(site: Site, hops: int, held: int, requests_per_s: float) -> float:
    _, arcs = lane(hops, held)
    tokens = requests_per_s * (site.prompt + site.answer)
    nodes = np.zeros((8, hops))
    nodes[0], nodes[1] = held, 1.0
    return mean_trip(tuple(site), *arcs, tokens, nodes)


def test_an_idle_lane_takes_its_steps_and_its_links() -> None:
    site = equal_site(instance(5, 20))
    assert trip_of(site, 5, 4, 1e-9) == pytest.approx(5 * 4 * DECODE_S + 6 * 0.001, rel=1e-3)


@few
@given(st.integers(2, 30), st.floats(0.05, 1.5))
def test_a_lane_of_equal_prompts_is_the_road_without_passing(hops: int, rate: float) -> None:
    # Without links, a token takes max(Td, Tp - age of the newest prompt). Prompts come at random, and one
    # older than the last trip is out: no token passes it. The model lets a token meet a prompt at the
    # first node within p (there is no step before it) and adds waiting for plain steps, bounded here.
    site = equal_site(instance(hops, 4 * hops, latency=0.0, speed=1e9))
    d, p = 4 * DECODE_S, 4 * PROMPT_S
    found = trip_of(site, hops, 4, rate)
    # Prompts that come while one waits make the step found longer, and share the step a token joins.
    long = p * (1.0 + rate * p)
    gap = np.where(np.arange(hops) == 0, p, p - d)
    age = np.minimum(np.cumsum(gap), found)
    new = np.diff(age, prepend=0.0)
    behind = 1.0 - np.exp(-rate * age)
    fresh = np.diff(behind, prepend=0.0)
    exact = hops * d + ((behind - fresh) * (long - d)).sum()
    exact += (fresh * long * (1.0 - new / gap / 2.0)).sum() + rate * p * long * behind.sum()
    assert exact <= found * (1 + 1e-3) <= exact + hops * d * (0.5 + rate * p) + 1e-3 * found
    # And the continuous limit with few prompts: ages up to m = min(T, D) count, D = Tp - Td.
    few_prompts = rate / 10.0
    apart = hops * (p - d)
    limit, before = hops * d + apart, 0.0
    while abs(limit - before) > 1e-6:
        x = few_prompts * min(limit, apart)
        met = 1.0 - np.exp(-x)
        before, limit = limit, hops * d + apart * met - (met - x * np.exp(-x)) / few_prompts
    found = trip_of(site, hops, 4, few_prompts)
    assert found == pytest.approx(limit, rel=0.1, abs=hops * d / 2 + p)


def test_a_token_never_meets_what_came_out_before_it() -> None:
    # Ten links on which a prompt takes a second: it is on its way for 10 s, a token for less. Were prompts
    # met however old they are, a trip would take Td + D - (1 - exp(-r D)) / r.
    site = equal_site(instance(11, 44, latency=0.0, speed=500.0))
    rate, apart = 0.1, 10.0 * (1.0 - 1 / 500.0) + 11 * 4 * (PROMPT_S - DECODE_S)
    found = trip_of(site, 11, 4, rate)
    assert found < 0.75 * (apart - (1.0 - np.exp(-rate * apart)) / rate)
    met = 1.0 - np.exp(-rate * found)
    late = apart * met - (met - rate * found * np.exp(-rate * found)) / rate
    assert late < found < late + 0.5


def test_steps_grow_with_load_until_the_node_cannot_keep_up() -> None:
    site = equal_site(instance(1, 4))
    met = [step(tuple(site), 4.0, r)[1] for r in (0.0, 2.0, 6.0, 12.0)]
    assert met == sorted(met)
    assert met[0] == pytest.approx(4 * DECODE_S)
    # rho = r p = 1 at r = 12.5.
    assert step(tuple(site), 4.0, 12.6)[1] == NEVER


def test_uneven_prompts_make_steps_longer() -> None:
    own = instance(6, 24)
    even, uneven = equal_site(own), site_of(own, input_square=2 * 500.0**2)
    assert step(tuple(uneven), 4.0, 3.0)[1] > step(tuple(even), 4.0, 3.0)[1]
    assert trip_of(uneven, 6, 4, 1.0) > trip_of(even, 6, 4, 1.0)


def test_littles_law_holds_at_the_answer() -> None:
    own = instance(4, 16)
    place, _ = lane(4)
    found = best_flows(own, place, equal_site(own))
    assert found.limiting is not None
    assert found.kv_use.max() == pytest.approx(1.0, abs=2e-3)
    per_s = found.tokens_per_s / 600.0
    assert found.in_flight == pytest.approx(per_s * found.residence_s)
    # Every node of a lane sees every request: what they hold is what may be held.
    assert found.in_flight * 600.0 == pytest.approx(40_000.0, rel=2e-3)
    assert found.decode_tokens_per_s == pytest.approx(found.tokens_per_s / 6)


def test_by_default_long_answers_belong_to_long_prompts() -> None:
    own = instance(4, 16)
    usual = site_of(own)
    assert usual.held == pytest.approx(TOGETHER * 500.0 + 100.0)
    assert usual.spread == pytest.approx(SPREAD)
    assert (usual.kv == ADMITTED * own.timing.kv_tokens).all() if own.timing else False
    place, _ = lane(4)
    found, most = best_flows(own, place), best_flows(own, place, equal_site(own))
    assert found.tokens_per_s < most.tokens_per_s
    assert found.in_flight * usual.held == pytest.approx(ADMITTED * 40_000.0, rel=2e-3)


def random_placement(rng: np.random.Generator, nodes: int, layers: int) -> Placement:
    """Lanes cut at random places, so that every node is on a way from source to sink."""
    start, end = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    i = 0
    while nodes - i >= layers // 8 + 1:
        cuts = [0]
        while cuts[-1] < layers and i < nodes:
            step = int(rng.integers(4, 9))
            start[i], end[i] = cuts[-1], min(layers, cuts[-1] + step)
            cuts.append(int(end[i]))
            i += 1
    return Placement(start, end)


@few
@given(st.integers(0, 2**20), st.integers(3, 9))
def test_flows_are_conserved_and_within_kv(seed: int, nodes: int) -> None:
    own = instance(nodes, 16)
    place = random_placement(np.random.default_rng(seed), nodes, 16)
    found = best_flows(own, place)
    flows = found.flows
    into: Floats = flows.edge.sum(axis=0) + flows.enter
    assert np.allclose(into, flows.edge.sum(axis=1) + flows.leave)
    assert flows.value == pytest.approx(flows.enter.sum())
    assert (found.kv_use <= SPARE + 1e-9).all()
    again = sustain(own, place, flows)
    assert again.tokens_per_s == pytest.approx(found.tokens_per_s, rel=2e-3)
    assert evaluator(site_of(own))(place.start, place.end) <= found.tokens_per_s * (1 + 2e-3)


@few
@given(st.integers(0, 2**20), st.integers(3, 9))
def test_no_less_of_a_balanced_flow_lasts(seed: int, nodes: int) -> None:
    own = instance(nodes, 16)
    place = random_placement(np.random.default_rng(seed), nodes, 16)
    corner = best_flows(own, place, balanced=False)
    assert best_flows(own, place).tokens_per_s >= corner.tokens_per_s * (1 - 1e-3)


def test_equal_nodes_side_by_side_get_as_much() -> None:
    # Behind the first node are two: a cheapest flow fills one of them before it uses the other.
    own = instance(3, 16)
    own = replace(own, rate=own.rate * np.array([[1.0], [0.6], [0.6]]))
    place = Placement(np.array([0, 8, 8]), np.array([8, 16, 16]))
    corner = best_flows(own, place, balanced=False).flows.leave
    even = best_flows(own, place).flows.leave
    assert corner[1:].max() > 1.4 * corner[1:].min()
    assert even[1:].max() < 1.1 * even[1:].min()


@few
@given(st.integers(0, 2**20))
def test_more_memory_or_less_latency_never_sustains_less(seed: int) -> None:
    place = random_placement(np.random.default_rng(seed), 6, 16)
    flows = best_flows(instance(6, 16), place).flows
    base = sustain(instance(6, 16), place, flows).tokens_per_s
    assert sustain(instance(6, 16, kv=60_000.0), place, flows).tokens_per_s >= base - 1e-6
    assert sustain(instance(6, 16, latency=0.05), place, flows).tokens_per_s <= base + 1e-6


def test_short_ranges_cost_what_max_flow_does_not_see() -> None:
    # Same nodes, same rates per layer: two lanes of 4 hops, or one of 8 hops with half the layers each.
    own = instance(8, 32, latency=0.04)
    wide = Placement(np.array([0, 8, 16, 24] * 2), np.array([8, 16, 24, 32] * 2))
    deep = Placement(np.arange(8) * 4, np.arange(8) * 4 + 4)
    assert best_flows(own, wide).tokens_per_s > 1.2 * best_flows(own, deep).tokens_per_s


def test_a_placement_with_a_gap_sustains_nothing() -> None:
    found = best_flows(instance(2, 16), Placement(np.array([0, 9]), np.array([8, 16])))
    assert found.tokens_per_s == 0.0
    assert found.limiting is None


def test_without_times_the_objective_cannot_be_used() -> None:
    with pytest.raises(InputError, match="max-flow"):
        site_of(replace(instance(2, 8), timing=None))
